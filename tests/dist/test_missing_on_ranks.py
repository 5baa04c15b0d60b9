"""Raw keys that a pass lacks, if ranks choose differently how to read them, and some rank has no samples."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tiercache as tc
from tests.dist.trainings import OPTIONS, step_by

if TYPE_CHECKING:
    from tests.dist.pool import RanksPool
    from tiercache.dist.communicator import AnyCommunicator

CHOICES = {"zero": 0.0, "init": 1.0, "load": 0.5}
"""The vector of a key that was trained in the pass before, by the choice."""
SIZES = {"all": (2, 3, 1), "not the first": (0, 3, 1), "not the second": (2, 0, 1), "only the last": (0, 0, 2)}


def read(ranks: AnyCommunicator, folder: str, *, sizes: list[int], ended: bool) -> list[list[Any]]:
    """Look up a key of the pass and the one before, for each combination of choices; return the vectors found."""
    data, found = tc.PassDataset.open(Path(folder) / "keys"), list[list[Any]]()
    with tc.TierCache(Path(folder) / f"{sizes}{ended}.tc", data, **OPTIONS) as cache:
        rows = tc.EmbeddingCollection(cache.schema)
        cache.register(rows=rows)
        for p in cache.passes(epochs=1):
            for choices in itertools.product(CHOICES, repeat=ranks.size) if p.index else [("error",) * ranks.size]:
                size = sizes[ranks.rank] if p.index else 1
                keys = np.full(size, p.index) if choices[0] == "error" else np.arange(size) % 2
                batch = p.batch(None if ended and not size else {"a": keys}, missing=choices[ranks.rank])
                assert batch is not None
                vectors = rows(batch)["a"]
                step_by(cache, vectors.sum() * batch.weight)
                if p.index:
                    found.append([choices, size, float(vectors[0, 0])])
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_each_rank_reads_by_its_own_choice(ranks_pool: RanksPool, tmp_path: Path, sizes: str, ended: bool) -> None:
    """No rank waits for another. A rank without samples gets the first sample of the first rank with some."""
    table = tc.Table(name="a", dim=2, optimizer=tc.optim.SGD(learning_rate=0.5), initializer=tc.init.Constant(value=1))
    tc.write_key_sets(tmp_path / "keys", [table], [{"a": np.array([0])}, {"a": np.array([1])}])
    every = ranks_pool.run(3, read, folder=str(tmp_path), sizes=list(SIZES[sizes]), ended=ended)
    lender = next(rank for rank, size in enumerate(SIZES[sizes]) if size)
    for rank, found in enumerate(every):
        assert len(found) == len(CHOICES) ** 3
        for choices, size, vector in found:
            assert vector == CHOICES[choices[rank if size else lender]]
