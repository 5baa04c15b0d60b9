"""Many reads by one call, of bytes and of the fields of rows: what `os.pread` gives, and the library says of it."""

from __future__ import annotations

import errno
import mmap
import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.kernels.cpu.file_io import _STEP_BYTES, FieldFile, has_reads, read_checked, read_fields

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


pytestmark = [pytest.mark.disk, pytest.mark.skipif(not has_reads(), reason="the kernel is for other systems or CPUs")]

PAGE, FILE_BYTES = 4096, 300_001


@pytest.fixture(scope="module")
def handles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """A file of noise, opened as usual and, where that can be, past the page cache."""
    path: Path = tmp_path_factory.mktemp("file") / "noise"
    np.random.default_rng(3).integers(0, 256, FILE_BYTES, dtype=np.uint8).tofile(path)
    usual = os.open(path, os.O_RDONLY)
    try:
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.preadv(direct, [mmap.mmap(-1, PAGE)], 0)
    except OSError:
        direct = os.open(path, os.O_RDONLY)
    yield usual, direct
    os.close(usual)
    os.close(direct)


PLACES = st.tuples(
    st.integers(0, FILE_BYTES + PAGE), st.integers(1, 5 * PAGE), st.lists(st.integers(0, 5 * PAGE), max_size=5),
    st.booleans(),
)  # fmt: skip


@given(wanted=st.lists(PLACES, max_size=5))
def test_arrays_are_what_pread_gives_with_their_checksums(
    handles: tuple[int, int], wanted: list[tuple[int, int, list[int], bool]]
) -> None:
    """At any offset, in whole pages or not, short at the end of the file; memory beside an array stays as it is."""
    memory = np.frombuffer(mmap.mmap(-1, 8 * PAGE * max(1, len(wanted))), np.uint8)
    memory[:] = 7
    sources, parts, at = [], [], 0
    for offset, least, cuts, in_pages in wanted:
        size = least + 2 * PAGE * in_pages
        at += (offset - at) % PAGE
        bounds = np.array([0, *sorted(min(cut, size) for cut in cuts), size], np.int64)
        sources.append((handles[in_pages], in_pages, offset))
        parts.append((memory[at : at + size], bounds))
        at += size
    expected = memory.copy()
    done, sums = read_checked(sources, parts)
    first = 0
    for i, ((_, _, offset), (out, bounds)) in enumerate(zip(sources, parts, strict=True)):
        data, runs = os.pread(handles[0], out.size, offset), bounds.size - 1
        assert done[i] == len(data)
        assert out[: len(data)].tobytes() == data or done[i] < out.size
        if len(data) == out.size:
            seen = sums[first : first + runs].tolist()
            assert seen == [google_crc32c.value(data[a:b]) for a, b in pairwise(bounds.tolist())]
        first += runs
        out[:] = 7
    assert np.array_equal(memory, expected)


def test_a_read_that_fails_gives_its_error_and_the_others_are_made(handles: tuple[int, int]) -> None:
    """A handle that is none, between two that are some."""
    outs = [np.zeros(100, np.uint8) for _ in range(3)]
    sources = [(handles[0], False, 0), (-1, False, 0), (handles[0], False, 50)]
    done, _ = read_checked(sources, [(out, np.array([0, 100])) for out in outs])
    assert done.tolist() == [100, -errno.EBADF, 100]
    assert outs[2].tobytes() == os.pread(handles[0], 100, 50)
    assert not outs[1].any()


def test_what_would_be_read_past_an_array_is_refused(handles: tuple[int, int]) -> None:
    """Bounds that do not fit, whole pages for an array that has none or lies elsewhere in its page."""
    memory = np.frombuffer(mmap.mmap(-1, 4 * PAGE), np.uint8)
    for bounds in ([], [0], [1, 10], [0, 11], [0, 9], [0, 7, 3, 10]):
        with pytest.raises(ValueError, match="bounds"):
            read_checked([(handles[0], False, 0)], [(memory[:10], np.array(bounds, np.int64))])
    for out, offset in ((memory[:10], 0), (memory[1:], 0), (memory, 1)):
        with pytest.raises(ValueError, match="cannot be read in whole pages"):
            read_checked([(handles[1], True, offset)], [(out, np.array([0, out.size]))])
    done, sums = read_checked([], [])
    assert (done.size, sums.size) == (0, 0)


ROWS, WIDTHS = 5000, (256, 4, 12, 1)


