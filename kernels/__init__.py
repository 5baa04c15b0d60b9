"""Array kernels: arrays in, arrays out, no state. `cpu` holds those of numba, `cuda` those of a GPU."""
