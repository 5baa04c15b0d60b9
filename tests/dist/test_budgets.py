"""A budget that is too small is refused before the store changes."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiercache as tc
from tests.dist.pool import RanksPool
from tests.dist.trainings import (
    CASES,
    ONE,
    assert_as_alone,
    assert_same_rows,
    dense_of,
    model_of,
    open_sharded,
    resident,
    stored,
    train,
)
from tests.dist.trainings import trained as trained_by_step
from tests.train.cases import Case
from tiercache.data.pass_builder import device_bytes
from tiercache.dist.communicator import AnyCommunicator
from tiercache.sizes import parse_bytes
from tiercache.store.inspect import file_bytes_of
from tiercache.store.table import group_tables

LARGE = Case(tables=ONE.tables, specs=ONE.specs, num_samples=3000, num_keys=1 << 20, batch=250, epochs=2, shuffle=False)
ROW_BYTES = device_bytes(group_tables(LARGE.tables)[0])
SENTENCES = {
    "device_budget": "but device_budget is 4 KiB",
    "host_budget": "host_budget is 1 bytes, but the dump of one",
    "store_budget": "store_budget is 1 MiB, but the store needs",
    "commit_every": "commit_every is 0: expected at least 1 pass",
}
TOO_SMALL = {"device_budget": 4096, "host_budget": 1, "store_budget": "1MiB", "commit_every": 0}


def opened(ranks: AnyCommunicator, folder: str, **options: Any) -> list[int]:
    with open_sharded(ONE, folder, **options) as cache:
        return list(cache.store.commit.cursor)


def needed(ranks: AnyCommunicator, folder: str, **options: Any) -> int:
    with open_sharded(ONE, folder, **options) as cache:
        return cache.store_plan(cache.store.commit.state_bytes).needed


def trained_large(ranks: AnyCommunicator, folder: str, **options: Any) -> dict[str, Any]:
    with open_sharded(LARGE, folder, **options) as cache:
        model, optimizer = model_of(cache, LARGE)
        for _ in trained_by_step(cache, LARGE, (model, optimizer)):
            pass
    return dense_of(model)


def sharded(kind: str) -> dict[str, str]:
    return dict.fromkeys([one.name for one in ONE.tables], kind)


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files but the locks, which say who opened them last."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "writer.lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def held(path: Path) -> list[Any]:
    """Return the commits of a store, the blobs that each rank has once it is opened, and the names of its files.

    Without the next uses of keys, which are computed again.
    """
    with tc.Store.open(path) as store:
        blobs = [dict(rank.reader.stored()) for rank in store.ranks or [store]]
        commits = [commit.head for commit in store.commits]
    return [commits, blobs, {name for name in files_of(path) if "schedule" not in Path(name).parts}]


def assert_refused(errors: list[tuple[str, str] | None], sentence: str) -> None:
    """Every rank raises: one with the original error, each with the message."""
    assert all(error is not None and sentence in error[1] for error in errors), errors
    assert {"BudgetError", "ValueError"} & {error[0] for error in errors if error is not None}


OTHER_PASSES: dict[str, Any] = {"reorganize": True, "sharding": sharded("row_wise")}
"""The options of a training of other passes."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("size", "options", "at"),
    [
        pytest.param(1, {"sharding": sharded("row_wise"), "retention": 2}, [8, 0], id="one rank"),
        pytest.param(2, {"sharding": sharded("table_wise"), "retention": 2}, [8, 0], id="another sharding"),
        pytest.param(2, {"sharding": sharded("row_wise"), "retention": 1}, [8, 0], id="fewer commits"),
        pytest.param(2, {"sharding": sharded("row_wise"), "retention": 3}, [8, 0], id="more commits"),
        pytest.param(2, OTHER_PASSES | {"order_seed": None}, [0, 0], id="other passes"),
        pytest.param(2, OTHER_PASSES | {"order_seed": 5}, [0, 0], id="other passes in another order"),
    ],
)
def test_a_store_is_not_changed_for_a_budget_that_is_too_small(
    ranks_pool: RanksPool, tmp_path: Path, size: int, options: dict[str, Any], at: list[int]
) -> None:
    """Not written anew for other ranks or passes, and no commit is dropped: every file keeps its bytes."""
    CASES["one"].cut(tmp_path / "passes")
    folder = {"folder": str(tmp_path)}
    ranks_pool.run(2, train, case="one", **folder, sharding=sharded("row_wise"), retention=2)
    rows, before = stored(tmp_path), files_of(tmp_path / "model.tc")
    if "reorganize" in options:
        (tmp_path / "passes").rename(tmp_path / "old")
        Case(tables=ONE.tables, specs=ONE.specs, data_seed=7).cut(tmp_path / "passes")

    for name, sentence in SENTENCES.items():
        assert_refused(ranks_pool.errors(size, opened, **folder, **options | {name: TOO_SMALL[name]}), sentence)
        assert files_of(tmp_path / "model.tc") == before

    assert ranks_pool.run(size, opened, **folder, **options) == [at] * size
    if at != [0, 0]:
        assert_same_rows(stored(tmp_path), rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "order_seed"), [(1, None), (1, 5), (3, None)])
