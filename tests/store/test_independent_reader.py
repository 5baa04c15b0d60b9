"""What docs/format.md says is enough to read a store of either engine."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr

from tests.store import independent_reader
from tests.store.independent_reader import read_table
from tiercache.store import Store
from tiercache.store.testing.world import World

if TYPE_CHECKING:
    from tiercache.store import Table


@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
def test_a_reader_that_knows_only_the_format_reads_every_live_row(
    kind: str, tmp_path: Path, tables: list[Table]
) -> None:
    """Keys, vectors and optimizer state of all tables, bit for bit, after passes of two schedules."""
    world = World(tables, piece_rows=3, block_rows=11)
    with Store.open(tmp_path / "s", tables=tables, engine=kind) as store:
        world.run(store, 5)
        world.keys_per_pass = 8
        world.follow(store, world.draw(1))
        world.run(store, 2)
        assert any(sum(map(sum, one.stale_rows)) for one in store.commit.settled)
        groups = [[table.name for table in group.tables] for group in store.groups]
    for table in tables:
        widths = [field.width for field in table.fields]
        found = {key: b"".join(row) for key, row in read_table(tmp_path / "s", groups, widths, table.name).items()}
        assert found == {key: row for (name, key), row in world.rows.items() if name == table.name}


def test_the_independent_reader_is_independent() -> None:
    """It imports json, struct, NumPy and LMDB, and nothing of this package or of Zarr."""
    tree = ast.parse(Path(independent_reader.__file__).read_text())
    names = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"__future__", "collections", "json", "lmdb", "numpy", "pathlib", "struct", "typing"}


def test_plain_zarr_reads_keys_and_vectors(tmp_path: Path, tables: list[Table]) -> None:
    """As in a notebook: arrays of whole segments, with the state beside them and the ranges as attributes."""
    world = World(tables, num_passes=2, keys_per_pass=60, block_rows=7)
    with Store.open(tmp_path / "s", tables=tables, engine="zarr") as store:
        world.run(store, 1)
        segment, groups = store.segments[0], store.groups
    root = zarr.open(str(tmp_path / "s"), mode="r")
    for group, stream in zip(groups, segment.streams, strict=True):
        node = root[f"segments/{segment.id}/{group.index}"]
        keys, fields = node["keys"][:], [node[field.name][:] for field in group.fields]
        assert keys.dtype == np.int64
        assert node.attrs["piece_rows"] == stream.piece_rows
        row = 0
        for rows in node.attrs["ranges"]:
            for name in node.attrs["tables"]:
                for _ in range(rows["rows"][name]):
                    assert world.uses[name, int(keys[row])] == rows["next_use"]
                    expected = world.rows[name, int(keys[row])]
                    assert b"".join(field[row].tobytes() for field in fields) == expected
                    row += 1
        assert row == len(keys) == len(fields[0])


def test_rows_that_a_commit_freed_are_no_numbers_to_plain_zarr(tmp_path: Path, tables: list[Table]) -> None:
    """Their chunks are gone; what is left of a segment is where it was."""
    world = World(tables, num_passes=3, block_rows=4)
    with Store.open(tmp_path / "s", tables=tables, engine="zarr") as store:
        world.run(store, 1)
        group, stream = store.groups[0], store.segments[0].streams[0]
        path = f"segments/{store.segments[0].id}/{group.index}/vector"
        before = zarr.open(str(tmp_path / "s"), mode="r")[path][:]
        world.run(store, 1)
    after = zarr.open(str(tmp_path / "s"), mode="r")[path][:]
    freed = int(np.isnan(after).all(axis=1).sum())
    assert 0 < freed < stream.rows
    assert freed % stream.block_rows == 0
    assert after[freed:].tobytes() == before[freed:].tobytes()
