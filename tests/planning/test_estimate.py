"""Estimates agree with the planner for the same numbers, and with a real dataset and its store."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tiercache as tc
from tests.apart import ran
from tests.train.cases import Case, Spec, table, tiered, train
from tiercache.errors import BudgetError
from tiercache.planning.capacity import Capacity
from tiercache.planning.estimate import Model, Workload, cut_passes
from tiercache.planning.key_model import KeyModel
from tiercache.planning.plan_file import Rates
from tiercache.planning.reuse import Reuse, ReuseCounts
from tiercache.planning.row_offsets import RowOffsets
from tiercache.planning.schedule import Schedule
from tiercache.rows.sizing import _warnings
from tiercache.store.table import group_tables

RATES = Rates(read=1e9, write=5e8, copy=5e9, link=5e9, commit_seconds=0.001, samples=1e6)
TABLES = (
    table("a", 64), table("b", 16, tc.optim.Adam()), table("c", 16, tc.optim.Adam()),
    table("d", 33, tc.optim.RowWiseAdagrad(), dtype="bfloat16"),
)  # fmt: skip
ROWS = {"a": 2_000_000, "b": 300_000, "c": 50, "d": 1_000_000}
KEYS = {"a": 1.0, "b": 2.5, "c": 1.0, "d": 0.5}


def model_of(commit_every: int = 1, **cut: Any) -> Model:
    work = Workload(TABLES, ROWS, KEYS, 5_000_000, 0)
    options: dict[str, Any] = {"device_budget": None, "unique_per_pass": None, "passes": None, "zipf": None}
    return Model(work, cut_passes(work, **(options | cut)), commit_every=commit_every, eval_budget=None)


# -- the model of keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.3])
def test_the_model_counts_the_keys_that_passes_draw(exponent: float) -> None:
    rows, draws, passes, chance = 20_000, 8000, 6, np.random.default_rng(0)
    weights = np.arange(1, rows + 1) ** -exponent
    drawn = [np.unique(chance.choice(rows, draws, p=weights / weights.sum())) for _ in range(passes)]
    last, found = np.full(rows, -1), np.zeros(passes)
    for pass_index in range(2 * passes):
        keys = drawn[pass_index % passes]
        if pass_index >= passes:
            found += np.bincount(pass_index - last[keys] - 1, minlength=passes) / passes
        last[keys] = pass_index
    model = KeyModel(rows, exponent)
    np.testing.assert_allclose(model.rows_at(draws, passes), found, rtol=0.05, atol=25)
    assert model.rows(draws) == pytest.approx(np.mean([keys.size for keys in drawn]), rel=0.02)
    assert model.rows(draws) == pytest.approx(model.rows_at(draws, passes).sum())
    assert model.rows(draws * passes) == pytest.approx(np.unique(np.concatenate(drawn)).size, rel=0.02)


def test_the_model_of_many_keys_is_that_of_each_key() -> None:
    weights = np.arange(1, 3_000_001) ** -1.05
    weights /= weights.sum()
    for draws in (100, 1e5, 1e8):
        assert KeyModel(3_000_000, 1.05).rows(draws) == pytest.approx(-np.expm1(-draws * weights).sum(), rel=1e-3)
    assert KeyModel(1, 1.0).rows(50) == pytest.approx(1)


# -- the planner ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("commit_every", "zipf"), [(1, 1.0), (1, 0.0), (2, 0.8)])
def test_an_estimate_is_what_the_planner_plans_for_such_passes(commit_every: int, zipf: float) -> None:
    """The second epoch, for which the planner plans, has memory that the first left, and the sixth has none."""
    model = model_of(commit_every, passes=12, zipf=zipf)
    schedule = Schedule(num_passes=12, dataset_digest="")
    positions = RowOffsets(model.groups, np.array(model.positions.starts_PT))
    counts = ReuseCounts(schedule, positions, None, [model._counts] * 12)
    reuse = Reuse(schedule, positions, counts, (), np.zeros((12, 4), np.int64))
    capacity = Capacity(reuse, [round(model.cut.samples)] * 12, RATES)
    assert model.least_host == capacity.least()
    points = capacity.curve(1 << 33)
    assert len(points) > 3
    for host in [point.host_budget for point in points]:
        point, traffic = capacity.at(host, commit_every=commit_every), model.traffic(host)
        planner = capacity._planner(host, commit_every)
        read = sum(planner.plan_next().bytes_read * (v >= 60) for v in range(72))  # the sixth epoch's
        moved = sum(p.bytes_loaded + p.bytes_written for p in point.passes[12:])
        whole = point.total("bytes_written") + 8 * point.total("rows_written")
        for planned in (read, point.total("bytes_read")):
            assert 12 * traffic.read == pytest.approx(planned, abs=0.08 * whole)
        assert 12 * traffic.written == pytest.approx(whole, rel=0.05 if commit_every > 1 else 1e-9)
        seconds, later = traffic.seconds(RATES, model.cut.samples, 2)
        assert 12 * traffic.moved == pytest.approx(moved, rel=0.2 if commit_every > 1 else 1e-9)
        assert 12 * later.total == pytest.approx(point.epoch_seconds, rel=0.05)
        first = sum(point.seconds[v].total for v in range(12))
        assert seconds - 12 * later.total == pytest.approx(first, rel=0.1)
    assert traffic.read == 0


CASES = [
    Case(
        tables=(table("user", 16), table("item", 8, tc.optim.Adam(learning_rate=0.01))),
        specs=(Spec(name="user", table="user"), Spec(name="item", table="item", hotness="multi_hot", length=3)),
        num_samples=40_000, pass_rows=5000, num_keys=30_000, batch=500, epochs=1,
    ),
    Case(
        tables=(table("user", 32, tc.optim.SGD(), dtype="float16"),), specs=(Spec(name="user", table="user"),),
        num_samples=20_000, pass_rows=2500, num_keys=100_000, batch=500, epochs=2,
    ),
]  # fmt: skip
TOLERANCE = 0.15  # tolerance of an estimate for a dataset whose keys do not follow Zipf's law


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=["two tables", "16 bits"])
def test_an_estimate_of_a_real_dataset_agrees_with_its_plan_and_its_store(tmp_path: Path, case: Case) -> None:
    """Within 15 percent, from its numbers of rows, samples, passes and keys of a pass alone."""
    data = case.cut(tmp_path / "passes")
    positions = RowOffsets.of(data, group_tables(data.tables))
    reuse = Reuse.of(Schedule.of(data, None), positions, positions.keys_of(data))
    capacity = Capacity(reuse, [p.samples for p in data], RATES)
    rows = {table.name: found.keys for table, found in zip(positions.tables, reuse.tables, strict=True)}
    host = capacity.least() * 5 // 4
    found = tc.estimate(
        data.tables, rows, samples=case.num_samples, epochs=2, dense=1,
        keys_per_sample={spec.name: spec.length if spec.hotness == "multi_hot" else 1 for spec in case.specs},
        unique_per_pass=round(np.mean([positions.num_rows(p) for p in range(len(data))])), passes=len(data),
        host_budget=host, disk_gbps=1, link_gbps=5, samples_per_second=1e6, store=tmp_path,
    )  # fmt: skip
    point = capacity.at(host)
    assert found.passes == len(data)
    assert found.rows_per_pass == pytest.approx(positions.num_rows(0), rel=TOLERANCE)
    assert found.stored_rows == pytest.approx(sum(rows.values()), rel=TOLERANCE)
    assert found.least_host_bytes == pytest.approx(capacity.least(), rel=TOLERANCE)
    whole = point.total("bytes_written") + 8 * point.total("rows_written")
    assert found.bytes_written == pytest.approx(whole, rel=TOLERANCE)
    assert found.bytes_read == pytest.approx(point.total("bytes_read"), rel=TOLERANCE)
    plain = RATES.model_copy(update={"read": 1e9, "write": 1e9, "commit_seconds": 0.0})
    planned = Capacity(reuse, [p.samples for p in data], plain).at(host)
    assert found.seconds_per_epoch == pytest.approx(planned.epoch_seconds, rel=TOLERANCE)
    assert found.dataset_bytes == pytest.approx(_bytes_of(tmp_path / "passes"), rel=TOLERANCE)
    with tiered(tmp_path / "s", data, device_budget=found.device_bytes * 6 // 5, host_budget=host) as cache:
        planned_store = cache.store_plan().needed
        assert cache.device_bytes == pytest.approx(found.device_bytes, rel=TOLERANCE)
        train(cache, case)
    assert found.store_bytes == pytest.approx(planned_store, rel=TOLERANCE)
    assert found.store_bytes * (1 + TOLERANCE) > _bytes_of(tmp_path / "s") > 0.5 * found.store_bytes


def _bytes_of(folder: Path) -> int:
    return 512 * sum(file.stat().st_blocks for file in folder.rglob("*") if file.is_file())


# -- cutting passes, and nonsense -------------------------------------------------------------------------------


def test_passes_are_as_large_as_what_cuts_them_allows() -> None:
    """A device budget, a number of unique keys, or a number of passes; the last two determine the exponent."""
    model = model_of(device_budget=64 << 20, zipf=0.9)
    assert 0.97 * (64 << 20) < model.device_bytes <= 64 << 20
    same = model_of(unique_per_pass=model.pass_rows, zipf=0.9)
    assert same.cut.passes == pytest.approx(model.cut.passes, abs=1)
    fitted = model_of(unique_per_pass=model.pass_rows, passes=model.cut.passes)
    assert fitted.cut.exponent == pytest.approx(0.9, abs=0.01)
    assert fitted.pass_rows == pytest.approx(model.pass_rows, rel=1e-4)
    assert model_of(device_budget=1 << 40).cut.passes == 1
    assert model_of(passes=7).cut.samples == pytest.approx(5_000_000 / 7)


ONE = {"tables": TABLES[:1], "rows": 1e5, "samples": 1e6, "disk_gbps": 1}


def test_the_host_figure_says_what_limits_it() -> None:
    for rows, passes, words in (
        (1e6, 50, "enough for all rows, at most 70% of free memory"),
        (1e11, 5000, "the minimum: it caches 0"),
    ):
        found = tc.estimate(TABLES[:1], rows=rows, samples=100 * rows, disk_gbps=1, passes=passes)
        assert next(figure for figure in found.figures if figure.name == "host").formula.startswith(words)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"rows": -5}, ValueError, "rows of table 'a' is -5: expected a whole number of at least 1"),
        ({"rows": {"b": 5}}, ValueError, "rows names the unknown table 'b': expected 'a'"),
        ({"rows": {}}, ValueError, "rows has no number for table 'a': pass one"),
        ({"rows": 1.5}, ValueError, "rows of table 'a' is 1.5"),
        ({"samples": 0}, ValueError, "samples is 0: expected a whole number of at least 1"),
        ({"samples": float("inf")}, ValueError, "samples is inf"),
        ({"keys_per_sample": 0}, ValueError, "keys_per_sample of table 'a' is 0: expected a positive number"),
        ({"dense": -1}, ValueError, "dense is -1: expected a whole number of at least 0"),
        ({"epochs": 0}, ValueError, "epochs is 0"),
        ({"passes": 0}, ValueError, "passes is 0"),
        ({"passes": 200_000}, ValueError, "an epoch would have 200,000 passes"),
        ({"passes": 2000, "samples": 1000, "rows": 10}, ValueError, "passes is 2,000, but there are 1,000 samples"),
        ({"zipf": -1}, ValueError, "zipf is -1: expected an exponent from 0"),
        ({"zipf": 1, "unique_per_pass": 10, "passes": 3}, ValueError, "omit zipf, or one of them"),
        ({"unique_per_pass": 2e4, "passes": 3}, ValueError, "unique_per_pass is 20,000, .* this data has at least 4"),
        ({"unique_per_pass": 99e3, "passes": 3}, ValueError, "unique_per_pass is 99,000, .* this data has at most 9"),
        ({"unique_per_pass": 1000, "device_budget": 1000}, BudgetError,
         "device_budget is 0.977 KiB, and the rows of a pass take .*: raise it to"),
        ({"device_budget": 100}, BudgetError, "device_budget is 100, but the rows of one sample take 5"),
        ({"rows": 1e6, "zipf": 1.5}, ValueError, "with the exponent 1.5, include at most .* distinct ones: pass"),
        ({"device_budget": 0}, BudgetError, "invalid size '?0'?"),
        ({"host_budget": "1MiB", "passes": 10}, BudgetError, r"host_budget is 1 MiB, but .*raise host_budget to"),
        ({"device": "cuda:99"}, ValueError, "device 'cuda:99' cannot be measured .*: pass link_gbps"),
        ({"device": "abacus"}, ValueError, "device 'abacus' cannot be measured .*: pass link_gbps"),
        ({"disk_gbps": 0}, ValueError, "invalid disk_gbps 0: expected a positive number"),
        ({"disk_gbps": "1"}, ValueError, "invalid disk_gbps '1': expected a positive number"),
        ({"zipf": True}, ValueError, "zipf is True: expected an exponent"),
        ({"samples_per_second": float("nan")}, ValueError, "invalid samples_per_second nan"),
        ({"tables": ()}, ValueError, "no tables were given"),
        ({"rows": 1e11, "samples": 1e12, "zipf": 0, "device_budget": 1 << 45}, BudgetError, "but a device holds"),
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        tc.estimate(**(ONE | options))


def test_numbers_of_numpy_are_numbers() -> None:
    options: dict[str, Any] = {
        "rows": 1e5, "samples": 1e6, "keys_per_sample": 2, "zipf": 0.5, "passes": 10, "epochs": 2, "disk_gbps": 1,
        "link_gbps": 2, "samples_per_second": 1e4,
    }  # fmt: skip
    kinds = dict.fromkeys(options, np.int64) | {"zipf": np.float32, "disk_gbps": np.float32}
    given: dict[str, Any] = {name: kinds[name](value) for name, value in options.items()}
    records = [json.loads(json.dumps(tc.estimate(TABLES[:1], **numbers).to_record())) for numbers in (options, given)]
    for record in records:
        del record["rates"]["copy"]  # measured
    assert records[0] == records[1]


def test_what_this_machine_lacks_is_said() -> None:
    found = tc.estimate(TABLES[:1], 1e10, samples=1e11, passes=200, zipf=0.5, disk_gbps=2)
    assert any("exceed" in one and "of this machine: use a smaller device_budget" in one for one in found.warnings)
    assert any("that are free at" in one and "use another disk" in one for one in found.warnings)
    assert any("hours of moving rows alone" in one for one in found.assumptions)
    small = tc.estimate(TABLES[:1], 1e4, samples=1e5, disk_gbps=2, samples_per_second=1e3)
    assert small.warnings == ()
    assert small.bound == "compute"
    assert small.hours == pytest.approx(1e5 / 1e3 / 3600, rel=0.1)
    assert any("a device budget of 8 GiB" in one for one in small.assumptions)


def test_rows_on_the_device_take_host_memory_if_the_device_is_this_cpu() -> None:
    """One byte too few for both is a warning; a GPU has separate memory."""
    found = tc.estimate(TABLES[:1], 1e4, samples=1e5, disk_gbps=2)
    bytes_of_both = found.host_bytes + found.device_bytes
    memory = SimpleNamespace(total=bytes_of_both - 1, available=bytes_of_both - 1)
    given = found, found.host_bytes, memory, found.disk_bytes, Path()
    (warning,) = _warnings(*given, on_host=True)
    assert "rows on the device, which is this CPU" in warning
    assert _warnings(*given, on_host=False) == ()


def test_an_estimate_imports_no_torch() -> None:
    code = (
        "import sys; import tiercache as tc; tc.estimate([tc.Table(name='a')], 1e5, samples=1e6, disk_gbps=1);"
        "assert 'torch' not in sys.modules"
    )
    assert ran(code).returncode == 0
