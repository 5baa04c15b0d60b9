"""Sub-datasets: any samples in any order are what was written."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.data.cases import rich_schema, table
from tiercache.data.encoded_batch import FeatureIds, SampleBuffers, Samples
from tiercache.data.sample_layout import BATCH_SAMPLES, SampleLayout
from tiercache.data.samples_file import SamplesFile
from tiercache.data.samples_writer import SamplesWriter
from tiercache.errors import DatasetError
from tiercache.schema import Schema

LAYOUT = SampleLayout(rich_schema())
SINGLES = SampleLayout(
    Schema(
        features=tuple(tc.Feature(name=n, columns=(n,), table=t) for n, t in [("p", "x"), ("q", "y"), ("r", "x")]),
        tables=(table("x"), table("y", dim=8)),
    )
)


def some_samples(num_samples: int, seed: int, layout: SampleLayout = LAYOUT) -> Samples:
    """Return random samples of a layout."""
    random = np.random.default_rng(seed)
    ids: dict[str, FeatureIds] = {}
    for f in layout.schema.features:
        offsets = None
        if f.hotness != "one_hot":
            lengths = np.full(num_samples, f.length) if f.length else random.integers(0, 4, num_samples)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        size = num_samples if offsets is None else int(offsets[-1])
        weights = random.random(size, dtype=np.float32) if f.weights else None
        ids[f.name] = FeatureIds(random.integers(0, 1 << 30, size, dtype=np.int32), offsets, weights)
    return Samples(
        label=random.random(num_samples, dtype=np.float32) if layout.schema.label else None,
        dense=random.random((num_samples, len(layout.schema.dense)), dtype=np.float32),
        singles=np.empty((0, num_samples), np.int32),
        ids=ids,
    )


def write(path: Path, samples: Samples, cuts: list[int], layout: SampleLayout = LAYOUT) -> SamplesFile:
    """Write samples in several calls and open the file."""
    writer = SamplesWriter(path, layout)
    bounds = sorted({0, *cuts, samples.num_samples})
    for low, high in pairwise(bounds):
        writer.append(part_of(samples, low, high))
    writer.finish()
    return SamplesFile(path, layout)


def part_of(samples: Samples, low: int, high: int) -> Samples:
    """Return samples [low, high)."""
    ids = {}
    for name, entry in samples.ids.items():
        a, b = (low, high) if entry.offsets is None else (entry.offsets[low], entry.offsets[high])
        offsets = None if entry.offsets is None else entry.offsets[low : high + 1] - a
        ids[name] = FeatureIds(entry.ids[a:b], offsets, None if entry.weights is None else entry.weights[a:b])
    label = None if samples.label is None else samples.label[low:high]
    return Samples(label, samples.dense[low:high], samples.singles[:, low:high], ids)


def assert_read(samples: Samples, wanted: Samples, indices: np.ndarray[Any, Any]) -> None:
    """Compare what was read at ``indices`` with the samples that were written, one sample at a time."""
    assert (samples.label is None) == (wanted.label is None)
    if samples.label is not None and wanted.label is not None:
        np.testing.assert_array_equal(samples.label, wanted.label[indices])
    np.testing.assert_array_equal(samples.dense, wanted.dense[indices])
    for name, entry in samples.ids.items():
        source = wanted.ids[name]
        for mine, theirs in ((entry.ids, source.ids), (entry.weights, source.weights)):
            assert (mine is None) == (theirs is None)
            if mine is None or theirs is None:
                continue
            if entry.offsets is None or source.offsets is None:
                np.testing.assert_array_equal(mine, theirs[indices])
                continue
            rows = [theirs[source.offsets[i] : source.offsets[i + 1]] for i in indices]
            np.testing.assert_array_equal(np.diff(entry.offsets), [len(row) for row in rows])
            np.testing.assert_array_equal(mine, np.concatenate([*rows, theirs[:0]]))


@given(
    num_samples=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    seed=st.integers(0, 1000),
    picks=st.lists(st.integers(0, 10_000), max_size=80),
)
@settings(deadline=None, max_examples=40)
def test_samples_come_back_in_any_order(num_samples: int, cuts: list[int], seed: int, picks: list[int]) -> None:
    """Every feature, label, weight and offset of every index, repeated or not, is what was written."""
    samples = some_samples(num_samples, seed)
    indices = np.array(picks, dtype=np.int64) % num_samples
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder) / "s", samples, [c for c in cuts if c < num_samples])
        assert_read(file.read(indices), samples, indices)


def test_some_features_come_back_alone(tmp_path: Path) -> None:
    """Those that were asked for, in the schema's order, as when all are read; label and dense too."""
    samples, indices = some_samples(50, 3), np.array([7, 0, 49, 7])
    file = write(tmp_path / "s", samples, [20])
    names = [feature.name for feature in LAYOUT.schema.features]
    for wanted in (names[::2], names[1::2], names[:1], []):
        found = file.read(indices, features=wanted)
        assert list(found.ids) == wanted
        assert_read(found, samples, indices)


