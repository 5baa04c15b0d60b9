"""Datasets: their content, and detection of incomplete ones."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tiercache as tc
from tests.data.cases import key_batch, plain_schema, reference, rich_columns, rich_schema, table
from tests.datasets import raw_batch, write_dataset
from tests.files import flip
from tiercache.data.array_file import ArrayFile, ArrayFileWriter
from tiercache.data.dataset import PassDataset
from tiercache.data.manifest import checksum_of
from tiercache.data.sample_layout import SampleLayout
from tiercache.errors import DatasetError
from tiercache.store.bits import hash_keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def small(tmp_path: Path) -> PassDataset:
    """Return a set of two passes of the rich schema."""
    return reference(tmp_path / "passes", rich_schema(), rich_columns(300), [0, 100, 300])


def test_key_sets_are_in_hash_order_with_counts(small: PassDataset) -> None:
    """A table's keys are distinct, in the order of unsigned hashes, and counted over all features that share it."""
    schema, columns = rich_schema(), rich_columns(300)
    for p, (low, high) in zip(small, [(0, 100), (100, 300)], strict=True):
        batch = key_batch(schema, columns, low, high)
        for spec in small.tables:
            keys = p.keys(spec.name)
            hashes = hash_keys(keys, spec.table_id)
            assert np.all(hashes[1:] > hashes[:-1])
            counts = Counter[int]()
            for f in schema.features:
                counts.update(batch.features[f.name].keys.tolist() if f.table == spec.name else ())
            assert counts == dict(zip(keys.tolist(), p.counts(spec.name).tolist(), strict=True))
            assert p.rows(spec.name) == keys.size


def test_the_digest_is_about_content(tmp_path: Path, small: PassDataset) -> None:
    """The same samples have the same digest everywhere; another sample, pass boundary or meaning changes it."""
    schema, columns = rich_schema(), rich_columns(300)
    assert reference(tmp_path / "same", schema, columns, [0, 100, 300]).digest == small.digest
    assert reference(tmp_path / "cut", schema, columns, [0, 101, 300]).digest != small.digest
    one_label = {**columns, "y": np.where(np.arange(300) == 7, 1 - columns["y"], columns["y"])}
    assert reference(tmp_path / "label", schema, one_label, [0, 100, 300]).digest != small.digest
    meaning = replace(schema, features=(replace(schema.features[0], null="embed"), *schema.features[1:]))
    assert reference(tmp_path / "null", meaning, columns, [0, 100, 300]).digest != small.digest
    trained = replace(schema, tables=tuple(replace(t, optimizer=tc.optim.Adam()) for t in schema.tables))
    assert reference(tmp_path / "adam", trained, columns, [0, 100, 300]).digest == small.digest


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_dataset_goes_to_other_processes(small: PassDataset, copied: Callable[[PassDataset], PassDataset]) -> None:
    """As the workers of a loader need it that are not forked."""
    small.passes[0].keys(small.tables[0].name)
    other = copied(small)
    assert (other.path, other.digest, other.schema) == (small.path, small.digest, small.schema)
    for mine, its in zip(small, other, strict=True):
        for spec in small.tables:
            np.testing.assert_array_equal(mine.keys(spec.name), its.keys(spec.name))
        places = np.arange(mine.samples)
        np.testing.assert_array_equal(mine.read(places).label, its.read(places).label)


def test_a_pass_can_be_closed_and_read_again(small: PassDataset) -> None:
    """Close releases the maps; arrays that refer to them stay valid, and the next use opens them again."""
    p = small.passes[0]
    keys, before = p.keys("a"), p.read(np.arange(5)).ids["a"].ids.copy()
    p.close()
    assert keys.tolist() == p.keys("a").tolist()
    np.testing.assert_array_equal(p.read(np.arange(5)).ids["a"].ids, before)
    p.prefetch()


