"""Shares of a pass set: every row has one owner, every rank knows where, and a rank's own cache keeps its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

import tiercache as tc
from tests.training.cases import Case, Spec, table
from tiercache.planning.positions import Positions
from tiercache.ranks.placement import Placement, Slice, TablePlacement, sliced
from tiercache.ranks.shares import Share, part_tables
from tiercache.store import MemoryEngine
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    from pathlib import Path

CASE = Case(
    tables=(table("a", 4), table("b", 4), table("c", 6, tc.RowWiseAdagrad(learning_rate=0.1)), table("d", 4)),
    specs=(
        Spec(name="f", table="a"),
        Spec(name="g", table="b", hotness="ragged"),
        Spec(name="h", table="c"),
        Spec(name="i", table="d"),
    ),
)
MIXED = Placement(
    4,
    {
        "a": TablePlacement("row"),
        "b": TablePlacement("table", (Slice(1, 0, 4),)),
        "c": sliced(6, [2, 0]),
        "d": TablePlacement("replicate"),
    },
)
ONE_RANK = Placement(3, {name: sliced(dim, [1]) for name, dim in [("a", 4), ("b", 4), ("c", 6), ("d", 4)]})


@pytest.mark.parametrize("placement", [MIXED, ONE_RANK], ids=["mixed", "all on rank 1"])
def test_every_row_has_one_owner_for_each_column(tmp_path: Path, placement: Placement) -> None:
    """And every rank finds it where its owner keeps it."""
    passes = CASE.cut(tmp_path)
    shares = [Share(passes, placement, rank) for rank in range(placement.num_ranks)]
    positions = [Positions.of(cast("tc.PassSet", share), group_tables(share.tables)) for share in shares]
    for p, one in enumerate(passes.passes):
        owners = shares[0].owners(p)
        for t, whole in enumerate(passes.tables):
            times = np.zeros((one.rows(whole.name), whole.dim), dtype=int)
            for rank, share in enumerate(shares):
                low, high = int(owners.low_TW[t, rank]), int(owners.high_TW[t, rank])
                np.testing.assert_array_equal(share.passes[p].keys(whole.name), one.keys(whole.name)[low:high])
                np.testing.assert_array_equal(share.passes[p].counts(whole.name), one.counts(whole.name)[low:high])
                first, last = owners.columns_TW2[t, rank]
                times[low:high, first:last] += 1
                group = int(owners.group_TW[t, rank])
                place = positions[rank].groups[group].place(whole.name)
                assert owners.first_TW[t, rank] == positions[rank].table_starts(p, group)[place]
            assert (times == 1).all()


@pytest.mark.parametrize("placement", [MIXED, ONE_RANK], ids=["mixed", "all on rank 1"])
def test_a_cache_walks_the_passes_of_a_share(tmp_path: Path, placement: Placement) -> None:
    """Where the rank owns some tables, parts of tables, or nothing at all: its store ends with its initial rows."""
    passes = CASE.cut(tmp_path)
    for rank in range(placement.num_ranks):
        share = Share(passes, placement, rank)
        tables = part_tables(passes.tables, placement, rank)
        store = tc.Store.open(None, tables=tables, engine=MemoryEngine())
        with tc.TierCache(
            store, cast("tc.PassSet", share), device_budget="1MiB", host_budget="8MiB", progress=False
        ) as cache:
            for visit in cache.passes(2):
                assert visit.num_samples == passes.passes[visit.pass_index].samples
        for one in tables:
            wanted = {int(key) for p in share.passes for key in p.keys(one.name)}
            found = {int(key) for some, *_ in store.scan(one.name) for key in some}
            assert found == wanted
