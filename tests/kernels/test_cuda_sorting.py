"""The sort of a step's entries by the CUDA sources, run on the CPU."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.shim.device import ORDERS, KernelError, ShimDevice, device_for, devices
from tiercache.kernels.cpu import sorting
from tiercache.kernels.cuda import sorting as cuda_sorting
from tiercache.kernels.cuda.launch import source

# After the one that is not listed all lanes wait for each other again, in __match_any_sync; but that orders no memory.
BARRIER = re.compile(r"__sync(?:threads|warp)\(\);(?!  // and the next turn)")
LOW = np.uint64(2**32 - 1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([0, 1, 2, 100, 4095, 4096, 4097, 9000]),
    num_slots=st.sampled_from([1, 2, 3, 255, 256, 2**11 + 1, 10**6, 2**22 + 1, 2**31 - 1]),
    skew=st.sampled_from([1, 8]),
    order=st.sampled_from(ORDERS),
)
def test_pairs_are_those_of_the_cpu(seed: int, size: int, num_slots: int, skew: int, order: str) -> None:
    """For any number of slots, sizes beside a tile's, uniform and skewed."""
    slots = (np.random.default_rng(seed).random(size) ** skew * num_slots).astype(np.int32)
    device = device_for(order)
    pairs = cuda_sorting.sort_slots(device, device.place(slots), num_slots, cuda_sorting.SortBuffers(device))
    assert np.array_equal(device.read(pairs), sorting.sort_slots(slots, num_slots, sorting.SortBuffers()))
    device.close()


def test_one_slot_keeps_batch_order() -> None:
    """All ids equal: the order is the batch's, over several tiles."""
    for device in devices():
        slots = device.place(np.full(10_000, 5, np.int32))
        pairs = cuda_sorting.sort_slots(device, slots, 6, cuda_sorting.SortBuffers(device))
        assert np.array_equal(device.read(pairs) & LOW, np.arange(10_000))


def test_more_tiles_than_blocks_sort_too() -> None:
    """Blocks take several tiles each; 35 of them and one lone entry here, on a device with room for 32 blocks."""
    device = device_for("random")
    slots = np.random.default_rng(0).integers(0, 300, 35 * 4096 + 1).astype(np.int32)
    pairs = cuda_sorting.sort_slots(device, device.place(slots), 300, cuda_sorting.SortBuffers(device))
    assert np.array_equal(device.read(pairs) & LOW, np.argsort(slots, kind="stable"))


def test_entries_without_a_row_come_last() -> None:
    """Slot -1, and slots that no row has, in batch order behind all others."""
    slots = np.array([3, -1, 0, 10, 9, 2**31 - 1, 0, -(2**31)], np.int32)
    for device in devices():
        pairs = cuda_sorting.sort_slots(device, device.place(slots), 10, cuda_sorting.SortBuffers(device))
        assert (device.read(pairs) & LOW).tolist() == [2, 6, 0, 4, 1, 3, 5, 7]
        assert (device.read(pairs) >> np.uint64(32)).tolist() == [0, 0, 3, 9, 10, 10, 10, 10]


def test_buffers_are_reused_for_smaller_steps() -> None:
    """A small step after a large one sorts right and takes no new memory."""
    device, rng = device_for("forward"), np.random.default_rng(0)
    buffers = cuda_sorting.SortBuffers(device)
    cuda_sorting.sort_slots(device, device.place(rng.integers(0, 100, 5000).astype(np.int32)), 100, buffers)
    held = buffers.nbytes
    slots = rng.integers(0, 100, 50).astype(np.int32)
    pairs = cuda_sorting.sort_slots(device, device.place(slots), 100, buffers)
    assert np.array_equal(device.read(pairs) & LOW, np.argsort(slots, kind="stable"))
    assert buffers.nbytes == held


@pytest.mark.parametrize("number", range(len(BARRIER.findall(source("sorting")))))
def test_every_barrier_of_the_sort_is_needed(number: int) -> None:
    """Without any one of them, some order of threads sorts wrong or writes outside: the shim sees each."""
    slots = np.random.default_rng(0).integers(0, 65_535, 36 * 4096).astype(np.int32)
    wanted = sorting.sort_slots(slots, 65_535, sorting.SortBuffers())

    def without(_: str, text: str) -> str:
        start = [match.start() for match in BARRIER.finditer(text)][number]
        return text[:start] + text[text.index(";", start) + 1 :]

    def agrees(order: str) -> bool:
        device = ShimDevice(order, changed=without)
        try:
            pairs = cuda_sorting.sort_slots(device, device.place(slots), 65_535, cuda_sorting.SortBuffers(device))
        except (KernelError, AssertionError):
            return False
        return bool(np.array_equal(pairs, wanted))

    assert not all(agrees(order) for order in ORDERS)
