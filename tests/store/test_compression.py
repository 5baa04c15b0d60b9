"""Tables that are compressed: the same rows in fewer bytes, read by ranges, by plain Zarr too, and damage is found."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.files import flip
from tests.store.damage import assert_sentence, generator_of, lying
from tests.store.test_fuzz import bounded_memory
from tests.store.test_independent_reader import compressed_tables
from tiercache.store import (
    SGD,
    BlockReadError,
    CorruptBlockError,
    CorruptStoreError,
    MemoryEngine,
    Range,
    Store,
    StoreError,
    Stream,
    Table,
    TableMismatchError,
    ZarrEngine,
    Zeros,
    group_tables,
    info,
    verify,
)
from tiercache.store.base_segment import base_stream
from tiercache.store.testing.contract import form_of, given_as, segment_blocks
from tiercache.store.testing.world import World
from tiercache.store.zarr_arrays import Arrays
from tiercache.store.zarr_manifest import BlockObjects, Manifest
from tiercache.store.zarr_objects import Objects
from tiercache.store.zarr_shards import cut

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.store.zarr_arrays import Span

__all__ = ["bounded_memory"]  # a fixture

KINDS = ("zstd", "blosc")


def plain(**changes: object) -> Table:
    """Return a table of rows of 256 bytes."""
    table = Table(name="t", dim=64, optimizer=SGD(learning_rate=1.0), initializer=Zeros())
    return dataclasses.replace(table, **changes)


def read_all(store: Store) -> None:
    """Read the keys of every block and every piece of the first segment, one by one."""
    segment = store.segments[0]
    stream = segment.streams[0]
    for block in range(stream.num_blocks):
        store.read_keys(segment, 0, block)
    for piece, size in enumerate(np.diff(stream.piece_offset_P).tolist()):
        store.read(segment, 0, piece, piece + 1, np.empty(size, np.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_compressed_store_holds_the_rows_that_any_store_holds(tmp_path: Path, kind: str) -> None:
    """Through passes, a commit inside one, a reopen, a rollback and a compaction: loads, lookups, scans and changes."""
    chosen = compressed_tables(kind)
    world = World(chosen, num_passes=4, keys_per_pass=60)
    with Store.open(tmp_path / "s", tables=chosen, retention=2) as store:
        assert isinstance(store._engine, ZarrEngine)
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


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 400), piece_rows=st.integers(1, 30), block_rows=st.integers(1, 90))
def test_inner_chunks_divide_chunks_and_are_about_pieces(rows: int, piece_rows: int, block_rows: int) -> None:
    """Chunks hold the rows of blocks, or all rows; a block of whole pieces that are small has them as inner chunks."""
    ranges = (Range(next_use=1, table_rows=(rows,)),)
    stream = Stream(row_bytes=4, piece_rows=piece_rows, block_bytes=4 * block_rows, ranges=ranges)
    chunk_rows, inner_rows = cut(stream)
    assert chunk_rows % inner_rows == 0
    assert chunk_rows >= rows if stream.num_blocks == 1 else chunk_rows == stream.block_rows
    assert 4 * inner_rows >= min(piece_rows, block_rows, rows)
    if block_rows % piece_rows == 0:
        assert inner_rows == min(piece_rows, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_compressed_rows_are_cut_evenly(kind: str) -> None:
    """Into inner chunks of 16 KiB, or of a row that is larger; plain blocks are as they were."""
    for dim in (1, 3, 65, 500, 40_000):
        (group,) = group_tables([plain(dim=dim, compression=kind)])
        stream = base_stream(group, [])
        rows = Range(next_use=1, table_rows=(3 * stream.block_rows,))
        chunk_rows, inner_rows = cut(dataclasses.replace(stream, ranges=(rows,)))
        assert chunk_rows == stream.block_rows
        assert inner_rows == max(1, (16 << 10) // group.row_bytes)
        (group,) = group_tables([plain(dim=dim)])
        assert base_stream(group, []).block_bytes == max(4 << 20, group.row_bytes)


def test_a_range_is_read_and_not_the_block_that_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pieces of 64: the index, and eight inner chunks, are what is asked of the disk."""
    table = plain(compression="zstd")
    ranges = (Range(next_use=1, table_rows=(16_384,)),)
    stream = Stream(row_bytes=256, piece_rows=256, block_bytes=4 << 20, ranges=ranges)
    rows = np.random.default_rng(0).integers(0, 256, stream.rows * 256, dtype=np.uint8)
    asked: list[Span] = []
    ranges_of = Objects.ranges
    with Store.open(tmp_path / "s", tables=[table]) as store:
        segment = store.append(0, [stream], [(0, 0, rows, np.arange(stream.rows, dtype=np.int64))])
        monkeypatch.setattr(Objects, "ranges", lambda self, spans: (asked.extend(spans), ranges_of(self, spans))[1])
        out = np.empty(2 * 65_536, np.uint8)
        store.read(segment, 0, 30, 32, out)
    assert out.tobytes() == rows[30 * 65_536 : 32 * 65_536].tobytes()
    read = sum(span.stop - span.start for span in asked)
    assert out.size < read < 1.05 * out.size


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_repeat_themselves_take_less(tmp_path: Path, kind: str) -> None:
    """And what they take is what the engine counts against its bound."""
    sizes = {}
    for compression in (None, kind):
        path = tmp_path / str(compression)
        chosen = plain(compression=compression)
        with Store.open(path, tables=[chosen], engine="zarr", max_bytes=3 << 20) as store:
            stream = base_stream(store.groups[0], [Range(next_use=1, table_rows=(10_000,))])
            rows = np.tile(np.arange(64, dtype=np.float32), 10_000).view(np.uint8)
            store.append(0, [stream], [(0, 0, rows, np.arange(10_000, dtype=np.int64))])
            sizes[compression] = store._engine._sweep.chunk_bytes
    files = sum(f.stat().st_size for f in (tmp_path / kind / "segments").rglob("c.*"))
    assert sizes[kind] < sizes[None] / 10
    assert files == 0 or files == sizes[kind]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 1 << 20), bit=st.integers(0, 7), which=st.integers(0, 50))