def test_a_whole_dataset_verifies_and_a_changed_byte_is_found(small: PassDataset) -> None:
    """Verify reads everything, reports progress, and names the sub-dataset with changed content."""
    told: list[tuple[int, int]] = []
    small.verify(lambda done, total: told.append((done, total)))
    assert told[-1] == (small.num_bytes, small.num_bytes)
    path = small.path / "pass-00001.safetensors"
    flip(path, path.stat().st_size // 2)
    with pytest.raises(DatasetError, match=r"sub-dataset 1: .*pass-00001.safetensors is not what was extracted"):
        PassDataset.open(small.path).verify()


def forged(small: PassDataset, array: str, at: int, value: int) -> PassDataset:
    """Write a number into an array of the first sub-dataset, with matching checksums and digests."""
    small = PassDataset.open(small.path)
    one = small.passes[0]
    layout = SampleLayout(small.schema).file(one.samples, one._record.rows, one._record.values)
    file, writer = ArrayFile(one.path, layout, one.digest), ArrayFileWriter(one.path.with_suffix(".new"), layout)
    for name in layout.specs:
        values = file.array(name).copy()
        if name == array:
            values.reshape(-1)[at] = value
        writer.write(name, 0, values)
    digest = writer.finish()
    one.path.with_suffix(".new").replace(one.path)
    record = one._record.model_copy(update={"digest": digest})
    replace(small.manifest, passes=(record, *small.manifest.passes[1:])).write(small.path)
    return PassDataset.open(small.path)


def test_numbers_of_the_manifest_are_those_of_the_files(small: PassDataset) -> None:
    """Rows and samples of a sub-dataset determine the offsets of its arrays: other numbers do not match the file
    size.
    """
    path = small.path / "dataset.json"
    record = json.loads(path.read_text())

    def write() -> None:
        path.write_text(json.dumps(record | {"checksum": checksum_of(record)}))

    record["passes"][0]["samples"] += 1
    write()
    with pytest.raises(DatasetError, match=r"pass-00000.safetensors has \d+ bytes, not \d+: delete"):
        PassDataset.open(small.path)
    record["passes"][0]["samples"] -= 1
    rows = record["passes"][1]["rows"]
    rows["a"], rows["b"] = rows["b"], rows["a"]
    write()
    with pytest.raises(DatasetError, match=r"sub-dataset 1: .* is not what was extracted \(its header does not match"):
        PassDataset.open(small.path).passes[1].keys("b")
    del record["passes"][1]["rows"]["unused"]
    write()
    with pytest.raises(DatasetError, match="the rows of a pass are of the tables a, b: delete"):
        PassDataset.open(small.path)


@pytest.mark.parametrize(
    ("array", "at", "feature", "name"),
    [("ids", 1, "b", "b"), ("ids.pair", 0, "pair", "b"), ("ids.tags", 0, "tags", "a")],
)
def test_an_id_outside_its_key_set_is_named(small: PassDataset, array: str, at: int, feature: str, name: str) -> None:
    """Written by a faulty machine with correct checksums; other features can be read."""
    rows = small.passes[0].rows(name)
    for bad in (-1, rows, (1 << 31) - 1):
        one = forged(small, array, at, bad).passes[0]
        said = f"sub-dataset 0: feature '{feature}' has the id {bad} in {one.path}, but table '{name}' has ids 0 to "
        with pytest.raises(DatasetError, match=f"{said}{rows - 1}: delete"):
            one.read(np.arange(100))
        others = {f.name for f in small.schema.features} - {feature}
        assert one.read(np.arange(100), features=others).ids.keys() == others


def test_a_list_outside_its_values_is_named(small: PassDataset) -> None:
    """An end before the begin, a begin below 0, or an end after the values; other samples can be read."""
    samples = small.passes[0].read(np.arange(100)).ids["tags"]
    assert samples.offsets is not None
    offsets, size = samples.offsets.copy(), samples.num_ids
    for bad in (-1, int(offsets[9]) + size, 1 << 62, -(1 << 63)):
        one = forged(small, "offsets.tags", 10, bad).passes[0]
        said = f"feature 'tags' of sample 9 in {one.path} has the values {offsets[9]} to {bad}, but there are {size}: "
        with pytest.raises(DatasetError, match=f"{said}delete"):
            one.read(np.array([3, 9, 4]))
        with pytest.raises(DatasetError, match=f"of sample 10 .* has the values {bad} to {offsets[11]},"):
            one.read(np.arange(10, 12))
        assert one.read(np.array([8, 11])).num_samples == 2


@pytest.mark.parametrize("name", ["pass-00000.safetensors", "pass-00001.safetensors"])
def test_a_truncated_or_missing_file_is_named_on_open(small: PassDataset, name: str) -> None:
    """Open checks the size of every file before anything is read."""
    path = small.path / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DatasetError, match=f"{name} has {size - 1} bytes, not {size}"):
        PassDataset.open(small.path)
    path.unlink()
    with pytest.raises(DatasetError, match=f"lacks {name}"):
        PassDataset.open(small.path)


