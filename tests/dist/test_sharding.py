"""Sharding plans as values, their records, and the rules by which users ask for them."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.datasets import raw_batch, write_dataset
from tests.dist.pool import RanksPool
from tests.dist.trainings import ONE, open_sharded
from tests.train.cases import table
from tiercache.dist.communicator import AnyCommunicator
from tiercache.planning.sharding_planner import sharding_of, slice_widths, sliced
from tiercache.store.bits import HASHES
from tiercache.store.sharding import KINDS, ShardingPlan, Slice, TableSharding, hash_bounds

USUAL = {
    "num_ranks": 3,
    "tables": {
        "a": {"kind": "row_wise"},
        "b": {"kind": "table_wise", "slices": [[2, 0, 4]]},
        "c": {"kind": "column_wise", "slices": [[1, 0, 2], [0, 2, 3]]},
        "d": {"kind": "data_parallel"},
    },
}


def test_fifteen_columns_on_eight_ranks_are_seven_slices_of_two_and_one_of_one() -> None:
    """Every slice has a column, wider ones come first, and more slices than columns are refused."""
    assert slice_widths(15, 8) == (2, 2, 2, 2, 2, 2, 2, 1)
    assert [part.last - part.first for part in sliced(15, range(8)).slices] == [2, 2, 2, 2, 2, 2, 2, 1]
    assert slice_widths(3, 3) == (1, 1, 1)
    with pytest.raises(ValueError, match="3 columns cannot be 4 slices"):
        slice_widths(3, 4)


def test_slices_of_one_rank_become_neighbors_and_one() -> None:
    """So a rank has one slice of a table, and a rank alone the whole table."""
    assert sliced(8, [2, 0, 2, 1]) == TableSharding("column_wise", (Slice(2, 0, 4), Slice(0, 4, 6), Slice(1, 6, 8)))
    assert sliced(8, [1, 1]) == TableSharding("table_wise", (Slice(1, 0, 8),))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 1024])
def test_ranges_of_hashes_follow_one_another_and_are_alike(num_ranks: int) -> None:
    bounds = hash_bounds(num_ranks)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, HASHES, num_ranks + 1)
    sizes = {high - low for low, high in pairwise(bounds)}
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=50, deadline=None)
@given(
    ranks=st.integers(1, 6),
    kinds=st.dictionaries(
        st.text(max_size=5), st.sampled_from(["row_wise", "data_parallel"]) | st.lists(st.integers(0, 5))
    ),
)
def test_a_record_gives_the_same_sharding_back(ranks: int, kinds: dict[str, Any]) -> None:
    tables = {}
    for name, how in kinds.items():
        owners = [rank % ranks for rank in how] if isinstance(how, list) else []
        tables[name] = sliced(9, owners[:9] or [0]) if isinstance(how, list) else TableSharding(how)
    sharding = ShardingPlan(ranks, tables)
    again = ShardingPlan.from_record(json.loads(json.dumps(sharding.to_record())))
    assert again == sharding
    assert hash(again) == hash(sharding)
    assert ShardingPlan(ranks, dict(reversed(tables.items()))).digest == sharding.digest
    assert ShardingPlan(ranks + 1, tables).digest != sharding.digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("row", "a sharding plan's record is 'row': it must be an object"),
        ({"num_ranks": 0}, "for 0 ranks: expected a whole number >= 1"),
        ({"num_ranks": True}, "for True ranks"),
        ({"num_ranks": "2"}, "for '2' ranks"),
        ({"more": 1}, "unknown 'more'"),
        ({"tables": []}, "says of tables is \\[\\]: it must be an object"),
        ({"tables": {"a": "row"}}, "table 'a' is 'row': it must be an object"),
        ({"tables": {"a": {}}}, "table 'a' lacks 'kind'"),
        ({"tables": {"a": {"kind": "row_wise", "rank": 1}}}, "unknown 'rank'"),
        ({"tables": {"a": {"kind": "best"}}}, "table 'a' is 'best': expected one of 'row_wise', 'table_wise'"),
        ({"tables": {"a": {"kind": ["row"]}}}, "expected one of 'row_wise'"),
        ({"tables": {"a": {"kind": "row"}}}, "table 'a' is 'row': expected one of 'row_wise'"),
        ({"tables": {"a": {"kind": "row_wise", "slices": [[0, 0, 4]]}}}, "'row_wise' with 1 slices: it has no slices"),
        ({"tables": {"a": {"kind": "table_wise"}}}, "'table_wise' with 0 slices: it has 1 slice"),
        ({"tables": {"a": {"kind": "column_wise", "slices": [[0, 0, 4]]}}}, "it has 2 or more slices"),
        ({"tables": {"a": {"kind": "table_wise", "slices": [[0, 4]]}}}, "each is \\[rank, first column, end column\\]"),
        ({"tables": {"a": {"kind": "table_wise", "slices": [[0, 0, 4.0]]}}}, "each is \\[rank"),
        ({"tables": {"a": {"kind": "table_wise", "slices": [[3, 0, 4]]}}}, "names rank 3: there are 3 ranks"),
        ({"tables": {"a": {"kind": "table_wise", "slices": [[-1, 0, 4]]}}}, "names rank -1"),
        ({"tables": {"a": {"kind": "table_wise", "slices": [[0, 0, 0]]}}}, "it must have a column"),
        ({"tables": {"a": {"kind": "table_wise", "slices": [[0, 1, 4]]}}}, "must begin at 0"),
        ({"tables": {"a": {"kind": "column_wise", "slices": [[0, 0, 2], [1, 3, 4]]}}}, "must begin at 0 and follow"),
        ({"tables": {"a": {"kind": "column_wise", "slices": [[0, 0, 2], [0, 2, 4]]}}}, "has two slices for one rank"),
    ],
)
def test_a_record_of_something_else_is_refused(change: Any, words: str) -> None:
    ShardingPlan.from_record(USUAL)
    with pytest.raises(ValueError, match=words):
        ShardingPlan.from_record({**USUAL, **change} if isinstance(change, dict) else change)


def test_records_have_the_words_of_users() -> None:
    """And a digest that does not change."""
    sharding = ShardingPlan.from_record(USUAL)
    assert [one.kind for one in sharding.tables.values()] == list(KINDS)
    assert sharding.to_record() == USUAL
    assert sharding.digest == "100da220599eb0723f454f088fdc1cac3106057db672fceeab617f0c5d31db83"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.floats(allow_nan=False)
    | st.sampled_from(["row_wise", "column_wise", ""]),
    lambda some: (
        st.lists(some, max_size=4)
        | st.dictionaries(st.sampled_from(["num_ranks", "tables", "kind", "slices", "a"]), some, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(JSON | st.fixed_dictionaries({"num_ranks": st.integers(1, 3), "tables": st.dictionaries(st.just("a"), JSON)}))
def test_any_record_is_read_or_refused(record: Any) -> None:
    try:
        sharding = ShardingPlan.from_record(record)
    except ValueError:
        return
    assert ShardingPlan.from_record(sharding.to_record()) == sharding


def test_a_sharding_of_other_tables_or_columns_is_refused() -> None:
    sharding = ShardingPlan(2, {"a": sliced(4, [0, 1])})
    sharding.check([table("a", 4)])
    with pytest.raises(ValueError, match="differ in b"):
        sharding.check([table("a", 4), table("b", 4)])
    with pytest.raises(ValueError, match="has 4 columns, but the table has 5"):
        sharding.check([table("a", 5)])


# -- users' requests for shardings ---------------------------------------------------------------------------


def chosen(ranks: AnyCommunicator, folder: str, asked: list[Any], **options: Any) -> dict[str, str]:
    """Open a store with each rank's request, and return the kind of each table."""
    one = asked[ranks.rank % len(asked)]
    if isinstance(one, dict) and "rules" in one:
        costs = tc.CostModel(**one.pop("costs", {}))
        one = tc.ShardingRules(**one["rules"], costs=costs)
    if isinstance(one, dict) and "plan" in one:
        one = ShardingPlan(
            one.get("ranks", ranks.size), {name: TableSharding(kind) for name, kind in one["plan"].items()}
        )
    with open_sharded(ONE, folder, sharding=one, **options) as cache:
        return {name: sharding.kind for name, sharding in cache.sharding.tables.items()}


