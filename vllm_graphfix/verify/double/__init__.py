"""The proof without a GPU: vLLM's own classes on a CPU double of CUDA graphs, with small stand-ins for the kernels."""
