"""Many reads of files in one call and without the GIL, what was read checked while it is in the caches.

A thread that reads beside a training takes the GIL once for many reads, not several times for each. For Linux, on
CPUs with an instruction for CRC32C: elsewhere `has_reads` says no, and whoever reads does it by itself.
"""

import functools
import mmap
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from tiercache.kernels.arrays import I8, U1, U4, Matrix, Written, address_of
from tiercache.kernels.cpu.checksum import _ORIGIN, Part, Runs, _checksums, has_crc32c
from tiercache.kernels.cpu.jit import intrinsic, serial_where
from tiercache.kernels.cpu.simd import _call, element_address

_PAGE_BYTES = 4096
_LONG, _INT = ir.IntType(64), ir.IntType(32)


class _Ends(threading.local):
    """Two pages of each thread, for what is read beside an array."""

    def __init__(self) -> None:
        self.pages = np.frombuffer(mmap.mmap(-1, 2 * _PAGE_BYTES), np.uint8)


_ends = _Ends()


@functools.cache
def has_reads() -> bool:
    """Tell whether this is such a system and such a CPU."""
    return sys.platform == "linux" and has_crc32c()


# of libc, where an address is a number
_preadv: Any = types.ExternalFunction("preadv", types.int64(types.int32, types.int64, types.int32, types.int64))


@intrinsic
def _or_error(_typing: Any, result: Any) -> Any:
    """Return what libc returned, or -errno where that is negative."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        error = builder.load(_call(builder, "__errno_location", _INT.as_pointer(), []))
        failed = builder.icmp_signed("<", arguments[0], ir.Constant(_LONG, 0))
        return builder.select(failed, builder.neg(builder.sext(error, _LONG)), arguments[0])

    return types.int64(types.int64), emit


@intrinsic
def _address(_typing: Any, array: Any, at: Any) -> Any:
    """Return the address of the element at `at`."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(element_address(context, builder, array, *arguments), _LONG)

    return types.int64(array, types.int64), emit


@intrinsic
def _copy(_typing: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy bytes from one address to another."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        places = [builder.inttoptr(place, ir.IntType(8).as_pointer()) for place in arguments[:2]]
        _call(builder, "memcpy", ir.IntType(8).as_pointer(), [*places, arguments[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@serial_where(has_reads)
def _read_checked(
    memory: U1,
    requests: Matrix[I8],
    origin: int,
    ends: int,
    first: I8,
    begins: I8,
    endings: I8,
    done: Written[I8],
    sums: Written[U4],
) -> None:
    parts = np.empty(6, np.int64)  # of a request: the page at its head, what lies between, the page at its tail
    for i in range(done.size):
        in_pages, offset, place, size = requests[i, 1], requests[i, 2], requests[i, 3], requests[i, 4]
        head = -offset % _PAGE_BYTES if in_pages else 0
        inner = (size - head) // _PAGE_BYTES * _PAGE_BYTES if in_pages else size
        tail = size - head - inner
        before = _PAGE_BYTES - head if head else 0
        parts[0], parts[1] = ends, _PAGE_BYTES
        parts[2], parts[3] = origin + place + head, inner
        parts[4], parts[5] = ends + _PAGE_BYTES, _PAGE_BYTES
        count = 1 + (1 if head else 0) + (1 if tail else 0)
        first_part = _address(parts, 0 if head else 2)
        read = _or_error(_preadv(requests[i, 0], first_part, count, offset - before))
        done[i] = read if read < 0 else max(0, min(read - before, size))
        if done[i] < size:
            continue
        _copy(origin + place, ends + before, head)
        _copy(origin + place + head + inner, ends + _PAGE_BYTES, tail)
        low, high = first[i], first[i + 1]
        _checksums(memory, begins[low:high] + place, endings[low:high] - begins[low:high], sums[low:high])


def read_checked(sources: Sequence[tuple[int, bool, int]], parts: Sequence[Part]) -> tuple[I8, U4]:
    """Fill arrays from files; returns the bytes read of each (N,), or -errno, and the CRC32C of runs of bytes (R,).

    A source is a file descriptor, whether it is read in whole pages (as past the page cache), and an offset: in whole
    pages, an array has one at least and lies in its page as the offset lies in its own. A part is the array to fill,
    one for each source, and the bounds of its runs (R_part + 1, rising from 0 to its size). The checksums come part
    after part, and say nothing of an array that was not filled: it is asked for once, so ask again or elsewhere.
    Raises ValueError for arrays and bounds that are not so.
    """
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.uint32)
    runs = Runs.of(parts, filled=True)
    handles, in_pages, offsets = (np.array(column, np.int64) for column in zip(*sources, strict=True))
    if handles.size != len(parts) or offsets.min() < 0:
        raise ValueError(f"{handles.size} sources for {len(parts)} parts begin at {offsets.tolist()}: from 0 on.")
    origin, sums = address_of(_ORIGIN), np.zeros(runs.begin.size, np.uint32)
    apart = (in_pages != 0) & ((runs.sizes < 2 * _PAGE_BYTES) | ((runs.places + origin - offsets) % _PAGE_BYTES != 0))
    if apart.any():
        i = int(apart.argmax())
        raise ValueError(
            f"an array of {runs.sizes[i]} bytes at {runs.places[i] + origin:#x} cannot be read in whole pages at "
            f"{offsets[i]}."
        )
    requests = np.stack([handles, in_pages, offsets, runs.places, runs.sizes], axis=1)
    done = np.empty(len(parts), np.int64)
    _read_checked(
        _ORIGIN, requests, origin, address_of(_ends.pages), runs.first, runs.begin, runs.end, done, sums
    )  # fmt: skip
    return done, sums
