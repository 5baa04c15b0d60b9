"""Tables, and the two engines with a common way to open a store."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiercache.store
from tests.store.big import BIG
from tests.store.world import World
from tiercache.store import (
    SGD,
    Adagrad,
    Adam,
    Constant,
    MemoryEngine,
    RowWiseAdagrad,
    Store,
    Table,
    Uniform,
    Zeros,
)


def small_tables() -> list[Table]:
    """Five tables in four groups."""
    uniform = Uniform(low=-0.1, high=0.1)
    adagrad = Adagrad(learning_rate=0.1)
    return [
        Table(name="user", dim=3, optimizer=adagrad, initializer=uniform),
        Table(name="item", dim=3, optimizer=adagrad, initializer=Zeros()),
        Table(name="word", dim=8, optimizer=Adam(), initializer=uniform, seed=7),
        Table(name="day", dim=1, optimizer=SGD(learning_rate=1.0), initializer=Zeros()),
        Table(name="place", dim=5, optimizer=RowWiseAdagrad(learning_rate=0.1), initializer=uniform),
    ]


def narrow_tables() -> list[Table]:
    """Six tables in five groups, five of them with 16-bit vectors, with even and odd dims."""
    start = Uniform(low=-0.1, high=0.1)
    adagrad = Adagrad(learning_rate=0.1)
    return [
        Table(name="user", dim=3, optimizer=adagrad, initializer=start, dtype="bfloat16"),
        Table(name="item", dim=3, optimizer=adagrad, initializer=start, dtype="bfloat16"),
        Table(name="word", dim=3, optimizer=adagrad, initializer=start, dtype="float16", seed=7),
        Table(name="day", dim=1, optimizer=SGD(learning_rate=1.0), initializer=Constant(value=0.3), dtype="float16"),
        Table(name="place", dim=6, optimizer=RowWiseAdagrad(learning_rate=0.1), initializer=start, dtype="bfloat16"),
        Table(name="wide", dim=3, optimizer=adagrad, initializer=start),
    ]


def stored_bytes(store: Store, prefix: str = "") -> dict[str, int]:
    """Return the stored bytes of each blob whose name begins with ``prefix``, by name."""
    stored = store._opened.engine.list()
    return {name: one.size - one.dropped for name, one in stored.items() if name.startswith(prefix)}


def needed_bytes(store: Store) -> dict[str, int]:
    """Return the bytes of each blob that the kept commits of a store need, counted block by block."""
    found: dict[str, int] = {}
    for commit in store.commits:
        assert commit.head is not None
        named = {head.name: head.size for head in (commit.head, *commit.ranks)}
        found |= named | {commit.own.state.name: commit.own.state.size}
        with store.at(commit.id) as older:
            for segment in older.segments:
                found[segment.meta_blob.name] = segment.meta_blob.size
                for blob in segment.blobs():
                    assert blob.of is not None
                    (group, layout), kind = blob.of, blob.name.rsplit("/", 1)[1]
                    first = older.snapshot.first_range(segment, group.index)
                    if first < layout.num_ranges:
                        block = layout.block_of_page(layout.pages_of_range(first)[0])
                        rest = layout.blob_bytes(kind) - layout.byte_in_blob(kind, block)
                        found[blob.name] = max(found.get(blob.name, 0), rest)
    return found


def held_blocks(store: Store) -> dict[tuple[str, int], int]:
    """Return the bytes of each block that a store keeps, by the name of its blob and its number in it."""
    needed = store.commit_writer._allocated if store.mode == "a" else store.history.needed
    found = {(name, 0): size for name, size in needed.whole.items()}
    for need in needed.segments.values():
        for blob in need.segment.blobs():
            assert blob.of is not None
            layout, kind = blob.of.layout, blob.name.rsplit("/", 1)[1]
            for block in range(int(need.first_blocks_G[blob.of.group.index]), layout.num_blocks):
                low, high = layout.rows_of_block(block)
                found[blob.name, block] = (high - low) * layout.item_bytes(kind)
    return found


def engine_of(kind: str, path: Path, *, create: bool = True) -> Any:
    """Return an empty engine, or the existing one."""
    if kind == "memory":
        return MemoryEngine()
    path.mkdir(parents=True, exist_ok=True)
    return getattr(tiercache.store, {"lmdb": "LmdbEngine", "zarr": "ZarrEngine"}[kind])(path, create=create)


class Careless(World):
    """Dumps a key of table ``day`` twice, which checksums cannot detect."""

    def layout(self, group, *, within):  # type: ignore[no-untyped-def]
        """Lay out two more rows, of the same key."""
        layout, keys = super().layout(group, within=within)
        self.rows |= {("day", key): b"\0" * 4 for key in (7, 8)}
        return layout, [("day", 7) if key[0] == "day" else key for key in keys]


class Home:
    """A place for one store, opened and reopened."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind, self.path = kind, path / "store.tc"
        self.engine = MemoryEngine()
        self.opened: list[Store] = []

    def open(self, tables: list[Table] | None = None, **options: Any) -> Store:
        """Open the store, after closing a store opened before."""
        self.close()
        engine: Any = self.engine if self.kind == "memory" else self.kind
        store = Store.open(self.path, tables=tables, engine=engine, **options)
        self.opened.append(store)
        return store

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()


@pytest.fixture
def tables() -> list[Table]:
    """Five tables in four groups."""
    return small_tables()


@pytest.fixture(params=["memory", "lmdb", "zarr"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """A place for a store on each engine."""
    place = Home(request.param, tmp_path)
    yield place
    place.close()


@pytest.fixture
def big(tmp_path: Path) -> Iterator[Store]:
    """A store of one table with rows of 2 KiB."""
    store = Store.open(tmp_path / "big.tc", tables=[BIG])
    yield store
    store.close()
