"""Stages of an extraction, one after another and on a Dask cluster: the files of one machine, byte for byte."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster, SchedulerPlugin
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.cli.command import invoke
from tests.data.cases import ROW_BYTES, bounds_of, extracted, plain_schema, rich_columns, rich_schema, write_parquet
from tests.data.shared_files import FATAL
from tests.files import files_of
from tiercache.data.extraction_resources import Workers
from tiercache.data.inputs import find_inputs
from tiercache.data.pass_builder import Cut, RowBudget
from tiercache.data.resume import WorkFolder
from tiercache.data.stages import Job, place_passes, scan_file, write_pass
from tiercache.errors import BudgetError, ExtractionError, TierCacheError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiercache.schema import Schema

DAYS = [0, 300, 1500, 1501, 3000]


def job(schema: Schema, split_by: str, unit: int, budget: int) -> Job:
    """Return a job of one device."""
    return Job(
        schema=schema, cut=Cut.parse(split_by, unit), unit=unit, device_bytes=budget, devices=1, memory_bytes=1 << 28,
        workers=1, with_samples=True,
    )  # fmt: skip


@given(
    cuts=st.lists(st.integers(1, 2999), max_size=4, unique=True),
    unit=st.sampled_from([7, 100, 500, 5000]),
    slack=st.floats(1.0, 3.0),
    split_by=st.sampled_from(["budget", "budget", "rows=700", "rows=1500", "file", "column=day", "column=at"]),
    seed=st.integers(0, 3),
)
@settings(deadline=None, max_examples=6)
def test_passes_are_placed_where_one_machine_ends_them(
    cuts: list[int], unit: int, slack: float, split_by: str, seed: int
) -> None:
    """Also if units, and values of the column that cuts, continue in the next file."""
    schema, columns = rich_schema(), rich_columns(3000, seed)
    days = np.repeat(np.array(["mon", "tue", "", "mon"]), np.diff(DAYS))
    data = {**columns, "day": [day or None for day in days.tolist()], "at": np.where(days == "mon", np.nan, 1.5)}
    unit = 100 if split_by.startswith("rows") else unit
    budget = int(slack * 105_000) if split_by == "budget" and unit < 1000 else 1 << 30
    with tempfile.TemporaryDirectory() as name:
        paths = write_parquet(Path(name), data, sorted({0, *cuts, 3000}))
        how: dict[str, Any] = {"device_budget": budget, "split_by": split_by, "batch_multiple": unit}
        made = extracted(paths, schema, Path(name) / "out", **how)
        one, files = job(schema, split_by, unit, budget), find_inputs(paths)
        found = list(place_passes(one, (scan_file(one, file) for file in files), Workers(2)))
        index = len(found) // 2
        _, file, row, *_ = found[index]
        tables = (scan_file(one, f, 0 if i else row) for i, f in enumerate(files[file:]))
        assert list(place_passes(one, tables, Workers(1), made.manifest.passes[:index], file, row)) == found[index:]
    assert [0, *np.cumsum([at.samples for at in found]).tolist()] == bounds_of(made)
    begins = [0, *sorted(cuts), 3000]
    assert [begins[at.first_file] + at.first_row for at in found] == bounds_of(made)[:-1]
    assert [begins[at.last_file] + at.last_row for at in found] == bounds_of(made)[1:]


def test_a_unit_over_the_budget_is_refused_as_on_one_machine(tmp_path: Path) -> None:
    """With the same message; a budget of one unit fits each, though units begin inside the stretches of a file."""
    paths = write_parquet(tmp_path, {"a": np.arange(600) // 2, "y": np.zeros(600)}, [0, 130, 600])
    row_bytes = RowBudget(plain_schema().tables, 0).needed([1])
    one = job(plain_schema(), "budget", 100, 50 * row_bytes)
    tables = [scan_file(one, file) for file in find_inputs(paths)]
    assert [at.samples for at in place_passes(one, tables, Workers(1))] == [100] * 6
    one = replace(one, device_bytes=49 * row_bytes)
    with pytest.raises(BudgetError) as error:
        extracted(paths, plain_schema(), tmp_path / "out", device_budget=one.device_bytes, batch_multiple=100)
    with pytest.raises(BudgetError, match=re.escape(str(error.value))):
        list(place_passes(one, tables, Workers(1)))


def test_a_stage_says_which_pass_does_not_fit_and_which_directory_it_lacks(tmp_path: Path) -> None:
    """It knows how many passes other tasks write."""
    paths = write_parquet(tmp_path, {"a": np.arange(400_000), "y": np.zeros(400_000)}, [0, 400_000])
    one = replace(job(plain_schema(), "file", 100, 1 << 30), memory_bytes=10 << 20)
    (tmp_path / "out" / "unfinished").mkdir(parents=True)
    with pytest.raises(BudgetError, match=r"sub-dataset 7 has .* rows"):
        write_pass(one, find_inputs(paths), 0, 400_000, 7, str(tmp_path / "out"))
    with pytest.raises(ExtractionError, match=r"a worker cannot find .*/other/unfinished: use a directory that all"):
        write_pass(one, find_inputs(paths), 0, 400_000, 7, str(tmp_path / "other"))


class Stages(SchedulerPlugin):
    """Records which worker ended which stage, and kills a worker when both have ended some."""

    def __init__(self) -> None:
        self.by_worker: dict[str, set[str]] = defaultdict(set)
        self.order: Path | None = None
        self.lost: list[str] = []

    def begin(self, order: Path) -> None:
        """Reset, and wait to request a death: see ``shared_files``."""
        self.by_worker.clear()
        self.lost.clear()
        self.order = order

    def transition(self, key: str, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Note the end of a stage."""
        stage = key.rpartition("-")[0].partition("-")[0]
        if (start, finish) == ("processing", "memory"):
            self.by_worker[kwargs["worker"]].add(stage)
        if self.order is not None and len(self.by_worker) == 2:
            self.order.write_text(str(os.getpid()))
            self.order = None

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        """Note the removal of a worker."""
        self.lost.append(worker)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Stages, Path]]:
    """Two worker processes, a record of their stages, and the folder of requested deaths."""
    orders, environment = tmp_path_factory.mktemp("orders"), dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FATAL, str(orders))
        with LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", preload=["tests.data.shared_files"]
        ) as made:
            stages = Stages()
            made.scheduler.add_plugin(stages)
            yield made, stages, orders
    os.environ.clear()  # a nanny sets thread limits for its workers in this process's environment
    os.environ.update(environment)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("call", "out"), [("open", "{}"), ("put_file", "shared://{}")])
