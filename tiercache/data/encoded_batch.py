"""Samples as training sees them: arrays of labels, dense features and local ids."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike, NDArray


class NoTensor:
    """Ids, or a batch of them, that stand where a model has a tensor: every operation of a tensor raises TypeError.

    Python's own comparison of objects would be False in silence, and so mask nothing.
    """

    __slots__ = ()
    __hash__ = object.__hash__
    __array_ufunc__ = None

    @property
    def _label(self) -> str:
        return f"a {type(self).__name__}"

    def _refusal(self, what: str) -> str:
        """Return the message of an error about an operation, or an attribute."""
        return (
            f"{what} is not defined for {self._label}, which is not a tensor of keys: look it up with a module. "
            "Compare a feature with a key by == or != (batch.features[name] == 0) for a mask; its local ids are in "
            ".values, and .offsets says where those of each sample begin"
        )

    def __eq__(self, other: object) -> Any:
        """Raise TypeError."""
        raise TypeError(self._refusal("comparison"))

    def __ne__(self, other: object) -> Any:
        """Raise TypeError."""
        raise TypeError(self._refusal("comparison"))

    def __array__(self, *_: object, **__: object) -> NDArray[Any]:
        """Raise TypeError: NumPy would make an array of one object."""
        raise TypeError(self._refusal("conversion to an array"))

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError."""
        if name.startswith("_") or name in getattr(type(self), "__dataclass_fields__", ()):
            raise AttributeError(name)
        raise AttributeError(self._refusal(f".{name}"))


def _refused(name: str) -> Callable[..., Any]:
    def operation(self: NoTensor, *_: object) -> Any:
        raise TypeError(self._refusal(name))

    operation.__name__, operation.__doc__ = name, "Raise TypeError."
    return operation


_UNARY = (
    "bool", "len", "iter", "contains", "getitem", "setitem", "lt", "le", "gt", "ge", "invert", "neg", "pos", "abs",
    "int", "float", "index", "complex", "round",
)  # fmt: skip
_BINARY = (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "xor",
    "or",
)  # fmt: skip
for _name in (*_UNARY, *_BINARY, *(f"r{_name}" for _name in _BINARY)):
    setattr(NoTensor, f"__{_name}__", _refused(f"__{_name}__"))


@dataclass(frozen=True, slots=True, eq=False)
class FeatureIds(NoTensor):
    """The local ids of one feature: E in all, those of one sample side by side."""

    ids: NDArray[np.int32]
    """(E,) positions in the key set of the feature's table."""
    offsets: NDArray[np.int64] | None
    """(n + 1,) where each sample's ids begin; None: one id per sample, so E = n."""
    weights: NDArray[np.float32] | None
    """(E,) one per id; None: all 1."""

    @property
    def num_ids(self) -> int:
        """E."""
        return int(self.ids.size)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBatch:
    """n samples. Arrays may be views of one another and of the buffers that they were read into."""

    label: NDArray[np.float32] | None
    """(n,); None where the schema has no label."""
    dense: NDArray[np.float32]
    """(n, D), D may be 0."""
    singles: NDArray[np.int32]
    """(S, n), contiguous: the features with one id that were read, in the order of ``SampleLayout.singles``, so that
    those of one group of tables are neighbors. ``ids`` has its rows."""
    ids: dict[str, FeatureIds]
    """The ids of every feature that was read, by its name."""

    @property
    def num_samples(self) -> int:
        """N."""
        return int(self.dense.shape[0])


class SampleBuffers:
    """Memory that reads fill again and again, so that a batch costs no fresh pages.

    What was read into it is valid until the next read into it. Not for use by two threads at once.
    """

    def __init__(self, allocate: Callable[[int, Any], NDArray[Any]] = np.empty) -> None:
        """``allocate(size, dtype)`` returns uninitialized memory, flat."""
        self._allocate, self._flat = allocate, dict[str, Any]()

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return sum(int(flat.nbytes) for flat in self._flat.values())

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialized C-contiguous array; the last one of this name loses its content."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.size < size or flat.dtype != dtype:
            flat = self._flat[name] = self._allocate(size + (size >> 3), dtype)
        found: NDArray[Any] = flat[:size].reshape(shape)
        return found
