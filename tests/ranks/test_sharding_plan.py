"""Sharding plans as values, and their records."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.cases import table
from tiercache.store.shards.sharding import (
    HASHES,
    ShardingPlan,
    Slice,
    TableSharding,
    hash_bounds,
    slice_widths,
    sliced,
)

USUAL = {
    "num_ranks": 3,
    "tables": {
        "a": {"kind": "row"},
        "b": {"kind": "table", "slices": [[2, 0, 4]]},
        "c": {"kind": "column", "slices": [[1, 0, 2], [0, 2, 3]]},
        "d": {"kind": "replicate"},
    },
}


def test_fifteen_columns_on_eight_ranks_are_seven_slices_of_two_and_one_of_one() -> None:
    """Every slice has a column, wider ones stand first, and more slices than columns are refused."""
    assert slice_widths(15, 8) == (2, 2, 2, 2, 2, 2, 2, 1)
    assert [part.last - part.first for part in sliced(15, range(8)).slices] == [2, 2, 2, 2, 2, 2, 2, 1]
    assert slice_widths(3, 3) == (1, 1, 1)
    with pytest.raises(ValueError, match="3 columns cannot be 4 slices"):
        slice_widths(3, 4)


def test_slices_of_one_rank_become_neighbors_and_one() -> None:
    """So a rank has one slice of a table, and a rank alone the whole table."""
    assert sliced(8, [2, 0, 2, 1]) == TableSharding("column", (Slice(2, 0, 4), Slice(0, 4, 6), Slice(1, 6, 8)))
    assert sliced(8, [1, 1]) == TableSharding("table", (Slice(1, 0, 8),))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 1024])
def test_ranges_of_hashes_follow_one_another_and_are_alike(num_ranks: int) -> None:
    """From 0 to 2^64, of sizes that differ by 1."""
    bounds = hash_bounds(num_ranks)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, HASHES, num_ranks + 1)
    sizes = {high - low for low, high in pairwise(bounds)}
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=50, deadline=None)
@given(
    ranks=st.integers(1, 6),
    kinds=st.dictionaries(st.text(max_size=5), st.sampled_from(["row", "replicate"]) | st.lists(st.integers(0, 5))),
)
def test_a_record_gives_the_same_sharding_back(ranks: int, kinds: dict[str, Any]) -> None:
    """Through JSON, with the same digest, whatever the order of tables."""
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
        ({"num_ranks": 0}, "for 0 ranks: it must be a whole number >= 1"),
        ({"num_ranks": True}, "for True ranks"),
        ({"num_ranks": "2"}, "for '2' ranks"),
        ({"more": 1}, "unknown 'more'"),
        ({"tables": []}, "says of tables is \\[\\]: it must be an object"),
        ({"tables": {"a": "row"}}, "table 'a' is 'row': it must be an object"),
        ({"tables": {"a": {}}}, "table 'a' lacks 'kind'"),
        ({"tables": {"a": {"kind": "row", "rank": 1}}}, "unknown 'rank'"),
        ({"tables": {"a": {"kind": "best"}}}, "table 'a' is 'best': it must be 'row'"),
        ({"tables": {"a": {"kind": ["row"]}}}, "it must be 'row'"),
        ({"tables": {"a": {"kind": "row", "slices": [[0, 0, 4]]}}}, "'row' with 1 slices: it has no slices"),
        ({"tables": {"a": {"kind": "table"}}}, "'table' with 0 slices: it has 1 slice"),
        ({"tables": {"a": {"kind": "column", "slices": [[0, 0, 4]]}}}, "it has 2 or more slices"),
        ({"tables": {"a": {"kind": "table", "slices": [[0, 4]]}}}, "each is \\[rank, first column, column behind\\]"),
        ({"tables": {"a": {"kind": "table", "slices": [[0, 0, 4.0]]}}}, "each is \\[rank"),
        ({"tables": {"a": {"kind": "table", "slices": [[3, 0, 4]]}}}, "names rank 3: there are 3 ranks"),
        ({"tables": {"a": {"kind": "table", "slices": [[-1, 0, 4]]}}}, "names rank -1"),
        ({"tables": {"a": {"kind": "table", "slices": [[0, 0, 0]]}}}, "it must have a column"),
        ({"tables": {"a": {"kind": "table", "slices": [[0, 1, 4]]}}}, "must begin at 0"),
        ({"tables": {"a": {"kind": "column", "slices": [[0, 0, 2], [1, 3, 4]]}}}, "must begin at 0 and follow"),
        ({"tables": {"a": {"kind": "column", "slices": [[0, 0, 2], [0, 2, 4]]}}}, "gives a rank two slices"),
    ],
)
def test_a_record_of_something_else_is_refused(change: Any, words: str) -> None:
    """With a sentence that names the table."""
    ShardingPlan.from_record(USUAL)
    with pytest.raises(ValueError, match=words):
        ShardingPlan.from_record({**USUAL, **change} if isinstance(change, dict) else change)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.floats(allow_nan=False)
    | st.sampled_from(["row", "column", ""]),
    lambda some: (
        st.lists(some, max_size=4)
        | st.dictionaries(st.sampled_from(["num_ranks", "tables", "kind", "slices", "a"]), some, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(JSON | st.fixed_dictionaries({"num_ranks": st.integers(1, 3), "tables": st.dictionaries(st.just("a"), JSON)}))
def test_any_record_is_read_or_refused(record: Any) -> None:
    """Nothing else is raised, and what is read has a record that says the same."""
    try:
        sharding = ShardingPlan.from_record(record)
    except ValueError:
        return
    assert ShardingPlan.from_record(sharding.to_record()) == sharding


def test_a_sharding_of_other_tables_or_columns_is_refused() -> None:
    """It says which."""
    sharding = ShardingPlan(2, {"a": sliced(4, [0, 1])})
    sharding.check([table("a", 4)])
    with pytest.raises(ValueError, match="differ in b"):
        sharding.check([table("a", 4), table("b", 4)])
    with pytest.raises(ValueError, match="has 4 columns and the table 5"):
        sharding.check([table("a", 5)])
