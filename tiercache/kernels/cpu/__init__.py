"""Array kernels for the CPU, compiled by numba."""
