"""The errors of a CUDA device. They import nothing, so that naming them loads neither NumPy nor CuPy."""


class CudaError(RuntimeError):
    """A CUDA device cannot be used. The message says why and what to install."""


class NoGpuError(CudaError):
    """There is no GPU: no driver, or a driver that shows none. Other CudaErrors may come from a machine with one."""
