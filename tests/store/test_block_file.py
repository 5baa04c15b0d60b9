"""The file of blocks and its free space: what is put comes back, whatever its size, place in memory and way to disk."""

import errno
import mmap
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiercache.store import StoreFullError
from tiercache.store.engines.block_file import BlockFile, Extent, ExtentAllocator
from tiercache.store.files import PAGE_BYTES
from tiercache.store.store_errors import BlockReadError

pytestmark = pytest.mark.disk


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 9)), max_size=60))
def test_free_space_is_what_a_set_of_bytes_says(steps: list[tuple[bool, int, int]]) -> None:
    """Through any order of taking, giving back, growing and cutting: no byte is handed out twice, none is lost."""
    space, free, taken = ExtentAllocator(), set[int](), list[tuple[int, int]]()
    for giving, which, size in steps:
        if giving and taken:
            low, count = taken.pop(which % len(taken))
            space.give(low, count)
            free |= set(range(low, low + count))
        elif giving:
            space.cut_tail()
            free = {byte for byte in free if byte < space.end}
            assert space.end - 1 not in free
            assert space.end == max((low + count for low, count in taken), default=0)
        else:
            at = space.take(size)
            runs_fit = any(all(i + k in free for k in range(size)) for i in free)
            assert (at is not None) == runs_fit
            if at is None:
                space.grow(size)
                free |= set(range(space.end - size, space.end))
                at = space.take(size)
            assert set(range(at, at + size)) <= free
            free -= set(range(at, at + size))
            taken.append((at, size))
        assert space.free_bytes == len(free)


def aligned(size: int, shift: int = 0) -> NDArray[np.uint8]:
    """Return memory that begins ``shift`` bytes into a page."""
    return np.frombuffer(mmap.mmap(-1, size + PAGE_BYTES), np.uint8)[shift : shift + size]


SIZES = [0, 1, 4095, 4096, 4097, 100_000, 262_143, 262_144, 262_145, 3 * 4096 * 100, 1_048_577, 2_500_001]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("stable", [True, False])
def test_blocks_come_back_from_any_memory(tmp_path: Path, *, stable: bool, direct: bool) -> None:
    """Of all sizes, aligned or not, gathered or not, past the page cache or through it; ranges of them too."""
    file = BlockFile(tmp_path / "blocks", readonly=False, store_budget=None)
    if not direct:
        file._direct = None
    rng = np.random.default_rng(1)
    blocks: list[tuple[Extent, bytes]] = []
    held = []
    for shift in (0, 64):
        for size in [*SIZES, *rng.permutation(SIZES).tolist()]:
            data = aligned(size, shift)
            data[:] = rng.integers(0, 256, size, dtype=np.uint8)
            blocks.append((file.put(data, stable=stable), data.tobytes()))
            if stable:
                held.append(data)
            else:
                data[:] = 0  # what is not stable was taken already
    file.flush()
    file.sync()
    for place, data in blocks:
        assert place.offset % PAGE_BYTES == 0
        low = int(rng.integers(0, place.size + 1))
        for first, last in ((0, place.size), (low, place.size), (0, low)):
            for shift in (0, (place.offset + first) % PAGE_BYTES, 4):
                out = aligned(last - first, shift)
                file.read(place.offset + first, out)
                assert out.tobytes() == data[first:last]
    file.close()
    with closing(BlockFile(tmp_path / "blocks", readonly=True, store_budget=None)) as again:
        for place, data in blocks:
            out = np.empty(place.size, np.uint8)
            again.read(place.offset, out)
            assert out.tobytes() == data


def test_a_file_system_that_refuses_to_pass_the_cache_is_written_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take the flag and refuse the write; and it may write a part at a time."""
    file = BlockFile(tmp_path / "blocks", readonly=False, store_budget=None)
    refused, write = file._direct, os.pwritev

    def pwritev(handle: int, views: list[memoryview], offset: int) -> int:
        if handle == refused:
            raise OSError(errno.EINVAL, "no")
        return write(handle, [b"".join(views)[: 3 * PAGE_BYTES + 5]], offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    data = aligned(300_000)
    data[:] = np.random.default_rng(2).integers(0, 256, data.size, dtype=np.uint8)
    place = file.put(data, stable=True)
    file.flush()
    out = np.empty(data.size, np.uint8)
    file.read(place.offset, out)
    assert out.tobytes() == data.tobytes()
    file.close()


def test_a_failed_write_gives_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is as long as before, and what was queued is not written later."""
    file = BlockFile(tmp_path / "blocks", readonly=False, store_budget=None)
    first = file.put(np.full(10_000, 7, np.uint8), stable=False)
    file.flush()
    size = file.size

    def full(*_arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        places = [file.put(aligned(500_000), stable=True)]
        with pytest.raises(StoreFullError, match=r"was full, and has .* free by now: free some"):
            file.flush()
    file.discard(places)
    assert file.size <= size
    file.put(np.full(10_000, 8, np.uint8), stable=False)
    file.flush()
    out = np.empty(10_000, np.uint8)
    file.read(first.offset, out)
    assert set(out.tolist()) == {7}
    file.close()


def test_a_short_file_is_an_error_on_reading(tmp_path: Path) -> None:
    """For ranges past the page cache and through it."""
    file = BlockFile(tmp_path / "blocks", readonly=False, store_budget=None)
    place = file.put(aligned(600_000), stable=True)
    file.flush()
    os.truncate(tmp_path / "blocks", 5000)
    for size in (600_000, 10_000):
        with pytest.raises(BlockReadError, match="is cut short, as blocks ends at byte 5,000"):
            file.read(place.offset, aligned(size))
    file.close()
