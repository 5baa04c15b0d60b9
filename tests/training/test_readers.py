"""Other processes read while a training writes."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

import pytest

import tiercache as tc
from tests.crash.told import finish, start
from tests.store.reader import digest, read_on
from tests.training.cases import Case, Spec, table, tiered, train
from tiercache.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CASE = Case(
    tables=(table("a", 16), table("b", 5, tc.optim.Adam(learning_rate=0.01))),
    specs=(Spec(name="f", table="a", hotness="ragged"), Spec(name="g", table="b")),
    num_samples=600,
    pass_rows=100,
    num_keys=5000,
    batch=50,
    epochs=3,
)
NUM_PASSES = 18
READERS = 2


def train_into(store: Store, passes: tc.PassDataset, each_pass: Callable[[], None] = lambda: None) -> None:
    """Train the case, one commit a pass; ``each_pass`` is called within some of them."""
    with tiered(store, passes, host_budget="2MiB", eval_budget="128KiB") as cache:
        train(cache, CASE, each_batch=lambda number, batch: each_pass() if 0 < number < 7 and not batch else None)


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_readers_in_other_processes_see_whole_commits_while_a_training_goes_on(tmp_path: Path, engine: str) -> None:
    """Whatever a reader sees, rows, states and dense state, are those of its one commit, and stay so."""
    passes = CASE.cut(tmp_path / "passes")
    with Store.open(tmp_path / "kept.tc", tables=CASE.tables, engine=engine, retention=NUM_PASSES + 1) as store:
        train_into(store, passes)
        expected = {commit.id: digest(store.at(commit.id)) for commit in store.commits}
    assert len(set(expected.values())) == NUM_PASSES + 1, "one before the first pass and one after each"

    path, ends, seen = tmp_path / "read.tc", [], list[tuple[int, str, str]]()
    with Store.open(path, tables=CASE.tables, engine=engine) as store:
        for _ in range(READERS):
            mine, other = multiprocessing.Pipe()
            ends.append((start(read_on, path, other), mine))
        for process, mine in ends:
            assert mine.recv() == "ready", process
        train_into(store, passes, lambda: seen.extend(mine.recv() for _, mine in ends))
        for process, mine in ends:
            mine.send("stop")
            seen += iter(mine.recv, None)
            assert finish(process) == 0
    assert all(first == again == expected[commit] for commit, first, again in seen)
    assert len({commit for commit, *_ in seen}) > 3, "the readers saw hardly any of the training"
