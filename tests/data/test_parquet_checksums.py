"""Parquet files that cannot be read whole: a flipped bit is an error that names column and rows, lost rows are one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tests.data.cases import plain_schema
from tiercache.data.inputs import find_inputs
from tiercache.data.source import Source
from tiercache.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

ROWS, GROUP = 40_000, 10_000
SCHEMA = plain_schema(features=(tc.Feature(name="a"), tc.Feature(name="b", hotness="ragged")), tables=())


def read(path: Path, row: int = 0) -> list[int]:
    """Return the column ``a``."""
    return [k for b in Source(find_inputs(path), SCHEMA).batches(0, row) for k in b.columns.column("a").to_pylist()]


def flip(path: Path, column: str, group: int) -> None:
    """Flip a bit in the last data page of a column in a row group."""
    meta = pq.ParquetFile(path).metadata.row_group(group)
    chunk = next(meta.column(i) for i in range(meta.num_columns) if meta.column(i).path_in_schema.startswith(column))
    start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    data = bytearray(path.read_bytes())
    data[start + chunk.total_compressed_size - 9] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("column", ["a", "b", "y"])
@pytest.mark.parametrize(
    "how",
    [
        {"compression": "none", "use_dictionary": False},
        {"compression": "none"},
        {"compression": "snappy"},
        {"compression": "zstd", "data_page_version": "2.0"},
        {"compression": "none", "use_dictionary": False, "data_page_version": "2.0"},
    ],
)
def test_a_flipped_bit_is_named_with_column_and_rows(tmp_path: Path, how: dict[str, Any], column: str) -> None:
    """For every encoding; files without checksums are read as before."""
    path, keys = tmp_path / "x.parquet", np.arange(ROWS) % 3000
    data = pa.table({"a": keys, "b": pa.array(keys.reshape(-1, 1).tolist()), "y": np.arange(ROWS) / 7})
    pq.write_table(data, path, row_group_size=GROUP, write_page_checksum=True, **how)
    assert read(path) == keys.tolist()
    flip(path, column, 2)
    expected = rf"x\.parquet, column '{column}', row group 2 \(rows 20000 to 29999\) cannot be read \(.+\): the file is"
    for row in (0, 25_000):
        with pytest.raises(SourceError, match=expected) as caught:
            read(path, row)
        assert "\n" not in str(caught.value)
    assert read(path, 30_000) == keys[30_000:].tolist()


def test_rows_that_arrow_loses_are_an_error(tmp_path: Path) -> None:
    """Arrow returns no rows for a row group of one row whose list of dictionaries spans several pages."""
    path, words = tmp_path / "x.parquet", [["a", "b", "c", "d"], ["a", "b"]]
    lists = pa.array(words, pa.list_(pa.dictionary(pa.int32(), pa.string())))
    data = pa.table({"a": [1, 2], "b": lists, "y": [0.0, 1.0]})
    pq.write_table(data, path, row_group_size=1, data_page_size=10)
    schema = plain_schema(features=(tc.Feature(name="b", key="string", hotness="ragged"),), tables=())
    with pytest.raises(SourceError, match=r"x\.parquet has 2 rows, but Arrow reads \d: write the file again"):
        list(Source(find_inputs(path), schema).batches())
