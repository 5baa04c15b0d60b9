"""The parts of a batch: its range of the sample order, and memory from a pool."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tiercache.rows.backends.host_arrays import BufferPool
from tiercache.train.batches import sample_order
from tiercache.train.passes import Pass

MANY = 10**15
"""Samples of a pass whose order does not fit in memory."""


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_from_the_midst_of_a_pass_makes_no_order_of_all_its_samples(shuffle: bool) -> None:
    whole = SimpleNamespace(keys=nothing, schema=None)
    source: Any = SimpleNamespace(index=3, samples=MANY, check_samples=nothing, whole=whole)
    rows: Any = SimpleNamespace(check=nothing)
    raw: Any = SimpleNamespace(exchange=SimpleNamespace(ranks=None))
    for done in (MANY // 2, MANY - 8192):
        pass_index = Pass(
            index=0, epoch=1, source=source, rows=rows, seed=2, raw=raw,
            pipeline=SimpleNamespace(), first_sample=done,  # type: ignore[arg-type]
        )  # fmt: skip
        cuts = pass_index._cuts(8192, shuffle)
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

    threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.num_bytes < 100 * 1024  # what came back was given again
