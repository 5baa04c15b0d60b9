"""Sub-datasets: samples in any order, or key sets alone, equal the written ones; damage is found before use."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.data.cases import rich_schema, table
from tests.datasets import write_sub_dataset
from tiercache.data import array_file, dataset_writer
from tiercache.data.raw_batch import FeatureKeys, RawBatch
from tiercache.data.sample_layout import SampleLayout
from tiercache.data.sub_dataset import SampleBuffers, SubDataset
from tiercache.errors import DatasetError
from tiercache.io.key_set_file import read_key_set
from tiercache.kernels.cpu.hashing import hash_keys
from tiercache.schema import Schema

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.data.sub_dataset import EncodedBatch

RICH = rich_schema()
SINGLES = Schema(
    features=tuple(tc.Feature(name=n, columns=(n,), table=t) for n, t in [("p", "x"), ("q", "y"), ("r", "x")]),
    tables=(table("x"), table("y", dim=8)),
)


def some_samples(num_samples: int, seed: int, schema: Schema = RICH) -> RawBatch:
    """Return random samples of a schema."""
    random = np.random.default_rng(seed)
    features: dict[str, FeatureKeys] = {}
    for f in schema.features:
        offsets = None
        if f in schema.lists:
            lengths = np.full(num_samples, f.length) if f.length else random.integers(0, 4, num_samples)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        size = num_samples if offsets is None else int(offsets[-1])
        weights = random.random(size, dtype=np.float32) if f.weights else None
        features[f.name] = FeatureKeys(random.integers(-50, 50, size), offsets, weights)
    label = random.random(num_samples, dtype=np.float32) if schema.label else None
    dense = random.random((num_samples, len(schema.dense)), dtype=np.float32)
    columns = {one.name: random.integers(-99, 99, num_samples).astype(one.dtype) for one in schema.kept}
    return RawBatch(label, dense, features, columns)


def write(folder: Path, samples: RawBatch, schema: Schema = RICH) -> SubDataset:
    """Write samples and open them."""
    return SubDataset(folder, 0, write_sub_dataset(folder, 0, schema, samples), SampleLayout(schema))


def assert_read(one: SubDataset, samples: EncodedBatch, wanted: RawBatch, indices: Any, schema: Schema = RICH) -> None:
    """Compare the samples read at ``indices`` with the written ones, one at a time."""
    assert (samples.label is None) == (wanted.label is None)
    if samples.label is not None and wanted.label is not None:
        np.testing.assert_array_equal(samples.label, wanted.label[indices])
    np.testing.assert_array_equal(samples.dense, wanted.dense[indices])
    assert samples.columns.keys() == wanted.columns.keys()
    for name, column in samples.columns.items():
        assert column.dtype == wanted.columns[name].dtype
        np.testing.assert_array_equal(column, wanted.columns[name][indices])
    for name, entry in samples.ids.items():
        source = wanted.features[name]
        keys = one.keys(schema.feature(name).table)[entry.ids]
        for mine, theirs in ((keys, source.keys), (entry.weights, source.weights)):
            assert (mine is None) == (theirs is None)
            if mine is None or theirs is None:
                continue
            if entry.offsets is None or source.offsets is None:
                np.testing.assert_array_equal(mine, theirs[indices])
                continue
            rows = [theirs[source.offsets[i] : source.offsets[i + 1]] for i in indices]
            np.testing.assert_array_equal(entry.offsets, np.cumsum([0, *(len(row) for row in rows)]))
            np.testing.assert_array_equal(mine, np.concatenate([*rows, theirs[:0]]))


@given(
    num_samples=st.integers(1, 60),
    seed=st.integers(0, 1000),
    picks=st.lists(st.integers(0, 10_000), max_size=80),
    block=st.sampled_from([64, 1000, 1 << 20]),
)
@settings(deadline=None, max_examples=15)
def test_samples_come_back_in_any_order(num_samples: int, seed: int, picks: list[int], block: int) -> None:
    """Every feature, label, weight and offset of any indices, repeated or not, in any blocks."""
    samples = some_samples(num_samples, seed)
    indices = np.array(picks, dtype=np.int64) % num_samples
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(array_file, "BLOCK_BYTES", block)
        one = write(Path(folder), samples)
        assert_read(one, one.read(indices), samples, indices)


def test_some_features_come_back_alone(tmp_path: Path) -> None:
    """The requested ones, in the schema's order, as when all are read; also label and dense."""
    samples, indices = some_samples(50, 3), np.array([7, 0, 49, 7])
    one = write(tmp_path, samples)
    names = [feature.name for feature in RICH.features]
    for wanted in (names[::2], names[1::2], names[:1], []):
        found = one.read(indices, features=wanted)
        assert list(found.ids) == wanted
        assert_read(one, found, samples, indices)


