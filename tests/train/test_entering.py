"""A store enters a schedule in the middle: training continues to the same bits as an uninterrupted one."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.train.cases import Case, Net, assert_bits_of_memory, open_store, smallest_host_budget, tiered, train
from tests.train.loops import train_store
from tests.train.test_reorganize import one_case
from tiercache.store import Cursor, load_rows, verify


def five_passes(**options: Any) -> Case:
    usual = {"num_samples": 5 * 32, "pass_rows": 32, "num_keys": 60, "batch": 8, "epochs": 3, "shuffle": True}
    return one_case(tc.optim.Adam(learning_rate=0.01), **usual | options)


def train_to(store: tc.Store, passes: tc.PassDataset, case: Case, pass_index: int, batches: int, **options: Any) -> Any:
    """Train from the store's position to a commit at the beginning of a pass or after some of its batches."""
    with tiered(store, passes, order_seed=case.order_seed, **options) as cache:

        def stop(at: int, batch: int) -> None:
            if (at, batch + 1) == (pass_index, batches):
                cache.commit()
                if batches * case.batch == case.pass_rows:
                    raise InterruptedError
            if (at, batch) == (pass_index, batches):  # what was trained since is not kept
                raise InterruptedError

        with pytest.raises(InterruptedError):
            train(cache, case, each_batch=stop)
    assert store.commit.cursor == (pass_index, batches * case.batch)


def go_on(store: tc.Store, passes: tc.PassDataset, case: Case, **options: Any) -> Net:
    seed = 1 if store.commit is None else 99
    return train_store(store, passes, case, seed=seed, order_seed=case.order_seed, **options)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 99),
    pass_index=st.integers(0, 13),
    batches=st.integers(0, 3),
    order_seed=st.sampled_from([None, 5]),
    commit_every=st.integers(1, 3),
    detour=st.sampled_from(["compact", "another order", "another set", "none"]),
    small=st.booleans(),
    again=st.booleans(),
)
def test_training_goes_on_from_any_place_of_a_schedule_to_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, seed: int, pass_index: int, batches: int, order_seed: int | None,
    commit_every: int, detour: str, small: bool, again: bool,
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("entering")
    case = five_passes(data_seed=seed, order_seed=order_seed)
    passes = case.cut(path / "passes")
    with open_store(path / "s.tc", case, "memory") as store:
        if pass_index or batches:
            train_to(store, passes, case, pass_index, batches)
            at = store.commit.cursor
            if detour == "compact" and not batches:
                store.compact()
            elif detour == "another set":
                other = five_passes(data_seed=seed + 1, num_samples=96, num_keys=90)
                tc.reorganize(store, other.cut(path / "other"), start=(1, 4), progress=False)
            elif detour != "none":
                tc.reorganize(store, passes, order_seed=8, start=(pass_index + 2, 0), progress=False)
            commit = tc.reorganize(store, passes, order_seed=order_seed, start=at, progress=False)
            assert commit.cursor == at
        options: dict[str, Any] = {"commit_every": commit_every}
        if small:
            options["host_budget"] = smallest_host_budget(store, passes, order_seed=order_seed, **options)
        if again and pass_index < 13 and (pass_index or batches):
            train_to(store, passes, case, pass_index + 1, 2, **options)
        model = go_on(store, passes, case, **options)
        assert_bits_of_memory(store, passes, model, case)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
@pytest.mark.parametrize("order_seed", [None, 5])
def test_a_store_on_disk_goes_on_from_inside_an_epoch(tmp_path: Path, engine: str, order_seed: int | None) -> None:
    case = five_passes(order_seed=order_seed)
    passes = case.cut(tmp_path / "passes")
    with open_store(tmp_path / "s.tc", case, engine) as store:
        train_to(store, passes, case, 7, 2)
        tc.reorganize(store, passes, order_seed=8, start=(3, 0), progress=False)
        tc.reorganize(store, passes, order_seed=order_seed, start=(7, 16), progress=False)
    assert verify(tmp_path / "s.tc")["problems"] == []
    with tc.Store.open(tmp_path / "s.tc") as store:
        assert store.commit.cursor == Cursor(7, 16)
        model = go_on(store, passes, case)
        assert_bits_of_memory(store, passes, model, case)
    assert verify(tmp_path / "s.tc")["problems"] == []


