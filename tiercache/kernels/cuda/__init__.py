"""Array kernels for a CUDA GPU: the sources, and the code that launches them."""
