"""Rows go back to the checkpoint that they began from: as an overlay, or merged into a copy of its file."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file

import tiercache as tc
from tests.cli.command import error_of, invoke, run, told
from tests.store.checkpoints import DIM, ROWS, TENSOR, save, weights
from tiercache.errors import CheckpointError, ImportExportError
from tiercache.io import overlay
from tiercache.store.bits import nearest


def trained(
    folder: Path, *, dtype: str = "bfloat16", keys: Any = (5, 17, 900, 1999), source: Path | None = None,
    tensor: str = TENSOR,
) -> Path:  # fmt: skip
    """Train a table on some rows of a checkpoint, which is written unless ``source`` names one; returns the store."""
    if source is None:
        source = save(folder / "model.safetensors", model__embed__weight=weights())
    start = tc.init.Checkpoint(path=str(source), tensor=tensor)
    table = tc.Table(name="gram", dim=DIM, dtype=dtype, optimizer=tc.optim.SGD(learning_rate=0.5), initializer=start)
    feature = tc.Feature(name="gram", hotness="multi_hot", length=len(keys))
    schema = tc.Schema(features=(feature,), tables=(table,), label=None, dense=())
    data = tc.write_key_sets(folder / f"keys-{dtype}", schema, [{"gram": np.array(keys)}])
    model = tc.Embedding(schema, "gram")
    with tc.TierCache(
        folder / "store", data, model=model, device_budget="1MiB", host_budget="64MiB", progress=False
    ) as cache:
        for _ in cache.passes(epochs=1):
            model(torch.tensor([keys])).square().sum().backward()
            cache.optimizer.step()
            cache.optimizer.zero_grad()
    return folder / "store"


def rows_of(store: Path) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    with tc.Store.open(store, mode="r") as opened:
        ((keys, fields),) = opened.scan("gram")
        order = np.argsort(keys)
        return keys[order], fields[0][order]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_overlay_has_the_touched_rows_with_their_bits(tmp_path: Path, dtype: str) -> None:
    store, out = trained(tmp_path, dtype=dtype), tmp_path / "overlay.safetensors"
    done = tc.export_overlay(store, out)
    keys, vectors = rows_of(store)
    with safe_open(out, framework="pt") as file:
        metadata, found = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == {f"{TENSOR}.keys", f"{TENSOR}.rows"}
    assert found[f"{TENSOR}.keys"].tolist() == keys.tolist() == [5, 17, 900, 1999]
    assert found[f"{TENSOR}.rows"].dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(found[f"{TENSOR}.rows"].float().numpy(), vectors)
    assert not np.array_equal(vectors, weights()[keys].float().numpy())
    assert metadata["tensor"] == TENSOR
    assert metadata["base_bytes"] == str((tmp_path / "model.safetensors").stat().st_size)
    assert done == ("gram", TENSOR, 4, out.stat().st_size, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_merged_file_is_the_checkpoint_with_these_rows(tmp_path: Path, dtype: str) -> None:
    store, out = trained(tmp_path, dtype=dtype), tmp_path / "merged.safetensors"
    tc.export_overlay(store, out, merge=True)
    before, after = load_file(tmp_path / "model.safetensors"), load_file(out)
    keys, vectors = rows_of(store)
    expected = before[TENSOR].clone()
    expected[keys] = torch.from_numpy(nearest(vectors, "bfloat16")).bfloat16()
    assert before.keys() == after.keys()
    for name, tensor in (before | {TENSOR: expected}).items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor)


def test_an_overlay_is_of_one_commit_whatever_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and rows are read one after the other."""
    store, out, make = trained(tmp_path), tmp_path / "overlay.safetensors", overlay._new_file
    before, vectors = rows_of(store)

    def forget_first(*args: Any) -> Any:
        code = (
            "import sys, numpy as np; from tiercache.store import Store, forget\n"
            "with Store.open(sys.argv[1]) as store: forget(store, 'gram', np.array([5, 17]), now=True)"
        )
        subprocess.run([sys.executable, "-c", code, str(store)], check=True)
        return make(*args)

    monkeypatch.setattr(overlay, "_new_file", forget_first)
    assert tc.export_overlay(store, out).rows == 4
    assert rows_of(store)[0].tolist() == before[2:].tolist()
    assert load_file(out)[f"{TENSOR}.keys"].tolist() == before.tolist()
    np.testing.assert_array_equal(load_file(out)[f"{TENSOR}.rows"].float().numpy(), vectors)


