"""Compressed chunks of the Zarr engine: range reads, smaller size, and damage is found before decompression."""

import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.files import flip
from tests.store.blobs import bytes_of, layout_of, put, segment
from tiercache.store.engines.engine import ReadRequest
from tiercache.store.engines.zarr_engine import ZarrEngine
from tiercache.store.engines.zarr_layout import ShardingCodec, cut, sealed
from tiercache.store.layout import Range, SegmentLayout
from tiercache.store.store_errors import BlockReadError

KINDS = ("zstd", "blosc")


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 400), page_rows=st.integers(1, 30), block_rows=st.integers(1, 90))
def test_inner_chunks_divide_chunks_and_are_about_pages(rows: int, page_rows: int, block_rows: int) -> None:
    ranges = (Range(next_use=1, table_rows=(rows,)),)
    layout = SegmentLayout.of(row_bytes=4, page_rows=page_rows, block_bytes=4 * block_rows, ranges=ranges)
    chunk_rows, inner_rows = cut(layout)
    assert chunk_rows % inner_rows == 0
    assert chunk_rows >= rows if layout.num_blocks == 1 else chunk_rows == layout.block_rows
    assert 4 * inner_rows >= min(page_rows, block_rows, rows)
    if block_rows % page_rows == 0:
        assert inner_rows == min(page_rows, rows)


def test_a_range_is_read_and_not_the_block_that_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages of 64: the index, and eight inner chunks, are read from disk."""
    layout = layout_of([16_384], page_rows=256, block_rows=16_384, dim=63, compression="zstd")
    rows = segment(layout)[1]
    engine = ZarrEngine(tmp_path, create=True)
    put(engine, [rows])
    ranges, ends = Mock(side_effect=engine._objects.ranges), Mock(side_effect=engine._objects.ends)
    monkeypatch.setattr(engine._objects, "ranges", ranges)
    monkeypatch.setattr(engine._objects, "ends", ends)
    out = np.empty(2 * 65_536, np.uint8)
    engine.read(ReadRequest(rows.blob, 30 * 65_536, out))
    assert out.tobytes() == rows.pieces[0][30 * 65_536 : 32 * 65_536].tobytes()
    read = sum(place.size for call in ranges.call_args_list for place in call.args[0])
    read += sum(size for call in ends.call_args_list for size in call.args[1])
    assert out.size < read < 1.2 * out.size


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 1 << 20), bit=st.integers(0, 7), which=st.integers(0, 50))
def test_a_changed_bit_is_found_before_anything_is_decompressed(
    tmp_path_factory: pytest.TempPathFactory, kind: str, place: int, bit: int, which: int
) -> None:
    """In rows, keys or index."""
    path = tmp_path_factory.mktemp("s")
    engine = ZarrEngine(path, create=True)
    contents = put(engine, segment(layout_of([9, 12], block_rows=6, compression=kind))[1:])
    chunks = sorted(path.glob("segments/*/*/*/c.*"))
    chunk = chunks[which % len(chunks)]
    flip(chunk, place % chunk.stat().st_size, 1 << bit)
    wrong = []
    for blob, pieces in contents:
        for at, data in pieces.items():
            try:
                assert bytes_of(engine, blob, at, at + data.size) == data.tobytes()
            except BlockReadError as error:
                wrong.append(str(error))
    assert len(wrong) == 1
    assert re.search(r"has checksum .* over its compressed bytes", wrong[0])


def test_what_points_beyond_a_chunk_is_an_error() -> None:
    """An index with a correct checksum and wrong offsets, and compressed bytes of another length."""
    shards = ShardingCodec(compression="blosc", item_bytes=4, row_bytes=8, chunk_rows=8, inner_rows=4)
    rows = np.arange(64, dtype=np.uint8)
    shard = np.frombuffer(shards.encode(rows), np.uint8)
    index = shards.index_of(shard[-shards.index_bytes :])
    assert shards.decode(index, shard, 0, 8).tobytes() == rows.tobytes()
    assert shards.decode(index[:1], shard, 1, 3).tobytes() == rows[8:24].tobytes()
    for wrong in ([0, 1 << 40], [1 << 40, 1], [-2, 5], [shards.most_bytes, 1]):
        entries = np.array([[0, 8], wrong], "<i8").tobytes()
        with pytest.raises(BlockReadError, match="points beyond its end"):
            shards.index_of(np.frombuffer(sealed(entries), np.uint8))
    for kind in KINDS:
        codec = ShardingCodec(compression=kind, item_bytes=4, row_bytes=8, chunk_rows=8, inner_rows=4)
        other = np.frombuffer(codec.pack(rows), np.uint8)
        for size in (0, 32, 128):
            with pytest.raises(BlockReadError, match="cannot be decompressed"):
                codec.unpack(other, np.empty(size, np.uint8))
        for size in (4, 64, 252, 256, 260, 65_536, 70_000, 1 << 20):
            out, data = np.empty(size, np.uint8), np.arange(size, dtype=np.uint8)
            codec.unpack(np.frombuffer(codec.pack(data), np.uint8), out)
            assert out.tobytes() == data.tobytes()
        noise = np.frombuffer(sealed(bytes(range(40))), np.uint8)
        with pytest.raises(BlockReadError, match="cannot be decompressed"):
            codec.unpack(noise, np.empty(64, np.uint8))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 64), row_bytes=st.sampled_from([4, 8, 260]), seed=st.integers(0, 100))
def test_no_shard_is_longer_than_the_most_that_one_has(kind: str, rows: int, row_bytes: int, seed: int) -> None:
    """Also for noise, which does not compress; rows that repeat themselves do."""
    shards = ShardingCodec(compression=kind, item_bytes=4, row_bytes=row_bytes, chunk_rows=rows, inner_rows=rows)
    noise = np.random.default_rng(seed).integers(0, 256, rows * row_bytes, dtype=np.uint8)
    assert len(shards.encode(noise)) <= shards.most_bytes
    assert rows * row_bytes < 1000 or len(shards.encode(np.full_like(noise, 7))) < noise.size / 5
