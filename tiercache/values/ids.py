"""Ids of one feature of a batch, in host memory or found on the device. Legend: E entries (ids)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

Array = Any
"""An array on the device."""


class NoTensor:
    """Ids, or a batch of them, instead of a tensor: every operation of a tensor raises TypeError.

    Python's own comparison of objects would silently be False, and mask nothing.
    """

    __slots__ = ()
    _error: type[Exception] = TypeError
    """The type of error that torch's functions raise for it."""
    __hash__ = object.__hash__
    __array_ufunc__ = None

    @property
    def _label(self) -> str:
        return f"a {type(self).__name__}"

    def _refusal(self, what: str) -> str:
        """Return the message of an error about an operation, or an attribute."""
        return (
            f"{what} is not defined for {self._label}, which is not a tensor of keys: look it up with a module. "
            "Compare a feature with a key with == or != (batch.features[name] == 0) for a mask; its local ids are in "
            ".values, and .offsets has the start of each sample's ids"
        )

    def __eq__(self, other: object) -> Any:
        """Raise TypeError."""
        raise TypeError(self._refusal("comparison"))

    def __ne__(self, other: object) -> Any:
        """Raise TypeError."""
        raise TypeError(self._refusal("comparison"))

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise an error: this is an argument of a function of torch."""
        arguments = [*args, *(kwargs or {}).values()]
        arguments += [part for argument in arguments if isinstance(argument, list | tuple) for part in argument]
        for argument in arguments:
            if isinstance(argument, NoTensor):
                raise argument._error(argument._refusal(f"torch.{getattr(function, '__name__', function)}"))
        return NotImplemented

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
    """The local ids of one feature: E in all, sample after sample."""

    ids: NDArray[np.int32]
    """(E,) positions in the key set of the feature's table."""
    offsets: NDArray[np.int64] | None
    """(n + 1,) the start of each sample's ids; None: one id per sample, so E = n."""
    weights: NDArray[np.float32] | None
    """(E,) one per id; None: all 1."""

    @property
    def num_ids(self) -> int:
        """E."""
        return int(self.ids.size)


class Found(Protocol):
    """The local ids of a batch's raw keys, feature after feature; -1 for a key that is not in the pass."""

    @property
    def device_ids(self) -> Array:
        """(E,) int32, on the device."""

    def missing(self) -> Any:
        """Return how many keys are not in the pass (``count``), and the ``first`` of them; waits for the search."""

    def host(self) -> NDArray[np.int32]:
        """Return the ids (E,) in host memory, read-only; waits for the search."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundIds(NoTensor):
    """The local ids of one feature, like `FeatureIds`, found on the device: each one is a row, or -1."""

    found: Found
    first: int
    """The first of its entries in the numbering of all features."""
    last: int
    offsets: NDArray[np.int64] | None
    """(n + 1,) the start of each sample's ids; None: one id per sample."""
    weights: NDArray[np.float32] | None
    """(E,) one per id; None: all 1."""

    @property
    def ids(self) -> NDArray[np.int32]:
        """(E,) in host memory, read-only; the first read of a batch's ids waits for a GPU."""
        return self.found.host()[self.first : self.last]

    @property
    def device_ids(self) -> Array:
        """(E,) on the device."""
        return self.found.device_ids[self.first : self.last]

    @property
    def num_ids(self) -> int:
        """E."""
        return self.last - self.first