class Fields:
    """Files of noise, one for each field; rows of some of them are wanted."""

    def __init__(self, folder: Path) -> None:
        random = np.random.default_rng(3)
        self.rows = [random.integers(0, 256, (ROWS, width), dtype=np.uint8) for width in WIDTHS]
        self.paths = [str(folder / f"field {f}") for f in range(len(WIDTHS))]
        for path, rows in zip(self.paths, self.rows, strict=True):
            rows.tofile(path)
        self.direct = hasattr(os, "O_DIRECT")
        try:
            handle = os.open(self.paths[0], os.O_RDONLY | getattr(os, "O_DIRECT", 0))
            os.preadv(handle, [mmap.mmap(-1, 4096)], 0)
            os.close(handle)
        except OSError:
            self.direct = False

    def files(self, fields: list[int], first: int) -> list[FieldFile]:
        """Return where rows from ``first`` on begin."""
        return [(self.paths[f], ROWS * WIDTHS[f], first * WIDTHS[f], WIDTHS[f]) for f in fields]

    def pieces(self, fields: list[int], cuts: list[int]) -> list[bytes]:
        """Return pieces of rows, each field by field."""
        return [b"".join(self.rows[f][low:high].tobytes() for f in fields) for low, high in pairwise(cuts)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    """Four fields."""
    return Fields(tmp_path_factory.mktemp("fields"))


def bounds_of(cuts: list[int], row_bytes: int) -> NDArray[np.int64]:
    """Return the bytes at which pieces begin and end."""
    return (np.array(cuts, np.int64) - cuts[0]) * row_bytes


SOME_FIELDS = st.lists(st.integers(0, len(WIDTHS) - 1), min_size=1, max_size=4, unique=True)
CUTS = st.lists(st.integers(0, ROWS), min_size=1, max_size=8).map(sorted)


@given(wanted=st.lists(st.tuples(st.booleans(), SOME_FIELDS, CUTS), max_size=4))
def test_pieces_are_what_the_files_have_with_their_checksums(
    stored: Fields, wanted: list[tuple[bool, list[int], list[int]]]
) -> None:
    """Any rows of any fields, in whole pages or not, also none; memory beside an array stays as it is."""
    sources, parts, expected = [], [], list[bytes]()
    for in_pages, fields, cuts in wanted:
        bounds = bounds_of(cuts, sum(WIDTHS[f] for f in fields))
        sources.append((in_pages and stored.direct, stored.files(fields, cuts[0])))
        parts.append((np.full(int(bounds[-1]) + 20, 7, np.uint8)[10:-10], bounds))
        expected += stored.pieces(fields, cuts)
    done, sums = read_fields(sources, parts)
    assert done.tolist() == [out.size for out, _ in parts]
    assert b"".join(out.tobytes() for out, _ in parts) == b"".join(expected)
    assert sums.tolist() == [google_crc32c.value(piece) for piece in expected]
    for out, _ in parts:
        assert (out.base[:10] == 7).all()
        assert (out.base[-10:] == 7).all()


def test_more_than_a_step_and_a_piece_larger_than_one_are_read_whole(tmp_path: Path) -> None:
    """Steps end where pieces do; one piece may be larger."""
    rows = 3 * _STEP_BYTES // 256
    data = np.random.default_rng(5).integers(0, 256, (rows, 256), dtype=np.uint8)
    data.tofile(tmp_path / "all")
    file = (str(tmp_path / "all"), data.nbytes, 256, 256)
    for cuts in ([1, rows], [1, 100, 101, rows - 5, rows - 5, rows], list(range(1, rows, 97))):
        out = np.zeros((cuts[-1] - 1) * 256, np.uint8)
        _, sums = read_fields([(False, [file])], [(out, bounds_of(cuts, 256))])
        assert np.array_equal(out.reshape(-1, 256), data[1 : cuts[-1]])
        assert sums.tolist() == [google_crc32c.value(data[a:b].tobytes()) for a, b in pairwise(cuts)]


def test_a_file_that_cannot_be_read_gives_its_error_and_the_others_are_made(stored: Fields) -> None:
    """A missing file, one of another size, one that ends too early; no file stays open."""
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    whole = stored.files([0, 1], 0)
    path, size, begin, width = whole[1]
    wrong = [[whole[0], (path + "?", size, begin, width)], [whole[0], (path, size + 1, begin, width)]]
    wrong.append([whole[0], (path, size, begin + size - 5, width)])
    bounds = bounds_of([0, 3, 10], 260)
    parts = [(np.zeros(2600, np.uint8), bounds) for _ in range(5)]
    done, sums = read_fields([(False, files) for files in (whole, *wrong, whole)], parts)
    assert done.tolist() == [2600, -errno.ENOENT, -errno.EIO, -errno.EIO, 2600]
    assert parts[4][0].tobytes() == b"".join(stored.pieces([0, 1], [0, 3, 10]))
    assert sums[8:].tolist() == sums[:2].tolist()
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


def test_what_does_not_fit_is_refused(stored: Fields) -> None:
    """Bounds that are no whole rows or do not rise, rows without fields, names that no file can have."""
    files = stored.files([0, 1], 0)
    for bounds in ([], [260], [0, 260], [0, 300, 520], [0, 520, 260, 520], [260, 520]):
        with pytest.raises(ValueError, match="bounds must rise from 0 to 520"):
            read_fields([(False, files)], [(np.zeros(520, np.uint8), np.array(bounds, np.int64))])
    for wrong in ([], [(files[0][0], 1, 0, 0)], [(files[0][0], 1, -1, 4)]):
        with pytest.raises(ValueError, match="rows have one field or more"):
            read_fields([(False, wrong)], [(np.zeros(8, np.uint8), np.array([0, 8]))])
    with pytest.raises(ValueError, match="has a zero"):
        read_fields([(False, [("a\0b", 8, 0, 8)])], [(np.zeros(8, np.uint8), np.array([0, 8]))])
    done, sums = read_fields([], [])
    assert (done.size, sums.size) == (0, 0)
