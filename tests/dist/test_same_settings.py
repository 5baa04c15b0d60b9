"""Settings of rows that were changed on one rank: an error on all, before anything is committed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tiercache as tc
from tests.dist.trainings import OPTIONS
from tests.train.cases import SPECS, Case, table
from tiercache.errors import RankError

if TYPE_CHECKING:
    from tests.dist.pool import RanksPool
    from tiercache.dist.communicator import AnyCommunicator

CASE = Case(
    tables=(table("a", 4, tc.optim.Adam(learning_rate=0.5)), table("b", 4)), specs=SPECS, num_samples=64, pass_rows=16
)
CHANGED = {
    "dense": "lr of group 0 of register(optimizer=...) (0.125 on rank 0, 0.25 on rank 1)",
    "lr": "lr of table 'a' (0.5 on rank 0, 0.25 on rank 1)",
    "plateau": "lr of table 'a' (0.5 on rank 0, 0.25 on rank 1)",
    "betas": "betas of table 'a' ([0.9, 0.999] on rank 0, [0.25, 0.5] on rank 1)",
    "clips": "max_norm of clip_grad_norm_ (1.0 on rank 0, 2.0 on rank 1)",
    "max_norm": "max_norm of ['f', 'g', 'h', 'i'] (nothing on rank 0, 0.5 on rank 1)",
}


def change(cache: tc.TierCache, module: Any, what: str, rank: int) -> None:
    rows = cache.optimizer.rows
    group = next(one for one in rows.param_groups if one["table"] == "a")
    if what == "plateau":
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(rows, factor=0.5, patience=0)
        for loss in (3.0, 2.0 + rank):
            scheduler.step(loss)
    elif what == "dense" and rank:
        cache.optimizer.dense[0].param_groups[0]["lr"] = torch.tensor(0.25)
    elif what == "max_norm" and rank:
        module.max_norm = 0.5
    elif what in ("lr", "betas") and rank:
        group |= {"lr": 0.25} if what == "lr" else {"betas": (0.25, 0.5)}


def train(ranks: AnyCommunicator, folder: str, *, what: str, when: str) -> dict[str, Any]:
    """Change a setting in the second pass, or after it; return the error, and the position of the last commit."""
    cache = tc.TierCache(Path(folder) / "m.tc", tc.PassDataset.open(Path(folder) / "passes"), **OPTIONS)
    model, error, batches = tc.EmbeddingBagCollection(cache.schema), "", 0
    scale = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(scale.weight)
    torch.nn.init.zeros_(scale.bias)
    cache.register(model=model, scale=scale, optimizer=torch.optim.SGD(scale.parameters(), lr=0.125))
    try:
        for p in cache.passes(epochs=1):
            for batch in p.batches(8):
                (scale(model(batch).square().mean().reshape(1)) * batch.weight).sum().backward()
                cache.clip_grad_norm_(1.0 + (ranks.rank if what == "clips" and batches >= 2 else 0))
                cache.optimizer.step()
                cache.optimizer.zero_grad()
                batches += 1
                if when == "before a commit" and batches == 3:
                    change(cache, model, what, ranks.rank)
                    cache.commit()
            if when == "after a pass" and p.index == 1:
                change(cache, model, what, ranks.rank)
    except RankError as caught:
        error = str(caught)
        cache._close(failed=True)
    return {"error": error, "batches": batches}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("when", ["after a pass", "before a commit"])
@pytest.mark.parametrize("what", CHANGED)
def test_settings_of_one_rank_alone_are_never_committed(
    ranks_pool: RanksPool, tmp_path: Path, what: str, when: str
) -> None:
    """All ranks raise an error that names the setting, both values and what to do; the store has the pass before."""
    CASE.cut(tmp_path / "passes")
    found = ranks_pool.run(2, train, folder=str(tmp_path), what=what, when=when)
    for one in found:
        assert one["error"].startswith("ranks differ in ")
        assert CHANGED[what] in one["error"]
        assert "set the same value on all ranks (a scheduler that takes a loss needs the mean" in one["error"]
        assert one["batches"] == (4 if when == "after a pass" else 3)
    with tc.Store.open(tmp_path / "m.tc", mode="r") as store:
        assert store.commit is not None
        assert store.commit.cursor == (1, 0)
