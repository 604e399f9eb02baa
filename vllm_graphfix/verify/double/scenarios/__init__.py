"""One module a fix: `run()` drives vLLM's own classes without and with CUDA graphs."""