def test_a_changed_bit_is_found_before_anything_is_decompressed(
    tmp_path_factory: pytest.TempPathFactory, kind: str, place: int, bit: int, which: int
) -> None:
    """In any chunk, at any place: rows, keys or index; the error names the segment, or the bytes are not looked at."""
    path = tmp_path_factory.mktemp("s")
    form = form_of((9, 12), block_rows=6, compression=kind)
    table = form.group.tables[0]
    with Store.open(path, tables=[table]) as store:
        world = World([table], keys_per_pass=30, block_rows=6, piece_rows=3)
        world.run(store, 1)
    chunks = sorted(path.glob("segments/*/*/*/c.*"))
    chunk = chunks[which % len(chunks)]
    flip(chunk, place % chunk.stat().st_size, 1 << bit)
    with Store.open(path, mode="r") as store:
        words = rf"block \d+ of segment {store.segments[0].id} .* has checksum .* over its compressed bytes"
        with pytest.raises(CorruptBlockError, match=words):
            read_all(store)


def test_what_points_beyond_a_chunk_is_an_error(tmp_path: Path) -> None:
    """An index with a right checksum and wrong places, and compressed bytes of another length."""
    from tiercache.store.zarr_codec import Codec, sealed
    from tiercache.store.zarr_shards import Shards

    shards = Shards(codec=Codec("blosc", 4), row_bytes=8, chunk_rows=8, inner_rows=4)
    rows = np.arange(64, dtype=np.uint8)
    shard = np.frombuffer(shards.encode(rows), np.uint8)
    index = shards.index_of(shard[-shards.index_bytes :], shard.size)
    assert shards.decode(index, shard, 0, 8).tobytes() == rows.tobytes()
    assert shards.decode(index[:1], shard, 1, 3).tobytes() == rows[8:24].tobytes()
    for wrong in ([0, 1 << 40], [1 << 40, 1], [-2, 5], [shard.size, 1]):
        entries = np.array([[0, 8], wrong], "<i8").tobytes()
        with pytest.raises(BlockReadError, match="points beyond its end"):
            shards.index_of(np.frombuffer(sealed(entries), np.uint8), shard.size)
    for kind in KINDS:
        codec = Codec(kind, 4)
        other = np.frombuffer(codec.encode(rows), np.uint8)
        for size in (0, 32, 128):
            with pytest.raises(BlockReadError, match="cannot be decompressed"):
                codec.decode(other, np.empty(size, np.uint8))
        for size in (4, 64, 252, 256, 260, 65_536, 70_000, 1 << 20):
            out, data = np.empty(size, np.uint8), np.arange(size, dtype=np.uint8)
            codec.decode(np.frombuffer(codec.encode(data), np.uint8), out)
            assert out.tobytes() == data.tobytes()
        noise = np.frombuffer(sealed(bytes(range(40))), np.uint8)
        with pytest.raises(BlockReadError, match="cannot be decompressed"):
            codec.decode(noise, np.empty(64, np.uint8))


