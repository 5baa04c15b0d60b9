"""Reads of rows while another thread commits."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from tests.store.conftest import engine_of, small_tables, stored_bytes
from tests.store.failing import Between
from tests.store.world import World
from tiercache.store import CommitMissingError, CorruptBlockError, Store, StoreClosedError, StoreError
from tiercache.store.lookup import read_found

Rows = dict[int, bytes]
NAME = "user"


@pytest.fixture(params=["memory", "lmdb", "zarr"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Trained:
    """A store that trains in steps, its engine, and the expected rows of one table after each pass."""

    def __init__(self, kind: str, path: Path, *, retention: int = 1) -> None:
        self.engine = Between(engine_of(kind, path))
        self.world = World(small_tables(), num_passes=3, keys_per_pass=12, universe=24, block_rows=3, page_rows=2)
        self.store = Store.open(None, tables=self.world.tables, engine=self.engine, retention=retention)
        self.seen: list[Rows] = []
        self.places = count(1, 1 if kind == "memory" else 5)
        """Reads before which a commit may happen: they are slow on a disk."""
        self.run(6)
        self.keys = np.array(list(self.seen[-1]))

    def run(self, passes: int) -> None:
        for _ in range(passes):
            self.world.train()
            self.seen.append({key: row for (name, key), row in self.world.rows.items() if name == NAME})
            self.world.append(self.store)
            self.world.pass_index += 1
            self.world.publish(self.store)

    def lookup(self, store: Store | None = None, *, missing: str = "error") -> Rows:
        fields = (store or self.store).lookup(NAME, self.keys, missing=missing)
        return {key: b"".join(v[i].tobytes() for v in fields.values()) for i, key in enumerate(self.keys.tolist())}


@pytest.fixture
def trained(kind: str, tmp_path: Path) -> Iterator[Trained]:
    """A store on each engine, after a cycle of its passes and another."""
    found = Trained(kind, tmp_path / "s")
    yield found
    found.store.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("missing", ["error", "zeros", "initial"])
def test_a_lookup_is_of_one_moment_whatever_commits_come_between_its_reads(trained: Trained, missing: str) -> None:
    """Never zeros, and never false damage."""
    for nth in trained.places:
        trained.engine.in_reads(nth, lambda: trained.run(1 + nth % 3))  # noqa: B023 - called before it changes
        before = len(trained.seen) - 1
        found = trained.lookup(missing=missing)
        assert found in trained.seen[before:]
        if not trained.engine.reached:
            break
    assert nth > 10


def test_a_lookup_beside_a_commit_half_made_waits_for_nothing(trained: Trained) -> None:
    """The engine has published it and the store does not know it yet: the lookup returns the appended rows."""
    found: list[Rows] = []

    def look() -> None:
        reader = threading.Thread(target=lambda: found.append(trained.lookup()))
        reader.start()
        reader.join(60)

    trained.engine.after_publish = look
    trained.run(1)
    assert found == [trained.seen[-1]]


def test_lookups_beside_a_training_are_each_of_one_moment(trained: Trained) -> None:
    """Two threads run freely, until some lookups at the newest commit and at one that may be older have ended."""
    found, done = [trained.lookup()], threading.Event()

    def train() -> None:
        while not done.is_set():
            trained.run(1)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        while trainer.is_alive() and (len(found) < 8 or len(trained.seen) < 12):
            found.append(trained.lookup())
            with suppress(CommitMissingError), trained.store.at(trained.store.commit.id) as store:
                found.append(trained.lookup(store))
    finally:
        done.set()
        trainer.join()
    assert len(found) >= 8
    assert all(rows in trained.seen for rows in found)


def test_what_a_reading_holds_is_freed_after_it(kind: str, tmp_path: Path) -> None:
    """A scan gives the rows of its commit while others are made; the first commit after it frees them."""
    trained, quiet = Trained(kind, tmp_path / "s"), Trained(kind, tmp_path / "t")
    scan = trained.store.scan(NAME, chunk_rows=1)
    chunks, before = [next(scan)], trained.seen[-1]
    for one in (trained, quiet):
        one.run(5)
    assert sum(stored_bytes(trained.store).values()) > sum(stored_bytes(quiet.store).values())
    chunks += scan
    assert {keys.item(): b"".join(field.tobytes() for field in fields) for keys, fields in chunks} == before
    del scan, chunks
    for one in (trained, quiet):
        one.run(1)
    assert stored_bytes(trained.store) == stored_bytes(quiet.store)


def test_damage_is_still_damage(tmp_path: Path) -> None:
    trained = Trained("memory", tmp_path)
    for name in [name for name in trained.engine.blobs if name.endswith(("/rows", "/keys"))]:
        del trained.engine.blobs[name]
    for read in (trained.lookup, lambda: list(trained.store.changes(NAME, since=-1))):
        with pytest.raises(CorruptBlockError, match="is missing"):
            read()


def test_rows_that_were_located_before_a_commit_are_not_zeros_after_it(trained: Trained) -> None:
    keys = np.append(trained.keys, 999)
    ids, rows = trained.store.locate(NAME, keys, after=-1)
    group = next(g.index for g in trained.store.groups if NAME in [table.name for table in g.tables])
    assert not read_found(trained.store.reader, trained.store.snapshot, group, ids, rows)[0][-1].any()
    trained.run(6)
    with pytest.raises(StoreError, match=r"no longer has segment \d+, where rows were found: locate them again"):
        read_found(trained.store.reader, trained.store.snapshot, group, ids, rows)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("since", [-1, 4])
def test_changes_are_of_one_commit_whatever_is_made_meanwhile(trained: Trained, since: int) -> None:
    for nth in trained.places:
        trained.engine.in_reads(nth, lambda: trained.run(2))
        before, expected = trained.seen[-1], trained.store.changed_rows(NAME, since=since)
        given = 0
        for keys, fields in trained.store.changes(NAME, since=since):
            given += keys.size
            for i, key in enumerate(keys.tolist()):
                assert b"".join(values[i].tobytes() for values in fields.values()) == before[key]
        assert given == expected > 0
        if not trained.engine.reached:
            break
    assert nth > 3


def test_changes_of_retained_segments_are_of_one_commit(tmp_path: Path) -> None:
    """They are scanned; their number is known without reading a row."""
    trained = Trained("memory", tmp_path)
    trained.world.keys_per_pass = 2
    trained.world.follow(trained.store, trained.world.draw(7))
    assert trained.store.commit.retained_ids
    for since in (-1, 3, trained.store.commit.id - 1):
        reads = trained.store.counters.row_bytes_read
        expected = trained.store.changed_rows(NAME, since=since)
        assert trained.store.counters.row_bytes_read == reads
        trained.engine.in_reads(2, lambda: trained.run(1))
        assert sum(keys.size for keys, _ in trained.store.changes(NAME, since=since)) == expected


def test_an_older_commit_that_is_given_up_is_read_for_as_long_as_it_is_open(kind: str, tmp_path: Path) -> None:
    """It cannot be opened a second time, and ends with its store, whose engine reads it."""
    trained = Trained(kind, tmp_path / "s", retention=3)
    id_, rows = trained.store.commits[0].id, trained.seen[-3]
    with trained.store.at(id_) as older, older.at(id_) as same:
        trained.run(5)
        for store in (older, same):
            assert trained.lookup(store) == rows
            assert store.state() == b"state at 4, 0"
            assert sum(keys.size for keys, _ in store.changes(NAME, since=-1)) == len(rows)
        with pytest.raises(CommitMissingError, match=f"has no commit {id_}: pass one of"):
            trained.store.at(id_)
        trained.store.close()
        with pytest.raises(StoreClosedError, match="is closed: open it again"):
            trained.lookup(older)
