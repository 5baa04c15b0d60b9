"""Unique keys: numbers, counts and hash order, for any keys, any cuts into calls and any number of parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray  # noqa: TC002

from tiercache.kernels.cpu import unique_keys
from tiercache.kernels.cpu.hashing import hash_keys
from tiercache.kernels.cpu.unique_keys import UniqueKeys

SMALL = st.integers(-9, 9)
KEYS = st.lists(SMALL | st.integers(-(1 << 63), (1 << 63) - 1), max_size=120)


def add(unique: UniqueKeys, keys: NDArray[np.int64]) -> NDArray[np.int32]:
    """Add keys to every part and return their numbers."""
    out = np.full(keys.size, -7, np.int32)
    for part in range(unique.parts):
        unique.add(keys, out, part)
    return out


@settings(max_examples=150, deadline=None)
@given(calls=st.lists(KEYS, min_size=1, max_size=4), forgotten=KEYS, parts=st.sampled_from([1, 2, 8]))
def test_unique_keys_come_in_hash_order_with_their_counts(
    calls: list[list[int]], forgotten: list[int], parts: int
) -> None:
    """Keys that are taken back are as if they had never come; every number has the place of its key."""
    unique, numbers, given_keys = UniqueKeys(12345, parts), [], []
    for call in calls:
        keys = np.array(call, np.int64)
        counts, others = list(unique.counts), np.array(forgotten, np.int64)
        add(unique, others)
        unique.take_back(others, counts)
        assert unique.counts == counts
        numbers.append(add(unique, keys))
        given_keys.append(keys)
    everything = np.concatenate(given_keys)
    expected, occurrences = np.unique(everything, return_counts=True)
    assert unique.count == expected.size
    np.testing.assert_array_equal(unique.keys()[np.concatenate(numbers)], everything)
    if parts == 1:
        assert unique.keys().tolist() == list(dict.fromkeys(everything.tolist()))
    keys, found, positions = unique.sorted()
    hashes = hash_keys(keys, 12345)
    assert np.all(hashes[1:] > hashes[:-1])
    order = np.argsort(keys)
    np.testing.assert_array_equal(keys[order], expected)
    np.testing.assert_array_equal(found[order], occurrences)
    np.testing.assert_array_equal(keys[positions[np.concatenate(numbers)]], everything)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_many_keys_in_the_order_of_their_hashes_are_as_quick_as_others(is_sorted: bool) -> None:
    """No call of a million keys looks at one end of the table only; the table grows on the way."""
    keys = np.arange(1 << 20, dtype=np.int64)
    keys = keys[np.argsort(hash_keys(keys, 1))] if is_sorted else keys
    unique = UniqueKeys(1)
    out = add(unique, keys)
    np.testing.assert_array_equal(out, np.arange(1 << 20))
    assert unique.nbytes <= 52 << 20
    found, counts, positions = unique.sorted()
    np.testing.assert_array_equal(found[positions], keys)
    assert np.all(counts == 1)


def test_counts_go_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that is full is carried to 64 bits; taking back takes from what was carried as well."""
    unique, keys = UniqueKeys(3), np.array([5, 6], np.int64)
    add(unique, keys)
    for slots in unique._slots:
        full = slots[1::2] != 0
        slots[1::2][full] |= np.uint64(0xFFFFFFFF << 32)
    add(unique, np.array([5], np.int64))
    counts = list(unique.counts)
    add(unique, np.array([6, 6], np.int64))
    unique.take_back(np.array([6, 6], np.int64), counts)
    found, occurrences, _ = unique.sorted()
    assert dict(zip(found.tolist(), occurrences.tolist(), strict=True)) == {5: (1 << 32), 6: (1 << 32) - 1}


def test_too_many_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are int32: the error says what to do."""
    monkeypatch.setattr(unique_keys, "_MOST", 100)
    with pytest.raises(ValueError, match="more than 100 distinct keys: numbers are int32; make sub-datasets smaller"):
        add(UniqueKeys(3), np.arange(1000))
