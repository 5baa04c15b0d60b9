"""Ranks with different folders, options or settings of rows are refused before anything is made or committed."""

import os
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch

import tiercache as tc
from tests.cache_options import gathered
from tests.dist.meeting import meet
from tests.dist.pool import RanksPool
from tests.dist.trainings import CASES, ONE, OPTIONS, on_ranks, stored
from tests.train.cases import SPECS, Case, table
from tiercache.dist.communicator import AnyCommunicator
from tiercache.dist.consistency import check_same
from tiercache.errors import RankError

END = ": pass the same values on all ranks and restart them"


def opened(ranks: AnyCommunicator, folder: str, by_rank: list[dict[str, Any]]) -> None:
    mine = by_rank[ranks.rank]
    passes = tc.PassDataset.open(Path(folder) / "passes")
    with chdir(mine.pop("cwd", folder)):
        store = mine.pop("store", "model.tc")
        if mine.pop("held", False):
            store = tc.Store.open(store, tables=passes.tables)
        model = None
        if mine.pop("model", False):
            model = tc.EmbeddingBagCollection(passes.schema)
        tc.TierCache(store, passes, model=model, **gathered(OPTIONS | mine)).close()


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"store": "model-0.tc"}, {"store": "model-1.tc"}, r"the store \(.*/model-0.tc on rank 0, .*/model-1.tc on"),
        ({"cwd": "a"}, {"cwd": "b"}, r"the store \(.*/a/model.tc on rank 0, .*/b/model.tc on rank 1\)"),
        ({"cwd": "a"}, {"store": "b/model.tc"}, r"the store \(.*/a/model.tc on rank 0, .*/b/model.tc on rank 1\)"),
        ({"store": "link/m.tc"}, {"store": "b/m.tc"}, r"the store \(.*/link/m.tc on rank 0, .*/b/m.tc on rank 1\)"),
        ({"shard_dirs": ["a", "b"]}, {"shard_dirs": ["a", "c"]}, r"shard_dirs\[1\] \(.*/b on rank 0, .*/c on rank 1\)"),
        ({"shard_dirs": ["a", "b"]}, {}, r"shard_dirs\[0\] \(.*/a on rank 0, nothing on rank 1\); shard_dirs\[1\]"),
        ({"shard_dirs": ["c", "c"], "cwd": "a", "store": "../m"}, {"shard_dirs": ["c", "c"], "store": "m"},
         r"shard_dirs\[0\] \(.*/a/c on rank 0, .*/c on rank 1\)"),
        ({"held": True}, {}, r"the kind of store \(a Store on rank 0, a path on rank 1\)"),
        ({"model": True}, {}, r"the model and the optimizer \(\[\"model\"\] on rank 0, \[\] on rank 1\)"),
    ],
)  # fmt: skip
def test_ranks_with_different_folders_are_refused(
    ranks_pool: RanksPool, tmp_path: Path, one: dict[str, Any], other: dict[str, Any], words: str
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("a")
    ONE.cut(tmp_path / "passes")
    by_rank = [asked | {"cwd": str(tmp_path / asked.get("cwd", ""))} for asked in (one, other)]

    errors = ranks_pool.errors(2, opened, folder=str(tmp_path), by_rank=by_rank)

    assert errors[0] == errors[1]
    kind, sentence = errors[0] or ("", "")
    assert kind == "RankError"
    assert sentence.endswith(END)
    with pytest.raises(RankError, match=rf"^ranks differ in {words}"):
        raise RankError(sentence)
    left = {"m", "m.tc", "model.tc", "model-0.tc", "model-1.tc", "rank-0", "rank-1"}
    made = {name for _, folders, files in os.walk(tmp_path) for name in (*folders, *files)} & left
    assert made == ({"model.tc"} if "held" in one else set()), "one that the caller opened is there before"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("m.tc", "m.tc"),
        ("m.tc", "{here}/m.tc"),
        ("a/m.tc", "link/m.tc"),
        ("a/new/m.tc", "link/new/m.tc"),
        ("a/m.tc", "{here}/b/../a/m.tc"),
        ("there.tc", "linked.tc"),
        ("there.tc/", "./a/../linked.tc"),
    ],
)
def test_paths_that_lead_to_one_folder_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: str, other: str
) -> None:
    for name in ("a", "b", "there.tc"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "linked.tc").symlink_to("there.tc")
    monkeypatch.chdir(tmp_path)
    paths = [Path(path.format(here=tmp_path)) for path in (one, other)]

    def compare(ranks: Any, *more: str) -> None:
        check_same(ranks, {"the store": paths[ranks.rank].joinpath(*more[: ranks.rank])})

    assert meet(2, compare) == [None, None]
    assert all(isinstance(error, RankError) for error in meet(2, lambda ranks: compare(ranks, "below")))


def test_ranks_train_one_store_by_different_paths(ranks_pool: RanksPool, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    CASES["one"].cut(tmp_path / "passes")
    asked = [{"store": str(tmp_path / "model.tc")}, {"store": str(tmp_path / "link" / "model.tc")}]
    assert ranks_pool.errors(2, opened, folder=str(tmp_path), by_rank=asked) == [None, None]
    on_ranks(ranks_pool, 2, tmp_path, epochs=1)
    assert stored(tmp_path).keys() == stored(tmp_path / "link").keys()


# -- settings of rows ----------------------------------------------------------------------------------------


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
