"""Strategies of sharding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.datasets import raw_batch, write_dataset
from tests.train.cases import Case, Spec, table
from tiercache.planning.sharding_planner import TableStats, plan_sharding, sharding_of, stats_of
from tiercache.planning.sharding_rules import STRATEGIES, CostModel, ShardingRules
from tiercache.store.sharding import ShardingPlan, TableSharding

SGD = tc.optim.SGD(learning_rate=1.5)


def sizes(given: list[tuple[int, int]]) -> tuple[list[tc.Table], dict[str, TableStats]]:
    tables = [table(f"t{i}", dim, SGD) for i, (_, dim) in enumerate(given)]
    return tables, {f"t{i}": TableStats(rows=rows, samples=1000) for i, (rows, _) in enumerate(given)}


def planned(tables: list[tc.Table], table_stats: dict[str, TableStats], num_ranks: int, **rules: Any) -> ShardingPlan:
    return plan_sharding(tables, table_stats, num_ranks, ShardingRules(**rules))


def owned_bytes(sharding: ShardingPlan, tables: list[tc.Table], table_stats: dict[str, TableStats]) -> list[float]:
    total = [0.0] * sharding.num_ranks
    for one in tables:
        for rank in range(sharding.num_ranks):
            table_sharding, size = sharding.tables[one.name], table_stats[one.name].rows * one.row_bytes
            part = table_sharding.slice_of(rank)
            if table_sharding.by_hash:
                total[rank] += size / sharding.num_ranks
            elif part is not None:
                total[rank] += size * (part.last - part.first) / one.dim
    return total


@settings(max_examples=150, deadline=None)
@given(
    given_sizes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 40)), min_size=1, max_size=12),
    num_ranks=st.integers(1, 9),
    strategy=st.sampled_from(STRATEGIES),
    thresholds=st.fixed_dictionaries(
        {},
        optional={
            name: st.none() | st.integers(1, 200_000)
            for name in ("replicate_threshold", "column_threshold", "row_threshold")
        },
    ),
    asked=st.lists(st.sampled_from([None, "row_wise", "table_wise", "column_wise", "data_parallel"]), max_size=12),
)
def test_every_strategy_shards_every_column_once(
    given_sizes: list[tuple[int, int]], num_ranks: int, strategy: str, thresholds: Any, asked: list[str | None]
) -> None:
    """For any tables on any number of ranks; deterministic, with the requested kinds if possible."""
    tables, table_stats = sizes(given_sizes)
    kinds = {one.name: kind for one, kind in zip(tables, asked, strict=False) if kind is not None}
    given = [name for name in ("replicate_threshold", "column_threshold", "row_threshold") if thresholds.get(name)]
    thresholds |= zip(given, sorted(thresholds[name] for name in given), strict=True)  # they must not fall
    sharding = planned(tables, table_stats, num_ranks, strategy=strategy, kinds=kinds, **thresholds)
    sharding.check(tables)
    assert sharding == planned(tables, table_stats, num_ranks, strategy=strategy, kinds=kinds, **thresholds)
    assert ShardingPlan.from_record(sharding.to_record()) == sharding
    for name, kind in kinds.items():
        found = sharding.tables[name].kind
        if num_ranks == 1:
            assert found == "row_wise"
        else:
            assert found == kind or (kind == "column_wise" and found == "table_wise")
    for one in sharding.tables.values():
        assert len({part.rank for part in one.slices}) == len(one.slices), "a rank has one slice of a table at most"
    for rank in range(num_ranks):
        assert {one.name for one in sharding.shard_tables(tables, rank)} == {one.name for one in tables}


def test_basic_deals_out_whole_tables_in_the_order_given() -> None:
    tables, table_stats = sizes([(5, 1), (900, 9), (1, 2), (7, 7)])
    sharding = planned(tables, table_stats, 3, strategy="basic")
    assert [sharding.tables[t.name].slices[0].rank for t in tables] == [0, 1, 2, 0]


def test_memory_balanced_gives_the_largest_first_to_the_emptiest_rank() -> None:
    tables, table_stats = sizes([(10, 1), (40, 1), (30, 1), (20, 1), (25, 1)])
    sharding = planned(tables, table_stats, 2, strategy="memory_balanced")
    assert [sharding.tables[t.name].slices[0].rank for t in tables] == [1, 0, 1, 0, 1]
    assert owned_bytes(sharding, tables, table_stats) == [240, 260]


def test_memory_optimized_divides_what_is_larger_than_a_fair_share() -> None:
    tables, table_stats = sizes([(1000, 8), (10, 8), (30, 8), (500, 4), (20, 4)])
    balanced = planned(tables, table_stats, 4, strategy="memory_balanced")
    optimized = planned(tables, table_stats, 4, strategy="memory_optimized")
    assert optimized.tables["t0"] == TableSharding("row_wise")
    fair = sum(owned_bytes(optimized, tables, table_stats)) / 4
    assert max(owned_bytes(balanced, tables, table_stats)) > 2 * fair
    assert max(owned_bytes(optimized, tables, table_stats)) < 2 * fair


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("strategy", ["basic", "auto"])
def test_tables_above_a_threshold_are_sliced(num_ranks: int, strategy: str) -> None:
    """A threshold counts the bytes of float32 here."""
    tables, table_stats = sizes([(100, 8), (5, 8), (10, 8), (25, 4), (11, 2)])
    sharding = planned(tables, table_stats, num_ranks, strategy=strategy, column_threshold=4 * 45)
    kinds = {one.name: sharding.tables[one.name].kind for one in tables}
    assert [kinds[name] for name in ("t0", "t2", "t3")] == ["column_wise"] * 3


def test_slices_that_meet_on_the_emptiest_rank_are_one() -> None:
    """Two ranks are full with tables that are as large as the slices of the third one together."""
    tables, table_stats = sizes([(100, 1), (100, 1), (52, 2)])
    sharding = planned(tables, table_stats, 3, strategy="memory_balanced", column_threshold=4 * 100)
    assert sharding.tables["t2"].kind == "table_wise"
    assert sorted(owned_bytes(sharding, tables, table_stats)) == [400, 400, 416]


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_by_cost_fewer_tables_than_ranks_keep_all_ranks_at_work(num_ranks: int) -> None:
    tables, table_stats = sizes([(100_000, 16)] * (num_ranks - 1))
    sharding = planned(tables, table_stats, num_ranks)
    for rank in range(num_ranks):
        assert any(
            table_sharding.by_hash or table_sharding.slice_of(rank) for table_sharding in sharding.tables.values()
        )


def test_by_cost_large_tables_go_by_row_and_many_tiny_ones_whole() -> None:
    """A rarely used table costs less on few ranks; tiny ones are spread over ranks."""
    tables, table_stats = sizes([(1_000_000, 64)] * 2 + [(2, 4)] * 40)
    sharding = planned(tables, table_stats, 4)
    assert [sharding.tables[f"t{i}"].kind for i in range(2)] == ["row_wise", "row_wise"]
    ranks = [sharding.tables[f"t{i}"].slices[0].rank for i in range(2, 42)]
    assert np.bincount(ranks, minlength=4).tolist() == [10, 10, 10, 10]


def test_by_cost_a_wide_table_of_few_rows_is_cut_into_columns() -> None:
    """A single row that all ranks use has one owner by hash; its columns can be on all ranks."""
    tables, table_stats = sizes([(1, 65_536)])
    assert planned(tables, table_stats, 4).tables["t0"].kind == "column_wise"


def test_by_cost_a_hot_table_is_copied_where_steps_are_rare() -> None:
    """Rows are sent once a step instead of once a batch."""
    tables = [table("t0", 64, SGD)]
    table_stats = {"t0": TableStats(rows=2000, samples=1_000_000, hotness=10.0)}
    assert planned(tables, table_stats, 2).tables["t0"].kind == "row_wise"
    assert planned(tables, table_stats, 2, costs=CostModel(batches_per_step=8)).tables["t0"].kind == "data_parallel"


def test_wrong_words_are_refused_with_those_that_are_allowed() -> None:
    tables, table_stats = sizes([(5, 1)])
    with pytest.raises(ValueError, match="strategy of sharding is 'best': it must be one of 'auto', 'basic'"):
        planned(tables, table_stats, 2, strategy="best")
    with pytest.raises(ValueError, match="to be sharded by 'rows': expected one of 'row_wise', 'table_wise'"):
        planned(tables, table_stats, 2, kinds={"t0": "rows"})
    with pytest.raises(ValueError, match="table 't0' is 'row': expected one of 'row_wise', 'table_wise'"):
        ShardingPlan(2, {"t0": TableSharding("row")})
    with pytest.raises(ValueError, match="unknown table 't1': the tables are 't0'"):
        planned(tables, table_stats, 2, kinds={"t1": "row_wise"})


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=60), samples=st.integers(0, 400))
def test_unique_ids_are_those_of_drawing_with_the_keys_shares(counts: list[int], samples: int) -> None:
    """Within a rounding of the sum over keys, whether told apart or put together by size."""
    total = sum(counts)
    stats = TableStats(rows=len(counts), samples=total, uses=tuple((1.0, float(count)) for count in counts))
    wanted = sum(1 - np.exp(-samples * count / total) for count in counts)
    assert abs(stats.unique(samples) - wanted) <= 0.5 + 1e-6
    assert stats.unique(10**9) == len(counts)


def test_statistics_of_key_sets_alone_are_those_of_the_samples_that_their_keys_make(tmp_path: Path) -> None:
    """If keys were given as often as they occur; if each was given once, the least number of samples that have them."""
    tables = (table("a", 4), table("b", 4))
    features = (tc.Feature(name="f", table="a"), tc.Feature(name="g", table="b", hotness="multi_hot", length=3))
    schema = tc.Schema(tables=tables, features=features)
    a, b = np.arange(600) % 90, np.arange(1800) % 400
    samples = write_dataset(tmp_path / "samples", schema, [raw_batch(schema, {"f": a, "g": b.reshape(600, 3)})])

    assert stats_of(tc.write_key_sets(tmp_path / "keys", schema, [{"a": a, "b": b}])) == stats_of(samples)
    once = stats_of(tc.write_key_sets(tmp_path / "once", schema, [{"a": np.unique(a), "b": np.unique(b)}]))
    assert (once["a"].samples, once["b"].samples) == (133, 133)


def test_statistics_are_those_of_the_largest_sub_dataset(tmp_path: Path) -> None:
    """Rows, hotness and, of a batch as large as the sub-dataset, about as many unique ids as it has rows."""
    case = Case(
        tables=(table("a", 4), table("b", 4), table("unused", 4)),
        specs=(
            Spec(name="f", table="a"),
            Spec(name="g", table="a", hotness="multi_hot"),
            Spec(name="h", table="b", hotness="ragged"),
        ),
        num_samples=4096,
        pass_rows=1024,
    )
    passes = case.cut(tmp_path)
    table_stats = stats_of(passes)
    for name in ("a", "b"):
        largest = max(passes.passes, key=lambda p: p.rows(name))
        assert table_stats[name].rows == largest.rows(name)
        assert table_stats[name].hotness == pytest.approx(largest.counts(name).sum() / 1024)
        assert 0.7 * table_stats[name].rows < table_stats[name].unique(1024) <= table_stats[name].rows
        assert table_stats[name].unique(64) < table_stats[name].unique(128) < 128 * table_stats[name].hotness
    assert (table_stats["unused"].rows, table_stats["unused"].unique(100)) == (0, 0)
    for strategy in STRATEGIES:
        sharding_of(passes, 3, strategy).check(passes.tables)
    assert sharding_of(passes, 3, {"b": "data_parallel"}).tables["b"].kind == "data_parallel"
    sharding = sharding_of(passes, 2, "auto")
    assert sharding_of(passes, 2, sharding) is sharding
    with pytest.raises(ValueError, match="for 2 ranks, but there are 3"):
        sharding_of(passes, 3, sharding)
