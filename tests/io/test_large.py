"""Five gigabytes: checked, counted and exported to another program's format."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pytest
from numpy.typing import NDArray

import tiercache as tc
from tiercache.store import Cursor, Range, SegmentLayout, Store, hash_keys, info, verify

SEGMENTS, ROWS = 20, 1_000_000
TABLE = tc.Table(
    name="items", dim=64, optimizer=tc.optim.RowWiseAdagrad(learning_rate=0.05), initializer=tc.init.Zeros()
)
STREAM = SegmentLayout.of(
    row_bytes=260, page_rows=252, block_bytes=4 << 20, ranges=(Range(next_use=1 << 40, table_rows=(ROWS,)),)
)


def blocks(keys: NDArray[np.int64]) -> Iterator[tuple[int, int, NDArray[np.uint8], NDArray[np.int64]]]:
    """Yield the blocks of a segment: in the row of key k, number i of the vector is (k + i) % 97, the state k % 89."""
    for block in range(STREAM.num_blocks):
        low, high = STREAM.rows_of_block(block)
        out = np.empty(65 * (high - low), np.float32)
        for begin in range(low, high, STREAM.page_rows):
            mine = keys[begin : min(high, begin + STREAM.page_rows)]
            piece = out[65 * (begin - low) :][: 65 * mine.size]
            piece[: 64 * mine.size] = ((mine[:, None] + np.arange(64)) % 97).reshape(-1)
            piece[64 * mine.size :] = mine % 89
        yield 0, block, out.view(np.uint8), keys[low:high]


@pytest.mark.long
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_five_gigabytes_have_the_sums_that_duckdb_finds_in_their_export(tmp_path: Path, engine: str) -> None:
    if shutil.disk_usage(tmp_path).free < 25 << 30:
        pytest.skip("needs 25 GiB of free disk")
    path, out = tmp_path / "large.tc", tmp_path / "out"
    with Store.open(path, tables=[TABLE], engine=engine) as store:
        for pass_index in range(SEGMENTS):
            keys = np.arange(pass_index * ROWS, (pass_index + 1) * ROWS, dtype=np.int64)
            store.append(pass_index, [STREAM], blocks(keys[np.argsort(hash_keys(keys, TABLE.table_id))]))
            store.publish(Cursor(pass_index + 1, 0), state=b"", schedule_digest="", settings={}, environment={})
    assert sum(table["rows"] for table in info(path)["tables"]) == SEGMENTS * ROWS
    assert verify(path)["problems"] == []
    tc.export_store(path, out, format="parquet")
    every = np.arange(SEGMENTS * ROWS, dtype=np.int64)
    expected = (every.size, every.sum(), (every % 97).sum(), ((every + 63) % 97).sum(), (every % 89).sum())
    found = duckdb.sql(
        "select count(*), sum(key), sum(vector[1]::double), sum(vector[64]::double), sum(sum[1]::double) "
        f"from '{out / 'items.parquet'}'"
    ).fetchall()
    assert found == [expected]