def test_buffers_are_filled_again(tmp_path: Path) -> None:
    """A second read into the same buffers reuses the memory, a larger one grows it, and both are right."""
    samples, buffers = some_samples(1000, 4), SampleBuffers()
    one = write(tmp_path, samples)
    first = one.read(np.arange(64), buffers)
    second = one.read(np.arange(500, 564), buffers)
    assert np.shares_memory(first.ids["a"].ids, second.ids["a"].ids)
    assert_read(one, second, samples, np.arange(500, 564))
    everything = np.arange(1000)[::-1]
    assert_read(one, one.read(everything, buffers), samples, everything)


@pytest.mark.parametrize("indices", [[-1], [0, 10], [1 << 40]])
def test_indices_outside_the_sub_dataset_are_refused(tmp_path: Path, indices: list[int]) -> None:
    """No read ever leaves the file."""
    with pytest.raises(IndexError, match="has 10: indices start at 0"):
        write(tmp_path, some_samples(10, 5)).read(np.array(indices))


def test_a_sub_dataset_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    """The rules of the format find every array: a header of JSON, then contiguous arrays."""
    samples = some_samples(10, 7)
    data = write(tmp_path, samples).path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__")
    assert json.loads(metadata["ids"]) == ["a", "b"]
    assert [*header][-1] == "checksums"
    end = 0
    for name, entry in header.items():
        begin, last = entry["data_offsets"]
        kind = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "F32": "<f4", "U64": "<u8"}[entry["dtype"]]
        array = np.frombuffer(data[8 + size + begin : 8 + size + last], kind).reshape(entry["shape"])
        assert begin == end
        end = last
        if name == "label":
            np.testing.assert_array_equal(array, samples.label)
        if name == "offsets.tags":
            np.testing.assert_array_equal(array, samples.features["tags"].offsets)
        if name == "column.group":
            np.testing.assert_array_equal(array, samples.columns["group"])
    assert 8 + size + end == len(data)


@pytest.mark.parametrize("block", [256, 1 << 20])
def test_every_flipped_bit_is_found_before_it_is_used(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading everything and verifying name the file; data outside the damaged block can still be read."""
    monkeypatch.setattr(array_file, "BLOCK_BYTES", block)
    samples, indices = some_samples(60, 8), np.arange(60)
    one = write(tmp_path, samples)
    written = one.path.read_bytes()
    rng, whole = np.random.default_rng(9), 0
    for at in rng.integers(0, len(written), 400).tolist():
        data = bytearray(written)
        data[at] ^= 1 << int(rng.integers(8))
        one.path.unlink()
        one.path.write_bytes(data)
        one.close()
        with pytest.raises(DatasetError, match=r"pass-00000.safetensors is not what was extracted \(.*: delete the"):
            one.verify()
        one.close()
        try:
            one.keys("unused")
            read = one.read(indices[:1])
            assert_read(one, read, samples, indices[:1])
        except DatasetError:
            continue
        whole += 1
    assert (whole > 0) == (block == 256)


def test_a_file_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are checked when they are first read, and never again; verify checks all."""
    monkeypatch.setattr(array_file, "BLOCK_BYTES", 1 << 10)
    checked: list[int] = []
    checksum = array_file._checksum
    one = write(tmp_path, some_samples(4000, 1))
    monkeypatch.setattr(array_file, "_checksum", lambda data: (checked.append(data.size), checksum(data))[1])
    one.read(np.arange(10))
    few = len(checked)
    one.read(np.arange(10))
    assert len(checked) == few
    one.read(np.arange(4000))
    everything = len(checked)
    one.read(np.arange(4000)[::-1])
    assert few < everything == len(checked)
    one.verify()
    assert len(checked) > 2 * everything - few


USERS = (table("user"), table("item", dim=8))
USER_KEYS = st.lists(st.one_of(st.integers(-(1 << 63) + 2, (1 << 63) - 1), st.integers(-3, 3)), max_size=20)


def forms(keys: list[int]) -> list[Any]:
    """Return the same keys in every accepted form."""
    array = np.array(keys, np.int64)
    return [array, keys, torch.from_numpy(array.copy()), iter([array[:3], array[3:3], torch.from_numpy(array[3:])])]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(USER_KEYS, USER_KEYS), min_size=1, max_size=3), st.integers(0, 3), st.integers(1, 4))
