"""Claims from log, metrics, capacity arithmetic and tensors, and their reconciliation."""
