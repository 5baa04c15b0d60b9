"""The stable sort of a step's entries by slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import use_threads
from tiercache.kernels.cpu.sorting import SortBuffers, sort_slots


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([0, 1, 2, 100, 8191, 40_000]),
    num_slots=st.sampled_from([1, 2, 3, 2**13, 2**13 + 1, 10**6, 2**26, 2**26 + 1, 2**31 - 1]),
    skew=st.sampled_from([1, 8]),
    num_threads=st.sampled_from([1, 2]),
)
def test_entries_come_by_slot_and_within_it_in_batch_order(
    seed: int, size: int, num_slots: int, skew: int, num_threads: int
) -> None:
    """As NumPy's stable argsort, for any number of slots and threads."""
    slots = (np.random.default_rng(seed).random(size) ** skew * num_slots).astype(np.int32)
    with use_threads(num_threads):
        pairs = sort_slots(slots, num_slots, SortBuffers())
    order = np.argsort(slots, kind="stable")
    assert np.array_equal(pairs >> np.uint64(32), slots[order])
    assert np.array_equal(pairs & np.uint64(2**32 - 1), order)


def test_one_slot_keeps_batch_order() -> None:
    """All ids equal: the order is the batch's."""
    pairs = sort_slots(np.full(20_000, 5, np.int32), 6, SortBuffers())
    assert np.array_equal(pairs & np.uint64(2**32 - 1), np.arange(20_000))


def test_buffers_are_reused_for_smaller_steps() -> None:
    """A small step after a large one sorts right and takes no new memory."""
    buffers, rng = SortBuffers(), np.random.default_rng(0)
    sort_slots(rng.integers(0, 100, 5000).astype(np.int32), 100, buffers)
    held = buffers.nbytes
    slots = rng.integers(0, 100, 50).astype(np.int32)
    pairs = sort_slots(slots, 100, buffers)
    assert np.array_equal(pairs & np.uint64(2**32 - 1), np.argsort(slots, kind="stable"))
    assert buffers.nbytes == held


def test_a_slot_beyond_the_last_is_refused() -> None:
    """A slot that no row has would become a write into someone else's memory."""
    for bad in (10, -1, 2**31 - 1):
        with pytest.raises(ValueError, match="slot"):
            sort_slots(np.array([3, bad, 4], np.int32), 10, SortBuffers())
