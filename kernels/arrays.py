"""Checks of the arrays that kernels are given: a wrong dtype would compile another kernel instead of failing."""

import contextlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["NONE_F4", "NONE_I4", "NONE_I8", "NONE_U8", "aligned_zeros", "expect", "same_length"]

_HUGE_PAGE = 2 << 20
NONE_F4 = np.empty(0, np.float32)
NONE_I4 = np.empty(0, np.int32)
NONE_I8 = np.empty(0, np.int64)
NONE_U8 = np.empty(0, np.uint64)


def aligned_zeros(rows: int, width: int) -> NDArray[np.float32]:
    """Return zeros of (rows, width), float32, that begin at a cache line: rows are moved in half the time.

    Large ones stand in huge pages where the system has them: random rows of small pages cost a walk of the page table
    each. (What malloc returns may lie in its heap, which has small pages.)
    """
    if 4 * rows * width >= 2 * _HUGE_PAGE:
        held = mmap.mmap(-1, 4 * rows * width + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):
            held.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(held, np.float32)
        first = -memory.ctypes.data % _HUGE_PAGE // 4
    else:
        memory = np.zeros(rows * width + 16, np.float32)
        first = -memory.ctypes.data // 4 % 16
    return memory[first : first + rows * width].reshape(rows, width)


class _Address:
    """A read-only array seen as if it could be written: numba gives such arrays a type of their own."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.owner = array
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.__array_interface__["data"][0], False),
        }


def expect(name: str, array: NDArray[Any], dtype: DTypeLike, ndim: int = 1, *, written: bool = False) -> NDArray[Any]:
    """Return `array` as kernels want it, without a copy.

    Raises ValueError when its dtype, number of dimensions or memory order is another, or when a kernel would write to a
    read-only array.
    """
    if array.dtype != dtype or array.ndim != ndim or not array.flags.c_contiguous or not array.flags.aligned:
        flaws = "" if array.flags.c_contiguous else ", not C-contiguous"
        flaws += "" if array.flags.aligned else ", not aligned"
        raise ValueError(
            f"{name} is {array.ndim}-dimensional {array.dtype}{flaws}: "
            f"give an aligned C-contiguous {ndim}-dimensional array of {np.dtype(dtype)}."
        )
    if array.flags.writeable:
        return array
    if written:
        raise ValueError(f"{name} is read-only, and the kernel writes to it: give a writable array.")
    return np.asarray(_Address(array))


def same_length(**arrays: NDArray[Any]) -> int:
    """Return the common length of the arrays' first axes.

    Raises ValueError when they differ.
    """
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"arrays must have one length, but have {lengths}.")
    return int(next(iter(lengths.values())))