def test_parts_that_were_written_anew_are_given_up_where_the_budget_is_too_small_for_them(
    ranks_pool: RanksPool, tmp_path: Path, size: int, order_seed: int | None
) -> None:
    """For example if they have rows of earlier passes, which sizes alone do not reveal: no new part is left."""
    CASES["one"].cut(tmp_path / "passes")
    options: dict[str, Any] = {"folder": str(tmp_path), "sharding": sharded("row_wise"), "order_seed": order_seed}
    ranks_pool.run(2, train, case="one", **options)
    (tmp_path / "passes").rename(tmp_path / "old")
    Case(tables=ONE.tables, specs=ONE.specs, num_samples=32, data_seed=7).cut(tmp_path / "passes")
    rows, before = stored(tmp_path), held(tmp_path / "model.tc")
    file_bytes = file_bytes_of(tmp_path / "model.tc")

    options["reorganize"] = True
    shutil.copytree(tmp_path, tmp_path / "copy")
    copied = options | {"folder": str(tmp_path / "copy")}
    least = max(ranks_pool.run(size, needed, **copied))
    errors = ranks_pool.errors(size, opened, **options | {"store_budget": least - 1})
    assert_refused(errors, f"raise store_budget to {least} bytes")
    assert file_bytes_of(tmp_path / "model.tc") <= file_bytes
    assert held(tmp_path / "model.tc") == before
    assert_same_rows(stored(tmp_path), rows)
    assert ranks_pool.run(size, opened, **options | {"store_budget": least}) == [[0, 0]] * size


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 3])
def test_passes_cut_for_several_devices_are_trained_on_as_many(
    ranks_pool: RanksPool, tmp_path: Path, size: int
) -> None:
    """They are larger than one device holds, and end as on one process; extracted so, or split so."""
    budget = 800 * ROW_BYTES
    whole = LARGE.extract(tmp_path / "whole", device_budget=budget, devices=size, split_by="budget")
    passes = tc.repartition(
        LARGE.extract(tmp_path / "one", pass_rows=3000),
        tmp_path / "passes",
        device_budget=budget,
        devices=size,
        batch_multiple=1,
    )
    assert passes.digest == whole.digest
    rows = [sum(one.rows(table.name) for table in passes.tables) for one in passes]
    assert max(rows) > 800
    assert len(rows) > 2

    found = ranks_pool.run(
        size, trained_large, folder=str(tmp_path), device_budget=budget,
        sharding=sharded("row_wise"),
    )  # fmt: skip

    assert_as_alone(stored(tmp_path), found[0], resident(LARGE, passes))


def test_passes_cut_for_all_devices_together_are_refused_with_what_to_do(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Hashes give one rank more than half of the rows; whole tables need even more."""
    budget = 800 * ROW_BYTES
    passes = LARGE.extract(tmp_path / "all", device_budget=2 * budget, split_by="budget")
    passes.path.rename(tmp_path / "passes")
    advice = f", extract again with --device-budget {budget} --devices 2, "

    for kind, more in (("row_wise", "devices=2"), ("table_wise", "this assumes that all tables are sharded row_wise")):
        errors = ranks_pool.errors(2, opened, folder=str(tmp_path), device_budget=budget, sharding=sharded(kind))
        assert_refused(errors, advice)
        assert all(error is not None and error[1].endswith(more) for error in errors)


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_the_device_budget_that_an_error_gives_is_the_smallest_that_trains(
    ranks_pool: RanksPool, tmp_path: Path, kind: str
) -> None:
    """To the byte: the largest of the ranks' numbers, replicated vectors included."""
    CASES["one"].cut(tmp_path / "passes")

    def refused(device_budget: int) -> int:
        options = {"folder": str(tmp_path), "device_budget": device_budget, "sharding": sharded(kind)}
        texts = [error[1] for error in ranks_pool.errors(2, opened, **options) if error is not None]
        return max(parse_bytes(found) for text in texts for found in re.findall(r"2 ranks: raise it to (\w+), ", text))

    least = refused(1)
    assert refused(least - 1) == least
    ranks_pool.run(2, train, case="one", folder=str(tmp_path), device_budget=least, sharding=sharded(kind))
