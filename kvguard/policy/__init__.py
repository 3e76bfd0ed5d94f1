"""The policy file: what KV cache an engine must run, its models, its parser and its JSON schema."""
