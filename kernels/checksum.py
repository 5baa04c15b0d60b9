"""CRC32C of many runs of bytes in one call and without the GIL, by the processor's own instruction.

The store has a library for it, which holds the GIL: beside a training, each short call of it is a wait of the training
thread. Test vectors: RFC 3720, appendix B.4.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import types
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect
from tiercache.kernels.jit import inlined, intrinsic, serial
from tiercache.kernels.lanes import _call, address_of

__all__ = ["crc32c", "has_crc32c"]

_LONG = ir.IntType(64)
_ORIGIN = np.zeros(1, np.uint8)  # places in memory are counted from here


@functools.cache
def has_crc32c() -> bool:
    """Tell whether this processor has the instruction."""
    return bool(binding.get_host_cpu_features().get("sse4.2", False))


@intrinsic
def _add_word(_typing: Any, crc: Any, array: Any, offset: Any) -> Any:
    """Return the checksum after eight more bytes."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address = address_of(context, builder, array, arguments[1], arguments[2])
        word = builder.load(builder.bitcast(address, _LONG.as_pointer()), align=1)
        return _call(builder, "llvm.x86.sse42.crc32.64.64", _LONG, [arguments[0], word])

    return types.uint64(types.uint64, array, types.intp), emit


@intrinsic
def _add_byte(_typing: Any, crc: Any, array: Any, offset: Any) -> Any:
    """Return the checksum after one more byte."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address = address_of(context, builder, array, arguments[1], arguments[2])
        low = builder.trunc(arguments[0], ir.IntType(32))
        added = _call(builder, "llvm.x86.sse42.crc32.32.8", ir.IntType(32), [low, builder.load(address)])
        return builder.zext(added, _LONG)

    return types.uint64(types.uint64, array, types.intp), emit


@inlined
def _finish(crc, memory, at, size):  # type: ignore[no-untyped-def]
    words = size // 8
    for i in range(words):
        crc = _add_word(crc, memory, at + 8 * i)
    for i in range(8 * words, size):
        crc = _add_byte(crc, memory, at + i)
    return np.uint32(crc ^ np.uint64(0xFFFFFFFF))


@serial
def _crc32c(memory, places, sizes, out):  # type: ignore[no-untyped-def]
    start, first = np.uint64(0xFFFFFFFF), 0
    while first + 4 <= places.size:
        # Each step of a run waits for the one before it: four runs at a time keep the processor busy.
        a, b, c, d = start, start, start, start
        i, j, k, m = places[first], places[first + 1], places[first + 2], places[first + 3]
        done = 8 * (sizes[first : first + 4].min() // 8)
        for w in range(0, done, 8):
            a = _add_word(a, memory, i + w)
            b = _add_word(b, memory, j + w)
            c = _add_word(c, memory, k + w)
            d = _add_word(d, memory, m + w)
        out[first] = _finish(a, memory, i + done, sizes[first] - done)
        out[first + 1] = _finish(b, memory, j + done, sizes[first + 1] - done)
        out[first + 2] = _finish(c, memory, k + done, sizes[first + 2] - done)
        out[first + 3] = _finish(d, memory, m + done, sizes[first + 3] - done)
        first += 4
    for run in range(first, places.size):
        out[run] = _finish(start, memory, places[run], sizes[run])


def crc32c(parts: Sequence[tuple[NDArray[np.uint8], NDArray[np.int64]]]) -> NDArray[np.uint32]:
    """Return the CRC32C of runs of bytes in any number of arrays: (R,), part after part.

    A part is an array and the bounds of its runs (R_part + 1, rising). Raises ValueError where a bound lies outside
    the array. Only for processors with the instruction.
    """
    if not parts:
        return np.empty(0, np.uint32)
    places, sizes, origin = [], [], _address_of(_ORIGIN)
    for array, cuts in parts:
        data, bounds = expect("data", array, np.uint8), expect("bounds", cuts, np.int64)
        if bounds.size == 0 or bounds[0] < 0 or bounds[-1] > data.size or (bounds[1:] < bounds[:-1]).any():
            raise ValueError(f"bounds must rise from 0 or more to at most {data.size}, the bytes of the data.")
        places.append(bounds[:-1] + (_address_of(data) - origin))
        sizes.append(bounds[1:] - bounds[:-1])
    place, size = np.concatenate(places), np.concatenate(sizes)
    out = np.empty(place.size, np.uint32)
    _crc32c(_ORIGIN, place, size, out)
    return out


def _address_of(array: NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])