def test_a_cluster_whose_worker_dies_in_a_stage_writes_the_files_of_one_machine(
    cluster: tuple[Any, Stages, Path], tmp_path: Path, call: str, out: str
) -> None:
    """Files are read at URLs and written to a folder or URLs; both workers ran stages, one died in another."""
    made, stages, orders = cluster
    write_parquet(tmp_path, rich_columns(20_000), [0, 1, 3000, 3003, 9000, 14_000, 17_000, 20_000])
    options: dict[str, Any] = {"device_budget": 2500 * ROW_BYTES, "batch_multiple": 100, "progress": False}
    one = tc.extract(f"shared://{tmp_path}/*.parquet", rich_schema(), tmp_path / "one", **options)
    made.wait_for_workers(2)
    stages.begin(orders / call)
    found = tc.extract(
        f"shared://{tmp_path}/*.parquet", rich_schema(), out.format(tmp_path / "many"), dask=made.scheduler_address,
        **options,
    )  # fmt: skip
    assert (orders / call).with_suffix(".done").exists()
    assert len(stages.lost) == 1
    assert len(stages.by_worker) >= 2
    assert len(found) > 10
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")
    assert found.digest == one.digest


def test_an_extraction_goes_from_a_cluster_to_one_machine_and_back(
    cluster: tuple[Any, Stages, Path], tmp_path: Path
) -> None:
    """Closed passes of a stopped one stay, and a finished dataset can be appended to, in either place."""
    paths = write_parquet(tmp_path, rich_columns(6000), [0, 1000, 4000, 6000])
    options: dict[str, Any] = {"device_budget": 1500 * ROW_BYTES, "batch_multiple": 100, "devices": 2, "samples": False}

    def stop(now: Any) -> None:
        if now.passes == 2:
            raise KeyboardInterrupt

    with Client(cluster[0]) as client:
        for out, first, second in (("a", None, None), ("b", client, None), ("c", None, client)):
            with pytest.raises(KeyboardInterrupt):
                tc.extract(paths[:2], rich_schema(), tmp_path / out, dask=first, progress=stop, **options)
            tc.extract(paths[:2], rich_schema(), tmp_path / out, dask=second, progress=False, **options)
            tc.extract(paths, rich_schema(), tmp_path / out, dask=first, append=True, progress=False, **options)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b") == files_of(tmp_path / "c")


