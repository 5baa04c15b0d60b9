"""The sort of all groups' entries by the CUDA sources, run on the CPU: the pairs of the CPU's kernel."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.shim.device import ORDERS, ShimDevice, device_for, devices
from tiercache.kernels.cpu import sorting
from tiercache.kernels.cuda.sorting import sort_groups

ALL_SLOTS = 2**31 - 1


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.sampled_from([0, 1, 2, 100, 255, 256, 257, 9000]), min_size=1, max_size=4),
    num_slots=st.sampled_from([1, 2, 255, 2**11 + 1, 10**6, 2**29, ALL_SLOTS]),
    skew=st.sampled_from([1, 8]),
    order=st.sampled_from(ORDERS),
)
def test_pairs_are_those_of_the_cpu(seed: int, sizes: list[int], num_slots: int, skew: int, order: str) -> None:
    """For any number of groups and slots, sizes beside a task's, uniform and skewed; one slot's in batch order."""
    rng, device = np.random.default_rng(seed), device_for(order)
    slots = [(rng.random(size) ** skew * num_slots).astype(np.int32) for size in sizes]
    found = sort_groups(device, [(device.place(some), num_slots) for some in slots])
    for pairs, some in zip(found, slots, strict=True):
        assert np.array_equal(device.read(pairs), sorting.sort_slots(some, num_slots, sorting.SortBuffers()))
    device.close()


@pytest.mark.parametrize(("num_slots", "sorts"), [(100, 1), (2**30, 3), (ALL_SLOTS, 3)])
def test_groups_share_a_sort_as_long_as_their_slots_are_int32_numbers(num_slots: int, sorts: int) -> None:
    """Three groups: a launch before and one behind each sort."""
    device = ShimDevice()
    slots = np.array([num_slots - 1, 0, 0], np.int32)
    found = sort_groups(device, [(device.place(slots), num_slots)] * 3)
    assert device.launches == ["sorting.make_keys", "sorting.make_pairs"] * sorts
    wanted = sorting.sort_slots(slots, num_slots, sorting.SortBuffers())
    assert all(np.array_equal(pairs, wanted) for pairs in found)


def test_entries_without_a_row_come_last_in_their_group() -> None:
    """Slot -1, and slots that no row has, in batch order behind all others, as of the slot behind the last."""
    slots = np.array([3, -1, 0, 10, 9, 2**31 - 1, 0, -(2**31)], np.int32)
    for device in devices():
        for pairs in sort_groups(device, [(device.place(slots), 10)] * 2):
            assert (device.read(pairs) & np.uint64(2**32 - 1)).tolist() == [2, 6, 0, 4, 1, 3, 5, 7]
            assert (device.read(pairs) >> np.uint64(32)).tolist() == [0, 0, 3, 9, 10, 10, 10, 10]


def test_without_entries_nothing_is_launched() -> None:
    """Groups have no entries, or there are no groups."""
    device = ShimDevice()
    assert sort_groups(device, []) == []
    assert [pairs.size for pairs in sort_groups(device, [(np.empty(0, np.int32), 5)] * 2)] == [0, 0]
    assert device.launches == []
