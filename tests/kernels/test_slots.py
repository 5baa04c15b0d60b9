"""Which slots the rows of the next pass get."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiercache.kernels.cpu.slots import assign_slots, stable_order_by_gap

LONGEST = 4


@st.composite
def passes(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    """Return slots and next gaps of a pass, previous gaps of the next one, and slots in no use."""
    next_gap = np.array(draw(st.lists(st.integers(1, LONGEST), max_size=30)), np.int32)
    kept = int((next_gap == 1).sum())
    others = draw(st.lists(st.integers(2, LONGEST), max_size=30))
    prev_gap = np.array(draw(st.permutations([1] * kept + others)), np.int32)
    capacity = max(next_gap.size, prev_gap.size) + draw(st.integers(0, 5))
    slots = np.array(draw(st.permutations(range(capacity))), np.int32)
    return slots[: next_gap.size], next_gap, prev_gap, slots[next_gap.size :]


def by_gap(gaps: np.ndarray) -> np.ndarray:
    """Return their stable order."""
    order = np.empty(gaps.size, np.int32)
    stable_order_by_gap(gaps, LONGEST, order)
    return order


@given(passes())
def test_rows_take_spare_slots_first_and_then_those_that_depart_in_the_order_of_their_dump(
    given: tuple[np.ndarray, ...],
) -> None:
    """Kept rows stay where they are, in the order in which both sides meet them; what nobody has is spare again."""
    old_slots, next_gap, prev_gap, spare = given
    stack = np.full(old_slots.size + spare.size + 1, -1, np.int32)
    stack[: spare.size], stack[-1] = spare, spare.size
    dump_order, load_order, slots = by_gap(next_gap), by_gap(prev_gap), np.empty(prev_gap.size, np.int32)
    kept = assign_slots(old_slots, next_gap, dump_order, prev_gap, load_order, stack, slots)
    assert kept == (next_gap == 1).sum()
    free = [*old_slots[dump_order[:kept]], *spare[::-1], *old_slots[dump_order[kept:]]]
    taken = [*range(kept), *range(kept, prev_gap.size)]
    assert slots[load_order].tolist() == [free[place] for place in taken]
    left = set(old_slots.tolist()) | set(spare.tolist())
    assert sorted(stack[: stack[-1]]) == sorted(left - set(slots.tolist()))


@given(passes())
def test_sides_that_keep_different_rows_are_told(given: tuple[np.ndarray, ...]) -> None:
    """By -1: a row would have the slot of another."""
    old_slots, next_gap, prev_gap, spare = given
    for one, other in ((np.append(prev_gap, 1), next_gap), (prev_gap, np.append(next_gap, 1))):
        mine, theirs = one.astype(np.int32), other.astype(np.int32)
        held = np.append(old_slots, old_slots.size + spare.size).astype(np.int32)[: theirs.size]
        stack = np.zeros(theirs.size + mine.size + 1, np.int32)
        stack[-1] = mine.size
        slots = np.empty(mine.size, np.int32)
        assert assign_slots(held, theirs, by_gap(theirs), mine, by_gap(mine), stack, slots) == -1
