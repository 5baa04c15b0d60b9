"""HugeCTR's key-set files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.files import files_of
from tests.io.cases import table
from tests.store.damage import assert_sentence
from tiercache.data.from_arrays import write_dataset
from tiercache.data.raw_batch import RawBatch
from tiercache.errors import ImportExportError
from tiercache.io.key_set_file import export_key_sets, read_key_set
from tiercache.schema import Feature, Schema


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """One that is missing, a folder, one of no whole keys; and an unknown dtype."""
    with pytest.raises(ImportExportError, match=r"there is no .*keys: check the path"):
        read_key_set(tmp_path / "keys", "int64")
    with pytest.raises(ImportExportError, match="is no regular file"):
        read_key_set(tmp_path, "int64")
    (tmp_path / "keys").write_bytes(bytes(9))
    with pytest.raises(ImportExportError, match="has 9 bytes, which are no whole int64 keys"):
        read_key_set(tmp_path / "keys", "int64")
    with pytest.raises(ImportExportError, match="dtype 'int32' of a key set is unknown"):
        read_key_set(tmp_path / "keys", "int32")


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=80), dtype=st.sampled_from(["uint32", "int64"]))
def test_a_key_set_of_any_bytes_is_refused_or_read(data: bytes, dtype: str) -> None:
    """Whole keys of any value are keys; anything else is a sentence."""
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
        RawBatch.of(schema, {"f": generator.integers(0, 9, 20), "g": generator.integers(0, 99, 20)}) for _ in range(3)
    ]
    passes = write_dataset(tmp_path / "passes", schema, batches)
    export_key_sets(passes, tmp_path / "keys", "uint32")
    assert files_of(tmp_path / "keys").keys() == {f"{t}/pass-{p:05d}.keys" for t in ("t", "u%2Fv") for p in range(3)}
    for part in passes:
        for name, folder in (("t", "t"), ("u/v", "u%2Fv")):
            found = read_key_set(tmp_path / "keys" / folder / f"pass-{part.index:05d}.keys", "uint32")
            assert found.tolist() == part.keys(name).tolist()
    with pytest.raises(ImportExportError, match="exists: give the key sets a path that is free"):
        export_key_sets(passes, tmp_path / "keys")
    large = [RawBatch.of(schema, {"f": np.array([-1, 3]), "g": np.array([1, 1 << 32])})]
    with pytest.raises(ImportExportError, match="keys -1 to 3 of table 't' do not all fit uint32"):
        export_key_sets(write_dataset(tmp_path / "large", schema, large), tmp_path / "other", "uint32")
    assert not (tmp_path / "other").exists()
