"""HugeCTR's key-set files and manifests of exports: any bytes are read or refused with a message."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.datasets import raw_batch, write_dataset
from tests.files import files_of
from tests.io.cases import all_tables, filled, random_rows, table
from tests.store.damage import LIES, assert_sentence, places
from tiercache.errors import ImportExportError
from tiercache.io.exporting import MANIFEST, ExportManifest
from tiercache.io.key_set_file import export_key_sets, read_key_set
from tiercache.schema import Feature, Schema


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportExportError, match=r"keys does not exist: check the path"):
        read_key_set(tmp_path / "keys", "int64")
    with pytest.raises(ImportExportError, match="is not a regular file"):
        read_key_set(tmp_path, "int64")
    (tmp_path / "keys").write_bytes(bytes(9))
    with pytest.raises(ImportExportError, match="has 9 bytes, not whole int64 keys"):
        read_key_set(tmp_path / "keys", "int64")
    with pytest.raises(ImportExportError, match="unknown dtype 'int32' of a key set"):
        read_key_set(tmp_path / "keys", "int32")


@settings(max_examples=60)
@given(data=st.binary(max_size=80), dtype=st.sampled_from(["uint32", "int64"]))
def test_a_key_set_of_any_bytes_is_refused_or_read(data: bytes, dtype: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "keys"
        path.write_bytes(data)
        size = {"uint32": 4, "int64": 8}[dtype]
        try:
            found = read_key_set(path, dtype)
        except ImportExportError as error:
            assert len(data) % size
            assert_sentence(error)
        else:
            assert found.dtype == dtype
            assert isinstance(found, np.memmap) == bool(data)
            assert not data or not found.flags.writeable
            assert found.astype(f"<{found.dtype.kind}{size}").tobytes() == data


def test_the_key_sets_of_passes_are_exported(tmp_path: Path) -> None:
    """One file for each table and pass, with the keys in hash order."""
    schema = Schema(
        features=(Feature(name="f", table="t"), Feature(name="g", table="u/v")),
        tables=(table("t", 2, "sgd"), table("u/v", 2, "sgd")),
    )
    generator = np.random.default_rng(0)
    batches = [
        raw_batch(schema, {"f": generator.integers(0, 9, 20), "g": generator.integers(0, 99, 20)}) for _ in range(3)
    ]
    passes = write_dataset(tmp_path / "passes", schema, batches)
    export_key_sets(passes, tmp_path / "keys", "uint32")
    assert files_of(tmp_path / "keys").keys() == {f"{t}/pass-{p:05d}.keys" for t in ("t", "u%2Fv") for p in range(3)}
    for part in passes:
        for name, folder in (("t", "t"), ("u/v", "u%2Fv")):
            found = read_key_set(tmp_path / "keys" / folder / f"pass-{part.index:05d}.keys", "uint32")
            assert found.tolist() == part.keys(name).tolist()
    with pytest.raises(ImportExportError, match="exists: choose another path for the key sets"):
        export_key_sets(passes, tmp_path / "keys")
    large = [raw_batch(schema, {"f": np.array([-1, 3]), "g": np.array([1, 1 << 32])})]
    with pytest.raises(ImportExportError, match="keys -1 to 3 of table 't' do not all fit uint32"):
        export_key_sets(write_dataset(tmp_path / "large", schema, large), tmp_path / "other", "uint32")
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "numpy"
    tables = all_tables()
    with filled(None, tables, random_rows(tables, [5] * len(tables))) as store:
        tc.export_store(store, folder, format="numpy")
    return folder / MANIFEST


def check_manifest(path: Path, data: bytes) -> None:
    """Read a manifest of these bytes: it can be written again, or is refused with a message."""
    path.write_bytes(data)
    try:
        read = ExportManifest.find(path.parent)
    except ImportExportError as error:
        assert_sentence(error)
    else:
        assert read is not None
        path.write_bytes(read.to_bytes())
        assert ExportManifest.find(path.parent) == read


@settings(max_examples=400)
@given(which=st.integers(0, 1 << 16), lie=st.sampled_from(LIES), gone=st.booleans())
def test_a_manifest_of_any_value(
    manifest: Path, tmp_path_factory: pytest.TempPathFactory, which: int, lie: Any, gone: bool
) -> None:
    record: Any = json.loads(manifest.read_bytes())
    all_places = list(places(record))
    *path, key = all_places[which % len(all_places)]
    inner = record
    for step in path:
        inner = inner[step]
    if gone:
        del inner[key]
    else:
        inner[key] = lie
    check_manifest(tmp_path_factory.getbasetemp() / MANIFEST, json.dumps(record).encode())


@given(at=st.integers(0, 1 << 16), cut=st.integers(0, 40), put=st.binary(max_size=40), alone=st.booleans())
def test_a_manifest_with_any_bytes_is_refused_or_read(
    manifest: Path, tmp_path_factory: pytest.TempPathFactory, at: int, cut: int, put: bytes, alone: bool
) -> None:
    written = manifest.read_bytes()
    at %= len(written) + 1
    data = put if alone else written[:at] + put + written[at + cut :]
    check_manifest(tmp_path_factory.getbasetemp() / MANIFEST, data)
