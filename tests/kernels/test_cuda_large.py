"""CUDA sources on arrays of more than 2^31 elements: address space is reserved, and only used rows take memory."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.kernels.shim.device import ShimDevice
from tests.kernels.test_large import DIM, LAST, NUM_SLOTS, reserved
from tiercache.kernels import cuda_pooling, cuda_sorting, cuda_update

pytestmark = pytest.mark.skipif(bool(os.environ.get("TIERCACHE_TEST_GPU")), reason="reserves host memory")


def test_rows_beyond_two_billion_elements_are_the_right_ones() -> None:
    """Lookup and step of the first and the last rows of a table of 2^31 elements and more."""
    vectors, sums, device = reserved(NUM_SLOTS, DIM), reserved(NUM_SLOTS, DIM), ShimDevice("random")
    for i, slot in enumerate(LAST):
        vectors[slot] = i + 1
    out = device.array((4, DIM), np.float32)
    cuda_pooling.gather(device, vectors, device.place(LAST), out)
    assert out[:, 0].tolist() == [1, 2, 3, 4]
    pooled, slots = device.place(np.zeros((2, 2 * DIM), np.float32)), device.empty(4, np.int32)
    ids, cols = device.place(np.arange(4, dtype=np.int64)), np.array([0, DIM])
    cuda_pooling.pool_one(device, vectors, device.place(LAST), ids, np.zeros(2, np.int64), cols, 2, pooled, slots)
    assert pooled[:, [0, DIM]].tolist() == [[1, 3], [2, 4]]
    pairs = cuda_sorting.sort_slots(device, slots, NUM_SLOTS, cuda_sorting.SortBuffers(device))
    described = cuda_update.one_id_gradients(device, device.place(np.ones_like(pooled)), cols)
    buffers = cuda_update.UpdateBuffers(device)
    cuda_update.update_adagrad(device, vectors, sums, pairs, described, buffers, learning_rate=0.5)
    assert vectors[LAST, DIM - 1].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert sums[LAST, 0].tolist() == [1, 1, 1, 1]
    assert not vectors[6:1000].any()
    assert not vectors[-1000:-101].any()


def test_places_beyond_two_billion_elements_of_output_and_gradient_are_the_right_ones() -> None:
    """The last sample of a wide output: pooled by bags, and its gradient taken."""
    num_samples, width, dim, device = 33, (1 << 31) // 32, 4, ShimDevice()
    out, col = reserved(num_samples, width), width - 4
    vectors, ids = device.place(np.arange(8, dtype=np.float32).reshape(2, 4)), device.place(np.ones(1, np.int32))
    offsets = device.place(np.array([0] * num_samples + [1]))
    slots, place = device.empty(1, np.int32), device.empty(1, np.int64)
    none, local = np.empty(0, np.float32), device.place(np.arange(2, dtype=np.int32))
    cuda_pooling.pool_bags(
        device, vectors, local, ids, np.zeros(1, np.int64), offsets, none, np.zeros(1, np.int8), np.array([col]), out,
        slots, None, place, None,
    )  # fmt: skip
    assert place.tolist() == [(num_samples - 1) * width + col]
    assert out[-1, col:].tolist() == [4, 5, 6, 7]
    pairs = cuda_sorting.sort_slots(device, slots, 2, cuda_sorting.SortBuffers(device))
    described, buffers = cuda_update.bag_gradients(device, out, place), cuda_update.UpdateBuffers(device)
    cuda_update.update_sgd(device, vectors, pairs, described, buffers, learning_rate=1.0)
    assert vectors.tolist() == [[0, 1, 2, 3], [0] * dim]
