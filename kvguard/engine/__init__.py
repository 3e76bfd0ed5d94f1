"""All I/O with vLLM: its command line, the launch plan, the child process, its log and metrics, its files."""
