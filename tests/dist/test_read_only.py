"""Ranks evaluate a store that was opened for reading as they did when they trained it, and train nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.dist.pool import RanksPool
from tests.dist.trainings import CASES, OPTIONS, model_of, train
from tiercache.dist.communicator import AnyCommunicator
from tiercache.errors import StateError


def evaluated(ranks: AnyCommunicator, case: str, folder: str, *, given: bool) -> dict[str, Any]:
    """Return this rank's logits of an evaluation; of a store that was ``given`` from its last commit."""
    passes, one = tc.PassDataset.open(Path(folder) / "passes"), CASES[case]
    store = tc.Store.open(Path(folder) / "model.tc", mode="r") if given else Path(folder) / "model.tc"
    with tc.TierCache(store, passes, **OPTIONS) as cache:
        model, _ = model_of(cache, one)
        cache.restore()
        with torch.no_grad():
            logits = [model(batch) for part in cache.evaluate(passes) for batch in part.batches(32)]
        planned = [(plan.rows_read, plan.rows_from_host) for plan in cache.plan(passes=3)]
        if given:
            with pytest.raises(StateError, match="is open read-only: to train, pass a path"):
                next(cache.passes(epochs=9))
            with pytest.raises(ValueError, match=r"was opened with the rows of 2 ranks: use the same number of ranks"):
                tc.TierCache(store, passes, sharding="row_wise", **OPTIONS)
            assert store.commit is not None
            store.close()
    return {"logits": torch.cat(logits).numpy(), "planned": planned}


def alone(_ranks: AnyCommunicator, case: str, folder: str) -> str:
    passes = tc.PassDataset.open(Path(folder) / "passes")
    assert case in CASES
    with (
        tc.Store.open(Path(folder) / "model.tc", mode="r") as store,
        pytest.raises(ValueError, match="was opened with the rows of 2 ranks") as caught,
    ):
        tc.TierCache(store, passes, **OPTIONS)
    return str(caught.value)


def test_ranks_evaluate_a_store_that_was_opened_for_reading(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """With the bits of those that may train it; a training is refused, and so is another number of ranks."""
    CASES["bags"].cut(tmp_path / "passes")
    ranks_pool.run(2, train, case="bags", folder=str(tmp_path), epochs=1)
    expected, found = (
        ranks_pool.run(2, evaluated, case="bags", folder=str(tmp_path), given=given) for given in (False, True)
    )

    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine["logits"], other["logits"])
        assert mine["planned"] == other["planned"]
    assert "pass its path to 1" in ranks_pool.run(1, alone, case="bags", folder=str(tmp_path))[0]
