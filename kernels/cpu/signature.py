"""What a kernel's annotations say: the types it is compiled for, and what it may be given."""

import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np
from numba.core.types import Array
from numba.np.numpy_support import from_dtype

from tiercache.kernels.arrays import Matrix, Written, expect

_TWO_AXES, _WRITTEN = (get_args(mark[Any])[1] for mark in (Matrix, Written))


class Parameter(NamedTuple):
    """One parameter of a kernel."""

    name: str
    dtypes: Sequence["np.dtype[Any]"]
    """One; of rows two, float32 and that of the bits of 16-bit numbers: the kernel is compiled for each."""
    ndim: int
    """0: a number."""
    written: bool

    def type(self, *, narrow: bool) -> Any:
        """Return numba's type: an array that is only read may be read-only."""
        item = from_dtype(self.dtypes[-1 if narrow else 0])
        return Array(item, self.ndim, "C", readonly=not self.written) if self.ndim else item

    def check(self, argument: Any) -> None:
        """Raise ValueError where an argument is another array than the kernel wants."""
        if self.ndim:
            expect(self.name, argument, *self.dtypes, ndim=self.ndim, written=self.written)


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of a function that is annotated as `kernels.arrays` says."""
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    return [_parameter(name, hint) for name, hint in hints.items()]


def _parameter(name: str, hint: Any) -> Parameter:
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if isinstance(kind, type):
        return Parameter(name, [np.dtype(marks[0] if marks else kind)], 0, written=False)
    kinds = get_args(kind) if get_origin(kind) in {types.UnionType, Union} else (kind,)
    return Parameter(name, [_dtype_of(one) for one in kinds], 2 if _TWO_AXES in marks else 1, written=_WRITTEN in marks)


def _dtype_of(array: Any) -> "np.dtype[Any]":
    """Return T of NDArray[T], which is ndarray[..., dtype[T]] before NumPy 2.5 and an alias with one argument since."""
    while arguments := get_args(array):
        array = arguments[-1]
    dtype: np.dtype[Any] = np.dtype(array)
    return dtype
