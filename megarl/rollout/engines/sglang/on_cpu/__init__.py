"""What stands in for SGLang's CUDA kernels on a CPU. Loaded inside the server's processes only."""
