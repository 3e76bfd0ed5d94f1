"""The life of a guarded engine: start, verify, serve, drain."""
