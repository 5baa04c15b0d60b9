"""Arrays of NumPy, torch and pandas: masks, byte orders, ragged forms and dtypes, in batches and in files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

import tiercache as tc
from tests.data.cases import Jagged, KeyedJagged, plain_schema
from tiercache.data.inputs import find_inputs
from tiercache.data.source import Source
from tiercache.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

RAGGED = tc.Feature(name="a", hotness="ragged")


def column(data: Any, feature: tc.Feature | None = None, label: str | None = "y") -> list[Any]:
    """Return the column ``a`` read from a source."""
    schema = plain_schema(features=(feature or tc.Feature(name="a"),), label=label)
    return [row["a"] for batch in Source(find_inputs(data), schema).batches() for row in batch.columns.to_pylist()]


def one(a: Any, *, feature: tc.Feature | None = None, samples: int = 2) -> list[Any]:
    """Return a column of one batch with a label."""
    return column([{"a": a, "y": np.zeros(samples)}], feature)


def structured(*, is_masked: bool = False) -> Any:
    """Return two records with a key and a label."""
    rows = np.array([(7, 0.0), (9, 1.0)], [("a", "i8"), ("y", "f4")])
    return np.ma.array(rows, mask=[(True, False), (False, False)]) if is_masked else rows


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.ma.array([7, 999], mask=[0, 1]), [7, None]),
        (np.ma.array([7.0, 999.0], mask=[1, 0]), [None, 999.0]),
        (np.ma.array([7, 999], mask=False), [7, 999]),
        (np.ma.array([7, 999], ">i4", mask=[0, 1]), [7, None]),
        (np.ma.array([7, 999, 5, 6], mask=[0, 1, 0, 0])[::2], [7, 5]),
        (np.ma.array(["x", "z"], mask=[0, 1]), ["x", None]),
        (np.ma.array([7, None], object, mask=[1, 0]), [None, None]),
        (np.ma.array([[7, 999], [3, 4]], mask=[[0, 1], [0, 0]]), [[7, None], [3, 4]]),
        (np.ma.array(np.array([[7, 3], [999, 4]]).T, mask=[[0, 1], [0, 0]]), [[7, None], [3, 4]]),
        ((np.ma.array([7, 999, 3], mask=[0, 1, 0]), [0, 2, 3]), [[7, None], [3]]),
        ([np.ma.array([7, 999], mask=[0, 1]), np.array([3])], [[7, None], [3]]),
        ([[7, np.ma.masked], [3]], [[7, None], [3]]),
        ([7, np.ma.masked], [7, None]),
        (torch.masked.masked_tensor(torch.tensor([7, 999]), torch.tensor([True, False])), [7, None]),
        (np.array([np.ma.array([7, 999], mask=[0, 1]), None], object), [[7, None], None]),
        (pd.Series([np.array([7, 9]), np.nan]), [[7, 9], None]),
        (pd.Series([np.array([]), pd.NA]), [[], None]),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked_values_are_null(value: Any, expected: list[Any]) -> None:
    """In arrays, matrices, pairs of values and offsets, and lists of arrays; fill values are not keys."""
    kind = pa.array(expected).type
    feature = tc.Feature(name="a", key="string") if kind == pa.string() else tc.Feature(name="a")
    assert one(value, feature=RAGGED if pa.types.is_list(kind) else feature) == expected


def test_masked_fields_of_structured_arrays_are_null() -> None:
    """A structured array is a batch, or all of the data; its fields are columns."""
    assert column([structured(is_masked=True)]) == [None, 9]
    assert column([structured()]) == column(structured()) == [7, 9]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([1, 2], ">i8"), [1, 2]),
        (np.array([1, 2], ">u2"), [1, 2]),
        (np.array([(1 << 63) + 5, 2], ">u8"), [(1 << 63) + 5, 2]),
        (np.array([1, 2], ">f8"), [1.0, 2.0]),
        (np.array([[1, 2], [3, 4]], ">i4"), [[1, 2], [3, 4]]),
        ((np.array([1, 2, 3], ">i8"), np.array([0, 1, 3], ">i4")), [[1], [2, 3]]),
        ([np.array([1], ">i8"), np.array([2, 3], ">i8")], [[1], [2, 3]]),
        (pd.Series(np.array([1, 2], ">i8")), [1, 2]),
        (np.array([np.array([1], ">i8"), np.array([2, 3], ">i8")], object), [[1], [2, 3]]),
    ],
)
def test_big_endian_numbers_are_swapped(value: Any, expected: list[Any]) -> None:
    """In every form of numbers in a batch."""
    assert one(value, feature=RAGGED if isinstance(expected[0], list) else None) == expected


@pytest.mark.parametrize("name", ["x.npz", "x.npy", "folder"])
def test_big_endian_files_are_swapped(tmp_path: Path, name: str) -> None:
    """Arrays, matrices and fields of structured arrays."""
    columns = {"a": np.arange(6).reshape(3, 2).astype(">i8"), "y": np.array([0, 1, 0.5], ">f4")}
    path = tmp_path / name
    if name == "x.npy":
        rows = np.empty(3, [("a", ">i8", (2,)), ("y", ">f4")])
        rows["a"], rows["y"] = columns["a"], columns["y"]
        np.save(path, rows)
    elif name == "x.npz":
        np.savez(path, **columns)
    else:
        path.mkdir()
        for key, values in columns.items():
            np.save(path / f"{key}.npy", values)
    assert column(path, RAGGED) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("names", [("键", "标签"), ("ключ", "y"), ("a'\"\\", "ÿ☃"), ("\U0001f511", "y"), ("né", "y")])
def test_structured_files_have_names_in_any_script(tmp_path: Path, names: tuple[str, str]) -> None:
    """NumPy writes them in version 3.0 of its format, or in the first if Latin-1 has the letters."""
    key, label = names
    np.save(tmp_path / "x.npy", np.array([(1, 0.0), (2, 1.0)], [(key, "i8"), (label, "f4")]))
    schema = plain_schema(label=label, features=(tc.Feature(name="a", columns=(key,)),))
    rows = [row for b in Source(find_inputs(tmp_path / "x.npy"), schema).batches() for row in b.columns.to_pylist()]
    assert rows == [{label: 0.0, key: 1}, {label: 1.0, key: 2}]


def test_an_unknown_version_of_numpys_format_is_named(tmp_path: Path) -> None:
    """And a header that is not UTF-8."""
    np.save(tmp_path / "x.npy", np.array([(1, 0.0)], [("a", "i8"), ("键", "f4")]))
    good = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(good[:6] + b"\x04" + good[7:])
    with pytest.raises(SourceError, match=r"format version 4\.0; versions 1\.0 to 3\.0 are known"):
        column(tmp_path / "x.npy")
    (tmp_path / "x.npy").write_bytes(good.replace("键".encode(), b"\xff\xff\xff"))
    with pytest.raises(SourceError, match=r"x\.npy is not a readable \.npy file \('utf-8' codec"):
        column(tmp_path / "x.npy")


def distances() -> torch.Tensor:
    """Return a nested tensor with values between its rows."""
    values = torch.tensor([1, 999, 2, 3])
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 4]), torch.tensor([1, 2]))


PARTS = [torch.tensor([1]), torch.tensor([2, 3])]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.nested.nested_tensor(PARTS, layout=torch.jagged), [[1], [2, 3]]),
        (torch.nested.nested_tensor(PARTS), [[1], [2, 3]]),
        (torch.nested.nested_tensor([PARTS[1], PARTS[1][:0]], layout=torch.jagged), [[2, 3], []]),
        (torch.nested.nested_tensor([PARTS[0][:0], PARTS[0][:0]]), [[], []]),
        (distances(), [[1], [2, 3]]),
        ([PARTS[0], None], [[1], None]),
        ([np.array([]), np.array([1 << 60, 2])], [[], [1 << 60, 2]]),
        ([np.array([], "i4"), np.array([])], [[], []]),
        ([np.array([1], "i4"), PARTS[1]], [[1], [2, 3]]),
        ([pa.array([1]), [2, 3]], [[1], [2, 3]]),
        ([pd.Series([1]), (2, 3)], [[1], [2, 3]]),
        ([[torch.tensor(1)], [torch.tensor(2), np.int32(3)]], [[1], [2, 3]]),
        (np.zeros((2, 0), np.int64), [[], []]),
        ((torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])), [[1], [2, 3]]),
        ((torch.tensor([1, 2, 3]), torch.tensor([0, 1])), [[1], [2, 3]]),
        (([1, 2, 3], [0, 3]), [[1, 2, 3], []]),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_lists_of_any_length_come_in_many_forms(value: Any, expected: list[Any]) -> None:
    """Nested tensors, lists of arrays, and offsets with the last one or without it."""
    assert one(value, feature=RAGGED) == expected


@pytest.mark.parametrize("how", [{"batch_size": None}, {"batch_size": None, "pin_memory": True}])
def test_a_pair_that_torch_made_a_list_is_refused(how: dict[str, Any]) -> None:
    """It was read as two samples: the values and the offsets."""
    pairs = [{"a": (torch.tensor([7, 8, 9]), torch.tensor([0, 1]))}]
    with pytest.raises(SourceError, match=r"batch 0, column 'a': a list of two tensors, .+ use collate_fn=lambda"):
        column(DataLoader(pairs, **how), RAGGED, None)  # type: ignore[arg-type]
    kept = DataLoader(pairs, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]
    assert column([*kept], RAGGED, None) == [[7], [8, 9]]
    lists = [{"a": [torch.tensor([7, 8]), torch.tensor([9])]}]
    assert column(DataLoader(lists, **how), RAGGED, None) == [[7, 8], [9]]  # type: ignore[arg-type]


def test_offsets_that_fit_two_numbers_of_samples_are_refused() -> None:
    """If offsets end at the number of values, the last one may be missing; another column decides."""
    pair = np.array([1, 2, 3]), np.array([0, 2, 3])
    with pytest.raises(SourceError, match=r"batch 0: offsets of 'a' end .* the number of samples: 2, or 3 if"):
        column([{"a": pair}], RAGGED, label=None)
    assert one(pair, feature=RAGGED, samples=2) == [[1, 2], [3]]
    assert one(pair, feature=RAGGED, samples=3) == [[1, 2], [3], []]
    assert column([{"a": (pair[0], [0, 2])}], RAGGED, label=None) == [[1, 2], [3]]
    assert column([{"a": KeyedJagged(a=Jagged([1, 2, 3], [0, 2, 3]))}], RAGGED, label=None) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (([1, 2, 3], [1, 2]), r"offsets \[1, 2, 3\] do not go from 0 to the number of values, 3"),
        (([1, 2, 3], [0, 2, 1]), "without decreasing"),
        (([1, 2, 3], [0, -1, 3]), "without decreasing"),
        (([1, 2, 3], [0, 1, 9]), "do not go from 0"),
        (([1, 2, 3], []), "do not go from 0"),
        (([1, 2, 3], [0.0, 1.0, 3.0]), "offsets are float64 of shape"),
        (([1, 2, 3], [[0, 1, 3]]), r"offsets are int64 of shape \(1, 3\)"),
        ((np.ones((3, 2), int), [0, 1, 3]), r"the values of the lists have shape \(3, 2\)"),
        (([1, 2, 3], np.ma.array([0, 1, 3], mask=[0, 1, 0])), "offsets have masked values"),
        (([1, 2, 3], [0, 3]), "columns of different lengths"),
    ],
)
def test_offsets_that_are_none_are_refused(value: Any, message: str) -> None:
    """Lengths instead of offsets, decreasing or too large offsets, and other types."""
    with pytest.raises(SourceError, match=message):
        one(value, feature=RAGGED, samples=4 if "different" in message else 2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, 2).to_sparse(), "a tensor of layout torch.sparse_coo: pass values and offsets"),
        (torch.eye(2).to_sparse_csr(), "a tensor of layout torch.sparse_csr"),
        (torch.ones(2, dtype=torch.bfloat16), "torch.bfloat16 on cpu cannot become an array"),
        (torch.ones(2).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.empty(2, device="meta"), "on meta cannot become an array"),
        (torch.ones(2, dtype=torch.complex64), "an array of complex64"),
        (torch.ones(2, 2, 2), r"an array of float32 of shape \(2, 2, 2\): expected one or two dimensions"),
        (np.array(3), r"an array of int64 of shape \(\)"),
        (np.array([1j, 2]), "an array of complex128"),
        (np.array([1, 2], np.longdouble), "an array of (longdouble|float128)"),
        (np.array([b"ab", b"c"], "V2"), r"an array of (\|V2|void)"),
        (np.array(["2020-01", "2021-01"], "M8[M]"), r"an array of datetime64\[M\]"),
        (np.array([1, "x"], object), "an array of object .*Could not convert 'x'"),
        (structured(), r"an array of \[\('a', '<i8'\), .*: make each of its fields a column"),
        (pd.Series([1j, 2]), "an array of complex128"),
        ([np.array([1]), np.array(["x"])], "int64 vs string"),
        (np.array(["2020-01-01", "2021-01-01"], "M8[D]"), r"column 'a': it holds date32\[day\], but feature 'a' needs"),
        (np.array([True, False]), "column 'a': it holds bool, but feature 'a' needs integers"),
        (torch.tensor([True, False]), "column 'a': it holds bool, but feature 'a' needs integers"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_an_array_that_cannot_hold_keys_is_named_by_its_dtype(value: Any, message: str) -> None:
    """One line with batch and column; nothing is guessed."""
    with pytest.raises(SourceError, match=message) as caught:
        one(value)
    assert "column 'a'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_array_of_a_file_that_is_not_used_may_have_any_dtype(tmp_path: Path) -> None:
    """A column that is used is named with file, column and dtype."""
    np.savez(tmp_path / "x.npz", a=np.array([1, 2]), y=np.zeros(2), z=np.array([1j, 2]))
    assert column(tmp_path / "x.npz") == [1, 2]
    with pytest.raises(SourceError, match=r"x\.npz, column 'z': an array of complex128"):
        column(tmp_path / "x.npz", label="z")


@pytest.mark.parametrize(
    "batch",
    [
        pd.DataFrame([[1, 2, 0.0]], columns=["a", "a", "y"]),
        pd.DataFrame([[1, 2, 0.0]], columns=[1, "1", "y"]).rename(columns={1: "a", "1": "a"}),
        pa.table([[1], [2], [0.0]], names=["a", "a", "y"]),
        pa.record_batch([pa.array([1]), pa.array([2]), pa.array([0.0])], names=["a", "a", "y"]),
        {"a": [1], "k": KeyedJagged(a=Jagged([1], [0, 1])), "y": [0.0]},
    ],
)
def test_a_column_that_stands_twice_is_refused_if_it_is_used(batch: Any) -> None:
    """An unused one is harmless."""
    with pytest.raises(SourceError, match="batch 0 has several columns 'a': name each column once"):
        column([batch])
    schema = plain_schema(features=(tc.Feature(name="b", columns=("y",)),), label=None, tables=())
    (found,) = Source(find_inputs([batch]), schema).batches()
    assert found.columns.to_pylist() == [{"y": 0.0}]


def test_masks_and_byte_orders_reach_a_matrix_of_dense_features() -> None:
    """Its columns are cut from the masked array."""
    dense = np.ma.array([[1.0, 2.0], [3.0, 4.0]], ">f4", mask=[[0, 1], [0, 0]])
    schema = plain_schema(dense=(tc.DenseFeature(column="d", null=0), tc.DenseFeature(column="e", null=0)))
    (found,) = Source(find_inputs([{"dense": dense, "a": [1, 2], "y": [0, 1]}]), schema).batches()
    assert [(r["d"], r["e"]) for r in found.columns.to_pylist()] == [(1.0, None), (3.0, 4.0)]