@pytest.mark.parametrize("merge", [False, True])
def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge: bool) -> None:
    store, out = trained(tmp_path), tmp_path / "out.safetensors"

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ImportExportError, match=r"out\.safetensors.*No space left on device"):
        tc.export_overlay(store, out, merge=merge)
    monkeypatch.undo()
    assert {one.name for one in tmp_path.iterdir()} == {"model.safetensors", "keys-bfloat16", "store"}
    assert tc.export_overlay(store, out, merge=merge).rows == 4


def test_holes_of_the_checkpoint_stay_holes(tmp_path: Path) -> None:
    """A tensor of a gigabyte of which a row is data is copied with its blocks alone."""
    path, rows = tmp_path / "model.safetensors", 1 << 20
    header = json.dumps({TENSOR: {"dtype": "F32", "shape": [rows, DIM], "data_offsets": [0, 4 * rows * DIM]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * rows * DIM)
        os.pwrite(file.fileno(), np.full(DIM, 3.0, np.float32).tobytes(), 8 + len(header) + 4 * DIM * 17)
    store = trained(tmp_path, dtype="float32", keys=(17, 18, rows - 1), source=path)
    tc.export_overlay(store, tmp_path / "merged.safetensors", merge=True)
    assert (tmp_path / "merged.safetensors").stat().st_blocks * 512 < 1 << 20
    with safe_open(tmp_path / "merged.safetensors", framework="np") as merged:
        rows_found = merged.get_slice(TENSOR)[16:20]
    np.testing.assert_array_equal(rows_found[:, 0], [0, 3 - 0.5 * 2 * 3, 0, 0])


def test_a_second_training_goes_on_from_a_merged_checkpoint(tmp_path: Path) -> None:
    tc.export_overlay(trained(tmp_path), tmp_path / "merged.safetensors", merge=True)
    keys, vectors = rows_of(tmp_path / "store")
    start = tc.init.Checkpoint(path=str(tmp_path / "merged.safetensors"), tensor=TENSOR)
    table = tc.Table(name="gram", dim=DIM, dtype="bfloat16", initializer=start)
    with tc.Store.open(tmp_path / "next", tables=[table]) as store:
        np.testing.assert_array_equal(store.lookup("gram", keys, missing="initial")["vector"], vectors)


def test_the_command_writes_both(tmp_path: Path) -> None:
    store, over, merged = trained(tmp_path), tmp_path / "over.safetensors", tmp_path / "merged.safetensors"
    base = ("--overlay", tmp_path / "model.safetensors")
    assert told("export", store, over, *base)["rows"] == 4
    said = run("export", store, merged, *base, "--merge")
    assert "a copy of the checkpoint with 4 rows of model.embed.weight, as of commit 1" in " ".join(said.split())
    assert load_file(merged)[TENSOR].shape == (ROWS, DIM)
    for more, message in (((*base, "--format", "numpy"), "omit --format"), ((*base, "--since", "0"), "omit"), ((), "")):
        done = invoke("export", store, tmp_path / "x", *more)
        assert done.exit_code != 0
        assert message in " ".join(done.output.split())


def test_verify_reads_the_checkpoint_and_finds_another(tmp_path: Path) -> None:
    store = trained(tmp_path)
    assert told("verify", store, "--checkpoints")["checkpoints"] == {"gram": ROWS * DIM * 2}
    said = " ".join(run("verify", store, "--checkpoints").split())
    assert "so are 78.1 KiB of the checkpoints that gram started from" in said
    assert "omit --checkpoints" in error_of("verify", tmp_path / "keys-bfloat16", "--checkpoints")
    changed = weights()
    changed[1500] += 1  # no row that was trained
    save(tmp_path / "model.safetensors", model__embed__weight=changed)
    assert "has different bytes at" in error_of("verify", store, "--checkpoints")


def test_another_checkpoint_is_refused(tmp_path: Path) -> None:
    store, out = trained(tmp_path), tmp_path / "out.safetensors"
    other = save(tmp_path / "other.safetensors", model__embed__weight=weights(), more=torch.ones(2))
    with pytest.raises(CheckpointError, match="is not what table 'gram' started from"):
        tc.export_overlay(store, out, base=other)
    short = save(tmp_path / "short.safetensors", model__embed__weight=torch.ones(ROWS, DIM + 1))
    with pytest.raises(ImportExportError, match=r"has 21 columns, but table 'gram' has dim 20"):
        tc.export_overlay(store, out, base=short)
    with pytest.raises(ImportExportError, match=rf"starts from tensor '{TENSOR}', not 'a': omit tensor"):
        tc.export_overlay(store, out, tensor="a")
    out.write_text("mine")
    with pytest.raises(ImportExportError, match="exists: choose another path for the export"):
        tc.export_overlay(store, out)
    assert out.read_text() == "mine"


@pytest.mark.parametrize("merge", [False, True])
def test_another_model_with_the_same_header_is_refused(tmp_path: Path, *, merge: bool) -> None:
    """As a base, and in place of the checkpoint: its other rows would come out."""
    store, out = trained(tmp_path), tmp_path / "out.safetensors"
    other = save(tmp_path / "other.safetensors", model__embed__weight=weights() + 1)
    with pytest.raises(CheckpointError, match=r"has different bytes at \d+ than when the store first read it"):
        tc.export_overlay(store, out, base=other, merge=merge)
    other.replace(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has different bytes at \d+ than when the store first read it"):
        tc.export_overlay(store, out, merge=merge)
    assert not out.exists()


def test_a_row_beyond_the_tensor_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    table = tc.Table(name="gram", dim=DIM)
    with tc.Store.open(tmp_path / "store", tables=[table]) as store:
        from tiercache.store import load_rows

        keys = np.array([3, ROWS])
        load_rows(store, [("gram", (keys, (np.ones((2, DIM), np.float32), np.zeros((2, DIM), np.float32))))])
    base = save(tmp_path / "model.safetensors", model__embed__weight=weights())
    with pytest.raises(ImportExportError, match=r"not start from a checkpoint: pass tensor \(--tensor\)$"):
        tc.export_overlay(tmp_path / "store", tmp_path / "out", base=base)
    with pytest.raises(ImportExportError, match=r"has a row of key 2000, but .* has 2,000 rows"):
        tc.export_overlay(tmp_path / "store", tmp_path / "out", base=base, tensor=TENSOR)
    assert {one.name for one in tmp_path.iterdir()} == {"store", "model.safetensors"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_row_that_does_not_fit_the_dtype_of_the_checkpoint_is_refused(tmp_path: Path, dtype: str) -> None:
    """It would be merged as infinity; an overlay has the dtype of the table."""
    base = save(tmp_path / "model.safetensors", model__embed__weight=weights().to(getattr(torch, dtype)))
    start = tc.init.Checkpoint(path=str(base), tensor=TENSOR)
    table = tc.Table(name="gram", dim=DIM, optimizer=tc.optim.SGD(), initializer=start)
    rows = np.ones((3, DIM), np.float32)
    rows[1, 2] = {"float16": -1e5, "bfloat16": np.finfo(np.float32).max}[dtype]
    with tc.Store.open(tmp_path / "store", tables=[table]) as store:
        tc.store.load_rows(store, [("gram", (np.array([3, 7, 9]), (rows,)))])
    words = (
        rf"the row of key 7 of table 'gram' has numbers beyond the largest of {dtype}, the dtype of tensor '{TENSOR}'"
    )
    with pytest.raises(ImportExportError, match=words):
        tc.export_overlay(tmp_path / "store", tmp_path / "out", merge=True)
    assert {one.name for one in tmp_path.iterdir()} == {"store", "model.safetensors"}
    tc.export_overlay(tmp_path / "store", tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors")[f"{TENSOR}.rows"].numpy().tobytes() == rows.tobytes()


def test_a_tensor_in_several_files_is_merged_into_a_copy_of_each(tmp_path: Path) -> None:
    folder = tmp_path / "released"
    folder.mkdir()
    for number, (low, high) in enumerate([(0, 600), (600, ROWS)]):
        save(folder / f"m-{number}.safetensors", **{f"t__{number}": weights()[low:high].contiguous()})
    index = {"weight_map": {f"t.{number}": f"m-{number}.safetensors" for number in range(2)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    trained(tmp_path, keys=(3, 599, 600), source=folder, tensor="t.*")
    tc.export_overlay(tmp_path / "store", tmp_path / "merged", merge=True)
    keys, vectors = rows_of(tmp_path / "store")
    expected = weights()
    expected[keys] = torch.from_numpy(vectors).bfloat16()
    found = [load_file(tmp_path / "merged" / f"m-{number}.safetensors") for number in range(2)]
    assert torch.equal(torch.cat([found[0]["t.0"], found[1]["t.1"]]), expected)
    assert torch.equal(found[0]["a"], torch.ones(3))
    done = tc.export_overlay(tmp_path / "store", tmp_path / "over.safetensors")
    assert load_file(tmp_path / "over.safetensors")["t.*.keys"].tolist() == keys.tolist()
    assert done.rows == 3