def test_samples_come_back_across_record_batches(tmp_path: Path) -> None:
    """Indices reach into every record batch, the short last one too; cuts into calls change no byte."""
    num_samples = 2 * BATCH_SAMPLES + 777
    samples = some_samples(num_samples, 1)
    file = write(tmp_path / "one", samples, [])
    other = write(tmp_path / "many", samples, [5, 40_000, BATCH_SAMPLES, BATCH_SAMPLES + 1, 100_000])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()
    assert file.digest() == other.digest()
    assert file.batch_sizes.tolist() == [BATCH_SAMPLES, BATCH_SAMPLES, 777]
    indices = np.random.default_rng(2).permutation(num_samples)[:5000]
    indices[:4] = [0, BATCH_SAMPLES - 1, BATCH_SAMPLES, num_samples - 1]
    assert_read(file.read(indices), samples, indices)


def test_features_with_one_id_lie_side_by_side_group_by_group(tmp_path: Path) -> None:
    """``singles`` is one contiguous array whose rows are the features' ids, those of a group next to each other."""
    samples = some_samples(100, 3, SINGLES)
    read = write(tmp_path / "s", samples, [], SINGLES).read(np.arange(50, 100))
    tables = [f.table for f in SINGLES.singles]
    assert tables in (["x", "x", "y"], ["y", "x", "x"])
    assert read.singles.flags.c_contiguous
    assert read.label is None
    assert read.dense.shape == (50, 0)
    for row, feature in zip(read.singles, SINGLES.singles, strict=True):
        assert np.shares_memory(row, read.ids[feature.name].ids)
        np.testing.assert_array_equal(row, samples.ids[feature.name].ids[50:])


@pytest.mark.parametrize("wanted", [["p"], ["q"], ["r", "p"], ["q", "r"]])
def test_some_features_with_one_id_come_back_alone(tmp_path: Path, wanted: list[str]) -> None:
    """They stand in the file beside those that were not asked for, which are passed over."""
    samples = some_samples(100, 3, SINGLES)
    indices = np.array([99, 0, 7, 7, 50])
    found = write(tmp_path / "s", samples, [], SINGLES).read(indices, features=wanted)
    assert sorted(found.ids) == sorted(wanted)
    for name, some in found.ids.items():
        np.testing.assert_array_equal(some.ids, samples.ids[name].ids[indices])


def test_buffers_are_filled_again(tmp_path: Path) -> None:
    """A second read into the same buffers uses the same memory, a larger one grows it, and both are right."""
    samples = some_samples(1000, 4)
    file, buffers = write(tmp_path / "s", samples, []), SampleBuffers()
    first = file.read(np.arange(64), buffers)
    second = file.read(np.arange(500, 564), buffers)
    assert np.shares_memory(first.singles, second.singles)
    assert np.shares_memory(first.dense, second.dense)
    assert_read(second, samples, np.arange(500, 564))
    everything = np.arange(1000)[::-1]
    assert_read(file.read(everything, buffers), samples, everything)


@pytest.mark.parametrize("indices", [[-1], [0, 10], [1 << 40]])
def test_indices_outside_the_file_are_refused(tmp_path: Path, indices: list[int]) -> None:
    """No read ever leaves the file."""
    file = write(tmp_path / "s", some_samples(10, 5), [])
    with pytest.raises(IndexError, match="has 10: indices start at 0"):
        file.read(np.array(indices))


def test_no_indices_are_no_samples(tmp_path: Path) -> None:
    """An empty batch has arrays of length 0."""
    read = write(tmp_path / "s", some_samples(10, 6), []).read(np.empty(0, np.int64))
    assert read.num_samples == 0
    assert read.ids["tags"].offsets is not None
    assert read.ids["tags"].offsets.tolist() == [0]


def test_a_sub_dataset_is_plain_arrow(tmp_path: Path) -> None:
    """Any Arrow reader sees the columns, with the features' names in the metadata."""
    samples = some_samples(10, 7)
    write(tmp_path / "s", samples, [])
    read = pa.ipc.open_file(tmp_path / "s").read_all()
    assert read.column_names == [
        "label",
        "dense",
        "ids",
        "ids:pair",
        "ids:tags",
        "weights:pair",
        "weights:tags",
        "weights:b",
    ]
    assert read.schema.field("ids").metadata == {b"columns": b'["a", "b"]'}
    offsets = samples.ids["tags"].offsets
    assert offsets is not None
    assert read["ids:tags"][3].as_py() == samples.ids["tags"].ids[offsets[3] : offsets[4]].tolist()


def test_samples_of_another_layout_are_refused(tmp_path: Path) -> None:
    """A file is never read by a schema that it was not written for."""
    write(tmp_path / "s", some_samples(10, 8), [])
    other = SampleLayout(Schema(features=(tc.Feature(name="a"),), tables=(table("a"),)))
    with pytest.raises(DatasetError, match="of another schema"):
        SamplesFile(tmp_path / "s", other)
    (tmp_path / "s").write_bytes((tmp_path / "s").read_bytes()[:-20])
    with pytest.raises(DatasetError, match="cannot be read"):
        SamplesFile(tmp_path / "s", LAYOUT)
