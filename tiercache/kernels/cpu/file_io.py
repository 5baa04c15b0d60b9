"""File reads and CRC32C: many reads in one call and without the GIL, checked while their bytes are in the caches.

A thread that reads next to a training takes the GIL once for many reads, not several times for each. Reads need Linux
and a CPU with an instruction for CRC32C: call `has_reads` first. Addresses are numbers, counted from `_ORIGIN` where
a kernel takes them as offsets into an array.
"""

import functools
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types

from tiercache.kernels.arrays import I8, U1, U4, Matrix, Written, address_of, expect
from tiercache.kernels.cpu.compile import inlined, intrinsic, serial
from tiercache.kernels.cpu.simd import call, element_address

_LONG, _INT = ir.IntType(64), ir.IntType(32)
_ORIGIN = np.zeros(1, np.uint8)
_PAGE_BYTES = 4096
_STEP_BYTES = 2 << 20  # of one field, read at once: what the second cache of a core holds
_HUGE_BYTES = 2 << 20
_IN_PAGES = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
_AS_IS = os.O_RDONLY | os.O_CLOEXEC
_SEEK_END, _RANDOM = os.SEEK_END, getattr(os, "POSIX_FADV_RANDOM", 1)
_SHORT = -5  # EIO: a file has fewer bytes than it should, or more

Part = tuple[U1, I8]
"""Bytes, and bounds (R + 1, rising) of runs of them."""
FieldFile = tuple[str, int, int, int]
"""Path, bytes of the file, the byte of it where the field of the first row begins, bytes of the field in a row."""

# of libc, where an address is a number; a handle that is negative is an error
_preadv: Any = types.ExternalFunction("preadv", types.int64(types.int32, types.int64, types.int32, types.int64))
_open: Any = types.ExternalFunction("open", types.int32(types.int64, types.int32))
_lseek: Any = types.ExternalFunction("lseek", types.int64(types.int32, types.int64, types.int32))
_advise: Any = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))
_close: Any = types.ExternalFunction("close", types.int32(types.int32))


@functools.cache
def has_crc32c() -> bool:
    """Return True if this CPU has an instruction for CRC32C."""
    return bool(binding.get_host_cpu_features().get("sse4.2", False))


@functools.cache
def has_reads() -> bool:
    """Return True if `read_checked` and `read_fields` can be called: on Linux, with an instruction for CRC32C."""
    return sys.platform == "linux" and has_crc32c()


class ByteRuns(NamedTuple):
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


