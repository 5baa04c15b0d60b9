"""CUDA kernels on the CPU: their sources compiled with g++, a thread as a fibre."""
