"""Zarr alone reads the rows of a store on Zarr, as in a notebook: ranges are attributes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

from tests.store.big import BIG, dump, publish
from tests.store.test_independent_reader import KINDS
from tests.store.test_row_versions import mixed
from tests.store.world import World
from tiercache.store import Group, Segment, Store, ZarrEngine
from tiercache.store.engines import zarr_layout


def check_arrays(place: Any, world: World, segment: Segment, groups: Sequence[Group]) -> None:
    """Compare the arrays of a segment with the rows of a world."""
    root = zarr.open(str(place) if isinstance(place, Path) else place, mode="r")
    for group, layout in zip(groups, segment.layouts, strict=True):
        node = root[f"{segment.name}/{group.index}"]
        assert node.attrs["tables"] == [table.name for table in group.tables]
        keys, fields = node["keys"][:], [node[field.name][:] for field in group.fields]
        assert keys.dtype == np.int64
        assert str(fields[0].dtype) == {"bfloat16": "uint16"}.get(group.dtype, group.dtype)
        dtype = {"dtype": "bfloat16"} if group.dtype == "bfloat16" else {}
        shape = {"page_rows": layout.page_rows, "block_rows": layout.block_rows, "compression": group.compression}
        shape["fields"] = [[field.name, field.words, field.dtype] for field in group.fields]
        assert dict(node["vector"].attrs) == shape | dtype
        assert dict(node["keys"].attrs) == shape
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


@pytest.mark.sampled(7)
@pytest.mark.parametrize("where", ["disk", "elsewhere"])
@pytest.mark.parametrize("chunk_bytes", [zarr_layout.PART_BYTES, 400])
@pytest.mark.parametrize(
    ("kind", "block_rows"),
    [("float32", 7), ("16 bits", 7), ("zstd", 7), ("zstd", 8), ("blosc", 8), ("blosc", 50), ("16 bits, zstd", 8)],
)
def test_plain_zarr_reads_keys_vectors_and_last_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, block_rows: int, chunk_bytes: int, where: str
) -> None:
    """For rows of a pass and moved rows; for pages that divide a block, that do not, and one block of all rows."""
    monkeypatch.setattr(zarr_layout, "PART_BYTES", chunk_bytes)
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
    """Holes if whole pages are free, missing chunks if no row is needed; the rest is unchanged."""

    def array(name: str) -> Any:
        return zarr.open(str(tmp_path / "s"), mode="r")[f"segments/{name}"]

    with Store.open(tmp_path / "s", tables=[BIG], engine="zarr") as store:
        dump(store, 0, {1: 256, 2: 256})
        publish(store, 1)
        before = array("0.0/0/vector")[:]
        publish(store, 2)
        store._opened.engine.drop([], shrink=True)
        after = array("0.0/0/vector")[:]
        assert not after[:252].any()
        assert after[256:].tobytes() == before[256:].tobytes()
        dump(store, 2, {3: 10})
        publish(store, 3)
    assert array("0.1/0/vector").shape == (10, 256)
    assert not (tmp_path / "s/segments/0.0").exists()
    (tmp_path / "s/segments/0.1/0/keys/c.0").unlink()
    assert set(array("0.1/0/keys")[:]) == {-(1 << 63)}