def test_a_dataset_is_finished_while_a_stage_of_a_stopped_one_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running stage on a cluster creates and deletes its own files in the folder that is removed."""
    work, unlink = WorkFolder(tmp_path), os.unlink
    stage = work.path / "stage-1"
    stage.mkdir()
    (stage / "lock").touch()

    def beaten(path: Any, **options: Any) -> None:
        monkeypatch.setattr(os, "unlink", unlink)
        unlink(path, **options)
        (stage / "pass-0").touch()
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(os, "unlink", beaten)
    work.remove()
    assert not work.path.exists()


def test_the_command_counts_the_rows_that_a_cluster_left_out(cluster: tuple[Any, Stages, Path], tmp_path: Path) -> None:
    """From all files, each counted once."""
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("y,a\n0,1\n0\n1,2\n")
    (tmp_path / "schema.toml").write_text('[label]\ncolumn = "y"\n[csv]\nbad_rows = "skip"\n[features.a]\n')
    done = invoke(
        "extract", tmp_path / "a.csv", tmp_path / "b.csv", "--schema", tmp_path / "schema.toml", "--out",
        tmp_path / "out", "--device-budget", "1MiB", "--dask", cluster[0].scheduler_address,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "out: 1 pass, 4 samples, " in done.stderr
    assert done.stderr.endswith(" s; 2 rows skipped\n")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data": [{"a": [1], "y": [0]}]}, "a Python iterable cannot be read on a cluster"),
        ({"min_count": 2}, "min_count is 2, but a cluster does not count keys"),
        ({"out": "good.parquet"}, "good.parquet is not a directory"),
        ({"out": "file://{}/done"}, "file://.*/done already has a dataset: choose another path"),
        ({"data": "bad.parquet"}, "bad.parquet, row 599, column 'y'"),
        ({"split_by": "rows=400", "batch_multiple": 400}, "sub-dataset 1, of 200 samples, needs 200 rows, .* but the"),
        ({"dask": "tcp://127.0.0.1:9"}, "no Dask scheduler answers at tcp://127.0.0.1:9: .* pass the address of one"),
        ({"dask": "no address"}, "no Dask scheduler answers at no address: .* pass the address of one"),
    ],
)
def test_what_a_cluster_cannot_do_is_one_sentence(
    cluster: tuple[Any, Stages, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any],
    expected: str,
) -> None:  # fmt: skip
    """Wherever it is detected; the dataset stays unfinished."""
    monkeypatch.chdir(tmp_path)
    keys = np.concatenate([np.zeros(400), np.arange(200)]).astype(np.int64)
    for name, labels in (("good", [0.0] * 600), ("bad", [0.0] * 599 + [None])):
        pq.write_table(pa.table({"a": keys, "y": labels}), f"{name}.parquet")
    options: dict[str, Any] = {"schema": plain_schema(), "device_budget": 100 * ROW_BYTES, "batch_multiple": 10}
    tc.extract("good.parquet", out="done", progress=False, **options)
    options |= {"data": "good.parquet", "out": "out", "dask": cluster[0].scheduler_address, **changes}
    options["out"] = options["out"].format(tmp_path)
    with dask.config.set({"distributed.comm.timeouts.connect": "200ms"}), pytest.raises(TierCacheError, match=expected):
        tc.extract(progress=False, **options)
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_a_missing_dask_is_named_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any file is written."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    paths = write_parquet(tmp_path, {"a": np.arange(50), "y": np.zeros(50)}, [0, 50])
    with pytest.raises(ExtractionError, match=r"Dask is not installed: pip install 'tiercache-embeddings\[dask\]'"):
        tc.extract(paths, plain_schema(), tmp_path / "out", device_budget="1MiB", dask="tcp://127.0.0.1:9")
    assert not (tmp_path / "out").exists()
