"""The pages of docs/format are enough to read a store of either engine."""

import ast
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.dist import sharded_world
from tests.files import flipped
from tests.store import independent_files, independent_format, independent_reader
from tests.store.conftest import narrow_tables, small_tables
from tests.store.independent_reader import read_store
from tests.store.test_rewrite import rows_of
from tests.store.test_row_versions import mixed
from tests.store.world import Key, World
from tiercache.store import Adagrad, Cursor, Store, Table, alter, forget


def compressed_tables(kind: str) -> list[Table]:
    """Return five tables, all but the last compressed."""
    return [replace(table, compression=kind) for table in small_tables()[:-1]] + small_tables()[-1:]


KINDS = {
    "float32": small_tables(),
    "16 bits": narrow_tables(),
    "zstd": compressed_tables("zstd"),
    "blosc": compressed_tables("blosc"),
    "16 bits, zstd": [replace(table, compression="zstd") for table in narrow_tables()],
}
"""Tables of every kind with a different storage format."""


def contents(path: Path, tables: Sequence[Table], commit: int | None = None) -> tuple[dict[Key, bytes], dict[Key, int]]:
    """Return the words and the last change of each row, by table and key, read by the format alone."""
    found, rows, changed = read_store(path, commit).tables, dict[Key, bytes](), dict[Key, int]()
    for table in tables:
        words = 4 * table.fields[0].words
        for key, row in found[table.name].items():
            vector, *states = row.fields
            assert len(vector) == table.dim * (4 if table.dtype == "float32" else 2)
            rows[table.name, key] = vector.ljust(words, b"\0") + b"".join(states)
            changed[table.name, key] = row.changed
    return rows, changed


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
@pytest.mark.parametrize("compact", [False, True])
def test_rows_of_altered_tables_are_those_that_the_format_says(engine: str, compact: bool, tmp_path: Path) -> None:
    """New columns of every initializer that the independent reader knows, state that starts over, a table without
    rows.
    """
    world = World(small_tables())
    with Store.open(tmp_path / "s.tc", tables=world.tables, engine=engine) as store:
        world.run(store, 2)
        tables = [replace(table, dim=table.dim + 3) for table in small_tables() if table.name != "day"]
        alter(store, tables)
        tables = [replace(table, optimizer=Adagrad(initial_accumulator=0.5)) for table in tables]
        alter(store, [*tables, Table(name="new", dim=2)])
        assert forget(store, "item", np.arange(10)).rows > 3
        if compact:
            store.compact()
        expected = rows_of(store)
    rows, _ = contents(tmp_path / "s.tc", store.tables)
    assert len(rows) > 100
    assert rows == expected


@pytest.mark.parametrize("kind", ["float32", "16 bits"])
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_reader_that_knows_only_the_format_reads_every_live_row(engine: str, kind: str, tmp_path: Path) -> None:
    """Keys, vectors, optimizer state and last changes of all tables, bit for bit; 16-bit vectors without padding.

    For rows dumped by passes, rows moved once or more, and rows that left a stale one.
    """
    tables = KINDS[kind]
    world = World(tables, keys_per_pass=9, universe=30, page_rows=3, block_rows=7)
    with Store.open(tmp_path / "s", tables=tables, engine=engine) as store:
        mixed(store, world)
        world.keys_per_pass = 2
        world.follow(store, world.draw(3))
        world.run(store, 1)
        assert store.commit.own.live.stale_ST.any()
    assert contents(tmp_path / "s", world.tables) == (world.rows, world.changed)


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_older_commits_and_dense_state_are_read_by_the_format_alone(engine: str, tmp_path: Path) -> None:
    """A commit inside a pass, the ones before and after it, and dense state of several chunks."""
    world, commits = World(small_tables(), keys_per_pass=9, universe=30, page_rows=3, block_rows=7), []
    with Store.open(tmp_path / "s", tables=world.tables, engine=engine, retention=4) as store:
        for sample in (0, 5, 0):
            world.train(part=sample)
            world.append(store, within=sample > 0)
            world.pass_index += not sample
            world.publish(store, sample=sample)
            commits.append((store.commit.id, world.state, {**world.rows}, {**world.changed}))
        state = bytes(range(256)) * (1 << 15) + b"end"
        store.publish(Cursor(world.pass_index), state=state, schedule_digest="cyclic", settings={}, environment={})
        assert len(store.commit.own.state.checksums) == 3
    assert read_store(tmp_path / "s").states == [state]
    for id_, state, rows, changed in commits:
        assert read_store(tmp_path / "s", id_).states == [state]
        assert contents(tmp_path / "s", world.tables, id_) == (rows, changed), id_


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_rows_of_several_ranks_are_read_by_the_format_alone(engine: str, tmp_path: Path) -> None:
    """Rows that are divided by hash, by table and by columns; the state of each rank; rows forgotten on all."""
    path = tmp_path / "s"
    assert sharded_world.train_shards(path, 3, 4, engine=engine, retention=2) == [None] * 3
    with Store.open(path) as store:
        before, expected = store.commit.id, sharded_world.expected(store.commit.cursor)
        states = [rank.state() for rank in store.ranks]
        gone = [key for key in expected["word"] if key % 2]
        assert forget(store, "word", np.array(gone)).rows == len(gone) > 5
    for commit, forgotten in ((before, []), (None, gone)):
        found = read_store(path, commit)
        assert found.states == states
        for name, trained in expected.items():
            rows = {key: sharded_world.whole_row(sharded_world.WHOLE[name], key, *step) for key, step in trained.items()
                    if name != "word" or key not in forgotten}  # fmt: skip
            assert {key: row.fields for key, row in found.tables[name].items()} == {
                key: tuple(values.tobytes() for values in fields) for key, fields in rows.items()
            }, name


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_the_reader_checks_every_byte_down_from_the_head(engine: str, tmp_path: Path) -> None:
    """A flipped bit is refused, or is not part of the commit; LMDB's own pages have no checksum."""
    path, world = tmp_path / "s", World(small_tables()[:2], keys_per_pass=9, universe=30, page_rows=3, block_rows=7)
    with Store.open(path, tables=world.tables, engine=engine) as store:
        world.run(store, 2)
    whole, refused = read_store(path), 0
    for file in [file for file in path.rglob("*") if file.is_file() and file.suffix != ".mdb"]:
        size = file.stat().st_size
        for at in range(0, size, 1 + size // 50):
            with flipped(file, at, 4):
                try:
                    found = read_store(path)
                except (AssertionError, ValueError, KeyError, OSError, struct.error):
                    refused += 1
                else:
                    assert found == whole, (file, at)
    assert refused > 20
    assert read_store(path) == whole


def test_the_independent_reader_is_independent() -> None:
    found = set[str]()
    for module in (independent_format, independent_files, independent_reader):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        found |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        found |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert found - {"tests.store.independent_files", "tests.store.independent_format"} == {
        "collections.abc", "google_crc32c", "hashlib", "itertools", "json", "lmdb", "numpy", "pathlib", "struct",
        "typing",
    }  # fmt: skip
