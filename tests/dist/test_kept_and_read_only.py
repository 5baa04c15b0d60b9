"""Several ranks keep their state by name and resume from it, and evaluate a store that was opened for reading."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.dist.pool import RanksPool
from tests.dist.test_common_commits import different
from tests.dist.trainings import CASES, OPTIONS, dense_of, model_of, open_sharded, stored, train, trained
from tiercache.dist.communicator import AnyCommunicator
from tiercache.errors import StateError

MOMENTS = {"middle": (2, 1), "last": (1, 3)}


def keep(_: AnyCommunicator, case: str, folder: str, **options: Any) -> dict[str, Any]:
    """Train a case to its end and keep the moment after each named batch; returns the commits and the dense part."""
    with open_sharded(CASES[case], folder, **options) as cache:
        tracked = model_of(cache, CASES[case])
        kept = {}
        for p, number in trained(cache, CASES[case], tracked):
            for name, moment in MOMENTS.items():
                if (p.index, number) == moment:
                    kept[name] = cache.keep(name)
        cache.keep("end")
        return {"kept": kept, **dense_of(tracked[0])}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("commit_every", [1, 2])
def test_ranks_go_on_from_what_they_kept_to_the_same_bits(
    ranks_pool: RanksPool, tmp_path: Path, commit_every: int
) -> None:
    CASES["bags"].cut(tmp_path / "passes")
    options = {"case": "bags", "folder": str(tmp_path), "commit_every": commit_every}
    plain = ranks_pool.run(2, train, **options)
    rows = stored(tmp_path)
    (tmp_path / "model.tc").rename(tmp_path / "plain.tc")
    found = ranks_pool.run(2, keep, **options)
    assert found[0]["kept"] == found[1]["kept"]
    assert found[0]["kept"].keys() == MOMENTS.keys()
    assert different(stored(tmp_path), rows) == []
    with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
        for name, (index, batch) in MOMENTS.items():
            assert store.at(name).commit.id == found[0]["kept"][name]
            assert store.at(name).commit.cursor == (index, 16 * (batch + 1))
    for name in ("middle", "last"):
        again = ranks_pool.run(2, train, at=name, **options)
        assert different(stored(tmp_path), rows) == []
        for key in (key for key in plain[0] if key.startswith("dense")):
            np.testing.assert_array_equal(again[0][key], plain[0][key], err_msg=key)
    failed = ranks_pool.errors(3, train, at="last", **options)
    assert any("has the rows of 2 ranks, sharded differently from the tables of this training" in str(one)
               for one in failed)  # fmt: skip
    assert different(stored(tmp_path), rows) == []


def take_shard_out(_: AnyCommunicator, folder: str) -> str:
    """Use the store of a cache where the rows or the commits of all ranks are needed; returns the shard's label."""
    with open_sharded(CASES["one"], folder) as cache:
        cache.register(model=(model := tc.Embedding(cache.schema, "user")))
        cache.restore()
        refused = "is the shard of rank . of 2 and has only that rank's rows: open the whole store"
        for takes in (
            lambda: tc.to_torch(model, cache.store),
            lambda: tc.to_torch(model, cache.store, like=torch.nn.Embedding(1000, 8)),
            lambda: tc.export_store(cache.store, Path(folder) / "rows", format="numpy"),
            lambda: tc.export_overlay(cache.store, Path(folder) / "rows.safetensors", table="users"),
            lambda: tc.import_store({}, cache.store),
            lambda: cache.store.pin("best"),
            lambda: cache.store.unpin("best"),
            lambda: cache.store.rollback(1),
            cache.store.compact,
            lambda: tc.store.alter(cache.store, cache.store.tables),
            lambda: tc.store.forget(cache.store, "users", np.array([-1])),
            lambda: tc.reorganize(cache.store, cache.dataset),
        ):
            with pytest.raises(ValueError, match=refused):
                takes()
        with tc.Store.open(Path(folder) / "model.tc", mode="r") as whole:
            tc.to_torch(model, whole)
        return cache.store.label


def test_the_shard_of_a_rank_is_not_taken_for_the_whole_store(ranks_pool: RanksPool, tmp_path: Path) -> None:
    CASES["one"].cut(tmp_path / "passes")
    assert len(set(ranks_pool.run(2, take_shard_out, folder=str(tmp_path)))) == 2


# -- stores that were opened for reading ---------------------------------------------------------------------


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
    CASES["bags"].cut(tmp_path / "passes")
    ranks_pool.run(2, train, case="bags", folder=str(tmp_path), epochs=1)
    expected, found = (
        ranks_pool.run(2, evaluated, case="bags", folder=str(tmp_path), given=given) for given in (False, True)
    )

    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine["logits"], other["logits"])
        assert mine["planned"] == other["planned"]
    assert "pass its path to 1" in ranks_pool.run(1, alone, case="bags", folder=str(tmp_path))[0]
