"""Paths of a whole training: absolute from where they are given, and never a local folder for a URL."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiercache as tc
from tests.datasets import write_dataset
from tests.files import files_of
from tests.train.cases import Case, Spec, assert_same_bits, resident_result, result_of, table, tiered, train
from tiercache.errors import BudgetError
from tiercache.io.key_set_file import export_key_sets
from tiercache.reporting.figures import draw_passes, read_reports, write_html
from tiercache.store import verify
from tiercache.train import cache_parts

CASE = Case(
    tables=(table("a", 4), table("b", 6, tc.optim.SGD(learning_rate=0.1))),
    specs=(Spec(name="f", table="a", hotness="ragged"), Spec(name="g", table="b")),
    num_samples=240, pass_rows=60, num_keys=100, epochs=2,
)  # fmt: skip


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_training_stays_in_its_store_wherever_the_process_goes(
    tmp_path: Path, passes: tc.PassDataset, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Another store and another dataset with the same names are unchanged."""
    for run in ("1", "2"):
        (tmp_path / run).mkdir()
        shutil.copytree(passes.path, tmp_path / run / "passes")
        with tiered(tmp_path / run / "model.tc", passes, engine=engine) as trained:
            train(trained, CASE, epochs=1)
    for file in (tmp_path / "2" / "passes").iterdir():
        file.write_bytes(b"another dataset")
    held = files_of(tmp_path / "2")
    monkeypatch.chdir(tmp_path / "1")

    def leave(pass_index: int, batch: int) -> None:
        if (pass_index, batch) == (5, 1):
            monkeypatch.chdir(tmp_path / "2")

    with tiered("model.tc", tc.PassDataset.open("passes"), reorganize=True) as trained:
        model = train(trained, CASE, each_batch=leave)
        trained.write_report(tmp_path / "run.jsonl")
    assert files_of(tmp_path / "2") == held
    assert verify(tmp_path / "1" / "model.tc")["problems"] == []
    with tc.Store.open("../1/model.tc", mode="r") as store:
        assert_same_bits(result_of(store, passes, model), resident_result(CASE, passes))


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_training_ends_if_its_store_was_moved(tmp_path: Path, passes: tc.PassDataset, engine: str) -> None:
    """Its backup and the store itself are unchanged: both open."""
    path, away = tmp_path / "model.tc", tmp_path / "away.tc"
    with tiered(path, passes, engine=engine) as trained:
        train(trained, CASE, epochs=1)
    held = files_of(path)

    def replace(pass_index: int, batch: int) -> None:
        if (pass_index, batch) == (5, 1):
            trained.drain(staged=False)  # a write under way would be half copied
            path.rename(away)
            shutil.copytree(away, path)
            held.clear()  # the passes before this one deleted files of their own store
            held.update(files_of(path))

    with pytest.raises(tc.errors.StoreError, match="moved, replaced or deleted"), tiered(path, passes) as trained:
        train(trained, CASE, each_batch=replace)
    assert files_of(path) == held
    for folder in (path, away):
        assert verify(folder)["problems"] == []


def test_a_new_store_that_budgets_refuse_is_deleted_only_where_it_was_made(
    tmp_path: Path, passes: tc.PassDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.tc"
    with pytest.raises(BudgetError):
        tiered(path, passes, host_budget=1)
    assert not path.exists()

    def replace(_models: Any) -> None:
        path.rename(tmp_path / "away.tc")
        path.mkdir()
        (path / "notes.txt").write_text("mine")

    monkeypatch.setattr(
        cache_parts, "drop_weights", replace
    )  # the store is open by then, and budgets are not yet checked
    with pytest.raises(BudgetError):
        tiered(path, passes, host_budget=1)
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]


DOORS: dict[str, tuple[Callable[[str, tc.PassDataset], object], str]] = {
    "a store": (tiered, "engine=ZarrEngine"),
    "a dataset": (lambda url, passes: tc.TierCache("model.tc", url), "copy the dataset"),
    "a dataset that is opened": (lambda url, passes: tc.PassDataset.open(url), "copy the dataset"),
    "a plan": (lambda url, passes: tc.TierCache("model.tc", passes, plan=url), "a plan must be a local path"),
    "a folder of a rank": (lambda url, passes: tiered("model.tc", passes, shard_dirs=[url]), "the folder of a rank"),
    "an extraction": (
        lambda url, passes: tc.extract("data.parquet", CASE.schema, url, device_budget="1GiB", progress=False),
        "dask=",
    ),
    "a new dataset": (lambda url, passes: write_dataset(url, CASE.schema, []), "a dataset that is written"),
    "a repartition": (lambda url, passes: tc.repartition(passes, url, device_budget="1GiB"), "a dataset that is"),
    "an export": (lambda url, passes: tc.export_store("model.tc", url, format="numpy"), "an export"),
    "an export's store": (
        lambda url, passes: tc.export_store(url, "out", format="numpy"),
        "a store must be a local path",
    ),
    "an import": (lambda url, passes: tc.import_store(url, "model.tc"), "what is imported"),
    "an import's store": (lambda url, passes: tc.import_store("in", url), "a store must be a local path"),
    "key sets": (lambda url, passes: export_key_sets(passes, url), "an export of key sets"),
    "a schema": (lambda url, passes: tc.Schema.load(url), "a schema must be a local path"),
    "a report": (lambda url, passes: read_reports(url), "a report must be a local path"),
    "a page": (lambda url, passes: write_html([], url, title=""), "a page must be a local path"),
    "a picture": (lambda url, passes: draw_passes([], url), "a picture must be a local path"),
}


@pytest.mark.parametrize("door", [*DOORS])
@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://b/y.html", "file:///tmp/z", "simplecache::s3://b/x"])
def test_no_door_takes_a_url_for_a_local_path(
    tmp_path: Path, passes: tc.PassDataset, monkeypatch: pytest.MonkeyPatch, door: str, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    CASE.write(tmp_path / "data.parquet")
    call, words = DOORS[door]
    with pytest.raises(ValueError, match="is a URL") as caught:
        call(url, passes)
    assert words in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["data.parquet"]
