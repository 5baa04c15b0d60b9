"""Rows whose fields lie in files of their own: read, brought together and checked in one call, without the GIL.

What `file_io` is for rows that lie as they are wanted. Pieces of rows are wanted field by field, so what one file has
of them is one run of bytes: it is read into memory of the thread and copied from there while it is in the caches.
"""

import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.core import types

from tiercache.kernels.arrays import I8, U1, U4, Matrix, Written, address_of, expect
from tiercache.kernels.cpu.checksum import _ORIGIN, Part, _checksums
from tiercache.kernels.cpu.file_io import _PAGE_BYTES, _address, _copy, _or_error, _preadv, has_reads
from tiercache.kernels.cpu.jit import inlined, serial_where

FieldFile = tuple[str, int, int, int]
"""Path, bytes of the file, the byte of it where the field of the first row begins, bytes of the field in a row."""

_STEP_BYTES = 2 << 20  # of one field, read at once: what the second cache of a core holds
_HUGE_BYTES = 2 << 20
_IN_PAGES = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
_AS_IS = os.O_RDONLY | os.O_CLOEXEC
_SEEK_END, _RANDOM = os.SEEK_END, getattr(os, "POSIX_FADV_RANDOM", 1)
_SHORT = -5  # EIO: a file has fewer bytes than it should, or more


class _Steps(threading.local):
    """Memory of each thread for one step, in huge pages where there are some."""

    def __init__(self) -> None:
        self.pages = np.empty(0, np.uint8)

    def hold(self, num_bytes: int) -> U1:
        if self.pages.size < num_bytes:
            memory = mmap.mmap(-1, num_bytes + _HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            pages = np.frombuffer(memory, np.uint8)
            self.pages = pages[-address_of(pages) % _HUGE_BYTES :][:num_bytes]
        return self.pages


_steps = _Steps()


# of libc, where an address is a number; a handle that is negative is an error
_open: Any = types.ExternalFunction("open", types.int32(types.int64, types.int32))
_lseek: Any = types.ExternalFunction("lseek", types.int64(types.int32, types.int64, types.int32))
_advise: Any = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))
_close: Any = types.ExternalFunction("close", types.int32(types.int32))


@inlined
def _fill(memory, origin, room, handles, files, row_bytes, widest, in_pages, places, sizes, sums, parts):  # type: ignore[no-untyped-def]
    """Read pieces, as many a step as the room holds; returns -errno or 0."""
    piece, first_row = 0, 0
    while piece < places.size:
        last, rows = piece, 0
        while last < places.size and (last == piece or (rows + sizes[last] // row_bytes) * widest <= _STEP_BYTES):
            rows += sizes[last] // row_bytes
            last += 1
        before = 0
        for f in range(files.shape[0]):
            width = files[f, 3]
            low = files[f, 2] + first_row * width
            high = low + rows * width
            begin = low - low % _PAGE_BYTES if in_pages else low
            parts[0], parts[1] = room, high - begin
            if in_pages:
                parts[1] = (high - begin + _PAGE_BYTES - 1) // _PAGE_BYTES * _PAGE_BYTES
            read = _or_error(_preadv(handles[f], _address(parts, 0), 1, begin))
            if read < high - begin:
                return read if read < 0 else _SHORT
            source = room + low - begin
            for p in range(piece, last):
                of_piece = sizes[p] // row_bytes
                _copy(origin + places[p] + of_piece * before, source, of_piece * width)
                source += of_piece * width
            before += width
        _checksums(memory, places[piece:last], sizes[piece:last], sums[piece:last])
        piece, first_row = last, first_row + rows
    return 0


@serial_where(has_reads)
def _read_fields(
    memory: U1,
    names: U1,
    origin: int,
    room: int,
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
        mine = files[first_file:last_file]
        seen, opened = 0, 0
        while seen >= 0 and opened < mine.shape[0]:
            seen = _or_error(np.int64(_open(_address(names, mine[opened, 0]), _IN_PAGES if in_pages else _AS_IS)))
            if seen >= 0:
                handles[opened] = seen
                if not in_pages:
                    _advise(seen, 0, 0, _RANDOM)  # nothing is read beside what is asked for
                if _lseek(seen, 0, _SEEK_END) != mine[opened, 1]:
                    seen = _SHORT
                opened += 1
        if seen >= 0:
            seen = _fill(
                memory, origin, room, handles, mine, row_bytes, widest, in_pages,
                places[first:last], sizes[first:last], sums[first:last], parts,
            )  # fmt: skip
        for f in range(opened):
            _close(handles[f])
        done[i] = seen if seen < 0 else sizes[first:last].sum()
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
    for (in_pages, mine), (array, bounds) in zip(sources, parts, strict=True):
        expect("out", array, np.uint8, written=True)
        expect("bounds", bounds, np.int64)
        widths, begins = [width for *_, width in mine], [begin for *_, begin, _ in mine]
        if not mine or min(widths) <= 0 or min(begins) < 0:
            raise ValueError(
                f"rows have one field or more, of 1 byte or more, which begins at byte 0 or later: {mine}."
            )
        row_bytes, pieces = sum(widths), np.diff(bounds)
        fit = bounds.size > 0 and bounds[0] == 0 and bounds[-1] == array.size and not (pieces < 0).any()
        if not fit or (bounds % row_bytes).any():
            raise ValueError(
                f"bounds must rise from 0 to {array.size}, the bytes of the array, by rows of {row_bytes}."
            )
        for path, file_bytes, begin, width in mine:
            files.append((len(names), file_bytes, begin, width))
            name = os.fsencode(path)
            if b"\0" in name:
                raise ValueError(f"{path!r} is no name of a file: it has a zero.")
            names += name + b"\0"
        most = max(most, int(pieces.max(initial=0)) // row_bytes * max(widths))
        requests.append((in_pages, row_bytes, max(widths), len(mine), pieces.size))
        places.append(bounds[:-1] + (address_of(array) - address_of(_ORIGIN)))
        sizes.append(pieces)
    place, size = np.concatenate(places), np.concatenate(sizes)
    done, sums = np.empty(len(parts), np.int64), np.zeros(place.size, np.uint32)
    room = address_of(_steps.hold(most + 2 * _PAGE_BYTES))
    _read_fields(
        _ORIGIN, np.frombuffer(bytes(names), np.uint8), address_of(_ORIGIN), room,
        np.array(requests, np.int64), np.array(files, np.int64), place, size, done, sums,
    )  # fmt: skip
    return done, sums
