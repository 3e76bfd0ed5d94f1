"""The checks: policy against evidence, before the start and after it."""
