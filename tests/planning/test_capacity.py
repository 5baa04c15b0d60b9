"""The capacity curve and plans match the training's plan and measurements."""

import re
from pathlib import Path
from typing import Any

import pytest

import tiercache as tc
from tests.train.cases import SPECS, Case, assert_same_bits, open_store, result_of, table, tiered, train
from tiercache.errors import BudgetError, PlanError
from tiercache.planning.capacity import Capacity
from tiercache.planning.plan_file import Rates, TrainingPlan
from tiercache.planning.reuse import Reuse
from tiercache.planning.row_offsets import RowOffsets
from tiercache.planning.schedule import OrderRule, Schedule
from tiercache.store.table import group_tables

CASE = Case(
    tables=(table("a", 16), table("b", 64, tc.optim.Adam(learning_rate=0.01))), specs=SPECS,
    num_samples=3000, pass_rows=250, num_keys=20_000, batch=50,
)  # fmt: skip
DEVICE = 8 << 20
RATES = Rates(read=1e9, write=5e8, copy=5e9, link=5e9, commit_seconds=0.001, samples=1e4)


def capacity_of(data: tc.PassDataset, order: OrderRule = None, rates: Rates = RATES) -> Capacity:
    positions = RowOffsets.of(data, group_tables(data.tables))
    schedule = Schedule(num_passes=len(data), dataset_digest=data.digest, order=order)
    return Capacity(Reuse.of(schedule, positions, positions.keys_of(data)), [p.samples for p in data], rates)


@pytest.mark.parametrize(("order", "commit_every"), [(None, 1), ((3, 1, 0, 2, *range(4, 12)), 3)])
def test_every_point_of_the_curve_is_what_training_plans(tmp_path: Path, order: OrderRule, commit_every: int) -> None:
    data = CASE.cut(tmp_path / "d")
    capacity = capacity_of(data, order)
    points = capacity.curve(1 << 30)
    assert [p.host_budget for p in points] == sorted(p.host_budget for p in points)
    assert points[0].total("rows_read") > points[-1].total("rows_read") == 0
    with pytest.raises(BudgetError, match="raise host_budget"):
        capacity.at(points[0].host_budget - 1)
    for point in points:
        ours = capacity.at(point.host_budget, commit_every=commit_every).passes
        assert [p.commits for p in ours] == [i % commit_every == 0 for i in range(1, len(ours) + 1)]
        with (
            open_store(tmp_path / "s", CASE, "memory") as store,
            tiered(
                store, data, order=order, host_budget=point.host_budget, commit_every=commit_every, device_budget=DEVICE
            ) as cache,
        ):
            theirs = cache.plan(passes=len(ours) - 1)
        for mine, other in zip(ours, theirs, strict=False):
            for name in ("sub_dataset", "rows_G", "kept_G", "rows_read", "bytes_read", "bytes_written", "host_bytes"):
                assert getattr(mine, name) == getattr(other, name), name


def test_memory_takes_the_least_memory_and_speed_the_least_time_to_the_same_bits(tmp_path: Path) -> None:
    """On a disk so slow that reads bound the training; its measurements match the file."""
    data = CASE.cut(tmp_path / "d")
    capacity = capacity_of(data, rates=RATES.model_copy(update={"read": 1e6, "samples": None}))
    points = capacity.curve(1 << 30)
    results, chosen = [], {}
    for optimize in ("memory", "speed"):
        point = chosen[optimize] = capacity.choose(optimize, points, None)
        path = tmp_path / f"{optimize}.toml"
        path.write_text(capacity.plan(point, optimize=optimize, device_budget=DEVICE).to_toml())
        plan = TrainingPlan.from_toml(path.read_text(), "it")
        with open_store(tmp_path / optimize, CASE, "lmdb") as store:
            with tc.TierCache(store, data, plan=path, progress=False) as cache:
                results.append(result_of(store, data, train(cache, CASE)))
                reports = cache.reports
            for said, found in zip(plan.passes, reports, strict=True):
                assert (said.index, said.sub_dataset, said.rows) == (found.pass_index, found.sub_dataset, found.rows)
                assert (said.rows_read, said.bytes_read) == (found.rows_read, found.bytes_read)
                assert (said.rows_written, said.bytes_written) == (found.rows_written, found.bytes_written)
                assert found.seconds_predicted == pytest.approx(said.seconds, rel=1e-4)
                assert found.record()["bound_predicted"] == said.bound
                assert found.seconds > 0
    assert_same_bits(*results)
    assert chosen["memory"].host_budget == min(p.host_budget for p in points)
    assert chosen["speed"].epoch_seconds <= 1.02 * min(p.epoch_seconds for p in points)
    assert chosen["speed"].epoch_seconds < chosen["memory"].epoch_seconds