UNTRAINED = {
    "compact": ("compact",),
    "compact twice": ("compact", "compact"),
    "compact, then roll back to that": ("compact", "rollback"),
    "import": ("import",),
    "import, then compact": ("import", "compact"),
    "compact, then import": ("compact", "import"),
    "compact, reorganize, compact": ("compact", "reorganize", "compact"),
    "reorganize what is in order": ("reorganize",),
    "roll back to now": ("rollback",),
}


def commit_untrained(store: tc.Store, passes: tc.PassDataset, case: Case, what: str) -> None:
    if what == "compact":
        store.compact()
    elif what == "rollback":
        store.rollback(store.commit.id)
    elif what == "reorganize":
        tc.reorganize(store, passes, order_seed=case.order_seed, progress=False)
    else:
        table = case.tables[0].name
        load_rows(store, [(table, (keys, tuple(fields))) for keys, fields in store.scan(table, chunk_rows=5)][:1])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("done", UNTRAINED.values(), ids=UNTRAINED.keys())
@pytest.mark.parametrize(("engine", "order_seed", "at"), [("lmdb", None, 5), ("zarr", 5, 7), ("memory", None, 15)])
def test_a_commit_that_trains_nothing_keeps_the_position(
    tmp_path: Path, done: tuple[str, ...], engine: str, order_seed: int | None, at: int
) -> None:
    case = five_passes(order_seed=order_seed)
    passes = case.cut(tmp_path / "passes")
    with open_store(tmp_path / "s.tc", case, engine, retention=2) as store:
        if at == 15:
            first = go_on(store, passes, case)
        else:
            train_to(store, passes, case, at, 0)
        for what in done:
            commit_untrained(store, passes, case, what)
            assert store.commit.cursor == (at, 0)
        seen: list[int] = []
        options: dict[str, Any] = {"order_seed": order_seed, "reorganize": True, "seed": 99}
        model = train_store(store, passes, case, each_batch=lambda pass_index, _: seen.append(pass_index), **options)
        assert sorted({*seen}) == [*range(at, 15)]
        assert_bits_of_memory(store, passes, first if at == 15 else model, case)


def test_a_compacted_store_begins_other_passes(tmp_path: Path) -> None:
    case = five_passes()
    passes = case.cut(tmp_path / "passes")
    other = five_passes(data_seed=9).cut(tmp_path / "other")
    with open_store(tmp_path / "s.tc", case, "memory", retention=2) as store:
        train_to(store, passes, case, 6, 0)
        compacted = store.compact().id
        assert tc.reorganize(store, other, progress=False).cursor == (0, 0)
        store.rollback(compacted)
        assert tc.reorganize(store, passes, order_seed=8, progress=False).cursor == (0, 0)


def test_a_store_that_stands_where_it_would_start_is_left_as_it_is(tmp_path: Path) -> None:
    case = five_passes()
    passes = case.cut(tmp_path / "passes")
    with open_store(tmp_path / "s.tc", case, "memory") as store:
        train_to(store, passes, case, 6, 1)
        commit = store.commit
        assert tc.reorganize(store, passes, start=(6, 8), progress=False) is commit
        assert tc.reorganize(store, passes, progress=False) is commit
        assert tc.reorganize(store, passes, start=(6, 0), progress=False).id == commit.id + 1
        with pytest.raises(ValueError, match=r"invalid start \(-1, 0\): passes and samples count from 0"):
            tc.reorganize(store, passes, start=(-1, 0), progress=False)
        with pytest.raises(ValueError, match="start is sample 33 of pass 6, but its sub-dataset has 32"):
            tc.reorganize(store, passes, start=(6, 33), progress=False)