def test_a_manifest_says_how_its_arrays_are_compressed() -> None:
    """And lengths that are too few, too many or no numbers are refused, as is another compression."""
    form = form_of((9, 12), block_rows=6, compression="zstd")
    arrays = Arrays.of("segments/1/0", form)
    blocks = {
        name: BlockObjects(data.nbytes, 0, arrays, (70, 80) if name[:1] == b"r" else (70,))
        for name, (data, _) in segment_blocks(form, 1).items()
    }
    good = Manifest(number=3, blocks=blocks)
    assert Manifest.from_bytes(good.to_bytes(), "it") == good
    name = min(blocks)
    for wrong in ((), (1, 2), (-1,)):
        bad = Manifest(number=3, blocks={**blocks, name: blocks[name]._replace(lengths=wrong)})
        with pytest.raises(CorruptStoreError, match="cannot be read"):
            Manifest.from_bytes(bad.to_bytes(), "it")
    for change in ({"compression": "gzip"}, {"inner_rows": 0}, {"inner_rows": 5}):
        odd = dataclasses.replace(arrays, **change)
        bad = Manifest(number=3, blocks={n: b._replace(arrays=odd) for n, b in blocks.items()})
        with pytest.raises(CorruptStoreError, match="is no compression of chunks"):
            Manifest.from_bytes(bad.to_bytes(), "it")


def test_tables_of_different_compression_share_no_stream() -> None:
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


def test_a_write_that_fails_leaves_no_compressed_chunk(tmp_path: Path) -> None:
    """And the same blocks can be written after it."""
    engine = ZarrEngine(tmp_path, create=True)
    form = form_of((9, 12), block_rows=6, compression="zstd")
    blocks = segment_blocks(form)

    def failing():
        yield from given_as(blocks)
        raise OSError("the source broke")

    with pytest.raises(OSError, match="the source broke"):
        engine.write(failing())
    assert not list(tmp_path.rglob("c.*"))
    engine.write(given_as(blocks))
    engine.commit({}, [])
    engine.close()


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_that_lies_is_refused_or_without_effect(tmp_path: Path, kind: str) -> None:
    """Whatever it says of arrays, lengths and blocks: a sentence, or the rows that were written; and little memory."""
    table = plain(compression=kind)
    world = World([table], keys_per_pass=30)
    with Store.open(tmp_path / "s", tables=[table]) as store:
        world.run(store, 2)
    newest = max((tmp_path / "s" / "manifests").iterdir(), key=lambda file: int(file.name))
    whole, refused = newest.read_bytes(), 0
    for seed in range(80):
        newest.write_bytes(lying(whole, generator_of(seed)))
        try:
            with Store.open(tmp_path / "s", mode="r") as store:
                world.check(store, after=world.pass_index - 1)
        except StoreError as error:
            assert_sentence(error)
            refused += 1
    assert refused > 40
