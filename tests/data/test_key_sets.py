"""Datasets of key sets alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.training.cases import table
from tiercache.data import key_sets
from tiercache.errors import DatasetError
from tiercache.io.key_set_file import read_key_set
from tiercache.kernels.cpu.hashing import hash_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

TABLES = (table("user", 4), table("item", 8))
KEYS = st.lists(st.one_of(st.integers(-(1 << 63) + 2, (1 << 63) - 1), st.integers(-3, 3)), max_size=20)


def forms(keys: list[int]) -> list[Any]:
    """Return the same keys in every form that is taken."""
    array = np.array(keys, np.int64)
    return [array, keys, torch.from_numpy(array.copy()), iter([array[:3], array[3:3], torch.from_numpy(array[3:])])]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(KEYS, KEYS), min_size=1, max_size=3), st.integers(0, 3), st.integers(1, 4))
def test_key_sets_are_the_unique_keys_in_hash_order_with_counts(
    passes: list[tuple[list[int], list[int]]], form: int, chunk: int
) -> None:
    """Whatever their order and form and however they come in stretches; the digest follows from nothing else."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_sets, "_CHUNK_KEYS", chunk)
        given = ({"user": forms(user)[form], "item": forms(item)[form]} for user, item in passes)
        written = tc.write_key_sets(Path(folder) / "a", TABLES, given)
        backwards = [{"item": item[::-1], "user": user[::-1]} for user, item in passes]
        again = tc.write_key_sets(Path(folder) / "b", TABLES, backwards)
        assert again.digest == written.digest
        written.verify()
        assert [p.samples for p in written] == [0] * len(passes)
        for found, (user, item) in zip(written, passes, strict=True):
            for spec, keys in ((TABLES[0], user), (TABLES[1], item)):
                unique, counts = np.unique(np.array(keys, np.int64), return_counts=True)
                order = np.argsort(hash_keys(unique, spec.table_id))
                assert found.keys(spec.name).tolist() == unique[order].tolist()
                assert found.counts(spec.name).tolist() == counts[order].tolist()


def test_key_set_files_of_hugectr_are_taken_as_they_are_mapped(tmp_path: Path) -> None:
    """Both dtypes, without a copy of the file in memory."""
    rng = np.random.default_rng(0)
    keys: dict[str, NDArray[np.int64]] = {name: rng.permutation(1000)[:500] for name in ("user", "item")}
    keys["user"].astype("<u4").tofile(tmp_path / "user")
    keys["item"].astype("<i8").tofile(tmp_path / "item")
    mapped = {"user": read_key_set(tmp_path / "user", "uint32"), "item": read_key_set(tmp_path / "item", "int64")}
    written = tc.write_key_sets(tmp_path / "passes", TABLES, [mapped])
    for name, expected in keys.items():
        assert sorted(written.passes[0].keys(name).tolist()) == sorted(expected.tolist())


def test_a_changed_key_set_is_found(tmp_path: Path) -> None:
    """Verification reads key sets where there are no samples."""
    written = tc.write_key_sets(tmp_path / "passes", TABLES, [{"user": [1, 2, 3]}, {"item": [5]}])
    path = tmp_path / "passes" / "pass-00001.safetensors"
    data = bytearray(path.read_bytes())
    at = data.index((5).to_bytes(8, "little"))
    data[at] = 6
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"sub-dataset 1: .* is not what was extracted"):
        tc.PassDataset.open(written.path).verify()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"user": [-(1 << 63)]}, "INT64_MIN"),
        ({"user": [1, -(1 << 63) + 1]}, "INT64_MIN"),
        ({"usr": [1]}, "unknown table 'usr' .did you mean 'user'"),
        ({"user": [0.5]}, "are float64: keys are int64"),
        ({"user": ["bob"]}, r"are texts or objects: keys are int64, that of a text is tiercache.key_of\(text\)"),
        ({"user": np.array([1], np.uint64)}, "are uint64: keys are int64"),
        ({"user": [True]}, "are bool"),
    ],
)
def test_what_are_no_keys_is_refused_and_no_set_is_left(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    """By a sentence that names table and pass; the directory can be written to again."""
    with pytest.raises(ValueError, match=message):
        tc.write_key_sets(tmp_path / "passes", TABLES, [{}, keys])
    with pytest.raises(DatasetError, match="no dataset"):
        tc.PassDataset.open(tmp_path / "passes")
    tc.write_key_sets(tmp_path / "passes", TABLES, [{"user": [1]}])
    with pytest.raises(DatasetError, match="holds a dataset already"):
        tc.write_key_sets(tmp_path / "passes", TABLES, [{"user": [1]}])


def test_a_set_has_at_least_one_pass_and_no_samples_to_read(tmp_path: Path) -> None:
    """The error of reading samples says what to call."""
    with pytest.raises(DatasetError, match="no passes were given"):
        tc.write_key_sets(tmp_path / "none", TABLES, [])
    written = tc.write_key_sets(tmp_path / "passes", TABLES, [{"user": [1]}])
    passes = tc.InMemoryCache(written).passes(epochs=1)
    p = next(passes)
    with pytest.raises(DatasetError, match=r"no samples: give the keys of each batch to Pass\.batch"):
        list(p.batches(4))
