"""CRC32C of many runs of bytes in one call and without the GIL, by the CPU's own instruction.

The store has a library for it, which holds the GIL: beside a training, each short call of it is a wait of the training
thread. Test vectors: RFC 3720, appendix B.4.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import types

from tiercache.kernels.arrays import I8, U1, U4, Written, address_of, expect
from tiercache.kernels.cpu.jit import inlined, intrinsic, serial_where
from tiercache.kernels.cpu.simd import _call, element_address

_LONG = ir.IntType(64)
_ORIGIN = np.zeros(1, np.uint8)  # places in memory are counted from here

Part = tuple[U1, I8]
"""Bytes, and bounds (R + 1, rising) of runs of them."""


@functools.cache
def has_crc32c() -> bool:
    """Tell whether this CPU has the instruction."""
    return bool(binding.get_host_cpu_features().get("sse4.2", False))


@intrinsic
def _add_word(_typing: Any, crc: Any, array: Any, offset: Any) -> Any:
    """Return the checksum after eight more bytes."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address = element_address(context, builder, array, arguments[1], arguments[2])
        word = builder.load(builder.bitcast(address, _LONG.as_pointer()), align=1)
        return _call(builder, "llvm.x86.sse42.crc32.64.64", _LONG, [arguments[0], word])

    return types.uint64(types.uint64, array, types.intp), emit


@intrinsic
def _add_byte(_typing: Any, crc: Any, array: Any, offset: Any) -> Any:
    """Return the checksum after one more byte."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address = element_address(context, builder, array, arguments[1], arguments[2])
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


@inlined
def _checksums(memory, places, sizes, out):  # type: ignore[no-untyped-def]
    start, first = np.uint64(0xFFFFFFFF), 0
    while first + 4 <= places.size:
        # Each step of a run waits for the one before it: four runs at a time keep the CPU busy.
        a, b, c, d = start, start, start, start
        i, j, k, m = places[first], places[first + 1], places[first + 2], places[first + 3]
        done = 8 * (min(sizes[first], sizes[first + 1], sizes[first + 2], sizes[first + 3]) // 8)
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


@serial_where(has_crc32c)
def _crc32c(memory: U1, places: I8, sizes: I8, out: Written[U4]) -> None:
    _checksums(memory, places, sizes, out)


class Runs(NamedTuple):
    """Runs of bytes in arrays, part after part."""

    places: I8
    """(N,): where the array of each part begins, from `_ORIGIN` on."""
    sizes: I8
    """(N,): bytes of each array."""
    first: I8
    """(N + 1,): the first run of each part, and the number of runs."""
    begin: I8
    """(R,): where each run begins in its array."""
    end: I8
    """(R,): where it ends."""

    @classmethod
    def of(cls, parts: Sequence[Part], *, filled: bool = False) -> Self:
        """Check all parts at once: each call of numpy that is made for each of them is one during which others wait.

        filled: whether arrays will be written, and bounds must be from 0 to their ends.
        """
        arrays, cuts = [array for array, _ in parts], [bounds for _, bounds in parts]
        for array, bounds in parts:
            expect("data", array, np.uint8, written=filled)
            expect("bounds", bounds, np.int64)
        places = np.array([address_of(array) for array in arrays]) - address_of(_ORIGIN)
        sizes, lengths = np.array([array.size for array in arrays]), [bounds.size for bounds in cuts]
        if min(lengths) == 0:
            raise ValueError(_wrong_bounds(arrays[lengths.index(0)].size, filled=filled))
        after, bounds = np.cumsum(lengths), np.concatenate(cuts)
        runs = np.ones(bounds.size - 1, np.bool_)
        runs[after[:-1] - 1] = False  # from the end of one part to the begin of the next
        begin, end = bounds[:-1][runs], bounds[1:][runs]
        first = np.zeros(sizes.size + 1, np.int64)
        first[1:] = after - np.arange(1, sizes.size + 1)
        low, high = bounds[after - lengths], bounds[after - 1]
        wrong = (low != 0) | (high != sizes) if filled else (low < 0) | (high > sizes)
        falls = end < begin
        if wrong.any() or falls.any():
            part = wrong.argmax() if wrong.any() else np.searchsorted(first, falls.argmax(), side="right") - 1
            raise ValueError(_wrong_bounds(int(sizes[part]), filled=filled))
        return cls(places, sizes, first, begin, end)


def _wrong_bounds(num_bytes: int, *, filled: bool) -> str:
    within = f"0 to {num_bytes}" if filled else f"0 or more to at most {num_bytes}"
    return f"bounds must rise from {within}, the bytes of the data."


def crc32c(parts: Sequence[Part]) -> U4:
    """Return the CRC32C of runs of bytes in any number of arrays: (R,), part after part.

    A part is an array and the bounds of its runs (R_part + 1, rising). Raises ValueError where a bound lies outside
    the array. Only for CPUs with the instruction.
    """
    if not parts:
        return np.empty(0, np.uint32)
    runs = Runs.of(parts)
    out = np.empty(runs.begin.size, np.uint32)
    _crc32c(_ORIGIN, runs.begin + runs.places.repeat(np.diff(runs.first)), runs.end - runs.begin, out)
    return out
