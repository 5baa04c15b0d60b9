"""Batches of raw keys have the numbers of the moment they were made, whatever a loader writes to its arrays then."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiercache as tc
from tests.dist.pool import RanksPool
from tests.dist.trainings import OPTIONS
from tests.train.cases import table
from tests.train.oracle import initial_row
from tiercache.dist.communicator import AnyCommunicator


def look_up_reused(ranks: AnyCommunicator, folder: str) -> list[Any]:
    """Make two batches from the same arrays before either is looked up; return their lookups, labels and dense."""
    passes = tc.PassDataset.open(Path(folder) / "keys")
    tables = tc.Schema(tables=passes.schema.tables, features=(tc.Feature(name="a", table="a", hotness="ragged"),))
    bag = tc.EmbeddingBag(tables, "a", mode="sum", padding_idx=0)
    with tc.TierCache(Path(folder) / f"{ranks.size}.tc", passes, model=bag, **OPTIONS) as cache:
        loop = cache.passes(epochs=1)
        p = next(loop)
        keys, offsets, label = np.array([0, 1, 2, 9]), np.array([0, 1, 4]), np.zeros(2, np.float32)
        first = p.batch({"a": (keys, offsets)}, label=label, missing="zero")
        for array, later in ((keys, [9, 2, 1, 0]), (offsets, [0, 3, 4]), (label, 1)):
            array[:] = later
        second = p.batch({"a": (keys, offsets)}, label=label, missing="zero")
        return [[bag(one).detach().numpy(), one.label.numpy()] for one in (first, second)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_loader_may_reuse_its_arrays(ranks_pool: RanksPool, tmp_path: Path, size: int) -> None:
    """Batches that were made before have the numbers of then; padding is found among the keys."""
    given = table("a", 4)
    tc.write_key_sets(tmp_path / "keys", (given,), [{"a": [0, 1, 2, 3]}])
    one, two = initial_row(given, 1), initial_row(given, 2)

    for (first, no_label), (second, label) in ranks_pool.run(size, look_up_reused, folder=str(tmp_path)):
        np.testing.assert_array_equal(first, [0 * one, one + two])
        np.testing.assert_array_equal(second, [two + one, 0 * one])
        assert (no_label.tolist(), label.tolist()) == ([0, 0], [1, 1])
