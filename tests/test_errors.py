"""The errors that users catch, in one module."""

from tiercache import errors
from tiercache.kernels.cuda import cupy_device as cuda


def test_every_error_has_its_line_in_the_tree() -> None:
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, Exception)
        if not error.__module__.startswith("tiercache.store"):
            assert name in str(errors.__doc__)


def test_a_missing_gpu_can_be_told_from_one_that_cannot_be_used() -> None:
    assert cuda.NoGpuError is errors.NoGpuError
    assert issubclass(errors.NoGpuError, errors.CudaError)
