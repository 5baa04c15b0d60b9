"""Whatever an export's manifest says: a sentence, or the rows; nothing else happens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.io.cases import all_tables, filled, random_rows
from tests.store.damage import LIES, assert_sentence, places
from tiercache.errors import ImportExportError
from tiercache.io.export_manifest import MANIFEST, ExportManifest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest of an export."""
    folder = tmp_path_factory.mktemp("out") / "numpy"
    tables = all_tables()
    with filled(None, tables, random_rows(tables, [5] * len(tables))) as store:
        tc.export_store(store, folder, format="numpy")
    return folder / MANIFEST


def found(path: Path, data: bytes) -> None:
    """Read a manifest of these bytes: it can be written again, or is refused with a sentence."""
    path.write_bytes(data)
    try:
        read = ExportManifest.find(path.parent)
    except ImportExportError as error:
        assert_sentence(error)
    else:
        assert read is not None
        path.write_bytes(read.to_bytes())
        assert ExportManifest.find(path.parent) == read


@settings(max_examples=400, deadline=None)
@given(which=st.integers(0, 1 << 16), lie=st.sampled_from(LIES), gone=st.booleans())
def test_a_manifest_with_any_value_is_refused_or_read(
    manifest: Path, tmp_path_factory: pytest.TempPathFactory, which: int, lie: Any, gone: bool
) -> None:
    """One value for another, or gone; what is read can be written and read again."""
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
    found(tmp_path_factory.getbasetemp() / MANIFEST, json.dumps(record).encode())


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 1 << 16), cut=st.integers(0, 40), put=st.binary(max_size=40), alone=st.booleans())
def test_a_manifest_with_any_bytes_is_refused_or_read(
    manifest: Path, tmp_path_factory: pytest.TempPathFactory, at: int, cut: int, put: bytes, alone: bool
) -> None:
    """Some of its bytes for others, or others alone."""
    written = manifest.read_bytes()
    at %= len(written) + 1
    data = put if alone else written[:at] + put + written[at + cut :]
    found(tmp_path_factory.getbasetemp() / MANIFEST, data)
