"""The pool of batch-sized arrays, which lookups and the exchange of rows share."""

from __future__ import annotations

import threading

import numpy as np

from tiercache.backends.buffer_pool import BufferPool


def test_threads_never_hold_the_same_memory() -> None:
    """Each writes its own number all over what it takes, and finds it there until it lets go."""
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
