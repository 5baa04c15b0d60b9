"""The parts of a batch: its range of the sample order, and memory from a pool."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from tiercache.rows.backends.host_arrays import BufferPool
from tiercache.train.batches import sample_order
from tiercache.train.passes import Pass

MANY = 10**15  # samples of a pass whose order does not fit in memory


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_from_the_midst_of_a_pass_makes_no_order_of_all_its_samples(shuffle: bool) -> None:
    source: Any = MagicMock(index=3, samples=MANY)
    raw: Any = SimpleNamespace(exchange=SimpleNamespace(ranks=None))
    for done in (MANY // 2, MANY - 8192):
        p = Pass(
            index=0, epoch=1, source=source, rows=MagicMock(), seed=2, raw=raw, pipeline=MagicMock(), first_sample=done
        )
        cuts = p._cuts(8192, shuffle)
        end, places = next(cuts)
        order = sample_order(MANY, seed=2, epoch=1, sub_dataset=3, shuffle=shuffle)
        assert places.size == 8192
        assert np.array_equal(places, order(done, done + 8192))
        assert end == done + 8192
    assert next(cuts, None) is None


def test_threads_never_hold_the_same_memory() -> None:
    pool, wrong = BufferPool(), []

    def take(number: int) -> None:
        rng = np.random.default_rng(number)
        held: list[np.ndarray] = []
        for _ in range(3000):
            held.append(pool.take((int(rng.integers(1, 200)),), np.int32))
            held[-1].fill(number)
            if len(held) > 5:
                wrong.extend(one for one in held if (one != number).any())
                del held[: int(rng.integers(1, 5))]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(take, range(4)))
    assert not wrong
    assert pool.num_bytes < 100 * 1024  # what came back was given again
