"""Array kernels: arrays in, arrays out, no state. `cpu` holds those of numba, `cuda` those of a GPU."""

if __name__ != "tiercache.kernels":
    raise ImportError("import tiercache.kernels: the folder kernels at the top level is a link to it")
