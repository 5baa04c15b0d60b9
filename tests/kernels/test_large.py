"""Arrays of more than 2^31 elements: address space is reserved, and only the rows that are used take memory."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.cases import same_bits, use_threads
from tests.kernels.shim.memory import repeated, reserved
from tiercache.kernels.cpu.gradients import one_id_gradients
from tiercache.kernels.cpu.initial import NORMAL, UNIFORM, initial_rows
from tiercache.kernels.cpu.pooling import MEAN, SUM, gather, pool_one, weight_gradient
from tiercache.kernels.cpu.rows import Pieces, pack, unpack
from tiercache.kernels.cpu.sorting import SortBuffers, sort_slots
from tiercache.kernels.cpu.update import UpdateBuffers, update_adagrad

DIM = 16
NUM_SLOTS = (1 << 31) // DIM + 100
LAST = np.array([NUM_SLOTS - 1, 0, NUM_SLOTS - 100, 5], np.int32)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_beyond_two_billion_elements_are_the_right_ones(num_threads: int) -> None:
    """Lookup, step, pack and unpack of the first and the last rows of a table of 2^31 elements and more."""
    vectors, sums = reserved(NUM_SLOTS, DIM), reserved(NUM_SLOTS, DIM)
    for i, slot in enumerate(LAST):
        vectors[slot] = i + 1
    with use_threads(num_threads):
        out = np.zeros((4, DIM), np.float32)
        gather(vectors, LAST, out)
        assert out[:, 0].tolist() == [1, 2, 3, 4]
        pooled, slots = np.zeros((2, 2 * DIM), np.float32), np.zeros(4, np.int32)
        ids, cols = np.arange(4, dtype=np.int32), np.array([0, DIM])
        pool_one(vectors, LAST, ids, np.zeros(2, np.int64), cols, 2, pooled, slots)
        assert pooled[:, [0, DIM]].tolist() == [[1, 3], [2, 4]]
        pairs = sort_slots(slots, NUM_SLOTS, SortBuffers())
        described = one_id_gradients(np.ones_like(pooled), cols)
        update_adagrad(vectors, sums, pairs, described, UpdateBuffers(), learning_rate=0.5)
        assert vectors[LAST, DIM - 1].tolist() == [0.5, 1.5, 2.5, 3.5]
        assert sums[LAST, 0].tolist() == [1, 1, 1, 1]
        data = np.zeros(4 * 2 * DIM, np.float32)
        pieces = Pieces(2 * DIM)
        pieces.add(0, np.array([4]), np.zeros(1, np.int64), data)
        pack((vectors, sums), LAST, np.arange(4, dtype=np.int32), pieces)
        assert data[: 4 * DIM : DIM].tolist() == [0.5, 1.5, 2.5, 3.5]
        unpack((vectors, sums), LAST[::-1].copy(), pieces)
        assert vectors[LAST, 0].tolist() == [3.5, 2.5, 1.5, 0.5]
    assert not vectors[6:1000].any()
    assert not vectors[-1000:-101].any()


@pytest.mark.parametrize("kind", [UNIFORM, NORMAL])
def test_initial_rows_beyond_two_billion_elements_are_the_right_ones(kind: int) -> None:
    """The last row of 2^31 elements and more, as if it were made alone."""
    dim = 1 << 20
    keys, wanted = np.arange((1 << 31) // dim + 1) - 7, np.empty((1, dim), np.float32)
    out = repeated(keys.size, dim)
    initial_rows(keys, 5, 6, kind, 0.25, 0.5, out)
    initial_rows(keys[-1:], 5, 6, kind, 0.25, 0.5, wanted)
    assert same_bits(out[-1:], wanted)


@pytest.mark.parametrize("mode", [SUM, MEAN])
def test_gradients_of_weights_beyond_two_billion_elements_are_the_right_ones(mode: int) -> None:
    """Of the last sample of a wide output, whose bag has the last row of a large table and the first."""
    num_samples, width, col = 33, (1 << 31) // 32, (1 << 31) // 32 - DIM
    vectors, gradient = reserved(NUM_SLOTS, DIM), reserved(num_samples, width)
    vectors[[NUM_SLOTS - 1, 0]] = [[2], [3]]
    gradient[-1, col:] = np.arange(DIM)
    offsets, out = np.array([0] * num_samples + [2]), np.empty(2, np.float32)
    modes, slots = np.array([mode], np.int8), np.array([NUM_SLOTS - 1, 0], np.int32)
    weight_gradient(vectors, slots, np.array([0, 2]), offsets, modes, np.array([col]), gradient, out)
    assert out.tolist() == [240 / (1 + mode), 360 / (1 + mode)]  # 0 to 15 add up to 120; MEAN is 1, of two ids
