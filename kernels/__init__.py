"""Array kernels for the CPU: arrays in, arrays out, no state. Those of a CUDA device are in the modules `cuda_*`."""
