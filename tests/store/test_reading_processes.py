"""A writer and readers in the same and other processes: each sees the rows of a commit, whatever is written."""

import copy
import multiprocessing
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.store.conftest import small_tables
from tests.store.reader import digest, read
from tests.store.world import World
from tiercache.store import Store, verify


class Writer:
    """Takes steps of every kind; ``digests`` has the content of each commit."""

    def __init__(self, path: Path, engine: str) -> None:
        self.path, self.draw, self.done, self.digests = path, random.Random(7), Counter[str](), dict[int, str]()
        self.world = World(small_tables()[:2], num_passes=5, keys_per_pass=200, universe=300, block_rows=50)
        self.store = Store.open(path, tables=self.world.tables, engine=engine, retention=2)
        self.worlds: dict[int, World] = {}
        self.train()

    def step(self) -> None:
        way = self.draw.choice([*[self.train] * 6, self.discard, self.roll_back, self.reorganize, self.reopen])
        way()
        self.done[way.__name__] += 1

    def train(self) -> None:
        self.world.run(self.store, 1)
        self.commit()

    def discard(self) -> None:
        self.world.train()
        self.world.append(self.store)
        self.store.discard_uncommitted()
        self.world = copy.deepcopy(self.worlds[self.store.commit.id])

    def roll_back(self) -> None:
        oldest = self.store.commits[0].id
        self.store.rollback(oldest)
        self.world = copy.deepcopy(self.worlds[oldest])
        self.commit()

    def reorganize(self) -> None:
        self.world.keys_per_pass = self.draw.choice([20, 200])  # of few keys, segments are retained
        self.world.follow(self.store, self.world.draw(self.draw.randrange(100)))
        self.commit()

    def reopen(self) -> None:
        self.store.close()
        self.store = Store.open(self.path)

    def commit(self) -> None:
        """Note the newest commit."""
        self.worlds[self.store.commit.id] = copy.deepcopy(self.world)
        self.digests[self.store.commit.id] = digest(self.store)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "seconds", [pytest.param(2, id="some seconds"), pytest.param(60, marks=pytest.mark.long, id="a minute")]
)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_readers_beside_a_writer_see_no_wrong_row(engine: str, seconds: int, tmp_path: Path) -> None:
    """In two processes, and in a thread of the writer's."""
    writer = Writer(tmp_path / "s", engine)
    with (
        ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes,
        ThreadPoolExecutor(1) as threads,
    ):
        pools = (processes, processes, threads)
        readers = [pool.submit(read, tmp_path / "s", seconds, seed) for seed, pool in enumerate(pools)]
        while not all(reader.done() for reader in readers):
            writer.step()
        writer.store.close()
        for reader in readers:
            found = reader.result()
            assert len(found) > 3
            assert [writer.digests[id_] for id_, _ in found] == [seen for _, seen in found]
    assert writer.done["train"] > 3
    assert verify(tmp_path / "s")["problems"] == []
