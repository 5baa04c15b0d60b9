"""Arrays between protected pages, so that an index outside an array is caught."""

import ctypes
import mmap
import os
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

_PAGE = mmap.PAGESIZE
_RUBBISH = 0xA5
_REPEATED = 48 << 20  # no power of two: the place that 32 bits would make of a far one is other memory
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def reserved(rows: int, width: int) -> NDArray[np.float32]:
    """Return zeros (rows, width) whose memory is allocated when it is touched."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reserves address space as Linux does")
    try:
        no_reserve = 0x4000  # MAP_NORESERVE, which Python's mmap does not name
        memory = mmap.mmap(-1, rows * width * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError:
        pytest.skip("no address space to reserve")
    return np.frombuffer(memory, np.float32).reshape(rows, width)


def repeated(rows: int, width: int) -> NDArray[np.float32]:
    """Return an array (rows, width) in which every 48 MiB share memory: the last write to a place stays."""
    if not sys.platform.startswith("linux"):
        pytest.skip("maps memory as Linux does")
    whole = reserved(rows, width)
    file = os.memfd_create("repeated")
    try:
        os.ftruncate(file, _REPEATED)
        for start in range(0, whole.nbytes, _REPEATED):
            size = min(_REPEATED, whole.nbytes - start)
            flags = mmap.MAP_SHARED | 0x10  # MAP_FIXED, which Python's mmap does not name
            at = whole.ctypes.data + start
            assert _LIBC.mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0) == at
    finally:
        os.close(file)
    return whole


class GuardedMemory:
    """Arrays of one test. Each ends (``at_end``) or begins at a page that cannot be touched.

    The other side is filled with garbage, and `check` detects writes to it. Arrays are invalid after `close`.
    """

    def __init__(self, *, at_end: bool) -> None:
        self.at_end = at_end
        self._blocks: list[tuple[int, int, int, int]] = []  # mapping, its bytes, array, its bytes

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        room = max(1, -(-nbytes // _PAGE)) * _PAGE
        mapping = _LIBC.mmap(None, room + 2 * _PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert mapping not in {None, 2**64 - 1}
        inside = mapping + _PAGE
        assert _LIBC.mprotect(inside, room, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        ctypes.memset(inside, _RUBBISH, room)
        address = inside + room - nbytes if self.at_end else inside
        self._blocks.append((mapping, room + 2 * _PAGE, address, nbytes))
        memory = (ctypes.c_char * nbytes).from_address(address)
        return np.frombuffer(memory, dtype).reshape(shape) if nbytes else np.empty(shape, dtype)

    @property
    def ranges(self) -> NDArray[np.uint64]:
        """The address range of each array that has elements, in order: (arrays, 2)."""
        return np.array(sorted((at, at + size) for _, _, at, size in self._blocks if size), np.uint64).reshape(-1, 2)

    def place(self, array: NDArray[Any]) -> NDArray[Any]:
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def check(self) -> None:
        """Raise AssertionError if memory next to an array was written to."""
        for mapping, nbytes, address, size in self._blocks:
            first, last = mapping + _PAGE, mapping + nbytes - _PAGE
            for begin, end in ((first, address), (address + size, last)):
                padding = ctypes.string_at(begin, end - begin)
                assert padding.count(_RUBBISH) == len(padding), f"a kernel wrote next to an array of {size} bytes."

    def close(self) -> None:
        for mapping, nbytes, _, _ in self._blocks:
            _LIBC.munmap(mapping, nbytes)
        self._blocks.clear()
