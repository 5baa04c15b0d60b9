"""The file of blobs and its free space: data of any size, memory address and write path comes back."""

import errno
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.store import blobs
from tests.store.blobs import head_of, plain, publish, some_bytes
from tiercache.store import LmdbEngine, StoreFullError, direct_io
from tiercache.store.engines.block_file import BlockFile, ExtentAllocator, Extents, Run
from tiercache.store.files import PAGE_BYTES, paged
from tiercache.store.store_errors import BlockReadError, CorruptStoreError

pytestmark = pytest.mark.disk
MIB = 1 << 20


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 8)), max_size=60))
def test_free_space_is_what_a_set_of_pages_says(steps: list[tuple[bool, int, int]]) -> None:
    """Through any order of taking, freeing, growing and cutting: no page is used twice, and none is lost."""
    space, free, taken = ExtentAllocator(), set[int](), list[tuple[int, int]]()

    def pages_of(runs: Sequence[tuple[int, int]]) -> list[int]:
        return [low // PAGE_BYTES + i for low, count in runs for i in range(count // PAGE_BYTES)]

    for giving, which, size in steps:
        if giving and taken:
            run = taken.pop(which % len(taken))
            space.give(*run)
            free |= set(pages_of([run]))
        elif giving:
            space.cut_tail()
            free = {page for page in free if page < space.end // PAGE_BYTES}
            assert space.end // PAGE_BYTES - 1 not in free
            assert space.end == max((low + count for low, count in taken), default=0)
        else:
            one_fits = any(all(i + k in free for k in range(size)) for i in free)
            runs = space.take(size * PAGE_BYTES)
            assert len(pages_of(runs)) == min(size, len(free))
            assert len(runs) == 1 or not one_fits
            if not runs:
                space.grow(size * PAGE_BYTES)
                free |= set(range(space.end // PAGE_BYTES - size, space.end // PAGE_BYTES))
                runs = space.take(size * PAGE_BYTES)
            pages = pages_of(runs)
            assert len(set(pages)) == len(pages)
            assert set(pages) <= free
            free -= set(pages)
            taken += runs
        assert sum(high - low for low, high in space.runs) == len(free) * PAGE_BYTES


def test_a_blob_is_not_split_over_runs_that_are_short_beside_it() -> None:
    """From 100 runs of a page, and some of a mebibyte, a long blob takes the latter; a short one takes the former."""
    space = ExtentAllocator()
    space.grow(400 * MIB)
    assert space.take(400 * MIB) == [(0, 400 * MIB)]
    for i in range(100):
        space.give(i * 2 * MIB, PAGE_BYTES)
    for i in range(101, 106):
        space.give(i * 2 * MIB, MIB)
    assert space.take(4 * MIB) == [(i * 2 * MIB, MIB) for i in range(101, 105)]
    assert space.take(4 * MIB) == [(210 * MIB, MIB)]
    assert space.take(3 * PAGE_BYTES) == [(i * 2 * MIB, PAGE_BYTES) for i in range(3)]


@given(
    runs=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=6),
    less=st.integers(0, PAGE_BYTES - 1),
    drops=st.lists(st.integers(0, 30 * PAGE_BYTES), max_size=4),
    low=st.integers(0, 30 * PAGE_BYTES),
    count=st.integers(0, 30 * PAGE_BYTES),
)
def test_extents_are_what_a_list_of_bytes_says(
    runs: list[tuple[int, int]], less: int, drops: list[int], low: int, count: int
) -> None:
    """Any bytes of a blob are at the places of its runs, and a dropped front is whole pages of it."""
    at, places = 0, list[tuple[int, int]]()
    for gap, pages in runs:
        places.append((at + gap * PAGE_BYTES, pages * PAGE_BYTES))
        at = sum(places[-1])
    where = [low + i for low, pages in places for i in range(0, pages, PAGE_BYTES)]
    size = max(0, len(where) * PAGE_BYTES - less)
    extents, gone = Extents(size, 0, tuple(places)), 0
    for upto in drops:
        extents, freed = extents.drop(upto)
        gone = max(gone, len(where) if upto >= size else upto // PAGE_BYTES)
        assert extents.dropped == (size if gone == len(where) else gone * PAGE_BYTES)
        rest = [low + i for low, pages in extents.runs for i in range(0, pages, PAGE_BYTES)]
        assert rest == where[gone:]
        assert {low + i for low, pages in freed for i in range(0, pages, PAGE_BYTES)} <= set(where[:gone])
    low = min(max(low, extents.dropped), size)
    count = min(count, size - low)
    found = [low + i for low, n in extents.pieces(low, count) for i in range(n)]
    assert found == [where[byte // PAGE_BYTES] + byte % PAGE_BYTES for byte in range(low, low + count)]
    for end in {at, at // 2, 0, at - 1} - {-1}:
        whole = next((i for i in range(gone, len(where)) if where[i] + PAGE_BYTES > end), None)
        if whole is None or extents.whole_bytes(end) == size:
            assert extents.whole_bytes(end) == size
            assert whole is None or where[-1] + paged(size) - size < end + PAGE_BYTES
        else:
            assert extents.whole_bytes(end) == whole * PAGE_BYTES + max(0, end - where[whole])


def aligned(size: int, shift: int = 0) -> NDArray[np.uint8]:
    """Return memory that starts ``shift`` bytes after a page boundary."""
    return np.frombuffer(mmap.mmap(-1, size + PAGE_BYTES), np.uint8)[shift : shift + size]


def random_bytes(size: int, seed: int, shift: int = 0) -> NDArray[np.uint8]:
    """Return such memory, filled."""
    data = aligned(size, shift)
    data[:] = some_bytes(size, seed)
    return data


@pytest.fixture
def file(tmp_path: Path) -> Iterator[BlockFile]:
    """An empty file of blobs."""
    with closing(BlockFile(tmp_path / "blocks", readonly=False, store_budget=None)) as made:
        yield made


def put(file: BlockFile, data: Sequence[NDArray[np.uint8]], *, stable: bool = False) -> list[Extents]:
    """Write blobs in one part each."""
    rooms = file.take([one.size for one in data])
    for room, one in zip(rooms, data, strict=True):
        file.write(room, 0, one, stable=stable)
    return rooms


def bytes_of(file: BlockFile, room: Extents) -> bytes:
    out = np.empty(room.size, np.uint8)
    file.read([(room, 0, out)])
    return out.tobytes()


SIZES = [0, 1, 4095, 4096, 4097, 100_000, 262_143, 262_144, 262_145, 3 * 4096 * 100, 1_048_577, 2_500_001]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("stable", "direct", "split"), [*itertools.product([True, False], repeat=3)])
def test_any_memory_comes_back(tmp_path: Path, file: BlockFile, *, stable: bool, direct: bool, split: bool) -> None:
    """Blobs of all sizes, aligned or not, gathered or not, past the page cache or through it; also ranges of them."""
    if not direct:
        file._direct = None
    if split:
        holes = [put(file, [aligned(300_000)])[0] for _ in range(40)]
        file.give(run for hole in holes[::2] for run in hole.runs)
    rng = np.random.default_rng(1)
    blobs: list[tuple[Extents, bytes]] = []
    held = []
    for shift in (0, 64):
        for size in [*SIZES, *rng.permutation(SIZES).tolist()]:
            data = random_bytes(size, len(blobs), shift)
            blobs.append((put(file, [data], stable=stable)[0], data.tobytes()))
            if stable:
                held.append(data)
            else:
                data[:] = 0  # unstable memory was already copied
    file.flush()
    file.sync()
    assert split == any(len(room.runs) > 1 for room, _ in blobs)
    for room, written in blobs:
        assert all(number % PAGE_BYTES == 0 for run in room.runs for number in run)
        low = int(rng.integers(0, room.size + 1))
        for first, last in ((0, room.size), (low, room.size), (0, low)):
            for shift in (0, first % PAGE_BYTES, 4):
                out = aligned(last - first, shift)
                file.read([(room, first, out)])
                assert out.tobytes() == written[first:last]
    file.close()
    with closing(BlockFile(tmp_path / "blocks", readonly=True, store_budget=None)) as again:
        for room, written in blobs:
            assert bytes_of(again, room) == written


RANGES = [(first * 50_021 % 3_000_000, 60_000 + first * 997) for first in range(200)]
Large = tuple[BlockFile, Extents, list[bytes]]


def read_ranges(file: BlockFile, room: Extents) -> list[bytes]:
    """Read RANGES together, each into memory at the same offset in its page."""
    outs = [aligned(size, low % PAGE_BYTES) for low, size in RANGES]
    file.read([(room, low, out) for (low, _), out in zip(RANGES, outs, strict=True)])
    return [out.tobytes() for out in outs]


@pytest.fixture
def large(file: BlockFile) -> Large:
    """Return a file with a blob, and the bytes of RANGES of it."""
    data = random_bytes(3_300_000, 3)
    (room,) = put(file, [data])
    file.flush()
    return file, room, [data[low : low + size].tobytes() for low, size in RANGES]


needs_kernel = pytest.mark.skipif(direct_io._Kernel.open() is None, reason="no asynchronous I/O here")


@pytest.mark.parametrize("has_kernel", [pytest.param(True, marks=needs_kernel), False])
def test_many_ranges_are_read_together(large: Large, monkeypatch: pytest.MonkeyPatch, *, has_kernel: bool) -> None:
    """By one call for 64 of them; one by one on a system without asynchronous I/O."""
    file, room, expected = large
    calls, read = list[int](), direct_io._Kernel.read

    def counted(self: direct_io._Kernel, handle: int, reads: Sequence[direct_io._PagedRange]) -> list[int]:
        calls.append(len(reads))
        return read(self, handle, reads)

    monkeypatch.setattr(direct_io._Kernel, "read", counted)
    if not has_kernel:
        monkeypatch.setattr(direct_io._Kernel, "open", lambda: None)
    assert read_ranges(file, room) == expected
    if file._direct is not None:
        long = sum(size >= 64 << 10 for _, size in RANGES)
        assert calls == ([min(64, long - first) for first in range(0, long, 64)] if has_kernel else [])


@needs_kernel
def test_an_interruption_waits_for_reads_in_flight(large: Large, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is the caller's again, and later reads work."""
    file, room, expected = large
    made, calls = direct_io._Kernel._made, list[str]()

    def interrupted(self: direct_io._Kernel, number: int, *arguments: int) -> int:
        calls.append("io_submit" if number == self._numbers.submit else "io_getevents")
        if calls == ["io_submit", "io_getevents"]:
            raise KeyboardInterrupt
        return made(self, number, *arguments)

    monkeypatch.setattr(direct_io._Kernel, "_made", interrupted)
    outs = [aligned(size, low % PAGE_BYTES) for low, size in RANGES]
    with pytest.raises(KeyboardInterrupt):
        file.read([(room, low, out) for (low, _), out in zip(RANGES, outs, strict=True)])
    for out in outs:
        out[:] = 7
    assert read_ranges(file, room) == expected
    assert all((out == 7).all() for out in outs), "a read ended after the call"


class Lacking(direct_io._Kernel):
    """A kernel that reads at most some bytes of each range, or fails."""

    most = 0

    def read(self, handle: int, reads: Sequence[direct_io._PagedRange]) -> list[int]:
        results = super().read(handle, reads)
        for one in reads:
            left = max(self.most, 0)
            for view in one.views:
                view[left:] = 99  # not read
                left = max(0, left - view.size)
        return [min(result, self.most) for result in results]


@pytest.mark.parametrize("most", [0, 1, 4096, 5000, 70_000, -errno.EINVAL, -errno.EAGAIN])
def test_ranges_are_whole_whatever_the_kernel_reads(large: Large, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """What it did not read comes through the page cache, or by a call of its own; an error of the disk is raised."""
    file, room, expected = large
    monkeypatch.setattr(direct_io, "_Kernel", Lacking)
    monkeypatch.setattr(Lacking, "most", -errno.EIO)
    with pytest.raises(BlockReadError, match=r"cannot be read \(\[Errno 5\]"):
        read_ranges(file, room)
    monkeypatch.setattr(Lacking, "most", most)
    assert read_ranges(file, room) == expected


def test_the_rest_of_a_last_page_is_zeros(tmp_path: Path, file: BlockFile) -> None:
    """Even if the file had other bytes."""
    (full,) = put(file, [np.full(3 * PAGE_BYTES, 255, np.uint8)])
    file.flush()
    file.give(full.runs)
    put(file, [np.full(10, 7, np.uint8), np.full(5000, 8, np.uint8)])
    file.flush()
    data = (tmp_path / "blocks").read_bytes()
    assert data[: 3 * PAGE_BYTES] == bytes([7] * 10 + [0] * 4086 + [8] * 5000 + [0] * 3192)


def test_blobs_of_one_put_stand_together(file: BlockFile) -> None:
    """In one run if there is one, and the file grows only by the missing bytes."""
    rooms = file.take([5000, 0, 100_000, 1])
    assert [room.runs for room in rooms] == [((0, 8192),), (), ((8192, 102_400),), ((110_592, 4096),)]
    assert file.size == 114_688
    file.give(rooms[2].runs)
    (room,) = file.take([204_800])
    assert room.runs == ((8192, 102_400), (114_688, 102_400))
    assert file.size == 217_088
    file.give([(114_688, 102_400)])  # free room at the end, and what the file grows by, are one run
    (room,) = file.take([204_800])
    assert room.runs == ((114_688, 204_800),)


def test_a_refusal_to_pass_the_cache_writes_through_it(file: BlockFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may accept the flag and refuse the write; and it may write only part of the data."""
    refused, write = file._direct, os.pwritev

    def pwritev(handle: int, views: list[memoryview], offset: int) -> int:
        if handle == refused:
            raise OSError(errno.EINVAL, "no")
        return write(handle, [b"".join(views)[: 3 * PAGE_BYTES + 5]], offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    data = random_bytes(300_000, 2)
    (room,) = put(file, [data], stable=True)
    file.flush()
    assert bytes_of(file, room) == data.tobytes()


def test_a_failed_write_gives_its_room_back(file: BlockFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is as long as before, and queued data is not written later."""
    (first,) = put(file, [np.full(10_000, 7, np.uint8)])
    file.flush()
    size = file.size

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        rooms = put(file, [aligned(500_000)], stable=True)
        with pytest.raises(StoreFullError, match=r"was full, but now has .* free: free some"):
            file.flush()
    file.discard(rooms)
    assert file.size <= size
    put(file, [np.full(10_000, 8, np.uint8)])
    file.flush()
    assert set(bytes_of(file, first)) == {7}


def test_a_take_that_fails_takes_nothing(tmp_path: Path) -> None:
    """Even if there was space for a part."""
    with closing(BlockFile(tmp_path / "blocks", readonly=False, store_budget=1 << 20)) as file:
        rooms = [file.take([200_000])[0] for _ in range(4)]
        file.give(run for room in rooms[::2] for run in room.runs)
        free = [*file.space.runs]
        words = r"needs 905,216 more bytes but .* may hold 1,048,576: raise store_budget"
        with pytest.raises(StoreFullError, match=words):
            file.take([900_000, 1])
        assert file.space.runs == free
        assert sum(count for room in file.take([400_000]) for _, count in room.runs) == paged(400_000)


def test_a_short_file_is_an_error_on_reading(tmp_path: Path, file: BlockFile) -> None:
    """For ranges past the page cache and through it; nothing is written to it."""
    (room,) = put(file, [aligned(600_000)], stable=True)
    file.flush()
    os.truncate(tmp_path / "blocks", 5000)
    for size in (600_000, 10_000):
        with pytest.raises(BlockReadError, match="is truncated: blocks ends at byte 5,000"):
            file.read([(room, 0, aligned(size))])
    with pytest.raises(CorruptStoreError, match=r"ends at byte 5,000, before .*: restore the store from a copy"):
        file.take([10])
    file.give(room.runs)
    file.trim()
    assert file.size == 0
    assert file.take([10])[0].runs == ((0, PAGE_BYTES),)


def test_room_that_overlaps_is_refused(file: BlockFile) -> None:
    """Separate places are accepted, in any order."""
    file.take([100_000])
    runs: list[Run] = [(49_152, 4096), (0, 4096), (8192, 8192)]
    file.occupy(runs)
    assert file.space.runs == [(4096, 8192), (16_384, 49_152), (53_248, 102_400)]
    with pytest.raises(CorruptStoreError, match=r"blobs overlap in .*: restore the store from a copy"):
        file.occupy([*runs, (4096, 8192)])
    file.occupy([])
    assert file.space.runs == [(0, 102_400)]


def test_a_sync_of_blobs_that_failed_is_never_called_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops the failed pages, so a second sync would succeed without them (Rebello et al., 2020)."""
    engine = LmdbEngine(tmp_path, create=True)
    publish(engine, 0)
    blobs.put(engine, [plain("states/0.1", some_bytes(100_000))])
    blobs.assert_broken_by_a_failed_sync(engine, monkeypatch, os, "fdatasync")
    engine = LmdbEngine(tmp_path, create=False)
    assert engine.newest() == head_of(0)
    engine.close()
