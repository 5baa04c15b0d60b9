"""A writer and readers in the same and other processes: each checks every row that it sees."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.store.reading_process import NUM_PASSES, TABLES, Uses, check, commit, train
from tiercache.store import CommitMissingError, Cursor, Store, verify


def write(path: Path, store: Store, seconds: float) -> tuple[Store, Counter[str]]:
    """Run steps of every kind; return the store, which may be another one, and the number of each."""
    draw, done, end = random.Random(7), Counter[str](), time.monotonic() + seconds
    while time.monotonic() < end:
        assert store.commit is not None
        at, which = store.commit.cursor.pass_index, draw.random()
        if which < 0.75 or at <= NUM_PASSES:
            train(store, at)
            if draw.random() < 0.1:
                store.discard_uncommitted()
                done["discard"] += 1
                continue
            commit(store, at + 1)
            done["commit"] += 1
        elif which < 0.85:
            store.rollback(store.commits[0].id)
            done["rollback"] += 1
        elif which < 0.95:
            retain = draw.random() < 0.5
            store.rewrite(Uses(at), schedule_digest="cyclic", start=Cursor(at), retain_segments=retain)
            done["rewrite"] += 1
        else:
            store.close()
            store = Store.open(path)
            done["open"] += 1
    return store, done


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "seconds", [pytest.param(2, id="some seconds"), pytest.param(60, marks=pytest.mark.long, id="a minute")]
)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_readers_beside_a_writer_see_no_wrong_row(engine: str, seconds: int, tmp_path: Path) -> None:
    """Commits, discards, rollbacks, rewrites and openings; two processes, and a thread with views of the writer's
    store.
    """
    path, stop, seen = tmp_path / "s", threading.Event(), Counter[str]()
    store = Store.open(path, tables=TABLES, engine=engine, retention=2)
    train(store, 0)
    commit(store, 1)

    def read_inside() -> None:
        draw = random.Random(1)
        while not stop.is_set():
            try:
                with Store.open(path, mode="r") as own:
                    seen[check(own, draw)] += 1
            except CommitMissingError:
                seen["given up"] += 1
            except BaseException as error:
                seen[repr(error)] += 1
                raise

    thread = threading.Thread(target=read_inside)
    command = [sys.executable, "-m", "tests.store.reading_process", str(tmp_path), str(seconds)]
    others = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
        for seed in range(2)
    ]
    thread.start()
    try:
        store, done = write(path, store, seconds + 2)
    finally:
        stop.set()
        thread.join()
        told = [other.communicate() for other in others]
        store.close()
    for other, (said, errors) in zip(others, told, strict=True):
        assert other.returncode == 0, errors.decode()
        counts = json.loads(said)
        assert sum(counts[way] for way in counts if way != "given up") > 3
    assert seen.keys() <= {"lookup", "scan", "given up"}, seen
    assert seen["lookup"] + seen["scan"] > 3
    assert done["commit"] > 3
    assert verify(path)["problems"] == []
