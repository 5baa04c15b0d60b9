"""Kernels for the keys of a dump: the same bits as NumPy's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.kernels.cpu.hashing import hash_runs
from tiercache.kernels.cpu.key_maps import map_entries
from tiercache.store import bits
from tiercache.store import key_map as by_numpy


@settings(max_examples=60)
@given(
    seed=st.integers(0, 999),
    rows=st.lists(st.integers(0, 400), min_size=1, max_size=40),
    sizes=st.sampled_from([(0, 9, 7, 2), (3, 5, 11, 2), (9, 17, 7, 3), (14, 18, 14, 4)]),
    distinct=st.sampled_from([3, 1 << 32]),
)
def test_entries_are_as_numpys(seed: int, rows: list[int], sizes: tuple[int, int, int, int], distinct: int) -> None:
    first_rows = np.append(0, np.cumsum(rows))
    lows = np.random.default_rng(seed).integers(0, distinct, int(first_rows[-1]), np.uint64).astype(np.uint32)
    if not lows.size:
        return
    counts, entries = map_entries(lows, first_rows, *sizes)
    wanted_counts, wanted = by_numpy.map_entries(lows, first_rows, *sizes)
    assert counts.tolist() == wanted_counts.tolist()
    assert entries.tobytes() == wanted.tobytes()
    assert int(counts.sum()) == lows.size


def test_entries_of_parts_are_those_of_numpy() -> None:
    first_rows = np.array([0, 70_000, 70_000, 200_000])
    lows = np.random.default_rng(1).integers(0, 1 << 32, 200_000, np.uint64).astype(np.uint32)
    for found, wanted in zip(
        map_entries(lows, first_rows, 15, 14, 2, 2), by_numpy.map_entries(lows, first_rows, 15, 14, 2, 2), strict=True
    ):
        assert np.array_equal(found, wanted)


def test_hashes_of_runs_are_those_of_each_table() -> None:
    keys = np.random.default_rng(2).integers(-(1 << 63), (1 << 63) - 1, 1000)
    ids, counts = np.array([7, 1 << 63, 9], np.uint64), np.array([400, 0, 600])
    found = hash_runs(keys, ids, counts)
    assert np.array_equal(found, bits.hash_runs(keys, ids, counts))
    assert np.array_equal(found[:400], bits.hash_keys(keys[:400], 7))
    assert np.array_equal(found[400:], bits.hash_keys(keys[400:], 9))
    with pytest.raises(ValueError, match=r"counts add up to 999 keys, but 1000 were given"):
        hash_runs(keys, ids, np.array([399, 0, 600]))
