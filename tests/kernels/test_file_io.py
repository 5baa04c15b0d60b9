"""Many reads by one call: what `os.pread` gives and the library says of it, past the page cache and through it."""

from __future__ import annotations

import errno
import mmap
import os
from itertools import pairwise
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.kernels.cpu.file_io import has_reads, read_checked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.disk,
    pytest.mark.skipif(not has_reads(), reason="the kernel is for other systems or CPUs"),
]

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


@given(
    wanted=st.lists(
        st.tuples(
            st.integers(0, FILE_BYTES + PAGE),
            st.integers(1, 5 * PAGE),
            st.lists(st.integers(0, 5 * PAGE), max_size=5),
            st.booleans(),
        ),
        max_size=5,
    )
)
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