def test_what_is_no_dataset_is_refused(tmp_path: Path, small: PassDataset) -> None:
    """A directory without a manifest, or with an edited one, is named with a remedy."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "passes.json").touch()
    with pytest.raises(DatasetError, match="has the format of an older tiercache: delete it and extract it again"):
        PassDataset.open(tmp_path / "old")
    with pytest.raises(DatasetError, match=r"no dataset found in .*: extract it first"):
        PassDataset.open(tmp_path)
    (tmp_path / "half" / "unfinished").mkdir(parents=True)
    with pytest.raises(DatasetError, match=r"is unfinished: run the same extraction again"):
        PassDataset.open(tmp_path / "half")
    manifest = small.path / "dataset.json"
    record = json.loads(manifest.read_text())
    record["passes"][0]["digest"] = "0" * 64
    manifest.write_text(json.dumps(record))
    with pytest.raises(DatasetError, match="does not match its own digest"):
        PassDataset.open(small.path)
    manifest.write_text(json.dumps({**record, "version": 99}))
    with pytest.raises(DatasetError, match="version 99, this tiercache reads 2"):
        PassDataset.open(small.path)
    record["passes"][0]["digest"] = small.passes[0].digest
    record["schema"]["tables"][0]["seed"] ^= 1  # not part of the digest
    manifest.write_text(json.dumps(record))
    with pytest.raises(DatasetError, match="does not match its own checksum: delete the dataset"):
        PassDataset.open(small.path)
    manifest.write_text("{")
    with pytest.raises(DatasetError, match=r"dataset.json cannot be read"):
        PassDataset.open(small.path)
    manifest.unlink()
    manifest.mkdir()
    with pytest.raises(DatasetError, match=r"dataset.json cannot be read \(it is not a regular file"):
        PassDataset.open(small.path)


def test_a_dataset_of_another_schema_is_refused(small: PassDataset) -> None:
    """check_schema accepts other training parameters and names other differences."""
    schema = rich_schema()
    small.check_schema(replace(schema, tables=tuple(replace(t, dim=7) for t in schema.tables)))
    otherwise = replace(schema.features[0], null="embed"), *schema.features[1:]
    for other, what in (
        (plain_schema(), "other dense columns"),
        (replace(schema, label="z"), "other label"),
        (replace(schema, features=schema.features[:2]), "other features"),
        (replace(schema, tables=(*schema.tables, table("new"))), "other tables"),
        (replace(schema, features=otherwise), "feature 'a' is described differently"),
    ):
        with pytest.raises(DatasetError, match=f"a different schema \\({what}\\)"):
            small.check_schema(other)


def test_a_hand_made_set_is_never_overwritten(tmp_path: Path, small: PassDataset) -> None:
    """Writing to an existing dataset is refused."""
    batch = raw_batch(plain_schema(), {"a": [1, 2]}, label=[0, 1])
    with pytest.raises(DatasetError, match="holds a dataset already"):
        write_dataset(small.path, plain_schema(), [batch])
    assert len(write_dataset(tmp_path / "new", plain_schema(), [batch])) == 1
