"""Stand-ins for SGLang's CUDA kernels on a CPU. Loaded inside the server's processes only."""
