"""Smaller passes from larger ones: the same samples, and no pass with more rows than fit on one of several devices."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.data.cases import ROW_BYTES, key_batch, plain_schema, rich_columns, rich_schema
from tests.datasets import raw_batch, write_dataset
from tests.train.cases import Case, Spec, assert_same_bits, resident_result, result_of, table, tiered, train
from tiercache.data.dataset_writer import write_key_sets
from tiercache.data.pass_builder import RowBudget, device_bytes, max_device_rows
from tiercache.data.repartition import split_cursor
from tiercache.errors import DatasetError
from tiercache.store import MemoryEngine, hash_keys
from tiercache.store.sharding import hash_bounds
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.data.raw_batch import RawBatch


def batch_of(num_samples: int, seed: int = 0) -> RawBatch:
    return key_batch(rich_schema(), rich_columns(num_samples, seed), 0, num_samples)


def samples_of(passes: tc.PassDataset) -> list[tuple[object, ...]]:
    """Return all samples with keys in place of local ids."""
    found = []
    for one in passes:
        samples = one.read(np.arange(one.samples))
        assert samples.label is not None
        for i in range(one.samples):
            ids = []
            for feature in passes.schema.features:
                entry, keys = samples.ids[feature.name], np.asarray(one.keys(feature.table))
                span = slice(i, i + 1) if entry.offsets is None else slice(entry.offsets[i], entry.offsets[i + 1])
                ids.append(
                    (keys[entry.ids[span]].tolist(), [] if entry.weights is None else entry.weights[span].tolist())
                )
            found.append((float(samples.label[i]), samples.dense[i].tolist(), ids))
    return found


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    batch_multiple=st.integers(1, 9),
    rows=st.integers(30, 120),
    chunk=st.integers(1, 30),
    by_bytes=st.booleans(),
)
def test_parts_are_what_an_extraction_of_the_same_samples_gives(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], batch_multiple: int, rows: int, chunk: int,
    by_bytes: bool,
) -> None:  # fmt: skip
    """Samples, key sets, counts and digests; each part is as long as fits, and begins at an aligned sample."""
    path = tmp_path_factory.mktemp("split")
    ends = list(accumulate(sizes))
    whole = batch_of(ends[-1])
    old = write_dataset(
        path / "old", rich_schema(), [whole.slice(end - n, end) for n, end in zip(sizes, ends, strict=True)]
    )
    fits = lambda one: sum(one) <= rows  # noqa: E731
    limit = {"rows": rows}
    if by_bytes:
        limit = {"device_budget": rows * (ROW_BYTES + 8)}
        fits = RowBudget(old.tables, limit["device_budget"]).fits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercache.data.repartition._CHUNK_SAMPLES", chunk)
        try:
            new = tc.repartition(old, path / "new", batch_multiple=batch_multiple, **limit)
        except tc.TierCacheError as error:
            assert f"lower batch_multiple (now {batch_multiple})" in str(error)  # noqa: PT017
            return
    assert samples_of(new) == samples_of(old)
    cuts, begins = [], []
    for end, size, parts in zip(ends, sizes, new.manifest.options["parts"], strict=True):
        for part_end, part in zip(accumulate(parts), parts, strict=True):
            begins.append(part_end - part)
            cuts.append(whole.slice(end - size + part_end - part, end - size + part_end))
    assert all(begin % batch_multiple == 0 for begin in begins)
    fresh = write_dataset(path / "fresh", rich_schema(), cuts)
    assert new.digest == fresh.digest
    for one in new:
        assert fits([one.rows(t.name) for t in new.tables])
    new.verify()
    if not by_bytes:
        for one, begin, longer in zip(
            new.passes, [*begins[1:], 0], _one_unit_more(cuts, begins, batch_multiple), strict=True
        ):
            if begin:
                joined = write_dataset(path / f"longer{one.index}", rich_schema(), [longer])
                assert not fits([joined.passes[0].rows(t.name) for t in new.tables])
    assert tc.repartition(old, path / "new", batch_multiple=batch_multiple, **limit).digest == new.digest


def _one_unit_more(cuts: list[RawBatch], begins: list[int], batch_multiple: int) -> list[RawBatch]:
    from tiercache.data.raw_batch import join

    following = [*cuts[1:], cuts[-1]]
    return [
        join([cut, after.slice(0, min(batch_multiple, after.num_samples))])
        for cut, after in zip(cuts, following, strict=True)
    ]


def test_files_of_passes_that_fit_are_linked_and_outlive_the_old_set(tmp_path: Path) -> None:
    """They take no bytes, and the old set may be deleted."""
    old = write_dataset(tmp_path / "old", rich_schema(), [batch_of(8), batch_of(80, seed=1)])
    before = samples_of(old)
    new = tc.repartition(old, tmp_path / "new", rows=80, batch_multiple=4)
    assert new.manifest.options["parts"][0] == [8]
    assert len(new) > 2
    assert (tmp_path / "old" / "pass-00000.safetensors").samefile(tmp_path / "new" / "pass-00000.safetensors")
    shutil.rmtree(tmp_path / "old")
    assert samples_of(tc.PassDataset.open(tmp_path / "new")) == before


def test_parts_for_several_devices_are_larger_than_one_device_holds(tmp_path: Path) -> None:
    """They fill the devices up to the margin; another number of devices gives another set."""
    batch = raw_batch(plain_schema(), {"a": np.arange(4000)}, label=np.zeros(4000))
    old = write_dataset(tmp_path / "old", plain_schema(), [batch])
    budget = 600 * device_bytes(group_tables(old.tables)[0])
    new = tc.repartition(old, tmp_path / "new", device_budget=budget, devices=4, batch_multiple=8)
    most = max(one.rows("a") for one in new)
    assert max_device_rows(most, 4) <= 600 < max_device_rows(most + 8, 4)
    assert tc.repartition(old, tmp_path / "new", device_budget=budget, devices=4, batch_multiple=8).digest == new.digest
    with pytest.raises(tc.TierCacheError, match="another dataset:"):
        tc.repartition(old, tmp_path / "new", device_budget=budget, batch_multiple=8)


@pytest.mark.parametrize("bytes_left", [1, 100, 3000])
def test_a_disk_that_fills_is_named_and_the_same_call_goes_on(tmp_path: Path, bytes_left: int) -> None:
    """The error names the file that did not fit."""
    old = write_dataset(tmp_path / "old", rich_schema(), [batch_of(80)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, limits[1]))
    try:
        with pytest.raises(
            DatasetError, match=r"new.* cannot be written \(File too large\): .*ulimit -f, and run the same"
        ):
            tc.repartition(old, tmp_path / "new", rows=80, batch_multiple=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert samples_of(tc.repartition(old, tmp_path / "new", rows=80, batch_multiple=4)) == samples_of(old)


def test_two_calls_do_not_write_one_folder(tmp_path: Path) -> None:
    """The second is refused; after the first it returns the same dataset."""
    old = write_dataset(tmp_path / "old", rich_schema(), [batch_of(80)])
    (tmp_path / "new").mkdir()
    handle = os.open(tmp_path / "new", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(
            DatasetError, match=r"another process is writing a dataset to .*new: wait for it, or choose"
        ):
            tc.repartition(old, tmp_path / "new", rows=80, batch_multiple=4)
    finally:
        os.close(handle)
    made = tc.repartition(old, tmp_path / "new", rows=80, batch_multiple=4)
    assert tc.repartition(old, tmp_path / "new", rows=80, batch_multiple=4).digest == made.digest
    again = tc.repartition(old, tmp_path / "numpy", rows=np.int64(80), batch_multiple=np.int32(4))  # type: ignore[arg-type]
    assert again.digest == made.digest


def test_what_cannot_be_split_is_said(tmp_path: Path) -> None:
    old = write_dataset(tmp_path / "old", rich_schema(), [batch_of(40)])
    with pytest.raises(
        tc.TierCacheError, match=r"a part of sub-dataset 0 of 40 samples .* has \d+ keys, but a part may have 9"
    ):
        tc.repartition(old, tmp_path / "new", rows=9)
    with pytest.raises(tc.TierCacheError, match="the device budget is 9 bytes: raise it, or lower batch_multiple"):
        tc.repartition(old, tmp_path / "new", device_budget=9)
    for limits in ({"rows": 5, "devices": 2}, {"device_budget": 5, "devices": 0}):
        with pytest.raises(
            ValueError, match=r"invalid devices \d: expected a whole number, at least 1, and only with device_b"
        ):
            tc.repartition(old, tmp_path / "new", **limits)
    for limits in ({}, {"rows": 5, "device_budget": 5}):
        with pytest.raises(ValueError, match="either device_budget or rows"):
            tc.repartition(old, tmp_path / "new", **limits)
    with pytest.raises(ValueError, match="at least 1"):
        tc.repartition(old, tmp_path / "new", rows=5, batch_multiple=0)
    with pytest.raises(ValueError, match=r"rows is 5\.5 of type float: expected an int"):
        tc.repartition(old, tmp_path / "new", rows=5.5)  # type: ignore[arg-type]
    with pytest.raises(tc.TierCacheError, match="no dataset found"):
        tc.PassDataset.open(tmp_path / "new")
    with pytest.raises(tc.TierCacheError, match="already holds another dataset: choose another"):
        tc.repartition(old, tmp_path / "old", rows=50)
    keys = write_key_sets(tmp_path / "keys", plain_schema(), [{"a": [1, 2]}])
    with pytest.raises(tc.TierCacheError, match="has a key set but no samples"):
        tc.repartition(keys, tmp_path / "new", rows=1)


def training_case() -> Case:
    """Return an unshuffled, aligned training case."""
    rule = tc.optim.Adagrad(learning_rate=0.05)
    return Case(
        tables=(table("item", 5, rule), table("place", 3, rule)),
        specs=(Spec(name="a", table="item"), Spec(name="c", table="place", hotness="ragged")),
        num_samples=5 * 48, pass_rows=48, num_keys=160, batch=8, epochs=2, shuffle=False,
    )  # fmt: skip


def test_training_of_aligned_batches_over_parts_has_the_same_bits(tmp_path: Path) -> None:
    """In memory and over the tiers: the same batches, so the same rows, state and dense weights."""
    case = training_case()
    old = case.cut(tmp_path / "old")
    new = tc.repartition(old, tmp_path / "new", rows=70, batch_multiple=8)
    assert len(new) >= 2 * len(old)
    expected = resident_result(case, old)
    assert_same_bits(expected, resident_result(case, new))
    with tc.Store.open(None, tables=case.tables, engine=MemoryEngine()) as store:
        with tiered(store, new) as cache:
            model = train(cache, case)
        assert_same_bits(expected, result_of(store, old, model))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("pass_index", "batches"), [(0, 3), (3, 0), (4, 6), (7, 5), (9, 1)])
def test_a_training_goes_on_with_parts_from_where_it_stood(tmp_path: Path, pass_index: int, batches: int) -> None:
    """Also from inside a pass, and from its very end: the bits of a training that keeps the larger passes."""
    from tests.train.test_entering import train_to

    case = training_case()
    old = case.cut(tmp_path / "old")
    new = tc.repartition(old, tmp_path / "new", rows=70, batch_multiple=8)
    with tc.Store.open(None, tables=case.tables, engine=MemoryEngine()) as store:
        train_to(store, old, case, pass_index, batches)
        commit = store.commit
        moved = tc.reorganize(store, new, progress=False)
        assert moved.cursor == split_cursor(new, commit.cursor, order=commit.settings.get("order"))
        assert tc.reorganize(store, new, progress=False) is moved
        with tiered(store, new) as cache:
            model = train(cache, case, seed=99)
        assert_same_bits(resident_result(case, old), result_of(store, old, model))


@pytest.mark.parametrize(("batches", "order_seed"), [(3, None), (0, 5)])
def test_a_training_of_passes_that_all_fit_resumes_anywhere(
    tmp_path: Path, batches: int, order_seed: int | None
) -> None:
    """Inside a shuffled pass or a seeded epoch: nothing was split, so it has the schedule that the store follows."""
    from tests.train.test_entering import train_to

    case = replace(training_case(), shuffle=True, order_seed=order_seed)
    old = case.cut(tmp_path / "old")
    same = tc.repartition(old, tmp_path / "same", rows=1000, batch_multiple=8)
    with tc.Store.open(None, tables=case.tables, engine=MemoryEngine()) as store:
        train_to(store, same, case, 2, batches)
        with tiered(store, same, order_seed=order_seed, reorganize=True) as cache:
            model = train(cache, case, seed=99)
        assert_same_bits(resident_result(case, old), result_of(store, old, model))


def test_a_cursor_has_the_same_samples_behind_it_in_both_sets(tmp_path: Path) -> None:
    """Counted in samples from the beginning; a cursor without an equivalent is refused with an error."""
    old = write_dataset(tmp_path / "old", rich_schema(), [batch_of(n, seed=n) for n in (40, 9, 33)])
    new = tc.repartition(old, tmp_path / "new", rows=60, batch_multiple=4)
    plain = {"seed": 0, "shuffle": False}

    def samples_after(passes: tc.PassDataset, cursor: tuple[int, int]) -> int:
        epoch, place = divmod(cursor[0], len(passes))
        return epoch * passes.samples + sum(p.samples for p in passes.passes[:place]) + cursor[1]

    for pass_index in range(7):
        for sample in range(old.passes[pass_index % 3].samples + 1):
            cursor = split_cursor(new, (pass_index, sample), order=plain)
            assert samples_after(new, cursor) == samples_after(old, (pass_index, sample))
            assert cursor[1] < new.passes[cursor[0] % len(new)].samples or sample == old.passes[pass_index % 3].samples
    assert split_cursor(new, (4, 0)) == split_cursor(new, (4, 0), order=plain)
    for order in (None, {"seed": 0, "shuffle": True}, {"raw_batches": 2}):
        with pytest.raises(tc.TierCacheError, match="is 4 samples inside pass 1, whose samples are shuffled or"):
            split_cursor(new, (1, 4), order=order)
    assert split_cursor(new, (6, 0), order_seed=3) == (2 * len(new), 0)
    with pytest.raises(tc.TierCacheError, match="pass 7, inside epoch 2 of a seeded order"):
        split_cursor(new, (7, 0), order_seed=3)
    with pytest.raises(tc.TierCacheError, match="was not split from another"):
        split_cursor(old, (0, 0))


A = table("a", 8)


def rows_of(keys: NDArray[np.int64], devices: int) -> list[int]:
    """Return the number of keys on each device."""
    bounds = np.array(hash_bounds(devices)[1:-1], dtype=np.uint64)
    return np.bincount(np.searchsorted(bounds, hash_keys(keys, A.table_id), side="right"), minlength=devices).tolist()


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(0, 20_000), devices=st.integers(1, 64), seed=st.integers(0, 1 << 32))
def test_no_device_gets_more_rows_than_are_counted_with(rows: int, devices: int, seed: int) -> None:
    """For random keys, one example in 10^9 / W may."""
    keys = np.unique(np.random.default_rng(seed).integers(-(1 << 63), 1 << 63, rows, dtype=np.int64))
    assert max(rows_of(keys, devices)) <= max_device_rows(keys.size, devices)


def test_an_even_share_is_too_few() -> None:
    """Hashes do not divide evenly, and few rows can all fall to one device; for many the margin is small."""
    keys = np.arange(10_000)
    assert max(rows_of(keys, 8)) > 10_000 // 8
    assert max_device_rows(5, 4) == 5
    assert max_device_rows(10**6, 8) < 1.02 * 10**6 / 8
    assert all(max_device_rows(n, 3) <= max_device_rows(n + 1, 3) <= max_device_rows(n, 3) + 1 for n in range(5000))


def test_one_device_gets_all_rows() -> None:
    """To the row, as before."""
    assert all(max_device_rows(n, 1) == n for n in (0, 1, 7, 10**9))
    assert RowBudget([A], 10**6, devices=1).needed([1000]) == RowBudget([A], 10**6).needed([1000])


@pytest.mark.parametrize("devices", [2, 8])
def test_a_budget_of_several_devices_counts_what_each_holds(devices: int) -> None:
    """The largest number of rows that a pass gives to any of them."""
    budget = RowBudget([A], 0, devices=devices)
    budget.close([5000])
    assert budget.needed([3000]) == max_device_rows(5000, devices) * device_bytes(group_tables([A])[0])
    assert f"on each of {devices} devices with what earlier passes need" in budget.excess([3000])


def test_a_budget_counts_the_largest_pass_of_each_group_of_tables() -> None:
    """The device has memory for all of them, so smaller passes after a large one free nothing."""
    tables = [A, table("b", 16)]
    budget = RowBudget(tables, 0)
    for rows in ([100, 10], [10, 100], [10, 10]):
        budget.close(rows)
    assert budget.needed([50, 1]) == 100 * sum(map(device_bytes, group_tables(tables)))
