"""Batches on their way: what of them is the training's own once they are received."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.backends.jagged import LookupIds
from tiercache.kernels.step import Vectors
from tiercache.ranks.pending_batches import Coming, tensors_of
from tiercache.ranks.pooling import PooledBatch, _Served
from tiercache.tiers.rows import GroupRows
from tiercache.training.batch import Pooled

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_every_tensor_of_a_batch_is_found_wherever_it_is() -> None:
    """In rows, entries and pooled vectors; arrays of the host are none."""
    all_ = [torch.full((2,), float(i)) for i in range(9)]
    host = np.zeros(1, np.int64)
    rows = GroupRows(Vectors(all_[0], 1, 0), (), all_[1], {"t": 0}, {"t": 1}, host)
    entries = LookupIds(ids=all_[2], starts=host, bases=host, modes=host.astype(np.int8), cols=host, offsets=all_[3],
                      weights=all_[4], slots=all_[5], places=all_[6], scales=all_[7])  # fmt: skip
    served = _Served(0, 0, entries, 0, 1, 0)
    pooled = PooledBatch({"f": Pooled("sum", all_[8])}, (), host, (), (), ((served,),))
    found = tensors_of(([rows], pooled, None, "words", 3))
    assert {int(tensor[0]) for tensor in found} == set(range(9))


def test_a_batch_is_brought_once_and_what_it_brought_is_received() -> None:
    """Inside what is done beside the training, and as of its end."""
    log: list[Any] = []

    @contextmanager
    def exchanging() -> Iterator[None]:
        log.append("begin")
        yield
        log.append("end")

    streams = SimpleNamespace(
        exchanging=exchanging, exchanged=lambda: "the end",
        receive=lambda exchanged, tensors: log.append((exchanged, [int(tensor) for tensor in tensors])),
    )  # fmt: skip
    backend: Any = SimpleNamespace(queues=True, streams=streams)
    batch: Any = SimpleNamespace(label=torch.tensor(1), dense=torch.tensor(2), rows=SimpleNamespace(groups=()))
    due: Any = [torch.tensor(3)]

    def bring() -> tuple[Any, Any]:
        log.append("brought")
        return batch, due

    coming = Coming(bring, backend)
    assert not coming.is_brought
    assert coming.bring() is due
    assert coming.is_brought
    assert coming.receive() is batch
    assert log == ["begin", "brought", "end", ("the end", [1, 2, 3])]
