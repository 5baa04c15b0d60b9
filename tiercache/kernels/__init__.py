"""Array kernels: arrays in, arrays out, no state. `cpu` has the numba kernels, `cuda` the kernels for a GPU."""

if __name__ != "tiercache.kernels":
    raise ImportError("import tiercache.kernels: the folder kernels at the top level is a link to it")
