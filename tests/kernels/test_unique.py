"""Uniqueness: slots, their inverse and wire order; keys with their numbers, counts and hash order."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels.cases import use_threads
from tiercache.kernels.cpu import unique_keys
from tiercache.kernels.cpu.hashing import hash_keys
from tiercache.kernels.cpu.kernel_threads import threads
from tiercache.kernels.cpu.sorting import SortBuffers, sort_slots
from tiercache.kernels.cpu.unique import lay_out, mark_slots, unique_positions, unique_slots
from tiercache.kernels.cpu.unique_keys import UniqueKeys


def found(slots: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    unique, inverse = np.empty(slots.size, np.int32), np.empty(slots.size, np.int32)
    count = unique_slots(sort_slots(slots, num_slots, SortBuffers()), unique, inverse)
    return unique[:count], inverse


@given(st.lists(st.integers(0, 40), max_size=200))
def test_unique_slots_and_the_inverse_are_numpys(slots: list[int]) -> None:
    given_slots = np.array(slots, np.int32)
    unique, inverse = found(given_slots, 41)
    theirs, their_inverse = np.unique(given_slots, return_inverse=True)
    np.testing.assert_array_equal(unique, theirs)
    np.testing.assert_array_equal(inverse, their_inverse)


@given(st.lists(st.lists(st.integers(0, 200), max_size=100), min_size=1, max_size=3), st.integers(201, 400))
def test_unique_positions_are_those_of_the_sort(batches: list[list[int]], num_positions: int) -> None:
    words = -(-num_positions // 64)
    bits, before = np.zeros(words, np.uint64), np.empty(words, np.int32)
    for batch in batches:
        positions = np.array(batch, np.int32)
        unique, inverse = np.empty(positions.size, np.int32), np.empty(positions.size, np.int32)
        count = unique_positions(positions, num_positions, bits, before, unique, inverse)
        theirs, their_inverse = found(positions, num_positions)
        np.testing.assert_array_equal(unique[:count], theirs)
        np.testing.assert_array_equal(inverse, their_inverse)
        assert not bits.any()


@pytest.mark.parametrize("bad", [-1, 128])
def test_positions_outside_are_refused_before_a_bit_is_set(bad: int) -> None:
    positions, bits = np.array([0, bad], np.int32), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match=f"positions range from {min(0, bad)} to {max(0, bad)}"):
        unique_positions(positions, 128, bits, np.empty(2, np.int32), np.empty(2, np.int32), np.empty(2, np.int32))
    assert not bits.any()


@pytest.mark.parametrize("count", [1, 16384, 100_003])
def test_unique_slots_are_the_same_for_any_number_of_threads(count: int) -> None:
    rng = np.random.default_rng(count)
    slots = np.floor(rng.random(count) ** 6 * 5000).astype(np.int32)
    slots[-1] = 2**31 - 1
    results = []
    for number in range(1, threads() + 1):
        with use_threads(number):
            results.append(found(slots, 1 << 31))
    theirs, their_inverse = np.unique(slots, return_inverse=True)
    for unique, inverse in results:
        np.testing.assert_array_equal(unique, theirs)
        np.testing.assert_array_equal(inverse, their_inverse)


def test_stretches_are_laid_out_in_the_order_of_the_wire() -> None:
    """Rows 0 to 2 go after rows 3 and 4; a second range of rows 0 to 2 gives addresses and no slots."""
    unique = np.array([3, 5, 8, 20, 21], np.int32)
    addresses, slots = np.full(8, -1, np.int32), np.full(5, -1, np.int32)
    one = lambda *numbers: np.array(numbers, np.int64)  # noqa: E731
    lay_out(unique, one(0, 3, 0), one(3, 5, 3), one(-3, 10, 100), one(2, 0, 5), one(2, 0, -1), addresses, slots)
    np.testing.assert_array_equal(addresses, [30, 31, 0, 2, 5, 103, 105, 108])
    np.testing.assert_array_equal(slots, [2, 3, 4, 0, 1])


def test_stretches_that_do_not_fit_are_refused() -> None:
    unique, slots = np.arange(3, dtype=np.int32), np.empty(3, np.int32)
    one = lambda number: np.array([number], np.int64)  # noqa: E731
    with pytest.raises(ValueError, match=r"must be in \[0, 3\)"):
        lay_out(unique, one(1), one(4), one(0), one(0), one(0), np.empty(9, np.int32), slots)
    with pytest.raises(ValueError, match="reach to 4 of 3 addresses"):
        lay_out(unique, one(0), one(3), one(0), one(1), one(0), np.empty(3, np.int32), slots)


def test_marks_count_slots_once() -> None:
    seen = np.zeros(5, np.bool_)
    assert mark_slots(np.array([1, 1, 4], np.int32), seen) == 2
    assert mark_slots(np.array([4, 0], np.int32), seen) == 1
    np.testing.assert_array_equal(seen, [True, True, False, False, True])
    with pytest.raises(ValueError, match="there are 5"):
        mark_slots(np.array([5], np.int32), seen)


SMALL_KEYS = st.integers(-9, 9)
KEYS = st.lists(SMALL_KEYS | st.integers(-(1 << 63), (1 << 63) - 1), max_size=120)


def add(unique: UniqueKeys, keys: NDArray[np.int64]) -> NDArray[np.int32]:
    out = np.full(keys.size, -7, np.int32)
    for part in range(unique.parts):
        unique.add(keys, out, part)
    return out


@settings(max_examples=150)
@given(calls=st.lists(KEYS, min_size=1, max_size=4), forgotten=KEYS, parts=st.sampled_from([1, 2, 8]))
def test_unique_keys_are_in_hash_order_with_counts(calls: list[list[int]], forgotten: list[int], parts: int) -> None:
    unique, numbers, given_keys = UniqueKeys(12345, parts), [], []
    for call in calls:
        keys = np.array(call, np.int64)
        counts, others = list(unique.counts), np.array(forgotten, np.int64)
        add(unique, others)
        unique.remove(others, counts)
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
    """No call with a million keys uses only one end of the table; the table grows meanwhile."""
    keys = np.arange(1 << 20, dtype=np.int64)
    keys = keys[np.argsort(hash_keys(keys, 1))] if is_sorted else keys
    unique = UniqueKeys(1)
    out = add(unique, keys)
    np.testing.assert_array_equal(out, np.arange(1 << 20))
    assert unique.nbytes <= 52 << 20
    found, counts, positions = unique.sorted()
    np.testing.assert_array_equal(found[positions], keys)
    assert np.all(counts == 1)


@given(
    calls=st.lists(st.lists(st.tuples(SMALL_KEYS, st.integers(1, (1 << 32) - 1)), max_size=40), min_size=1, max_size=4),
    parts=st.sampled_from([1, 4]),
)
@example(calls=[[(1, 1), (1, (1 << 32) - 1), (0, 1), (1, 1)]], parts=1)
def test_a_key_may_be_added_many_times_at_once(calls: list[list[tuple[int, int]]], parts: int) -> None:
    unique, expected = UniqueKeys(7, parts), Counter[int]()
    for call in calls:
        keys, times = (np.array([pair[i] for pair in call], np.int64) for i in range(2))
        for turn in range(2):
            before = list(unique.counts)
            for part in range(parts):
                unique.add(keys, np.empty(keys.size, np.int32), part, times)
            if turn == 0:
                unique.remove(keys, before, times)
                assert unique.counts == before
        for key, count in call:
            expected[key] += count
    keys, counts, _ = unique.sorted(with_positions=False)
    assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == expected


def test_too_many_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unique_keys, "_MOST", 100)
    with pytest.raises(ValueError, match="more than 100 distinct keys: numbers are int32; make sub-datasets smaller"):
        add(UniqueKeys(3), np.arange(1000))
