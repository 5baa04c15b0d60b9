"""Finite numbers that a 16-bit dtype cannot represent are refused when rows are imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import tiercache as tc
from tiercache.errors import ImportExportError

if TYPE_CHECKING:
    from pathlib import Path

BF16_MOST = float(torch.finfo(torch.bfloat16).max)
INF, NAN = float("inf"), float("nan")


def table(dtype: str) -> tc.Table:
    return tc.Table(name="t", dim=2, dtype=dtype, optimizer=tc.optim.SGD(learning_rate=1.0))


def imported(path: Path, dtype: str, rows: list[list[float]]) -> np.ndarray:
    """Import rows as keys 10, 11, ... and return the stored rows."""
    keys = np.arange(len(rows)) + 10
    pair = keys, np.array(rows, np.float32)
    tc.import_store({"t": pair}, path, tables=(table(dtype),), initial_state=True, steps=0)
    with tc.Store.open(path, mode="r") as store:
        return store.lookup("t", keys)["vector"]


@pytest.mark.parametrize(
    ("dtype", "number", "shown"),
    [
        ("float16", 1e6, r"1e\+06"),
        ("float16", -65520.0, "-65520"),
        ("float16", 65520.0, "65520"),
        ("float16", 3e38, r"3e\+38"),
        ("bfloat16", 3.4e38, r"3\.4e\+38"),
        ("bfloat16", -3.4e38, r"-3\.4e\+38"),
    ],
)
def test_a_number_beyond_the_dtype_is_refused_by_key(tmp_path: Path, dtype: str, number: float, shown: str) -> None:
    """Infinities and NaN next to it are accepted."""
    rows = [[1.0, INF], [NAN, number], [2.0, 3.0]]
    expected = rf'vector of table \'t\' has {shown} for key 11, which is infinite in {dtype}: clip .* dtype = "float32"'
    with pytest.raises(ImportExportError, match=expected):
        imported(tmp_path / "m", dtype, rows)
    with tc.Store.open(tmp_path / "m") as store:
        assert store.commit is None


@pytest.mark.parametrize(
    ("dtype", "number", "stored"),
    [
        ("float16", 65504.0, 65504.0),
        ("float16", 65519.0, 65504.0),
        ("float16", -65519.996, -65504.0),
        ("float16", INF, INF),
        ("float16", -INF, -INF),
        ("float16", NAN, NAN),
        ("bfloat16", BF16_MOST, BF16_MOST),
        ("bfloat16", 1e6, 999424.0),
        ("bfloat16", INF, INF),
        ("bfloat16", NAN, NAN),
        ("float32", 3.4e38, np.float32(3.4e38)),
    ],
)
def test_numbers_within_the_dtype_are_rounded(tmp_path: Path, dtype: str, number: float, stored: float) -> None:
    np.testing.assert_array_equal(imported(tmp_path / "m", dtype, [[number, 1.0]]), [[stored, 1.0]])


def test_a_refused_import_leaves_the_rows_of_a_store(tmp_path: Path) -> None:
    """An overlay is one commit or none."""
    imported(tmp_path / "m", "float16", [[1.0, 2.0]])
    with tc.Store.open(tmp_path / "m") as store:
        with pytest.raises(ImportExportError, match="which is infinite in float16"):
            tc.import_store({"t": np.full((20, 2), 7e4, np.float32)}, store, initial_state=True)
        assert store.lookup("t", np.array([10]))["vector"].tolist() == [[1.0, 2.0]]
