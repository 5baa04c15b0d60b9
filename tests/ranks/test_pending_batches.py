"""Rows of batches: what of them is the training's own once they are brought."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tiercache.backends.jagged import LookupIds
from tiercache.kernels.step import Vectors
from tiercache.ranks.pending_batches import tensors_of
from tiercache.ranks.pooling import PooledBatch
from tiercache.tiers.rows import GroupRows
from tiercache.training.batch import Pooled


def test_every_tensor_of_a_batch_is_found_wherever_it_is() -> None:
    """In rows, entries and pooled vectors; arrays of the host are none."""
    all_ = [torch.full((2,), float(i)) for i in range(9)]
    host = np.zeros(1, np.int64)
    rows = GroupRows(Vectors(all_[0], 1, 0), (), all_[1], {"t": 0}, {"t": 1}, host)
    entries = LookupIds(ids=all_[2], starts=host, bases=host, modes=host.astype(np.int8), cols=host, offsets=all_[3],
                      weights=all_[4], slots=all_[5], places=all_[6], scales=all_[7])  # fmt: skip
    asked: Any = None
    pooled = PooledBatch({"f": Pooled("sum", all_[8])}, asked, (((asked, entries),),))
    found = tensors_of(([rows], pooled, None, "words", 3))
    assert {int(tensor[0]) for tensor in found} == set(range(9))
