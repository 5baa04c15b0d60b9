"""What docs/format says is enough to read a store of either engine; one on Zarr is read by Zarr alone."""

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

from tests.store import independent_reader
from tests.store.big import BIG, dump, publish
from tests.store.conftest import narrow_tables, small_tables
from tests.store.independent_reader import read_table
from tests.store.test_row_versions import mixed
from tests.store.world import World
from tiercache.store import Group, Segment, Store, Table, ZarrEngine
from tiercache.store.engines import zarr_layout


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
"""Tables of every kind that is stored in another way."""


@pytest.mark.parametrize("kind", ["float32", "16 bits"])
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_reader_that_knows_only_the_format_reads_every_live_row(engine: str, kind: str, tmp_path: Path) -> None:
    """Keys, vectors, optimizer state and last changes of all tables, bit for bit; vectors of 16 bits without padding.

    Of rows that passes dumped, of those that were moved, once or more, and of those that left a stale one behind.
    """
    tables = KINDS[kind]
    world = World(tables, keys_per_pass=9, universe=30, page_rows=3, block_rows=7)
    with Store.open(tmp_path / "s", tables=tables, engine=engine) as store:
        mixed(store, world)
        world.keys_per_pass = 2
        world.follow(store, world.draw(3))
        world.run(store, 1)
        assert any(sum(map(sum, one.stale_rows)) for one in store.commit.retained)
        groups = [[table.name for table in group.tables] for group in store.groups]
    for table in tables:
        found = read_table(
            tmp_path / "s", groups, [(field.name, field.width, "<f4") for field in table.fields], table.name
        )
        mine = {key: row for (name, key), row in world.rows.items() if name == table.name}
        assert {key: changed for key, (_, changed) in found.items()} == {
            key: world.changed[table.name, key] for key in mine
        }
        words = 4 * table.fields[0].words
        for key, ((vector, *states), _) in found.items():
            assert len(vector) == table.dim * (4 if table.dtype == "float32" else 2)
            assert vector.ljust(words, b"\0") + b"".join(states) == mine[key]


def test_the_independent_reader_is_independent() -> None:
    """It imports hashlib, json, struct, NumPy and LMDB, and nothing of this package or of Zarr."""
    tree = ast.parse(Path(independent_reader.__file__).read_text())
    names = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"hashlib", "json", "lmdb", "numpy", "pathlib", "struct", "typing"}


def check_arrays(place: Any, world: World, segment: Segment, groups: Sequence[Group]) -> None:
    """Compare the arrays of a segment, as in a notebook, with the rows of a world: ranges stand as attributes."""
    segments = zarr.open(str(place) if isinstance(place, Path) else place, mode="r")["segments"]
    folder = str(segment.id) if isinstance(place, Path) else f"{segment.id}-1"
    for group, layout in zip(groups, segment.layouts, strict=True):
        node = segments[f"{folder}/{group.index}"]
        assert node.attrs["tables"] == [table.name for table in group.tables]
        keys, fields = node["keys"][:], [node[field.name][:] for field in group.fields]
        assert keys.dtype == np.int64
        assert str(fields[0].dtype) == {"bfloat16": "uint16"}.get(group.dtype, group.dtype)
        assert dict(node["vector"].attrs) == ({"dtype": "bfloat16"} if group.dtype == "bfloat16" else {})
        assert node.attrs["page_rows"] == layout.page_rows
        for name in ("keys", *(field.name for field in group.fields)) if group.compression else ():
            (sharding,) = node[name].metadata.to_dict()["codecs"]
            codecs = [codec["name"] for codec in sharding["configuration"]["codecs"]]
            assert codecs == ["bytes", group.compression, "crc32c"]
        waiting = [
            (name, rows["next_use"])
            for rows in node.attrs["ranges"]
            for name in node.attrs["tables"]
            for _ in range(rows["rows"][name])
        ]
        pairs = [(name, int(key)) for (name, _), key in zip(waiting, keys, strict=True)]
        assert len(pairs) == layout.rows == len(fields[0])
        for row, pair in enumerate(pairs):
            assert world.uses[pair] == waiting[row][1]
            assert b"".join(field[row].tobytes() for field in fields) == world.rows[pair]
        if segment.changed:
            changed = node["changed"][:]
            assert changed.dtype == np.uint32
            assert changed.tolist() == [world.changed[pair] for pair in pairs]


@pytest.mark.parametrize("where", ["disk", "elsewhere"])
@pytest.mark.parametrize("chunk_bytes", [zarr_layout.CHUNK_BYTES, 400])
@pytest.mark.parametrize(
    ("kind", "block_rows"),
    [("float32", 7), ("16 bits", 7), ("zstd", 7), ("zstd", 8), ("blosc", 8), ("blosc", 50), ("16 bits, zstd", 8)],
)
def test_plain_zarr_reads_keys_vectors_and_last_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, block_rows: int, chunk_bytes: int, where: str
) -> None:
    """Of a pass's dump and of rows that moved: where pages divide a block, where not, and where it has all rows.

    However many chunks arrays have, and where they are in no folder.
    """
    monkeypatch.setattr(zarr_layout, "CHUNK_BYTES", chunk_bytes)
    place: Any = tmp_path / "s" if where == "disk" else MemoryStore()
    tables = KINDS[kind]
    world = World(tables, num_passes=2, keys_per_pass=40, block_rows=block_rows)
    with Store.open(None, tables=tables, engine=ZarrEngine(place, create=True)) as store:
        world.run(store, 1)
        check_arrays(place, world, store.segments[0], store.groups)
        mixed(store, world)
        segment, groups = store.segments[0], store.groups
    assert segment.changed
    check_arrays(place, world, segment, groups)


def test_rows_that_a_commit_freed_are_zeros_or_gone_to_plain_zarr(tmp_path: Path) -> None:
    """Holes where whole pages are free, nothing where no row of a chunk is needed; the rest is where it was."""
    with Store.open(tmp_path / "s", tables=[BIG], engine="zarr") as store:
        dump(store, 0, {1: 256, 2: 256})
        publish(store, 1)
        root = zarr.open(str(tmp_path / "s"), mode="r")
        before = root["segments/0/0/vector"][:]
        publish(store, 2)
        store._opened.engine.shrink()
        after = root["segments/0/0/vector"][:]
        assert not after[:252].any()
        assert after[256:].tobytes() == before[256:].tobytes()
        dump(store, 2, {3: 10})
        publish(store, 3)
    assert zarr.open(str(tmp_path / "s"), mode="r")["segments/1/0/vector"].shape == (10, 256)
    assert not (tmp_path / "s" / "segments" / "0").exists()
