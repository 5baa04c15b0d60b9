"""Other processes read while a training writes."""

from __future__ import annotations

import hashlib
import multiprocessing
from typing import TYPE_CHECKING

import pytest

import tiercache as tc
from tests.training.cases import Case, Spec, table, tiered, train
from tiercache.store import Store

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
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


def digest(store: Store) -> str:
    """Return a digest of every row, every optimizer state and the dense state at a store's commit."""
    found = hashlib.sha256(store.state())
    for one in store.tables:
        for keys, fields in store.scan(one.name):
            found.update(keys.tobytes())
            for values in fields:
                found.update(values.tobytes())
    return found.hexdigest()


def read_on(path: Path, end: Connection) -> None:
    """Open the store again and again and send the commit and the digest of what was seen, until told to stop."""
    seen: list[tuple[int, str, str]] = []
    while not end.poll():
        with Store.open(path, mode="r") as store:
            assert store.commit is not None
            seen.append((store.commit.id, digest(store), digest(store)))
    end.send(seen)


def train_into(store: Store, passes: tc.PassDataset) -> None:
    """Train the case, one commit a pass."""
    with tiered(store, passes, host_budget="2MiB", eval_budget="128KiB") as cache:
        train(cache, CASE)


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_readers_in_other_processes_see_whole_commits_while_a_training_goes_on(tmp_path: Path, engine: str) -> None:
    """Whatever a reader sees, rows, states and dense state, are those of its one commit, and stay so."""
    passes = CASE.cut(tmp_path / "passes")
    with Store.open(tmp_path / "kept.tc", tables=CASE.tables, engine=engine, retention=NUM_PASSES + 1) as store:
        train_into(store, passes)
        expected = {commit.id: digest(store.at(commit.id)) for commit in store.commits}
    assert len(set(expected.values())) == NUM_PASSES + 1, "one before the first pass and one after each"

    path, context = tmp_path / "read.tc", multiprocessing.get_context("spawn")
    ends = []
    with Store.open(path, tables=CASE.tables, engine=engine) as store:
        for _ in range(READERS):
            mine, other = context.Pipe()
            process = context.Process(target=read_when_there_is_a_commit, args=(path, other))
            process.start()
            ends.append((process, mine))
        for process, mine in ends:
            assert mine.recv() == "ready", process
        train_into(store, passes)
        seen = []
        for process, mine in ends:
            mine.send("stop")
            seen += mine.recv()
            process.join(60)
            assert process.exitcode == 0
    assert all(first == again == expected[commit] for commit, first, again in seen)
    assert len({commit for commit, *_ in seen}) > 3, "the readers saw hardly any of the training"


def read_when_there_is_a_commit(path: Path, end: Connection) -> None:
    """Say that this process is there, wait for the first commit, and read on."""
    end.send("ready")
    while True:
        with Store.open(path, mode="r") as store:
            if store.commit is not None:
                break
    read_on(path, end)
