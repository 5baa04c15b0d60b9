"""Days of data into one store: the store follows each new schedule."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.datasets import write_dataset
from tests.train.cases import (
    Case,
    Net,
    Spec,
    assert_bits_of_memory,
    assert_same_bits,
    open_store,
    result_of,
    result_of_resident,
    smallest_host_budget,
    table,
    tiered,
    train,
)
from tiercache.data.raw_batch import FeatureKeys, RawBatch
from tiercache.data.repartition import split_cursor
from tiercache.planning.pass_plan import segments_by_pass
from tiercache.store import Cursor, MemoryEngine, alter, external_sort, load_rows, verify
from tiercache.store.bulk_load import load_sorted
from tiercache.store.segment import BASE_PASS, base_layout


def one_case(optimizer: Any = None, **options: Any) -> Case:
    """Two tables of one group and one of another."""
    rule = optimizer or tc.optim.Adagrad(learning_rate=0.05)
    return Case(
        tables=(table("item", 5, rule), table("user", 5, rule), table("place", 3, rule)),
        specs=(Spec(name="a", table="item"), Spec(name="b", table="user"), Spec(name="c", table="place")),
        **{"shuffle": False, "epochs": 1, **options},
    )


def cuts_of(case: Case, drift: int) -> list[RawBatch]:
    """Return the samples of a case in passes; keys drift, so that each pass has new ones and drops old ones."""
    rng, n, cuts = np.random.default_rng(case.data_seed), case.pass_rows, []
    for number in range(case.num_samples // n):
        features = {
            spec.name: FeatureKeys(rng.integers(0, case.num_keys, n) + drift * number, None, None)
            for spec in case.specs
        }
        label, dense = rng.integers(0, 2, n).astype(np.float32), rng.standard_normal(n).astype(np.float32)[:, None]
        cuts.append(RawBatch(label, dense, features))
    return cuts


def two_days(folder: Path, **options: Any) -> tuple[Case, tc.PassDataset, tc.PassDataset]:
    """Return a case, and datasets of the first and of the last two of its passes."""
    case = one_case(**options)
    cuts = cuts_of(case, drift=3)
    return case, *(write_dataset(folder / f"d{i}", case.schema, cuts[2 * i : 2 * i + 2]) for i in range(2))


def outside_rows(case: Case) -> dict[str, tuple[np.ndarray, tuple[np.ndarray, ...]]]:
    """Return keys and fields of rows from outside, by table: some that are trained, some that are not."""
    keys, rng = np.arange(-3, 35), np.random.default_rng(4)
    return {
        one.name: (keys, tuple(rng.random((keys.size, field.width), dtype=np.float32) for field in one.fields))
        for one in case.tables
    }


def put(memory: tc.InMemoryCache, name: str, keys: np.ndarray, fields: tuple[np.ndarray, ...]) -> None:
    """Write the rows of those keys that a cache has."""
    _, mine, theirs = np.intersect1d(memory.keys(name), keys, return_indices=True)
    for values, new in zip(memory.fields(name), fields, strict=True):
        values[mine] = new[theirs]


def trained(store: tc.Store, passes: tc.PassDataset, case: Case, *, seed: int = 1, **options: Any) -> Net:
    with tiered(store, passes, **options) as cache:
        return train(cache, case, seed=seed)


def stopped(store: tc.Store, passes: tc.PassDataset, case: Case, at: int) -> None:
    """Train up to a pass."""

    def stop(pass_index: int, _batch: int) -> None:
        if pass_index == at:
            raise InterruptedError

    with pytest.raises(InterruptedError), tiered(store, passes) as cache:
        train(cache, case, each_batch=stop)
    assert store.commit.cursor == (at, 0)


def day_by_day(
    case: Case, cuts: list[RawBatch], days: int, path: Path, store: tc.Store, **options: Any
) -> Iterator[tuple[int, Net, tc.PassDataset]]:
    """Train one dataset after another into one store, each with a new model that the commit restores."""
    each = len(cuts) // days
    for day in range(days):
        passes = write_dataset(path / f"day{day}", case.schema, cuts[day * each : (day + 1) * each])
        tc.reorganize(store, passes, order_seed=case.order_seed, progress=False)
        with tiered(store, passes, order_seed=case.order_seed, **options) as cache:
            yield day, train(cache, case, seed=1 if day == 0 else 1000 + day), passes


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("engine", "slice_bytes"), [("memory", None), ("lmdb", None), ("zarr", None), ("memory", 2000), ("lmdb", 500)]
)
def test_ten_days_into_one_store_equal_one_training_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, slice_bytes: int | None
) -> None:
    """Rows, optimizer state and dense weights have the bits of one run over all days, with new keys on each day.

    The step count continues, and with it the rounding of 16-bit rows.
    Each row keeps the commit of its last training, however often it was moved, also if a rewrite is cut into slices,
    each a segment of the base.
    """
    if slice_bytes is not None:
        monkeypatch.setattr(external_sort, "LEAST_SLICE_BYTES", slice_bytes)
    case = one_case(tc.optim.Adam(learning_rate=0.01), num_samples=20 * 32, pass_rows=32, num_keys=60)
    tables = *case.tables[:2], replace(case.tables[2], dtype="bfloat16"), table("city", 3, dtype="float16")
    case = replace(case, tables=tables, specs=(*case.specs, Spec(name="d", table="city")))
    cuts = cuts_of(case, drift=7)
    whole = write_dataset(tmp_path / "whole", case.schema, cuts)
    with open_store(tmp_path / "s.tc", case, engine) as store:
        retained = 0
        for _, model, _ in day_by_day(case, cuts, 10, tmp_path, store):
            last = model
            retained += len(store.commit.retained_ids)
        assert retained > 0
        assert_bits_of_memory(store, whole, last, case)
        assert store.commit.id == 10 * 2 + 9
        assert store.commit.settings["steps"] == sum(-(-cut.num_samples // case.batch) for cut in cuts)
        trained = {
            (spec.table, key): 3 * (number // 2) + 1 + number % 2  # a day is a new schedule and two passes
            for number, cut in enumerate(cuts)
            for spec in case.specs
            for key in cut.features[spec.name].keys.tolist()
        }
        for since in (-1, 0, 1, 4, 14, 26, 28):
            given = [
                (t.name, k) for t in store.tables for ks, _ in store.changes(t.name, since=since) for k in ks.tolist()
            ]
            assert sorted(given) == sorted(key for key, commit in trained.items() if commit > since)
    if engine != "memory":
        assert verify(tmp_path / "s.tc")["problems"] == []


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 99),
    days=st.integers(2, 4),
    each=st.integers(1, 4),
    drift=st.integers(0, 40),
    commit_every=st.integers(1, 3),
    small=st.booleans(),
)
def test_days_equal_memory_for_any_cut_and_budget(
    tmp_path_factory: pytest.TempPathFactory, seed: int, days: int, each: int, drift: int, commit_every: int,
    small: bool,
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("days")
    case = one_case(num_samples=days * each * 16, pass_rows=16, num_keys=40, data_seed=seed, batch=8)
    cuts = cuts_of(case, drift)
    whole = write_dataset(path / "whole", case.schema, cuts)
    with open_store(path / "s.tc", case, "memory") as store:
        options: dict[str, Any] = {"commit_every": commit_every}
        if small:
            empty = tc.Store.open(None, tables=case.tables, engine=MemoryEngine())
            options["host_budget"] = smallest_host_budget(empty, whole, device_budget="64MiB")
        for _, model, _ in day_by_day(case, cuts, days, path, store, **options):
            last = model
        assert_bits_of_memory(store, whole, last, case)


@pytest.mark.parametrize("engine", ["memory", "lmdb"])
def test_a_day_of_few_keys_leaves_the_rows_of_others_where_they_are(tmp_path: Path, engine: str) -> None:
    """Segments stay through days that use few, many and then few of their keys."""
    case = one_case(tc.optim.Adam(learning_rate=0.01), num_samples=8 * 32, pass_rows=32, num_keys=120)
    cuts = cuts_of(case, drift=0)
    for few in (*cuts[2:4], *cuts[6:]):
        for part in few.features.values():
            part.keys[:] %= 7
    whole = write_dataset(tmp_path / "whole", case.schema, cuts)
    with open_store(tmp_path / "s.tc", case, engine) as store:
        retained, written = [], []
        for _, model, _ in day_by_day(case, cuts, 4, tmp_path, store):
            last = model
            retained.append(len(store.commit.retained_ids))
            written.append(store.counters.rows_written)
        assert retained[0] == 0
        assert retained[1] > 0
        assert retained[3] > 0
        assert written[1] - written[0] < written[0] / 2
        assert_bits_of_memory(store, whole, last, case)
    if engine != "memory":
        assert verify(tmp_path / "s.tc")["problems"] == []


def test_retained_segments_are_of_no_pass_of_the_new_schedule(tmp_path: Path) -> None:
    """Their passes belonged to another schedule: a load of the same number does not read them."""
    case = one_case(num_samples=4 * 32, pass_rows=32, num_keys=300)
    cuts = cuts_of(case, drift=0)
    one, two = (write_dataset(tmp_path / f"d{i}", case.schema, part) for i, part in enumerate((cuts[:3], cuts[3:])))
    with open_store(tmp_path / "s.tc", case, "memory") as store:
        trained(store, one, case)
        tc.reorganize(store, two, progress=False)
        retained = [segment for segment in store.segments if segment.id in store.commit.retained_ids]
        assert {segment.pass_index for segment in retained} == {0, 1, 2}
        assert segments_by_pass(store).keys() == {BASE_PASS}
        trained(store, two, case)
        assert segments_by_pass(store).keys() == {0}


def test_a_day_can_be_taken_back_to_before_the_store_was_reorganized(tmp_path: Path) -> None:
    """Rolled back to the end of the previous day and trained again: the bits of an uninterrupted training."""
    case = one_case(num_samples=6 * 32, pass_rows=32, num_keys=90)
    cuts = cuts_of(case, drift=25)
    whole = write_dataset(tmp_path / "whole", case.schema, cuts)
    with tc.Store.open(tmp_path / "s.tc", tables=case.tables, retention=9) as store:
        for day, model, _ in day_by_day(case, cuts, 3, tmp_path / "first", store):
            last = model
            if day == 1:
                end = store.commit.id
        assert store.commit.retained_ids
        store.rollback(end)
        passes = tc.PassDataset.open(tmp_path / "first" / "day2")
        tc.reorganize(store, passes, progress=False)
        last = trained(store, passes, case, seed=77)
        assert store.commit.retained_ids
        assert_bits_of_memory(store, whole, last, case)
    assert verify(tmp_path / "s.tc")["problems"] == []


def test_more_epochs_of_the_same_days_go_on_as_if_never_reorganized(tmp_path: Path) -> None:
    """Two epochs of one day, then the previous day again: rows equal a training in memory with those batches."""
    case = one_case(num_samples=6 * 32, pass_rows=32, num_keys=50)
    cuts = cuts_of(case, drift=9)
    order = [*cuts[:3], *cuts[:3], *cuts[3:], *cuts[:3]]
    whole = write_dataset(tmp_path / "whole", case.schema, order)
    days = [write_dataset(tmp_path / f"d{i}", case.schema, part) for i, part in enumerate((cuts[:3], cuts[3:]))]
    with open_store(tmp_path / "s.tc", case, "memory") as store:
        for passes, epochs in ((days[0], 2), (days[1], 1), (days[0], 1)):
            tc.reorganize(store, passes, progress=False)
            model = trained(store, passes, replace(case, epochs=epochs))
        assert_bits_of_memory(store, whole, model, case)


def test_a_store_that_follows_the_schedule_is_left_as_it_is(tmp_path: Path) -> None:
    """So a killed loop over days may begin its day again; a store without a commit follows any schedule."""
    case, one, two = two_days(tmp_path, num_samples=4 * 32, pass_rows=32)
    with open_store(tmp_path / "s.tc", case, "memory") as store:
        assert tc.reorganize(store, one, progress=False) is None
        trained(store, one, case)
        commit = store.commit
        assert tc.reorganize(store, one, progress=False) is commit
        moved = tc.reorganize(store, two, progress=False)
        assert (moved.id, moved.cursor) == (commit.id + 1, (0, 0))
        assert tc.reorganize(store, two, progress=False) is moved
        assert store.state() != b""


def test_training_in_another_order_is_refused_until_the_store_was_reorganized(tmp_path: Path) -> None:
    case, one, two = two_days(tmp_path, num_samples=4 * 32, pass_rows=32)
    with open_store(tmp_path / "s.tc", case, "memory") as store:
        trained(store, one, case)
        for passes, seed in ((two, None), (one, 5)):
            with pytest.raises(tc.TierCacheError, match=r"tiercache\.reorganize\(store, passes\) to continue"):
                tiered(store, passes, order_seed=seed)
        before = result_of(store, one, None)
        store.compact()
        with pytest.raises(tc.TierCacheError, match=r"has no training schedule .* or open the cache without"):
            tiered(store, one)
        assert_same_bits(before, result_of(store, one, None))
        tc.reorganize(store, one, order_seed=5, progress=False)
        trained(store, one, case, order_seed=5)


def test_a_store_inside_a_pass_is_not_reorganized(tmp_path: Path) -> None:
    """The rest of the pass would never be trained."""
    case, one, two = two_days(tmp_path, num_samples=4 * 32, pass_rows=32)
    with open_store(tmp_path / "s.tc", case, "memory") as store:

        def leave(_pass_index: int, _batch: int) -> None:
            cache.commit()
            raise InterruptedError

        with pytest.raises(InterruptedError), tiered(store, one) as cache:
            train(cache, case, each_batch=leave)
        with pytest.raises(ValueError, match="stands inside pass 0: train to the end of a pass"):
            tc.reorganize(store, two, progress=False)


@pytest.mark.parametrize("engine", ["memory", "zarr"])
def test_rows_from_outside_are_what_training_goes_on_from(tmp_path: Path, engine: str) -> None:
    case = one_case(num_samples=4 * 32, pass_rows=32, num_keys=40)
    passes = write_dataset(tmp_path / "passes", case.schema, cuts_of(case, drift=5))
    cache, given = tc.InMemoryCache(passes), outside_rows(case)
    for name, rows in given.items():
        put(cache, name, *rows)
    with open_store(tmp_path / "s.tc", case, engine) as store:
        load_rows(store, [*given.items()])
        with pytest.raises(tc.TierCacheError, match="has no training schedule at commit 0"):
            tiered(store, passes)
        tc.reorganize(store, passes, progress=False)
        model = trained(store, passes, case)
        assert_same_bits(result_of_resident(cache, train(cache, case)), result_of(store, passes, model))
        untouched = store.lookup("item", np.array([-3]))
        assert [values[0].tolist() for values in untouched.values()] == [one[0].tolist() for one in given["item"][1]]


@pytest.mark.parametrize("engine", ["memory", "lmdb", "zarr"])
def test_rows_imported_in_the_midst_of_a_schedule_are_what_it_goes_on_with(tmp_path: Path, engine: str) -> None:
    case = one_case(num_samples=4 * 32, pass_rows=32, num_keys=40, epochs=3, batch=32)
    passes = write_dataset(tmp_path / "passes", case.schema, cuts_of(case, drift=5))
    keys, fields = outside_rows(case)["item"]
    memory = tc.InMemoryCache(passes)

    def replace_rows(pass_index: int, _batch: int) -> None:
        if pass_index == 5:
            put(memory, "item", keys, fields)

    with open_store(tmp_path / "s.tc", case, engine, retention=2) as store:
        stopped(store, passes, case, at=6)
        tc.import_store({"item": (keys, fields[0])}, store, tables=[case.tables[0]], initial_state=True)
        load_rows(store, [("item", (keys, fields))])
        with pytest.raises(tc.TierCacheError, match="has no training schedule at commit"):
            tiered(store, passes)
        imported = store.commit.id
        split = tc.repartition(passes, tmp_path / "split", rows=48, batch_multiple=8)
        assert tc.reorganize(store, split, progress=False).cursor == split_cursor(split, Cursor(6, 0))
        store.rollback(imported)
        with tiered(store, passes, reorganize=True) as tiers:
            assert store.commit.cursor == (6, 0)
            model = train(tiers, case, seed=9)
        assert_same_bits(
            result_of_resident(memory, train(memory, case, each_batch=replace_rows)), result_of(store, passes, model)
        )
        untouched = store.lookup("item", np.array([-3]))
        assert [values[0].tolist() for values in untouched.values()] == [values[0].tolist() for values in fields]


@pytest.mark.parametrize("engine", ["memory", "lmdb", "zarr"])
def test_an_altered_store_trains_on_as_one_that_was_made_of_its_rows(tmp_path: Path, engine: str) -> None:
    """Another optimizer in the middle of a schedule: position and vectors stay, and Adam begins at step 0."""
    case = one_case(num_samples=4 * 32, pass_rows=32, num_keys=40, epochs=2, batch=16)
    cuts, adam = cuts_of(case, drift=5), tc.optim.Adam(learning_rate=0.03)
    passes = write_dataset(tmp_path / "passes", case.schema, cuts)
    tables = (*(replace(one, optimizer=adam) for one in case.tables[:2]), case.tables[2])
    altered = replace(case, tables=tables)
    new_passes = write_dataset(tmp_path / "altered", altered.schema, cuts)

    with open_store(tmp_path / "s.tc", case, engine) as store, open_store(tmp_path / "b.tc", altered, engine) as other:
        stopped(store, passes, case, at=6)
        before = {one.name: [fields[0] for _, fields in store.scan(one.name)] for one in tables}
        commit = alter(store, tables)
        assert commit.settings["tables"] == {"item": {"step": 0}, "user": {"step": 0}}
        for name, vectors in before.items():
            assert [fields[0].tolist() for _, fields in store.scan(name)] == [one.tolist() for one in vectors]
        load_sorted(other, lambda one: store.scan(one.name), state=store.state(), settings=commit.settings)
        tc.reorganize(other, new_passes, start=commit.cursor, progress=False)
        results = []
        for one in (store, other):
            with tiered(one, new_passes, reorganize=True) as tiers:
                assert one.commit.cursor == commit.cursor == (6, 0)
                model = train(tiers, altered, seed=9)
            results.append(result_of(one, new_passes, model))
        assert_same_bits(*results)
        assert store.lookup("item", np.array([cuts[3].features["a"].keys[0]]))["exp_avg"].any()


@pytest.mark.parametrize("pass_rows", [256, 2048])
@pytest.mark.parametrize("large_pages", [False, True])
def test_a_reorganized_store_trains_at_the_smallest_host_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pass_rows: int, large_pages: bool
) -> None:
    """Also with ranges longer than a region of host memory, and with pages of 40 KiB."""
    tables = (table("user", 24), table("item", 24))
    specs = (Spec(name="u", table="user"), Spec(name="i", table="item", hotness="multi_hot"))
    case = Case(
        tables=tables, specs=specs, num_samples=4 * pass_rows, pass_rows=pass_rows, num_keys=9 * pass_rows, batch=256,
        epochs=1, order_seed=5,
    )  # fmt: skip
    passes = case.cut(tmp_path / "p")
    with open_store(tmp_path / "s", case, "memory") as store:
        trained(store, passes, case)
        if large_pages:
            monkeypatch.setattr("tiercache.dist.reorganize._layout", lambda _: base_layout)
        tc.reorganize(store, passes, order_seed=5, progress=False)
        ((base, *_),) = segments_by_pass(store).values()
        smallest = smallest_host_budget(store, passes, device_budget="64MiB", order_seed=5)
        with tiered(store, passes, order_seed=5, host_budget=smallest) as cache:
            first = base.layouts[0].pages_of_range(0)
            low, high = map(base.layouts[0].byte_of_page, first)
            assert high - low > max(64 << 10, cache._rows.budget.block)
            assert (base.layouts[0].page_rows * base.layouts[0].row_bytes > cache._rows.budget.page) == large_pages
            train(cache, case)
            assert 0 < cache.host_bytes_peak <= cache._rows.budget.rows


def test_a_page_that_no_region_holds_is_said(tmp_path: Path) -> None:
    """A plan that does not count the store's pages ends in an error, not in a loop."""
    case, one, two = two_days(tmp_path, num_samples=4 * 4096, pass_rows=4096, num_keys=9000)
    with open_store(tmp_path / "s", case, "memory") as store:
        trained(store, one, case)
        tc.reorganize(store, two, progress=False)
        with tiered(store, two) as cache:
            cache._rows.memory.region_bytes = 1024
            with pytest.raises(tc.TierCacheError, match=r"reads a page of [\d,]+ bytes into regions of 1,024"):
                train(cache, case)
