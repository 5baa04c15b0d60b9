"""Unique slots, the way back, and the order of the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.kernels.cpu.jit import set_threads, threads
from tiercache.kernels.cpu.sorting import SortBuffers, sort_slots
from tiercache.kernels.cpu.unique import lay_out, mark_slots, unique_positions, unique_slots


def found(slots: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return unique slots and the inverse."""
    unique, inverse = np.empty(slots.size, np.int32), np.empty(slots.size, np.int32)
    count = unique_slots(sort_slots(slots, num_slots, SortBuffers()), unique, inverse)
    return unique[:count], inverse


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=200))
def test_unique_slots_and_the_inverse_are_numpys(slots: list[int]) -> None:
    """For any slots, none at all included."""
    given_slots = np.array(slots, np.int32)
    unique, inverse = found(given_slots, 41)
    theirs, their_inverse = np.unique(given_slots, return_inverse=True)
    np.testing.assert_array_equal(unique, theirs)
    np.testing.assert_array_equal(inverse, their_inverse)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 200), max_size=100), min_size=1, max_size=3), st.integers(201, 400))
def test_unique_positions_are_those_of_the_sort(batches: list[list[int]], num_positions: int) -> None:
    """For batch after batch with one scratch, whose bits are zero again after each."""
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
    """Below 0, and behind the last."""
    positions, bits = np.array([0, bad], np.int32), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match=f"positions go from {min(0, bad)} to {max(0, bad)}"):
        unique_positions(positions, 128, bits, np.empty(2, np.int32), np.empty(2, np.int32), np.empty(2, np.int32))
    assert not bits.any()


@pytest.mark.parametrize("count", [1, 16384, 100_003])
def test_unique_slots_are_the_same_for_any_number_of_threads(count: int) -> None:
    """Parts end inside runs of one slot; the highest slot is the highest that an int32 has."""
    rng = np.random.default_rng(count)
    slots = np.floor(rng.random(count) ** 6 * 5000).astype(np.int32)
    slots[-1] = 2**31 - 1
    before = threads()
    results = []
    try:
        for number in range(1, before + 1):
            set_threads(number)
            results.append(found(slots, 1 << 31))
    finally:
        set_threads(before)
    theirs, their_inverse = np.unique(slots, return_inverse=True)
    for unique, inverse in results:
        np.testing.assert_array_equal(unique, theirs)
        np.testing.assert_array_equal(inverse, their_inverse)


def test_stretches_are_laid_out_in_the_order_of_the_wire() -> None:
    """Rows 0 to 2 go behind rows 3 and 4; a second stretch of rows 0 to 2 gives addresses and no slots."""
    unique = np.array([3, 5, 8, 20, 21], np.int32)
    addresses, slots = np.full(8, -1, np.int32), np.full(5, -1, np.int32)
    one = lambda *numbers: np.array(numbers, np.int64)  # noqa: E731
    lay_out(unique, one(0, 3, 0), one(3, 5, 3), one(-3, 10, 100), one(2, 0, 5), one(2, 0, -1), addresses, slots)
    np.testing.assert_array_equal(addresses, [30, 31, 0, 2, 5, 103, 105, 108])
    np.testing.assert_array_equal(slots, [2, 3, 4, 0, 1])


def test_stretches_that_do_not_fit_are_refused() -> None:
    """Nothing is written outside the arrays."""
    unique, slots = np.arange(3, dtype=np.int32), np.empty(3, np.int32)
    one = lambda number: np.array([number], np.int64)  # noqa: E731
    with pytest.raises(ValueError, match=r"must lie in \[0, 3\)"):
        lay_out(unique, one(1), one(4), one(0), one(0), one(0), np.empty(9, np.int32), slots)
    with pytest.raises(ValueError, match="reach to 4 of 3 addresses"):
        lay_out(unique, one(0), one(3), one(0), one(1), one(0), np.empty(3, np.int32), slots)


def test_marks_count_slots_once() -> None:
    """Slots that were seen before do not count again."""
    seen = np.zeros(5, np.bool_)
    assert mark_slots(np.array([1, 1, 4], np.int32), seen) == 2
    assert mark_slots(np.array([4, 0], np.int32), seen) == 1
    np.testing.assert_array_equal(seen, [True, True, False, False, True])
    with pytest.raises(ValueError, match="there are 5"):
        mark_slots(np.array([5], np.int32), seen)
