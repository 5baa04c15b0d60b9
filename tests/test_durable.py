"""Every file of a finished dataset or export was synced after its last write, and its folder was synced."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tests.io.test_overlay import trained

Synced = set[tuple[int, int]]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Synced:
    found: Synced = set()

    def recording(sync: Any) -> Any:
        def call(handle: Any) -> None:
            sync(handle)
            status = os.fstat(handle if isinstance(handle, int) else handle.fileno())
            found.add((status.st_ino, status.st_mtime_ns))

        return call

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, recording(getattr(os, name)))
    return found


def unsynced(synced: Synced, *paths: Path) -> list[str]:
    """Return files whose last change is not on disk, and folders never synced: they may lose temporary files later."""
    every, folders = [one for path in paths for one in (path, *path.rglob("*"))], {inode for inode, _ in synced}
    assert any(one.is_file() for one in every)
    changes = {one: (one.stat().st_ino, one.stat().st_mtime_ns) for one in every}
    return [one.name for one, at in changes.items() if (at[0] not in folders if one.is_dir() else at not in synced)]


def test_a_dataset(tmp_path: Path, synced: Synced) -> None:
    schema = tc.Schema(features=(tc.Feature(name="user"),), tables=(tc.Table(name="user"),), label=None, dense=())
    pq.write_table(pa.table({"user": np.arange(3000)}), tmp_path / "data.parquet")
    out = tmp_path / "out"
    options = {"device_budget": "1GiB", "split_by": "rows=1000", "batch_multiple": 1, "progress": False}
    tc.extract(tmp_path / "data.parquet", schema, out, **options)
    assert len(tc.PassDataset.open(out)) == 3
    assert unsynced(synced, out) == []
    pq.write_table(pa.table({"user": np.arange(500)}), tmp_path / "more.parquet")
    tc.extract([tmp_path / "data.parquet", tmp_path / "more.parquet"], schema, out, append=True, **options)
    assert len(tc.PassDataset.open(out)) == 4
    assert unsynced(synced, out) == []
    tc.write_key_sets(tmp_path / "keys", schema, [{"user": np.arange(10)}, {"user": np.arange(20)}])
    assert unsynced(synced, tmp_path / "keys") == []


@pytest.mark.parametrize("format", ["numpy", "parquet", "safetensors", "torch"])
def test_an_export(tmp_path: Path, synced: Synced, format: str) -> None:  # noqa: A002
    tc.export_store(trained(tmp_path), tmp_path / "out", format=format)
    assert unsynced(synced, tmp_path / "out") == []


@pytest.mark.parametrize("merge", [False, True])
def test_an_overlay(tmp_path: Path, synced: Synced, *, merge: bool) -> None:
    tc.export_overlay(trained(tmp_path), tmp_path / "out.safetensors", merge=merge)
    assert unsynced(synced, tmp_path / "out.safetensors") == []