class _ThreadMemory(threading.local):
    """Memory of each thread: two pages for what is read next to an array, and one step of `read_fields`."""

    def __init__(self) -> None:
        self.ends = np.frombuffer(mmap.mmap(-1, 2 * _PAGE_BYTES), np.uint8)
        self._step = np.empty(0, np.uint8)

    def step(self, num_bytes: int) -> U1:
        """Return so many bytes or more, in huge pages if the system has them."""
        if self._step.size < num_bytes:
            memory = mmap.mmap(-1, num_bytes + _HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            pages = np.frombuffer(memory, np.uint8)
            self._step = pages[-address_of(pages) % _HUGE_BYTES :][:num_bytes]
        return self._step


_memory = _ThreadMemory()


@intrinsic
def _add_word(_typing: Any, crc: Any, array: Any, offset: Any) -> Any:
    """Return the checksum after eight more bytes."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address = element_address(context, builder, array, arguments[1], arguments[2])
        word = builder.load(builder.bitcast(address, _LONG.as_pointer()), align=1)
        return call(builder, "llvm.x86.sse42.crc32.64.64", _LONG, [arguments[0], word])

    return types.uint64(types.uint64, array, types.intp), emit


@intrinsic
def _add_byte(_typing: Any, crc: Any, array: Any, offset: Any) -> Any:
    """Return the checksum after one more byte."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address = element_address(context, builder, array, arguments[1], arguments[2])
        low = builder.trunc(arguments[0], ir.IntType(32))
        added = call(builder, "llvm.x86.sse42.crc32.32.8", ir.IntType(32), [low, builder.load(address)])
        return builder.zext(added, _LONG)

    return types.uint64(types.uint64, array, types.intp), emit


@intrinsic
def _or_error(_typing: Any, result: Any) -> Any:
    """Return what libc returned, or -errno where that is negative."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        error = builder.load(call(builder, "__errno_location", _INT.as_pointer(), []))
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
        call(builder, "memcpy", ir.IntType(8).as_pointer(), [*places, arguments[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


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


@serial
def _crc32c(memory: U1, places: I8, sizes: I8, out: Written[U4]) -> None:
    _checksums(memory, places, sizes, out)


def crc32c(parts: Sequence[Part]) -> U4:
    """Return the CRC32C of runs of bytes in any number of arrays: (R,), part after part.

    A part is an array and the bounds of its runs (R_part + 1, rising). Raises ValueError where a bound lies outside
    the array. Only for CPUs with the instruction.
    """
    if not parts:
        return np.empty(0, np.uint32)
    runs = ByteRuns.of(parts)
    out = np.empty(runs.begin.size, np.uint32)
    _crc32c(_ORIGIN, runs.begin + runs.places.repeat(np.diff(runs.first)), runs.end - runs.begin, out)
    return out


@serial
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
    runs = ByteRuns.of(parts, filled=True)
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
        _ORIGIN, requests, origin, address_of(_memory.ends), runs.first, runs.begin, runs.end, done, sums
    )  # fmt: skip
    return done, sums


@inlined
def _fill(memory, origin, buffer, handles, files, row_bytes, widest, in_pages, places, sizes, sums, parts):  # type: ignore[no-untyped-def]
    """Read pieces, as many a step as the buffer has room for; returns -errno or 0."""
    piece, first_row = 0, 0
    while piece < places.size:
        last, rows = piece, 0
        while last < places.size and (last == piece or (rows + sizes[last] // row_bytes) * widest <= _STEP_BYTES):
            rows += sizes[last] // row_bytes
            last += 1
        field_offset = 0
        for f in range(files.shape[0]):
            width = files[f, 3]
            low = files[f, 2] + first_row * width
            high = low + rows * width
            begin = low - low % _PAGE_BYTES if in_pages else low
            parts[0], parts[1] = buffer, high - begin
            if in_pages:
                parts[1] = (high - begin + _PAGE_BYTES - 1) // _PAGE_BYTES * _PAGE_BYTES
            read = _or_error(_preadv(handles[f], _address(parts, 0), 1, begin))
            if read < high - begin:
                return read if read < 0 else _SHORT
            source = buffer + low - begin
            for p in range(piece, last):
                piece_rows = sizes[p] // row_bytes
                _copy(origin + places[p] + piece_rows * field_offset, source, piece_rows * width)
                source += piece_rows * width
            field_offset += width
        _checksums(memory, places[piece:last], sizes[piece:last], sums[piece:last])
        piece, first_row = last, first_row + rows
    return 0


@serial
def _read_fields(
    memory: U1,
    names: U1,
    origin: int,
    buffer: int,
    requests: Matrix[I8],
    files: Matrix[I8],
    places: I8,
    sizes: I8,
    done: Written[I8],
    sums: Written[U4],
) -> None:
    parts, handles = np.empty(2, np.int64), np.empty(files.shape[0], np.int64)
    first_file, first = 0, 0
    for i in range(done.size):
        in_pages, row_bytes, widest = requests[i, 0] != 0, requests[i, 1], requests[i, 2]
        last_file, last = first_file + requests[i, 3], first + requests[i, 4]
        fields = files[first_file:last_file]
        status, opened = 0, 0
        while status >= 0 and opened < fields.shape[0]:
            status = _or_error(np.int64(_open(_address(names, fields[opened, 0]), _IN_PAGES if in_pages else _AS_IS)))
            if status >= 0:
                handles[opened] = status
                if not in_pages:
                    _advise(status, 0, 0, _RANDOM)  # nothing more than the rows is read
                if _lseek(status, 0, _SEEK_END) != fields[opened, 1]:
                    status = _SHORT
                opened += 1
        if status >= 0:
            status = _fill(
                memory, origin, buffer, handles, fields, row_bytes, widest, in_pages,
                places[first:last], sizes[first:last], sums[first:last], parts,
            )  # fmt: skip
        for f in range(opened):
            _close(handles[f])
        done[i] = status if status < 0 else sizes[first:last].sum()
        first_file, first = last_file, last


def read_fields(sources: Sequence[tuple[bool, Sequence[FieldFile]]], parts: Sequence[Part]) -> tuple[I8, U4]:
    """Fill arrays with rows from the files of their fields; returns what `file_io.read_checked` does.

    A source says whether files are read in whole pages, past the page cache, and has the file of each field in the
    order of a row. A part is the array to fill, one for each source, and the bounds of its pieces (R_part + 1, rising
    from 0 to its size): whole rows, of which all of the first field come first, then all of the next. A file of another
    size than said is not read (-EIO). Memory of the thread: 2 MiB, or a field of the largest piece. For systems where
    `file_io.has_reads`. Raises ValueError for arrays, bounds and files that do not fit.
    """
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.uint32)
    names, most = bytearray(), _STEP_BYTES
    requests, files, places, sizes = list[tuple[int, ...]](), list[tuple[int, ...]](), [], []
    for (in_pages, fields), (array, bounds) in zip(sources, parts, strict=True):
        expect("out", array, np.uint8, written=True)
        expect("bounds", bounds, np.int64)
        widths, begins = [width for *_, width in fields], [begin for *_, begin, _ in fields]
        if not fields or min(widths) <= 0 or min(begins) < 0:
            raise ValueError(
                f"rows have one field or more, of 1 byte or more, which begins at byte 0 or later: {fields}."
            )
        row_bytes, pieces = sum(widths), np.diff(bounds)
        fit = bounds.size > 0 and bounds[0] == 0 and bounds[-1] == array.size and not (pieces < 0).any()
        if not fit or (bounds % row_bytes).any():
            raise ValueError(
                f"bounds must rise from 0 to {array.size}, the bytes of the array, by rows of {row_bytes}."
            )
        for path, file_bytes, begin, width in fields:
            files.append((len(names), file_bytes, begin, width))
            name = os.fsencode(path)
            if b"\0" in name:
                raise ValueError(f"{path!r} is no name of a file: it has a zero.")
            names += name + b"\0"
        most = max(most, int(pieces.max(initial=0)) // row_bytes * max(widths))
        requests.append((in_pages, row_bytes, max(widths), len(fields), pieces.size))
        places.append(bounds[:-1] + (address_of(array) - address_of(_ORIGIN)))
        sizes.append(pieces)
    place, size = np.concatenate(places), np.concatenate(sizes)
    done, sums = np.empty(len(parts), np.int64), np.zeros(place.size, np.uint32)
    buffer = address_of(_memory.step(most + 2 * _PAGE_BYTES))
    _read_fields(
        _ORIGIN, np.frombuffer(bytes(names), np.uint8), address_of(_ORIGIN), buffer,
        np.array(requests, np.int64), np.array(files, np.int64), place, size, done, sums,
    )  # fmt: skip
    return done, sums