def test_key_sets_are_the_unique_keys_in_hash_order_with_counts(
    passes: list[tuple[list[int], list[int]]], form: int, chunk: int
) -> None:
    """In any order and form, in any stretches; the digest depends on nothing else."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_writer, "_CHUNK_KEYS", chunk)
        given = ({"user": forms(user)[form], "item": forms(item)[form]} for user, item in passes)
        written = tc.write_key_sets(Path(folder) / "a", USERS, given)
        backwards = [{"item": item[::-1], "user": user[::-1]} for user, item in passes]
        again = tc.write_key_sets(Path(folder) / "b", USERS, backwards)
        assert again.digest == written.digest
        written.verify()
        assert [p.samples for p in written] == [0] * len(passes)
        for found, (user, item) in zip(written, passes, strict=True):
            for spec, keys in ((USERS[0], user), (USERS[1], item)):
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
    written = tc.write_key_sets(tmp_path / "passes", USERS, [mapped])
    for name, expected in keys.items():
        assert sorted(written.passes[0].keys(name).tolist()) == sorted(expected.tolist())


def test_a_changed_key_set_is_found(tmp_path: Path) -> None:
    """Verification also reads key sets of datasets without samples."""
    written = tc.write_key_sets(tmp_path / "passes", USERS, [{"user": [1, 2, 3]}, {"item": [5]}])
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
        ({"user": ["bob"]}, r"are strings or objects: keys are int64, use tiercache.key_of\(text\) for strings"),
        ({"user": np.array([1], np.uint64)}, "are uint64: keys are int64"),
        ({"user": [True]}, "are bool"),
    ],
)
def test_what_are_no_keys_is_refused_and_no_set_is_left(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    """The message names table and pass; the directory can be written to again."""
    with pytest.raises(ValueError, match=message):
        tc.write_key_sets(tmp_path / "passes", USERS, [{}, keys])
    with pytest.raises(DatasetError, match="no dataset"):
        tc.PassDataset.open(tmp_path / "passes")
    tc.write_key_sets(tmp_path / "passes", USERS, [{"user": [1]}])
    with pytest.raises(DatasetError, match="holds a dataset already"):
        tc.write_key_sets(tmp_path / "passes", USERS, [{"user": [1]}])


def test_a_set_has_at_least_one_pass_and_no_samples_to_read(tmp_path: Path) -> None:
    """The error of reading samples says what to call."""
    with pytest.raises(DatasetError, match="no passes were given"):
        tc.write_key_sets(tmp_path / "none", USERS, [])
    written = tc.write_key_sets(tmp_path / "passes", USERS, [{"user": [1]}])
    passes = tc.InMemoryCache(written).passes(epochs=1)
    p = next(passes)
    with pytest.raises(DatasetError, match=r"no samples: pass the keys of each batch to Pass\.batch"):
        list(p.batches(4))
