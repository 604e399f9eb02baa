"""Real engines: vLLM on this machine's GPU, each in a process of its own, with tiny models or the user's."""
