"""Tables that are compressed: the same rows in fewer bytes, read by ranges, by plain Zarr too, and damage is found."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import tiercache as tc
from tests.store.test_independent_reader import compressed_tables
from tests.store.world import World
from tiercache.store import (
    SGD,
    MemoryEngine,
    Range,
    Store,
    Table,
    TableMismatchError,
    ZarrEngine,
    Zeros,
    group_tables,
    info,
    verify,
)
from tiercache.store.base_segment import base_layout
from tiercache.store.zarr_codec import cut

KINDS = ("zstd", "blosc")


def plain(**changes: object) -> Table:
    """Return a table of rows of 256 bytes."""
    table = Table(name="t", dim=64, optimizer=SGD(learning_rate=1.0), initializer=Zeros())
    return dataclasses.replace(table, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compressed_store_holds_the_rows_that_any_store_holds(tmp_path: Path, kind: str) -> None:
    """Through passes, a commit inside one, a reopen, a rollback and a compaction: loads, lookups, scans and changes."""
    chosen = compressed_tables(kind)
    world = World(chosen, num_passes=4, keys_per_pass=60)
    with Store.open(tmp_path / "s", tables=chosen, retention=2) as store:
        assert isinstance(store._opened.engine, ZarrEngine)
        for _ in range(6):
            world.check_load(store, world.pass_index)
            world.run(store, 1)
        world.train(part=1)
        world.append(store, within=True)
        world.publish(store, sample=7)
        world.check_within(store)
    with Store.open(tmp_path / "s", mode="r") as store:
        world.check(store, after=world.pass_index - 1)
        for table in chosen:
            keys = np.array([key for name, key in world.rows if name == table.name])
            found = store.lookup(table.name, keys)
            scanned = {int(k): i for keys, _ in store.scan(table.name) for i, k in enumerate(keys)}
            changed = {int(k) for keys, _ in store.changes(table.name, since=-1) for k in keys}
            assert set(scanned) == changed == set(keys.tolist())
            for i, key in enumerate(keys.tolist()):
                assert b"".join(f[i].tobytes() for f in found.values()) == world.rows[table.name, key]
    assert verify(tmp_path / "s")["problems"] == []
    with Store.open(tmp_path / "s") as store:
        store.rollback(store.commits[0].id)
        before = {t.name: [(k.tobytes(), *(f.tobytes() for f in fs)) for k, fs in store.scan(t.name)] for t in chosen}
        store.compact()
        after = {t.name: [(k.tobytes(), *(f.tobytes() for f in fs)) for k, fs in store.scan(t.name)] for t in chosen}
        assert after == before
        tc.export_store(store, tmp_path / "out", format="numpy")
    assert verify(tmp_path / "s")["problems"] == []
    assert [t["compression"] for t in info(tmp_path / "s")["tables"] if "compression" in t] == [kind] * 4
    tc.import_store(tmp_path / "out", tmp_path / "copy", steps=1)
    with Store.open(tmp_path / "copy") as copy:
        assert {t.name: t.compression for t in copy.tables} == {t.name: t.compression for t in chosen}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_compressed_rows_are_cut_evenly(kind: str) -> None:
    """Into inner chunks of 16 KiB, or of a row that is larger; plain blocks are as they were."""
    for dim in (1, 3, 65, 500, 40_000):
        (group,) = group_tables([plain(dim=dim, compression=kind)])
        layout = base_layout(group, [])
        rows = Range(next_use=1, table_rows=(3 * layout.block_rows,))
        chunk_rows, inner_rows = cut(base_layout(group, [rows]))
        assert chunk_rows == layout.block_rows
        assert inner_rows == max(1, (16 << 10) // group.row_bytes)
        (group,) = group_tables([plain(dim=dim)])
        assert base_layout(group, []).block_bytes == max(4 << 20, group.row_bytes)


def test_tables_of_different_compression_share_no_layout() -> None:
    """And without any, records and groups are what they were."""
    one, two = plain(), plain(name="u")
    assert len(group_tables([one, two])) == 1
    assert len(group_tables([one, dataclasses.replace(two, compression="zstd")])) == 2
    assert "compression" not in one.to_record()
    squeezed = plain(compression="blosc")
    assert Table.from_record(squeezed.to_record()).compression == "blosc"
    assert squeezed == one
    with pytest.raises(ValueError, match="compression of table 't' is 'gzip': it must be 'zstd', 'blosc' or None"):
        plain(compression="gzip")


def test_an_engine_that_cannot_compress_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """The sentence names the engine that can; without a choice that one is taken."""
    table = plain(compression="zstd")
    with pytest.raises(
        ValueError, match=r"table 't' asks for .*'zstd', and engine 'lmdb' has none: give engine='zarr'"
    ):
        Store.open(tmp_path / "s", tables=[table], engine="lmdb")
    assert not (tmp_path / "s").exists()
    Store.open(tmp_path / "s", tables=[table]).close()
    assert (tmp_path / "s" / "manifests").is_dir()
    Store.open(None, tables=[table], engine=MemoryEngine()).close()


def test_a_store_keeps_its_compression(tmp_path: Path) -> None:
    """Tables that do not speak of it open it; those that ask for another are refused."""
    Store.open(tmp_path / "s", tables=[plain(compression="zstd")]).close()
    with Store.open(tmp_path / "s", tables=[plain()]) as store:
        assert store.tables[0].compression == "zstd"
    with pytest.raises(TableMismatchError, match="has compression 'zstd' and 'blosc' was given"):
        Store.open(tmp_path / "s", tables=[plain(compression="blosc")])
    Store.open(tmp_path / "p", tables=[plain()], engine="zarr").close()
    with pytest.raises(TableMismatchError, match="has compression None and 'blosc' was given"):
        Store.open(tmp_path / "p", tables=[plain(compression="blosc")])


def test_a_schema_may_ask_for_compression(tmp_path: Path) -> None:
    """For all tables or for one; "none" leaves one out."""
    (tmp_path / "s.toml").write_text(
        '[defaults]\ndim = 2\noptimizer = { name = "sgd", learning_rate = 0.1 }\ninitializer = "zeros"\n'
        'compression = "zstd"\n'
        '[tables.a]\n[tables.b]\ncompression = "none"\n[tables.c]\ncompression = "blosc"\n'
        "[features.a]\n[features.b]\n[features.c]\n"
    )
    schema = tc.Schema.load(tmp_path / "s.toml")
    assert {t.name: t.compression for t in schema.tables} == {"a": "zstd", "b": None, "c": "blosc"}
    assert tc.Schema.from_record(schema.to_record()).tables[0].compression == "zstd"
