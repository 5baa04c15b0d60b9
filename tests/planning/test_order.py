"""Orders of sub-datasets: by overlap fewer rows move, with the bits of the same order in memory."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiercache as tc
from tests.datasets import write_dataset
from tests.train.cases import (
    SPECS,
    Case,
    assert_same_bits,
    open_store,
    resident,
    result_of,
    result_of_resident,
    table,
    tiered,
    train,
)
from tiercache.data.raw_batch import FeatureKeys, RawBatch
from tiercache.errors import DatasetError
from tiercache.planning.reuse import Reuse
from tiercache.planning.row_offsets import RowOffsets
from tiercache.planning.schedule import OrderRule, Schedule, order_rule, overlap_order, shared_bytes
from tiercache.store.table import group_tables

ONE = Case(tables=(table("a", 4),), specs=(SPECS[0],), batch=4, epochs=2)


def chained(folder: Path, order: list[int]) -> tc.PassDataset:
    """Cut sub-datasets of 12 keys; neighbors in ``order``, a cycle, share 4."""
    batches = []
    for p in range(len(order)):
        place = order.index(p)
        keys = (np.arange(12) + 8 * place) % (8 * len(order))
        label, dense = np.zeros(12, np.float32), np.zeros((12, 1), np.float32)
        batches.append(RawBatch(label, dense, {"f": FeatureKeys(keys.astype(np.int64), None, None)}))
    return write_dataset(folder, ONE.schema, batches)


def kept_bytes(data: tc.PassDataset, order: OrderRule) -> int:
    positions = RowOffsets.of(data, group_tables(data.tables))
    schedule = Schedule(num_passes=len(data), dataset_digest=data.digest, order=order)
    return Reuse.of(schedule, positions, positions.keys_of(data)).kept_bytes


def test_the_order_by_overlap_is_the_best_of_all_orders_of_a_ring(tmp_path: Path) -> None:
    """Seven shuffled sub-datasets: the cycle in which all neighbors share keys, in either direction."""
    data = chained(tmp_path / "d", [0, 3, 6, 1, 5, 2, 4])
    found = order_rule(data, "overlap")
    assert found in {(0, 3, 6, 1, 5, 2, 4), (0, 4, 2, 5, 1, 6, 3)}
    assert kept_bytes(data, found) == 7 * 4 * data.tables[0].row_bytes > kept_bytes(data, None)


def test_shared_bytes_are_those_of_set_intersections(tmp_path: Path) -> None:
    data = Case(tables=(table("a", 4), table("b", 8)), specs=SPECS).cut(tmp_path / "d")
    positions = RowOffsets.of(data, group_tables(data.tables))
    shared = shared_bytes(positions, positions.keys_of(data))
    for p, q in itertools.product(range(len(data)), repeat=2):
        sets = [(set(data.passes[p].keys(t.name)), set(data.passes[q].keys(t.name)), t) for t in data.tables]
        assert shared[p, q] == sum(len(one & other) * t.row_bytes for one, other, t in sets)
    sample = shared_bytes(positions, positions.keys_of(data), sampled_keys=100)
    assert 0 < sample.sum() < shared.sum()
    assert (sample <= shared).all()


def test_the_own_order_stays_where_no_other_shares_more(tmp_path: Path) -> None:
    """Its digest equals the default order's, so a store that was trained without one resumes."""
    data = chained(tmp_path / "d", [0, 1, 2, 3])
    assert overlap_order(RowOffsets.of(data, group_tables(data.tables)), data) == (0, 1, 2, 3)
    plain = Schedule(num_passes=4, dataset_digest="d")
    assert Schedule(num_passes=4, dataset_digest="d", order=(0, 1, 2, 3)).digest == plain.digest
    assert Schedule(num_passes=4, dataset_digest="d", order=(1, 0, 2, 3)).digest != plain.digest


def test_training_in_an_order_has_the_bits_of_that_order_in_memory_and_moves_fewer_rows(tmp_path: Path) -> None:
    data = chained(tmp_path / "d", [0, 2, 4, 1, 3])
    rows = {}
    for order in (None, "overlap"):
        with open_store(tmp_path / str(order), ONE, "lmdb") as store, tiered(store, data, order=order) as cache:
            result = result_of(store, data, train(cache, ONE))
            assert all(report.planned_equals_measured for report in cache.reports)
            rows[order] = sum(report.rows_kept for report in cache.reports)
            trained = [report.sub_dataset for report in cache.reports]
        memory = resident(data, order=order)
        assert_same_bits(result, result_of_resident(memory, train(memory, ONE)))
    assert trained in ([0, 2, 4, 1, 3] * 2, [0, 3, 1, 4, 2] * 2)
    assert rows["overlap"] == 4 * (2 * 5 - 1) > rows[None]


def test_a_training_goes_on_in_its_order_and_another_is_refused_or_reorganized(tmp_path: Path) -> None:
    data = chained(tmp_path / "d", [0, 2, 4, 1, 3])
    path, halves = tmp_path / "s", replace(ONE, epochs=1)

    def trained(**options: Any) -> list[int]:
        with open_store(path, ONE, "lmdb") as store, tiered(store, data, **options) as cache:
            train(cache, halves, epochs=2)
            return [report.sub_dataset for report in cache.reports]

    with open_store(path, ONE, "lmdb") as store, tiered(store, data, order=[4, 3, 2, 1, 0]) as cache:
        train(cache, halves)
    with pytest.raises(DatasetError, match="in this order is not the one"):
        trained(order="overlap")
    assert trained(order=[4, 3, 2, 1, 0]) == [4, 3, 2, 1, 0]
    assert trained(order=[1, 0, 3, 4, 2], reorganize=True) == [1, 0, 3, 4, 2] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": [0, 1, 1]}, "does not have each of the 3 sub-datasets once"),
        ({"order": "best"}, "'overlap' or a permutation"),
        ({"order": "overlap", "order_seed": 1}, "both given"),
    ],
)
def test_an_order_that_is_none_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    data = chained(tmp_path / "d", [0, 1, 2])
    with pytest.raises(ValueError, match=words):
        tc.TierCache(tmp_path / "s", data, device_budget="1MiB", host_budget="64MiB", **options)
    assert not (tmp_path / "s").exists()
