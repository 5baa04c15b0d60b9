"""``tiercache plan`` and the dataset half of ``tiercache info``: their files and output."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tiercache as tc
from tests.cli.command import error_of, invoke, run, told
from tests.planning.test_capacity import CASE
from tiercache.planning.plan_file import Rates, TrainingPlan
from tiercache.rows import transfer_rates


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_plan_that_the_command_wrote_trains(tmp_path: Path) -> None:
    data, path, store = CASE.cut(tmp_path / "d"), tmp_path / "plan.toml", tmp_path / "s"
    options = ["--store", store, "-o", path, "--samples-per-second", "1e5", "--order", "overlap"]
    record = told("plan", data.path, *options, "--optimize", "memory")
    plan = TrainingPlan.from_toml(path.read_text(), "it")
    assert plan.model_dump(mode="json", exclude={"machine", "passes"}, by_alias=True) == {
        key: value for key, value in record["plan"].items() if key not in {"machine", "passes"}
    }
    assert plan.machine.samples == 1e5
    assert record["kept_bytes"] > record["kept_bytes_own_order"]
    assert plan.budgets.host == record["curve"][0]["host_bytes"]
    with tc.TierCache(store, data, plan=path, progress=False) as cache:
        assert [p.sub_dataset for p in cache.plan(passes=12)] == list(plan.order or ())
        assert [p.bytes_read for p in cache.plan(passes=24)] == [p.bytes_read for p in plan.passes]


def test_a_trial_says_how_fast_a_model_trains_and_leaves_nothing(tmp_path: Path) -> None:
    """Compute then bounds the passes, and the folder of the store is unchanged."""
    data = CASE.cut(tmp_path / "d")
    (tmp_path / "disk").mkdir()
    record = told("plan", data.path, "--store", tmp_path / "disk" / "s", "--trial")
    assert record["plan"]["machine"]["samples"] > 0
    both = "plan", data.path, "--trial", "--samples-per-second", "5"
    assert "pass either --samples-per-second or --trial" in error_of(*both)
    assert not list((tmp_path / "disk").iterdir())


def test_rates_are_measured_once_for_a_disk_and_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    rates = Rates(read=1, write=2, copy=3, link=4, commit_seconds=0.5)

    def measure(_folder: Path, device: str) -> Rates:
        measured.append(device)
        return rates.model_copy(update={"read": float(len(measured))})

    monkeypatch.setattr(transfer_rates, "measure", measure)
    ask = transfer_rates.measured_rates
    assert ask(tmp_path).read == ask(tmp_path / "not" / "yet").read == 1
    assert ask(tmp_path, again=True).read == ask(tmp_path).read == 2
    assert ask(tmp_path, device="cuda").read == 3
    assert ask(tmp_path).read == 2
    transfer_rates.cache_file().write_text('{"x": 1}')
    assert ask(tmp_path).read == 4


def test_a_disk_is_measured_with_a_file_that_goes(tmp_path: Path) -> None:
    found = transfer_rates.measure(tmp_path, "cpu")
    assert min(found.read, found.write, found.copy_, found.link, found.commit_seconds) > 0
    assert not list(tmp_path.iterdir())


def test_the_info_of_a_dataset_has_its_sizes_and_what_host_memory_buys(tmp_path: Path) -> None:
    data = CASE.cut(tmp_path / "d")
    record = told("info", data.path, "--curve")
    assert record["samples"] == 3000
    assert [p["tables"]["b"]["rows"] for p in record["passes"]] == [p.rows("b") for p in data]
    assert sum(t["occurrences"] for t in record["tables"]) == sum(p.counts(n).sum() for p in data for n in ("a", "b"))
    assert record["curve"][0]["rows_read"] > record["curve"][-1]["rows_read"] == 0
    shown = run("info", data.path, "--curve", "--plot", tmp_path / "plot.png")
    assert "12 passes, 3,000 samples" in " ".join(shown.split())
    assert "one epoch by host memory" in shown
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    data = CASE.cut(tmp_path / "d")
    assert "pip install 'tiercache-embeddings[plots]'" in error_of("info", data.path, "--plot", tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device-budget", "4KiB"], "the passes need .* on the device"),
        (["--host-budget", "4KiB"], "raise host_budget to"),
        (["--store-budget", "1MiB"], "store_budget is 1 MiB, but the store needs .*raise store_budget to"),
        (["--optimize", "cost"], "must be speed or memory"),
        (["--order", "best"], "expected 'overlap' or a permutation"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path: Path, options: list[str], words: str) -> None:
    data, path = CASE.cut(tmp_path / "d"), tmp_path / "plan.toml"
    done = invoke("plan", data.path, "-o", path, *options)
    assert done.exit_code == 1
    assert re.search(words, done.output)
    assert not path.exists()


def test_first_uses_of_a_checkpoint_are_planned_apart(tmp_path: Path) -> None:
    """Rows are exact, bytes are a bound that the training keeps; it says how they are read. Files may have moved."""
    from tests.train.test_checkpoint_rows import prepared, train

    data = prepared(tmp_path)
    curve, record = (told("plan", data.path)[name] for name in ("curve", "checkpoint"))
    shown = told("info", data.path, "--curve")
    assert [one["host_bytes"] for one in shown["curve"]] == [one["host_bytes"] for one in curve]
    _, reports, _ = train(data, tmp_path / "store")
    read = [report for report in reports if report.checkpoint_rows]
    assert [(one["pass"], one["rows"]) for one in record] == [(one.pass_index, one.checkpoint_rows) for one in read]
    for one, report in zip(record, read, strict=True):
        assert 0 < report.checkpoint_bytes <= one["bytes"]
        assert one["how"] == "in order"
    assert "start from checkpoints in 4 passes that read in order: at most" in " ".join(run("plan", data.path).split())
    (table,), new = data.tables, tmp_path / "moved.safetensors"
    (tmp_path / "model.safetensors").rename(new)
    with tc.Store.open(tmp_path / "store") as store:
        tc.store.alter(store, [replace(table, initializer=replace(table.initializer, path=str(new)))])
    assert told("plan", data.path, "--store", tmp_path / "store")["checkpoint"] == record