ROWS = {"users": "row_wise", "items": "row_wise"}
COPIES = ROWS | {"users": "data_parallel"}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["basic", "cost"], "sharding (basic on rank 0, cost on rank 1)"),
        (
            [{"users": "row_wise"}, {"users": "table_wise"}],
            'sharding ({"users": "row_wise"} on rank 0, {"users": "table',
        ),
        (["auto", {"rules": {}}], "sharding (auto on rank 0, digest "),
        ([{"rules": {}}, {"rules": {"row_threshold": 1}}], "sharding (digest "),
        ([{"rules": {}}, {"rules": {}, "costs": {"samples": 1}}], "sharding (digest "),
        ([{"plan": ROWS}, {"plan": COPIES}], "sharding (digest "),
    ],
)
def test_ranks_that_ask_for_different_shardings_are_refused(
    ranks_pool: RanksPool, tmp_path: Path, asked: list[Any], words: str
) -> None:
    """The requests are compared, not the resulting shardings; nothing is made."""
    ONE.cut(tmp_path / "passes")

    errors = ranks_pool.errors(2, chosen, folder=str(tmp_path), asked=asked)

    assert errors[0] == errors[1]
    kind, sentence = errors[0] or ("", "")
    assert kind == "RankError"
    assert sentence.startswith(f"ranks differ in {words}")
    assert not (tmp_path / "model.tc").exists()


