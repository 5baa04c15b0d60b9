"""Next and last uses, and searches in hash order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_key_index import keys_of_hashes
from tiercache.kernels.cpu.hashing import hash_keys
from tiercache.kernels.cpu.next_use import hash_range_bound, search_keys, sweep_uses


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_passes=st.integers(1, 6), num_keys=st.integers(1, 8))
def test_gaps_are_the_passes_to_the_next_and_since_the_last_use(
    data: st.DataObject, num_passes: int, num_keys: int
) -> None:
    """Against a search through three epochs, each with its own order of the passes."""
    sets = [sorted(data.draw(st.sets(st.integers(0, num_keys - 1)))) for _ in range(num_passes)]
    orders = [data.draw(st.permutations(range(num_passes))) for _ in range(3)]
    passes = [sets[p] for order in orders for p in order]
    numbers = np.array([key for keys in sets for key in keys], np.int32)
    starts = np.concatenate([[0], np.cumsum([len(keys) for keys in sets])]).astype(np.int64)
    next_gap, prev_gap = np.full(numbers.size, -9, np.int32), np.full(numbers.size, -9, np.int32)
    arrays: Any = [np.array(order, np.int64) for order in orders]
    sweep_uses(numbers, starts, num_keys, arrays[0], arrays[1], arrays[2], next_gap, prev_gap)
    for place, p in enumerate(orders[1]):
        pass_index = num_passes + place
        for i, key in zip(range(starts[p], starts[p + 1]), sets[p], strict=True):
            assert next_gap[i] == next(g for g in range(1, 2 * num_passes) if key in passes[pass_index + g])
            assert prev_gap[i] == next(g for g in range(1, 2 * num_passes) if key in passes[pass_index - g])


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([0, 1, 2, 100, 5000]),
    table_id=st.integers(0, 2**64 - 1),
    upper=st.integers(0, 2**64),
)
def test_a_hash_range_ends_before_the_first_hash_above_it(seed: int, size: int, table_id: int, upper: int) -> None:
    """The bound is the number of keys whose hash is below it; 2^64 takes all."""
    keys = np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, size))
    hashes = hash_keys(keys, table_id)
    keys = keys[np.argsort(hashes)]
    keys.flags.writeable = False
    assert hash_range_bound(keys, table_id, upper) == sum(int(h) < upper for h in hashes)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([0, 1, 2, 3, 100, 20_000]), table_id=st.integers(0, 2**64 - 1))
def test_a_key_is_found_at_its_place_and_others_are_not(seed: int, size: int, table_id: int) -> None:
    """-1 for keys that are not there, below the first hash and above the last one too."""
    rng = np.random.default_rng(seed)
    keys = np.unique(rng.integers(-(2**62), 2**62, size))
    keys = keys[np.argsort(hash_keys(keys, table_id))]
    absent = rng.integers(2**62 + 1, 2**63 - 1, 200)
    queries = np.concatenate([keys, absent])
    order = rng.permutation(queries.size)
    out = np.empty(queries.size, np.int64)
    search_keys(keys, table_id, queries[order], out)
    assert np.array_equal(out, np.where(order < keys.size, order, -1))


def test_keys_whose_hashes_crowd_are_found_too() -> None:
    """Keys made so that interpolation is misled: the search falls back to halving."""
    hashes = [*range(0, 9000, 3), *range(2**63, 2**63 + 900, 3), *range(2**64 - 3000, 2**64, 3)]
    keys, absent = keys_of_hashes(hashes, 0), keys_of_hashes([h + 1 for h in hashes], 0)
    out = np.empty(2 * keys.size, np.int64)
    search_keys(keys, 0, np.concatenate([keys, absent]), out)
    assert out.tolist() == [*range(keys.size), *([-1] * keys.size)]


def test_search_results_need_one_place_a_query() -> None:
    """A short output is refused before anything is written."""
    with pytest.raises(ValueError, match="one length"):
        search_keys(np.arange(3), 0, np.arange(3), np.empty(2, np.int64))
