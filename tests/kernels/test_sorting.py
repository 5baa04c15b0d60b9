"""The stable sort of a step's entries by slot, on every machine."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from tests.kernels.cases import every_machine, machine
from tests.kernels.machines import Cuda
from tests.kernels.shim.device import ShimDevice, devices
from tiercache.kernels.arrays import View
from tiercache.kernels.cpu import sorting
from tiercache.kernels.cpu.sorting import SortBuffers, sort_slots
from tiercache.kernels.cuda.sorting import sort_groups

ALL_SLOTS = 2**31 - 1


@every_machine
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.sampled_from([0, 1, 2, 100, 255, 256, 257, 8191, 40_000]), min_size=1, max_size=4),
    num_slots=st.sampled_from([1, 2, 3, 255, 2**11 + 1, 2**13, 2**13 + 1, 10**6, 2**26, 2**26 + 1, 2**29, ALL_SLOTS]),
    skew=st.sampled_from([1, 8]),
    turn=st.integers(0, 2),
)
def test_entries_are_sorted_stably(
    kind: str, seed: int, sizes: list[int], num_slots: int, skew: int, turn: int
) -> None:
    rng = np.random.default_rng(seed)
    slots = [(rng.random(size) ** skew * num_slots).astype(np.int32) for size in sizes]
    with machine(kind, turn) as m:
        if kind == "cpu":
            found = [m.sort(some, num_slots).copy() for some in slots]
        else:
            halves = [np.array_split(some, 2) for some in slots]
            groups = [([m.place(half) for half in some], num_slots) for some in halves]
            found = [m.pairs(runs) for runs in sort_groups(m.device, groups)]
    for pairs, some in zip(found, slots, strict=True):
        order = np.argsort(some, kind="stable")
        assert np.array_equal(pairs >> np.uint64(32), some[order])
        assert np.array_equal(pairs & np.uint64(2**32 - 1), order)


def test_buffers_are_reused_for_smaller_steps() -> None:
    buffers, rng = SortBuffers(), np.random.default_rng(0)
    sort_slots(rng.integers(0, 100, 5000).astype(np.int32), 100, buffers)
    held = buffers.first
    slots = rng.integers(0, 100, 50).astype(np.int32)
    pairs = sort_slots(slots, 100, buffers)
    assert np.array_equal(pairs & np.uint64(2**32 - 1), np.argsort(slots, kind="stable"))
    assert buffers.first is held


def test_a_slot_beyond_the_last_is_refused() -> None:
    """A slot without a row would become an out-of-bounds write."""
    for bad in (10, -1, 2**31 - 1):
        with pytest.raises(ValueError, match="slot"):
            sort_slots(np.array([3, bad, 4], np.int32), 10, SortBuffers())


@pytest.mark.parametrize(("num_slots", "sorts"), [(100, 1), (2**30, 3), (ALL_SLOTS, 3)])
def test_groups_share_a_sort_as_long_as_their_slots_are_int32_numbers_on_cuda(num_slots: int, sorts: int) -> None:
    device = ShimDevice()
    slots = np.array([num_slots - 1, 0, 0], np.int32)
    found = sort_groups(device, [([device.place(slots)], num_slots)] * 3)
    assert device.launches == ["sorting.make_keys", "sorting.count_runs", "sorting.write_runs"] * sorts
    wanted = sorting.sort_slots(slots, num_slots, sorting.SortBuffers())
    assert all(np.array_equal(Cuda(device).pairs(runs), wanted) for runs in found)


def test_entries_without_a_row_come_last_in_their_group_on_cuda() -> None:
    """Slot -1, and slots without a row, in batch order after all others, as one slot past the last."""
    slots = np.array([3, -1, 0, 10, 9, 2**31 - 1, 0, -(2**31)], np.int32)
    for device in devices():
        for runs in sort_groups(device, [([device.place(slots)], 10)] * 2):
            pairs = Cuda(device).pairs(runs)
            assert (pairs & np.uint64(2**32 - 1)).tolist() == [2, 6, 0, 4, 1, 3, 5, 7]
            assert (pairs >> np.uint64(32)).tolist() == [0, 0, 3, 9, 10, 10, 10, 10]


def test_without_entries_nothing_is_launched_on_cuda() -> None:
    device = ShimDevice()
    assert sort_groups(device, []) == []
    assert [runs.size for runs in sort_groups(device, [([np.empty(0, np.int32)], 5)] * 2)] == [0, 0]
    assert device.launches == []


def test_more_entries_than_kernels_count_are_refused_on_cuda() -> None:
    """Before anything is allocated or launched; one fewer would be accepted."""

    class Huge(ShimDevice):
        def describe(self, array: Any) -> View:
            return View(16, (array,), np.dtype(np.int32))

        def empty(self, size: int, dtype: DTypeLike) -> NDArray[Any]:
            raise MemoryError

    most = 2**31 - 1 - 4096
    with pytest.raises(ValueError, match=f"at most {most:,} fit"):
        sort_groups(Huge(), [([most, 1], 5)])
    with pytest.raises(MemoryError):
        sort_groups(Huge(), [([most - 1, 1], 5)])
