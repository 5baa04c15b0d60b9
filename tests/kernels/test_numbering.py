"""Numbers for keys by first appearance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.kernels.cpu.key_to_index import KeyToIndex

KEYS = st.lists(st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1), max_size=60)


def insert(numbers: KeyToIndex, keys: list[int]) -> list[int]:
    """Insert and return the numbers."""
    out = np.empty(len(keys), np.int32)
    numbers.insert(np.array(keys, np.int64), out)
    return out.tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(KEYS, max_size=6))
def test_numbers_are_in_order_of_first_appearance_and_count_occurrences(batches: list[list[int]]) -> None:
    """Against a dict; tables grow on the way."""
    numbers, model, seen = KeyToIndex(1), dict[int, int](), list[int]()
    for keys in batches:
        wanted = [model.setdefault(key, len(model)) for key in keys]
        assert insert(numbers, keys) == wanted
        seen += keys
    assert numbers.keys().tolist() == list(model)
    assert numbers.counts().tolist() == [seen.count(key) for key in model]
    assert numbers.count == len(model)


@settings(max_examples=100, deadline=None)
@given(KEYS, KEYS, KEYS)
def test_truncate_undoes_the_newest_numbers(first: list[int], second: list[int], third: list[int]) -> None:
    """After a rollback a table is as if the batch had never come, also when it grew meanwhile."""
    numbers, other = KeyToIndex(1), KeyToIndex(1)
    insert(numbers, first)
    insert(other, first)
    count = numbers.count
    taken = insert(numbers, second)
    numbers.uncount(np.array(taken, np.int32))
    numbers.truncate(count)
    assert numbers.count == count
    assert insert(numbers, third) == insert(other, third)
    assert numbers.keys().tolist() == other.keys().tolist()
    assert numbers.counts().tolist() == other.counts().tolist()


def test_many_keys_keep_their_numbers_while_the_table_grows() -> None:
    """A hundred thousand keys from room for sixteen, then all again in another order."""
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, 100_000))
    rng.shuffle(keys)
    numbers, out = KeyToIndex(), np.empty(keys.size, np.int32)
    assert numbers.insert(keys, out) == keys.size
    assert np.array_equal(out, np.arange(keys.size))
    order = rng.permutation(keys.size)
    numbers.insert(keys[order], out)
    assert np.array_equal(out, order)
    assert numbers.nbytes < 64 * keys.size


def test_all_keys_equal_are_one_key() -> None:
    """The hottest column there is."""
    numbers, out = KeyToIndex(), np.empty(10_000, np.int32)
    assert numbers.insert(np.full(10_000, 7), out) == 1
    assert (out == 0).all()
    assert numbers.counts().tolist() == [10_000]


def test_a_rollback_to_more_keys_than_there_are_is_refused() -> None:
    """Truncate goes back, never forward."""
    with pytest.raises(ValueError, match="cannot go back to 3 keys: 0"):
        KeyToIndex().truncate(3)
