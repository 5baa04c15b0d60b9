"""Parts of training loops that many tests have."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import tiercache as tc
from tests.train.cases import Case, Net, tiered, train


def train_store(
    store: tc.Store | Path, passes: tc.PassDataset, case: Case, *, epochs: int | None = None, seed: int = 1,
    each_batch: Callable[[int, int], object] = lambda pass_index, batch: None, **options: Any,
) -> Net:  # fmt: skip
    """Train ``case`` on a cache that is opened for it with ``options``, and closed."""
    with tiered(store, passes, **options) as cache:
        return train(cache, case, epochs=epochs, seed=seed, each_batch=each_batch)


def descend(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Do what follows forward in most loops."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def first_pass(cache: Any) -> Iterator[Any]:
    """Yield the first pass of an epoch, and leave the loop."""
    loop = cache.passes(epochs=1)
    yield next(loop)
    loop.close()