def test_commits_are_further_apart_where_writes_bound_the_training(tmp_path: Path) -> None:
    data = CASE.cut(tmp_path / "d")
    slow = capacity_of(data, rates=RATES.model_copy(update={"write": 1e6, "samples": None}))
    points = slow.curve(1 << 30)
    assert slow.choose("speed", points, None).commit_every > 1
    assert slow.choose("speed", points, 1).commit_every == 1
    fast = capacity_of(data)
    assert fast.choose("speed", fast.curve(1 << 30), None).commit_every == 1


@pytest.mark.parametrize("commit_every", [1, 4])
def test_a_plan_keeps_its_store_budget_with_commits_as_far_apart_as_it_can(tmp_path: Path, commit_every: int) -> None:
    """The smallest one is that of the training. With a byte less commits are closer, or nothing is planned."""
    data = CASE.cut(tmp_path / "d")
    slow = capacity_of(data, rates=RATES.model_copy(update={"write": 1e6, "samples": None}))
    points = slow.curve(1 << 30)
    options = {"device_budget": DEVICE, "host_budget": "64MiB", "commit_every": commit_every}
    with pytest.raises(BudgetError, match="raise store_budget to") as caught:
        tc.TierCache(tmp_path / "s", data, store_budget=1, **options)  # type: ignore[arg-type]
    needed = int(re.search(r"raise store_budget to (\d+)", str(caught.value))[1])  # type: ignore[index]
    point = slow.choose("speed", points, None, needed)
    assert point.commit_every == commit_every
    with tc.TierCache(tmp_path / "s", data, store_budget=needed, **options):  # type: ignore[arg-type]
        pass
    if commit_every > 1:
        assert slow.choose("speed", points, None, needed - 1).commit_every < commit_every
    with pytest.raises(BudgetError, match=f"raise store_budget to {needed} bytes"):
        slow.choose("speed", points, commit_every, needed - 1)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[budgets]", "[budgets]\nhosts = 3", "budgets.hosts is not a key of a plan"),
        ("version = 1", "version = 2", "version is 2"),
        ('optimize = "memory"', 'optimize = "cost"', "optimize is 'cost', but should be 'speed' or 'memory'"),
        ("commit_every = 1", "commit_every = 0", "budgets.commit_every is 0"),
        ("commit_every = 1", "commit_every = true", "budgets.commit_every is True, but should be a valid integer"),
        ("read = 1e+09", 'read = "1e9"', "machine.read is '1e9', but should be a valid number"),
        ("passes = [", "order = [false, true]\npasses = [", "order.0 is False"),
        ("[machine]", "[machine", "is not TOML"),
        ("[machine]", f"x = {'[' * 100_000}", "is nested too deeply"),
        ('device = "8MiB"', 'device = "8 horses"', "budgets.device is '8 horses'"),
        ('device = "8MiB"', "", "budgets.device is missing"),
        ("read = 1e+09", "read = 0", "machine.read is 0, but should be greater than 0"),
        ('dataset = "', 'dataset = "00', "is for the dataset 00.*, but training was given"),
        ("passes = [", "order = [0, 1, 1]\npasses = [", "must list each of the 12 sub-datasets once"),
    ],
)
def test_a_plan_that_was_edited_badly_is_refused_with_the_key(tmp_path: Path, old: str, new: str, words: str) -> None:
    data = CASE.cut(tmp_path / "d")
    capacity = capacity_of(data)
    text = capacity.plan(capacity.at(capacity.least()), optimize="memory", device_budget=DEVICE).to_toml()
    assert text.count(old) == 1
    (tmp_path / "plan.toml").write_text(text.replace(old, new))
    with pytest.raises(PlanError, match=words):
        tc.TierCache(tmp_path / "s", data, plan=tmp_path / "plan.toml")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("edited", "words"),
    [({"device": 4096}, "the passes need .* on the device"), ({"host": 4096}, "raise host_budget to")],
)
def test_budgets_that_were_edited_to_too_little_are_refused(tmp_path: Path, edited: dict[str, Any], words: str) -> None:
    data = CASE.cut(tmp_path / "d")
    capacity = capacity_of(data)
    plan = capacity.plan(capacity.at(capacity.least()), optimize="memory", device_budget=DEVICE)
    plan = plan.model_copy(update={"budgets": plan.budgets.model_copy(update=edited)})
    path = tmp_path / "plan.toml"
    path.write_text(plan.to_toml())
    with pytest.raises(BudgetError, match=words):
        tc.TierCache(tmp_path / "s", data, plan=path)
    with tc.TierCache(tmp_path / "s", data, plan=path, device_budget=DEVICE, host_budget="64MiB", progress=False):
        pass
    with pytest.raises(ValueError, match="pass both, or the plan of"):
        tc.TierCache(tmp_path / "t", data, host_budget="64MiB")
