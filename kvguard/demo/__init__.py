"""A real engine, a small model and checkpoints with traps in them, for the demo and the tests."""
