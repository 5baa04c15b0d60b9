"""A cache opens the store at a path, or trains a store that its caller opened."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiercache as tc
from tests.cache_options import gathered
from tests.train.cases import (
    SPECS,
    Case,
    assert_close,
    assert_same_bits,
    open_store,
    registered,
    result_of,
    table,
    tiered,
    train,
)
from tests.train.devices import device_of_tests
from tiercache.errors import BudgetError, DatasetError, StateError

CASE = Case(
    tables=(table("a", 8), table("b", 3, tc.optim.Adam())), specs=SPECS, num_samples=200, pass_rows=100, batch=16
)
BUDGETS: dict[str, Any] = {"device_budget": "1MiB", "host_budget": "16MiB"}


def test_a_store_at_a_path_is_made_trained_and_closed_with_the_cache(tmp_path: Path, passes: tc.PassDataset) -> None:
    """With the same bits as a store opened before; another cache at the path resumes it."""
    with open_store(tmp_path / "given", CASE, "memory") as store, tiered(store, passes) as cache:
        expected = result_of(store, passes, train(cache, CASE))
    with tc.TierCache(tmp_path / "model.tc", passes, device=device_of_tests(), **BUDGETS) as cache:
        train(cache, CASE, epochs=1)
        assert cache.sharding is None
    with tc.TierCache(tmp_path / "model.tc", passes, device=device_of_tests(), retention=2, **BUDGETS) as cache:
        model = train(cache, CASE, seed=9)
    with tc.Store.open(tmp_path / "model.tc") as store:
        assert len(store.commits) == 2
        assert_same_bits(result_of(store, passes, model), expected)


def test_a_given_store_stays_open_and_one_for_reading_is_not_trained(tmp_path: Path, passes: tc.PassDataset) -> None:
    """Mode "r" never writes: if all passes are trained the loop ends, and more is refused."""
    with tc.TierCache(tmp_path / "model.tc", passes, **BUDGETS) as cache:
        train(cache, CASE, epochs=1)
    with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
        with tc.TierCache(store, passes, **BUDGETS) as cache:
            model, _ = registered(cache, CASE)
            assert list(cache.passes(epochs=1)) == []
            found = [model(batch) for piece in cache.evaluate(passes) for batch in piece.batches(50)]
            words = "is open read-only: to train, pass a path, or a Store opened with mode='a'"
            with pytest.raises(StateError, match=words):
                next(cache.passes(epochs=2))
        assert torch.cat(found).shape[0] == CASE.num_samples
        assert store.lookup("a", passes.passes[0].keys("a")[:1])


def test_what_is_said_of_a_store_that_is_open_already_is_refused(tmp_path: Path, passes: tc.PassDataset) -> None:
    """These options are fixed when it is opened."""
    with open_store(tmp_path, CASE, "memory") as store:
        for options in ({"engine": "zarr"}, {"retention": 3}, {"shard_dirs": [tmp_path]}):
            words = "engine, retention and shard_dirs apply to a store that the cache opens"
            with pytest.raises(ValueError, match=words):
                tc.TierCache(store, passes, **BUDGETS, **gathered(options))
        with pytest.raises(ValueError, match="unknown table 't9'"):
            tc.TierCache(store, passes, **BUDGETS, sharding={"t9": "row_wise"})


def test_a_store_is_reorganized(tmp_path: Path, passes: tc.PassDataset, capsys: pytest.CaptureFixture[str]) -> None:
    with tc.TierCache(tmp_path / "model.tc", passes, **BUDGETS) as cache:
        train(cache, CASE)
    others = Case(tables=CASE.tables, specs=SPECS, num_samples=80, pass_rows=40, data_seed=5).cut(tmp_path / "others")
    with pytest.raises(DatasetError, match="is not the one that"):
        tc.TierCache(tmp_path / "model.tc", others, options=tc.TierCacheOptions(reorganize=False), **BUDGETS)
    assert "reorganizing" not in capsys.readouterr().err
    with tc.Store.open(tmp_path / "model.tc", tables=CASE.tables) as store:
        before = store.commits
        with pytest.raises(BudgetError, match="host_budget is 40 KiB"):
            tc.TierCache(store, others, **BUDGETS | {"host_budget": "40KiB"})
        assert store.commits == before
    with tc.TierCache(tmp_path / "model.tc", others, **BUDGETS) as cache:
        said = re.sub(r"\s+", " ", capsys.readouterr().err)
        assert re.search(r"at most [\d.]+ KiB of rows are read", said)
        assert "training begins at epoch 0 of all 2 sub-datasets, including any trained before" in said
        assert cache.store.commit is not None
        assert cache.store.commit.cursor == (0, 0)
        train(cache, CASE, epochs=1)


def test_micro_batches_of_one_rank_end_as_its_batches(tmp_path: Path, passes: tc.PassDataset) -> None:
    """Their weights add up to 1, and each row is stepped once."""
    results = []
    for micro_batches in (1, 3):
        with open_store(tmp_path, CASE, "memory") as store, tiered(store, passes) as cache:
            model, optimizer = registered(cache, CASE)
            for p in cache.passes(epochs=1):
                for step in p.steps(CASE.batch, micro_batches=micro_batches):
                    weights = []
                    for batch in step:
                        (nn.functional.mse_loss(model(batch), batch.label) * batch.weight).backward()
                        weights.append(batch.weight)
                    assert sum(weights) == pytest.approx(1)
                    optimizer.step()
                    optimizer.zero_grad()
                assert p.samples_done == p.num_samples
            results.append(result_of(store, passes, model))
    assert_close(*results)
