"""CUDA sources on arrays of more than 2^31 elements: on the CPU only used rows take memory, on a GPU all of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import one_group
from tests.kernels.shim.device import device_for
from tests.kernels.test_large import DIM, LAST, NUM_SLOTS
from tiercache.kernels.cpu.initial import CONSTANT, UNIFORM, ZEROS, initial_rows
from tiercache.kernels.cpu.pooling import MEAN, SUM
from tiercache.kernels.cuda import gathering as cuda_gathering
from tiercache.kernels.cuda import initial as cuda_initial
from tiercache.kernels.cuda import update as cuda_update
from tiercache.kernels.cuda.vectors import Vectors
from tiercache.store.vectors import to_bits


def test_rows_beyond_two_billion_elements_are_the_right_ones() -> None:
    """Lookup and step of the first and the last rows of a table of 2^31 elements and more."""
    device = device_for("random")
    vectors, sums = (device.large(NUM_SLOTS, DIM) for _ in range(2))
    for i, slot in enumerate(LAST):  # by a kernel of ours: CuPy compiles one to assign a number, and lacks headers
        cuda_initial.fill_rows(device, i + 1.0, vectors, device.place(np.array([slot], np.int32)))
    out, last = device.array((4, DIM), np.float32), device.place(LAST)
    cuda_gathering.gather(device, vectors, last, out)
    assert device.read(out)[:, 0].tolist() == [1, 2, 3, 4]
    pooled, slots = device.place(np.zeros((2, 2 * DIM), np.float32)), device.empty(4, np.int32)
    ids, cols = device.place(np.arange(4, dtype=np.int64)), np.array([0, DIM])
    one_group.pool_one(device, vectors, last, ids, np.zeros(2, np.int64), cols, 2, pooled, slots)
    assert device.read(pooled)[:, [0, DIM]].tolist() == [[1, 3], [2, 4]]
    pairs = one_group.sort_slots(device, slots, NUM_SLOTS)
    described = cuda_update.one_id_gradients(device, device.place(np.ones((2, 2 * DIM), np.float32)), cols)
    buffers = None
    one_group.update_adagrad(device, vectors, sums, pairs, described, buffers, learning_rate=0.5)
    assert [device.read(vectors[slot])[DIM - 1] for slot in LAST] == [0.5, 1.5, 2.5, 3.5]
    assert [device.read(sums[slot])[0] for slot in LAST] == [1, 1, 1, 1]
    assert not device.read(vectors[6:1000]).any()
    assert not device.read(vectors[-1000:-101]).any()


def test_places_beyond_two_billion_elements_of_output_and_gradient_are_the_right_ones() -> None:
    """The last sample of a wide output: pooled by bags, and its gradient taken."""
    num_samples, width, dim, device = 33, (1 << 31) // 32, 4, device_for("forward")
    out, col = device.large(num_samples, width), width - 4
    vectors, ids = device.place(np.arange(8, dtype=np.float32).reshape(2, 4)), device.place(np.ones(1, np.int32))
    offsets = device.place(np.array([0] * num_samples + [1]))
    slots, place = device.empty(1, np.int32), device.empty(1, np.int64)
    none, local = np.empty(0, np.float32), device.place(np.arange(2, dtype=np.int32))
    one_group.pool_bags(
        device, vectors, local, ids, np.zeros(1, np.int64), offsets, none, np.zeros(1, np.int8), np.array([col]), out,
        slots, None, place, None,
    )  # fmt: skip
    assert device.read(place).tolist() == [(num_samples - 1) * width + col]
    assert device.read(out[-1, col:]).tolist() == [4, 5, 6, 7]
    pairs = one_group.sort_slots(device, slots, 2)
    described, buffers = cuda_update.bag_gradients(device, out, place), None
    one_group.update_sgd(device, vectors, pairs, described, buffers, learning_rate=1.0)
    assert device.read(vectors).tolist() == [[0, 1, 2, 3], [0] * dim]


@pytest.mark.parametrize("kind", [UNIFORM, CONSTANT, ZEROS])
def test_initial_rows_go_to_slots_beyond_two_billion_elements(kind: int) -> None:
    """The first and the last slots, over what stood there, and no other: float32, then 16 bits in as many bytes."""
    device = device_for("reversed")
    vectors, slots = device.large(NUM_SLOTS, DIM), device.place(LAST)
    keys, wanted = np.array([1 << 40, -1, 0, 7]), np.empty((4, 2 * DIM), np.float32)
    cuda_initial.fill_rows(device, 9.0, vectors, slots)
    assert [device.read(vectors[slot]).tolist() for slot in LAST] == [[9.0] * DIM] * 4
    initial_rows(keys, 5, 6, kind, -1.5, 2.5, wanted)
    there = device.place(keys)
    for out, right in (
        (vectors, wanted[:, :DIM]),
        (Vectors(vectors, 2 * DIM, "bfloat16"), to_bits(wanted, "bfloat16").view(np.float32)),
    ):
        cuda_initial.initial_rows(device, there, 5, 6, kind, -1.5, 2.5, out, slots)
        assert [device.read(vectors[slot]).tobytes() for slot in LAST] == [row.tobytes() for row in right]
    assert not device.read(vectors[6:1000]).any()
    assert not device.read(vectors[-99:-1]).any()
    assert not device.read(vectors[-1000:-100]).any()


@pytest.mark.parametrize("mode", [SUM, MEAN])
def test_gradients_of_weights_beyond_two_billion_elements_are_the_right_ones(mode: int) -> None:
    """Of the last sample of a wide output, whose bag has the last row of a large table and the first."""
    num_samples, width, col, device = 33, (1 << 31) // 32, (1 << 31) // 32 - DIM, device_for("random")
    vectors, gradient = device.large(NUM_SLOTS, DIM), device.large(num_samples, width)
    for i, slot in enumerate((NUM_SLOTS - 1, 0)):
        cuda_initial.fill_rows(device, i + 2.0, vectors, device.place(np.array([slot], np.int32)))
    blocks = gradient.reshape(-1, DIM)  # of which the last is the sample's
    cuda_initial.fill_rows(device, 0.5, blocks, device.place(np.array([blocks.shape[0] - 1], np.int32)))
    offsets, out = device.place(np.array([0] * num_samples + [2])), device.empty(2, np.float32)
    slots, modes = device.place(np.array([NUM_SLOTS - 1, 0], np.int32)), np.array([mode], np.int8)
    one_group.weight_gradient(device, vectors, slots, offsets, modes, np.array([col]), gradient, out)
    assert device.read(out).tolist() == [DIM / (1 + mode), 1.5 * DIM / (1 + mode)]  # MEAN is 1, of two ids
