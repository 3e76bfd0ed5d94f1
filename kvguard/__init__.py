"""kvguard: establish, enforce and record the KV cache that a vLLM engine really runs."""

__version__ = "0.1.0"
