"""Runs: arrays of ids that lie one behind the other already, so that they are joined without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Run(NamedTuple):
    """Arrays [first, last) of a sequence as one."""

    first: int
    last: int
    values: NDArray[Any]


def runs_of(arrays: Sequence[NDArray[Any]]) -> list[Run]:
    """Return arrays (n,) of one dtype as the fewest views: neighbors in memory, parts of one flat array, are one."""
    ends: list[int] = []
    at = -1
    for i, array in enumerate(arrays):
        address = array.ctypes.data
        if i and not (address == at and array.size and _same_flat(array, arrays[i - 1])):
            ends.append(i)
        at = address + array.nbytes
    return [
        Run(first, last, arrays[first] if last == first + 1 else _view(arrays[first], arrays[last - 1]))
        for first, last in zip([0, *ends], [*ends, len(arrays)], strict=True)
        if first < last
    ]


def _same_flat(one: NDArray[Any], other: NDArray[Any]) -> bool:
    base = one.base
    contiguous = one.flags.c_contiguous and other.flags.c_contiguous
    return contiguous and isinstance(base, np.ndarray) and base.flags.c_contiguous and base is other.base


def _view(first: NDArray[Any], last: NDArray[Any]) -> NDArray[Any]:
    base = first.base
    assert isinstance(base, np.ndarray)
    begin = (first.ctypes.data - base.ctypes.data) // first.itemsize
    size = (last.ctypes.data + last.nbytes - first.ctypes.data) // first.itemsize
    return base.reshape(-1).view(first.dtype)[begin : begin + size]