def test_thresholds_say_where_tables_stand(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """By the bytes of a table's rows in its largest pass; equal rules on all ranks are accepted."""
    passes = ONE.cut(tmp_path / "passes")
    size = max(one.rows("users") for one in passes) * ONE.tables[0].row_bytes
    rules: dict[str, Any] = {"strategy": "basic", "kinds": {"items": "table_wise"}}
    for name, most, kind in (
        ("", 0, "table_wise"),
        ("replicate_threshold", size, "data_parallel"),
        ("replicate_threshold", size - 1, "table_wise"),
        ("column_threshold", size - 1, "column_wise"),
        ("row_threshold", f"{size - 1}", "row_wise"),
        ("row_threshold", "1MiB", "table_wise"),
    ):
        asked = {"rules": rules | ({name: most} if name else {})}
        told = ranks_pool.run(2, chosen, folder=str(tmp_path), asked=[asked])
        assert told == [{"users": kind, "items": "table_wise"}] * 2, (name, most)


def test_costs_say_where_tables_stand(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """If every piece from another rank is expensive, tables stay whole on one rank."""
    ONE.cut(tmp_path / "passes")
    for seconds, kind in ((1e-6, "row_wise"), (1.0, "table_wise")):
        asked = {"rules": {}, "costs": {"piece_seconds": seconds}}
        assert ranks_pool.run(2, chosen, folder=str(tmp_path), asked=[asked]) == [{"users": kind, "items": kind}] * 2


def test_numbers_on_the_wire_count_as_the_cache_sends_them(tmp_path: Path) -> None:
    """Unless the costs set their size."""
    schema = tc.Schema(tables=(table("t", 64),), features=(tc.Feature(name="f", table="t"),))
    passes = write_dataset(tmp_path, schema, [raw_batch(schema, {"f": np.arange(4096) % 500})])
    rules = [
        tc.ShardingRules(costs=tc.CostModel(link_bytes_per_second=link, number_bytes=number))
        for link in np.geomspace(1e6, 1e13, 60).tolist() for number in (None, 4)
    ]  # fmt: skip
    wide, narrow = ([sharding_of(passes, 4, rule, number_bytes=n) for rule in rules] for n in (4, 1))
    assert wide[::2] != narrow[::2]
    assert wide[1::2] == narrow[1::2] == wide[::2]


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"strategy": "best"}, "the strategy of sharding is 'best': it must be one of 'auto', 'basic'"),
        ({"strategy": "row_wise"}, "or pass kinds by table, such as {'user': 'row_wise'}"),
        ({"row_threshold": "much"}, "row_threshold of the sharding rules: invalid size 'much'"),
        ({"column_threshold": 0}, "column_threshold of the sharding rules: invalid size 0"),
        (
            {"replicate_threshold": "2MiB", "row_threshold": "1MiB"},
            "replicate_threshold is 2 MiB and row_threshold 1 MiB: they must not fall from replicate_threshold to",
        ),
        ({"column_threshold": 5, "row_threshold": 4}, "column_threshold is 5 bytes and row_threshold 4 bytes"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tc.ShardingRules(**rules)


@pytest.mark.parametrize("number", [0, -1, float("nan"), float("inf"), "fast", True, None])
def test_costs_are_numbers_above_0(number: Any) -> None:
    """Only the bytes of a number may be left to the cache."""
    with pytest.raises(ValueError, match=r"link_bytes_per_second of the cost model is .*: it must be a number"):
        tc.CostModel(link_bytes_per_second=number)
    assert tc.CostModel(number_bytes=None).number_bytes is None


def test_what_is_no_sharding_is_refused(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ONE.cut(tmp_path / "passes")
    for asked, words in (
        (5, "sharding is 5: it must be a strategy, kinds by table, ShardingRules or a ShardingPlan"),
        ({"rules": {"kinds": {"users": "rows"}}}, "to be sharded by 'rows': expected one of 'row_wise', 'table_wise'"),
        ({"rules": {"kinds": {"user": "row_wise"}}}, "unknown table 'user': the tables are"),
        ({"user": "row_wise"}, "the sharding names the unknown table 'user'"),
        ({"users": "replicate"}, "table 'users' is to be sharded by 'replicate': expected one of"),
        ({"plan": ROWS, "ranks": 3}, "the sharding is for 3 ranks, but there are 2"),
    ):
        errors = ranks_pool.errors(2, chosen, folder=str(tmp_path), asked=[asked])
        assert all(error is not None and words in error[1] for error in errors), errors
    errors = ranks_pool.errors(2, chosen, folder=str(tmp_path), asked=["auto"], comm_dtype="int8")
    assert all(error is not None and "unknown comm_dtype 'int8'" in error[1] for error in errors), errors
