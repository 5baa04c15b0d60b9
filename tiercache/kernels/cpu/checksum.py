"""CRC32C of many runs of bytes in one call without the GIL, which would cost the training thread 3 us per page.

The kernel needs a CPU with an instruction for CRC32C: call `has_crc32c` first.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types

from tiercache.kernels.arrays import I8, U1, U4, Written, address_of, expect
from tiercache.kernels.cpu.compile import inlined, serial
from tiercache.kernels.cpu.simd import Elements, call, emitted

_INT, _LONG = ir.IntType(32), ir.IntType(64)
_ORIGIN = np.zeros(1, np.uint8)  # the kernel takes all arrays as one, which begins here

Part = tuple[U1, I8]
"""Bytes, and bounds (R + 1, rising) of their runs."""


@functools.cache
def has_crc32c() -> bool:
    """Return True if this CPU has an instruction for CRC32C."""
    return bool(binding.get_host_cpu_features().get("sse4.2", False))


@emitted(types.uint64, types.uint64, Elements, types.intp)
def _add_word(builder: Any, crc: Any, data: Elements, offset: Any) -> Any:
    """Return the checksum after eight more bytes."""
    address = builder.bitcast(data.address(builder, offset), _LONG.as_pointer())
    return call(builder, "llvm.x86.sse42.crc32.64.64", _LONG, [crc, builder.load(address, align=1)])


@emitted(types.uint64, types.uint64, Elements, types.intp)
def _add_byte(builder: Any, crc: Any, data: Elements, offset: Any) -> Any:
    """Return the checksum after one more byte."""
    inputs = [builder.trunc(crc, _INT), builder.load(data.address(builder, offset))]
    return builder.zext(call(builder, "llvm.x86.sse42.crc32.32.8", _INT, inputs), _LONG)


@inlined
def _finish(crc, memory, at, size):  # type: ignore[no-untyped-def]
    words = size // 8
    for i in range(words):
        crc = _add_word(crc, memory, at + 8 * i)
    for i in range(8 * words, size):
        crc = _add_byte(crc, memory, at + i)
    return np.uint32(crc ^ np.uint64(0xFFFFFFFF))


if has_crc32c():  # other CPUs could not compile it, and `prepare` compiles every kernel

    @serial
    def _crc32c(memory: U1, places: I8, sizes: I8, out: Written[U4]) -> None:
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


def crc32c(parts: Sequence[Part]) -> U4:
    """Return the CRC32C of runs of bytes in any number of arrays: (R,), part after part.

    A part is an array and the bounds of its runs (R_part + 1, rising). Raises ValueError if a bound is outside the
    array. Only for CPUs with the instruction.
    """
    if not parts:
        return np.empty(0, np.uint32)
    for array, bounds in parts:
        expect("data", array, np.uint8)
        expect("bounds", bounds, np.int64)
    # All parts at once: during a call of NumPy for each of them, other threads would wait.
    lengths, sizes = [bounds.size for _, bounds in parts], np.array([array.size for array, _ in parts])
    if min(lengths) == 0:
        raise ValueError(f"part {lengths.index(0)} has no bounds: pass one for each run, and the end of the last")
    after, bounds = np.cumsum(lengths), np.concatenate([bounds for _, bounds in parts])
    part_of = np.arange(sizes.size).repeat(lengths)
    runs = np.ones(bounds.size - 1, np.bool_)
    runs[after[:-1] - 1] = False  # from the end of one part to the start of the next
    wrong = (bounds < 0) | (bounds > sizes[part_of])
    wrong[1:] |= runs & (bounds[1:] < bounds[:-1])
    if wrong.any():
        at = int(wrong.argmax())
        found = f"bound {bounds[at]} in part {part_of[at]}, which has {sizes[part_of[at]]} bytes"
        raise ValueError(f"{found}: bounds must rise, from 0 or more to at most the size of the part")
    begin, end = bounds[:-1][runs], bounds[1:][runs]
    places = np.array([address_of(array) for array, _ in parts]) - address_of(_ORIGIN)
    out = np.empty(begin.size, np.uint32)
    _crc32c(_ORIGIN, begin + places[part_of[:-1][runs]], end - begin, out)
    return out
