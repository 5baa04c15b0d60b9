"""Reuse from one sweep of all keys equals the counts of sets and counters."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.train.cases import SPECS, Case, table
from tiercache.planning.next_use import find_next_uses
from tiercache.planning.reuse import Reuse, ReuseCounts
from tiercache.planning.row_offsets import RowOffsets
from tiercache.planning.schedule import OrderRule, Schedule
from tiercache.store.table import group_tables

CASE = Case(tables=(table("a", 4), table("b", 8)), specs=SPECS, num_samples=500, pass_rows=100)


@pytest.mark.parametrize("order", [None, (2, 0, 4, 1, 3)])
@pytest.mark.parametrize("keys_per_range", [7, 1 << 20])
def test_reuse_is_that_of_sets(tmp_path: Path, order: OrderRule, keys_per_range: int) -> None:
    data = CASE.cut(tmp_path / "d")
    positions = RowOffsets.of(data, group_tables(data.tables))
    schedule = Schedule(num_passes=5, dataset_digest="d", order=order)
    keys_of, names = positions.keys_of(data), [t.name for t in positions.tables]
    reuse = Reuse.of(
        schedule, positions, keys_of, lambda p, t: data.passes[p].counts(names[t]), keys_per_range=keys_per_range
    )
    places = schedule.order_of(0).tolist()
    for t, found in enumerate(reuse.tables):
        in_passes = Counter(k for p in data.passes for k in p.keys(names[t]).tolist())
        counts = Counter[int]()
        for p in data.passes:
            counts.update(dict(zip(p.keys(names[t]).tolist(), p.counts(names[t]).tolist(), strict=True)))
        assert found.keys == len(counts)
        assert found.occurrences == counts.total()
        assert found.keys_in_N.tolist() == [sum(n == i for n in in_passes.values()) for i in range(6)]
        top = [n for _, n in counts.most_common(max(1, round(0.01 * len(counts))))]
        assert found.top_share == pytest.approx(sum(top) / counts.total())
        distances = Counter[int]()
        for place, p in enumerate(places):
            for key in set(data.passes[p].keys(names[t]).tolist()):
                distances[
                    next(d for d in range(1, 6) if key in set(data.passes[places[place - d]].keys(names[t])))
                ] += 1
        assert found.distance_N.tolist() == [distances[d] for d in range(6)]
        for place, p in enumerate(places):
            both = set(data.passes[p].keys(names[t])) & set(data.passes[places[place - 1]].keys(names[t]))
            assert reuse.kept_PT[p, t] == len(both)
    out = np.empty((2, int(positions.starts_PT[:, -1].sum())), np.int32)
    counted = ReuseCounts(schedule, positions, lambda epoch: find_next_uses(schedule, epoch, positions, keys_of, out))
    for v in range(5):
        mine, theirs = reuse.counts.of(v), counted.of(v)
        for one, other in zip(mine.next_G + mine.prev_G, theirs.next_G + theirs.prev_G, strict=True):
            np.testing.assert_array_equal(one.distance_N, other.distance_N)
            np.testing.assert_array_equal(one.rows_NT, other.rows_NT)
