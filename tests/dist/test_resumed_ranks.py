"""Resumed ranks: each has its own shards of dense state, and all go through the same passes, data and commits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tiercache as tc
from tests.dist.test_gradients_as_torch import CASE, Net, opened
from tests.dist.trainings import OPTIONS, step_by
from tests.train.cases import table
from tiercache.errors import RankError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.dist.pool import RanksPool
    from tiercache.dist.communicator import AnyCommunicator


def sharded(ranks: AnyCommunicator, cache: tc.TierCache) -> tuple[Net, Callable[[], list[list[float]]]]:
    """Register a model with a sharded layer, and Adam; return it, and a function of this rank's weights and moments."""
    torch.manual_seed(1)
    model = Net(cache.schema)
    fully_shard(model.top, mesh=init_device_mesh("cpu", (ranks.size,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    cache.register(model=model, optimizer=optimizer)

    def local() -> list[list[float]]:
        weight: Any = model.top.weight
        states = [weight, *(optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq"))]
        return [one.detach().to_local().flatten().tolist() for one in states]

    return model, local


def restored(ranks: AnyCommunicator, folder: str) -> list[list[float]]:
    with opened(folder, "resumed.tc") as cache:
        _, local = sharded(ranks, cache)
        cache.restore()
        return local()


def refused(ranks: AnyCommunicator, folder: str) -> str:
    with pytest.raises(StateError) as caught:
        restored(ranks, folder)
    return str(caught.value)


def resume_sharded(ranks: AnyCommunicator, folder: str) -> dict[str, Any]:
    """Train an epoch with a sharded layer, and restore it; return this rank's numbers then."""
    with opened(folder, "resumed.tc") as cache:
        model, local = sharded(ranks, cache)
        for p in cache.passes(epochs=1):
            for batch in p.batches(16):
                step_by(cache, model(batch).square().mean() * batch.weight)
        trained = local()
    return {"trained": trained, "restored": restored(ranks, folder)}


def test_each_rank_restores_its_own_shards_of_an_optimizer(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Before the first step an optimizer has no state, and so the same on all ranks."""
    CASE.cut(tmp_path / "passes")
    first, second = ranks_pool.run(2, resume_sharded, folder=str(tmp_path))
    assert first["restored"] == first["trained"] != second["trained"] == second["restored"]
    for error in ranks_pool.run(3, refused, folder=str(tmp_path)):
        assert re.search(r"the state of model, optimizer in .* is sharded over 2 ranks, .* there are 3 now", error)
    again = ranks_pool.run(2, restored, folder=str(tmp_path))
    assert again == [first["trained"], second["trained"]], "the refused ranks changed the store"


def differing(ranks: AnyCommunicator, folder: str, what: str) -> str:
    with opened(folder, f"{what}.tc") as cache:
        try:
            if what == "epochs":
                next(cache.passes(epochs=1 + ranks.rank))
            else:
                next(cache.evaluate(tc.PassDataset.open(f"{folder}/passes{ranks.rank}")))
        except RankError as caught:
            return str(caught)
    return "no error"


@pytest.mark.parametrize("what", ["epochs", "the evaluated dataset"])
def test_ranks_that_differ_in_what_they_go_through_are_told(ranks_pool: RanksPool, tmp_path: Path, what: str) -> None:
    """They would wait for each other for ever, or read each other's rows."""
    CASE.cut(tmp_path / "passes")
    for rank in range(2):
        replace(CASE, data_seed=10 + rank).cut(tmp_path / f"passes{rank}")
    for error in ranks_pool.run(2, differing, folder=str(tmp_path), what=what):
        assert what in error
        assert "rank 1" in error


def commit_within(ranks: AnyCommunicator, folder: str, *, restarts: bool) -> dict[str, Any]:
    """Look up a quarter of the keys on rank 0 and the rest on rank 1, and commit after the second of four steps."""
    keys = torch.arange(32).view(4, 8)
    with tc.TierCache(f"{folder}/uneven.tc", f"{folder}/keys", **OPTIONS) as cache:
        module = tc.Embedding(cache.schema, "k")
        cache.register(model=module)
        for p in cache.passes(epochs=1):
            begin = p.start_batch, p.start_sample
            for step in range(p.start_batch, 4):
                step_by(cache, module(keys[step, slice(0, 2) if ranks.rank == 0 else slice(2, 8)]).sum())
                if step == 1 and not restarts:
                    cache.commit()
                    p.stop()
                    break
        with torch.no_grad():
            return {"begin": begin, "rows": module(keys.flatten()).sum(1).tolist()}


def test_a_commit_within_a_pass_counts_the_plain_keys_of_all_ranks(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Ranks may have different numbers of samples; a restart begins after those of all."""
    schema = tc.Schema(tables=(table("k", 4),), features=(tc.Feature(name="k", table="k"),))
    tc.write_key_sets(tmp_path / "keys", schema, [{"k": np.arange(32)}])
    for restarts in (False, True):
        found = ranks_pool.run(2, commit_within, folder=str(tmp_path), restarts=restarts)
        assert [one["begin"] for one in found] == [(2, 16) if restarts else (0, 0)] * 2
    first, second = found
    assert first["rows"] == second["rows"]
