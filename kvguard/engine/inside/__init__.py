"""The one file of ours that runs inside the engine; it is copied, alone, onto the engine's PYTHONPATH."""
