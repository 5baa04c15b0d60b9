"""Arrays of more than 2^31 elements: address space is reserved, and only the rows that are used take memory."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.cases import use_threads
from tests.kernels.shim.memory import reserved
from tiercache.kernels.gradients import one_id_gradients
from tiercache.kernels.pooling import gather, pool_one
from tiercache.kernels.rows import Pieces, pack, unpack
from tiercache.kernels.sorting import SortBuffers, sort_slots
from tiercache.kernels.update import UpdateBuffers, update_adagrad

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
