"""The arguments of kernels: annotations, and checks of arrays.

An array is C-contiguous and aligned and has one axis: `I4` is an array of int32. `Matrix[I4]` has two axes, and
`Written[I4]` is written to. A `Rows` array has float32 or the bits of 16-bit numbers. A kernel takes `Word` and
`Single` as uint64 and float32, and other numbers as their own types.
"""

import contextlib
import math
import mmap
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import DTypeLike, NDArray

_Array = TypeVar("_Array")
B1 = Annotated[NDArray[np.bool_], np.bool_]
I1 = Annotated[NDArray[np.int8], np.int8]
I2 = Annotated[NDArray[np.int16], np.int16]
I4 = Annotated[NDArray[np.int32], np.int32]
I8 = Annotated[NDArray[np.int64], np.int64]
U1 = Annotated[NDArray[np.uint8], np.uint8]
U4 = Annotated[NDArray[np.uint32], np.uint32]
U8 = Annotated[NDArray[np.uint64], np.uint64]
F4 = Annotated[NDArray[np.float32], np.float32]
Rows = Annotated[NDArray[np.float32] | NDArray[np.uint16], np.float32, np.uint16]
_TWO_AXES, _WRITTEN = "two axes", "written"
Matrix = Annotated[_Array, _TWO_AXES]
Written = Annotated[_Array, _WRITTEN]
Word = Annotated[int, np.uint64]
Single = Annotated[float, np.float32]

_HUGE_PAGE = 2 << 20
NONE_F4 = np.empty(0, np.float32)
NONE_I4 = np.empty(0, np.int32)
NONE_I8 = np.empty(0, np.int64)
NONE_U8 = np.empty(0, np.uint64)


def aligned_zeros(rows: int, width: int) -> NDArray[np.float32]:
    """Return zeros of (rows, width), float32, aligned to a cache line: rows are moved in half the time.

    Large arrays are in huge pages if the system has them: in small pages each random row costs a page table walk.
    (malloc may use its heap, which has small pages.)
    """
    if 4 * rows * width >= 2 * _HUGE_PAGE:
        memory_map = mmap.mmap(-1, 4 * rows * width + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):
            memory_map.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(memory_map, np.float32)
        first = -memory.ctypes.data % _HUGE_PAGE // 4
    else:
        memory = np.zeros(rows * width + 16, np.float32)
        first = -memory.ctypes.data // 4 % 16
    return memory[first : first + rows * width].reshape(rows, width)


def address_of(array: NDArray[Any]) -> int:
    """Return the address of an array; its `ctypes` takes ten times as long."""
    return int(array.__array_interface__["data"][0])


class View(NamedTuple):
    """Address, shape and dtype of an array in host memory or on a device."""

    address: int
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    contiguous: bool = True
    writable: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def check(self, name: str, dtypes: Collection[DTypeLike], ndim: int, *, written: bool) -> None:
        """Raise ValueError for a wrong dtype, number of dimensions or order, and for a read-only output."""
        aligned = self.address % self.dtype.itemsize == 0
        has_dtype = self.dtype.type in dtypes or self.dtype in dtypes  # comparing a dtype with a type takes longer
        if not has_dtype or len(self.shape) != ndim or not self.contiguous or not aligned:
            flaws = "" if self.contiguous else ", not C-contiguous"
            flaws += "" if aligned else ", not aligned"
            expected = " or ".join(str(np.dtype(dtype)) for dtype in dtypes)
            raise ValueError(
                f"{name} is {len(self.shape)}-dimensional {self.dtype}{flaws}: "
                f"pass an aligned C-contiguous {ndim}-dimensional array of {expected}."
            )
        if written and not self.writable:
            raise ValueError(f"{name} is read-only, but the kernel writes to it: pass a writable array.")


def view_of(array: NDArray[Any]) -> View:
    """Return the view of a NumPy array."""
    return View(address_of(array), array.shape, array.dtype, array.flags.c_contiguous, array.flags.writeable)


def expect(name: str, array: Any, *dtypes: DTypeLike, ndim: int = 1, written: bool = False) -> None:
    """Raise ValueError unless a NumPy array fits the kernel, as `View.check`."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is of type {type(array).__name__}: pass a NumPy array.")  # noqa: TRY004 - as others
    view_of(array).check(name, dtypes, ndim, written=written)


def same_length(**arrays: NDArray[Any]) -> int:
    """Return the common length of the arrays' first axes. Raises ValueError if they differ."""
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"arrays must have the same length, but have {lengths}.")
    return int(next(iter(lengths.values())))


class Parameter(NamedTuple):
    """One parameter of a kernel."""

    name: str
    dtypes: Sequence["np.dtype[Any]"]
    """One dtype; for rows there are two: float32, and uint16 for the bits of 16-bit numbers."""
    ndim: int
    """0: a number."""
    written: bool


def parameters_of(kernel: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of a function that has the annotations of this module."""
    found = []
    for name, hint in get_type_hints(kernel, include_extras=True).items():
        kind, *marks = get_args(hint) or (hint,)
        dtypes = [np.dtype(mark) for mark in marks if mark not in {_TWO_AXES, _WRITTEN}] or [np.dtype(kind)]
        ndim = 0 if kind in {bool, int, float} else 1 + (_TWO_AXES in marks)
        found.append(Parameter(name, dtypes, ndim, _WRITTEN in marks))
    return [parameter for parameter in found if parameter.name != "return"]
