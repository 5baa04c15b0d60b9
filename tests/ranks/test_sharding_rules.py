"""What users say of where tables stand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiercache as tc
from tests.ranks.pool import RanksPool
from tests.ranks.trainings import ONE, open_sharded
from tests.training.cases import table
from tiercache.data.from_arrays import write_dataset
from tiercache.data.raw_batch import RawBatch
from tiercache.dist.communicator import AnyCommunicator
from tiercache.ranks.sharding_planner import sharding_of
from tiercache.store.shards.sharding import ShardingPlan, TableSharding

OPEN = "tests.ranks.test_sharding_rules:chosen"


def chosen(ranks: AnyCommunicator, folder: str, asked: list[Any], **options: Any) -> dict[str, str]:
    """Open a store as each rank asks, and return the kind of each table."""
    one = asked[ranks.rank % len(asked)]
    if isinstance(one, dict) and "rules" in one:
        costs = tc.CostModel(**one.pop("costs", {}))
        one = tc.ShardingRules(**one["rules"], costs=costs)
    if isinstance(one, dict) and "plan" in one:
        one = ShardingPlan(ranks.size, {name: TableSharding(kind) for name, kind in one["plan"].items()})
    with open_sharded(ONE, folder, sharding=one, **options) as cache:
        return {name: sharding.kind for name, sharding in cache.sharding.tables.items()}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["basic", "cost"], "sharding (basic on rank 0, cost on rank 1)"),
        (
            [{"users": "row"}, {"users": "table"}],
            'sharding ({"users": "row"} on rank 0, {"users": "table"} on rank 1)',
        ),
        (["auto", {"rules": {}}], "sharding (auto on rank 0, digest "),
        ([{"rules": {}}, {"rules": {"row_threshold": 1}}], "sharding (digest "),
        ([{"rules": {}}, {"rules": {}, "costs": {"samples": 1}}], "sharding (digest "),
        (
            [{"plan": {"users": "row", "items": "row"}}, {"plan": {"users": "replicate", "items": "row"}}],
            "sharding (digest ",
        ),
    ],
)
def test_ranks_that_ask_for_different_shardings_are_refused(
    ranks_pool: RanksPool, tmp_path: Path, asked: list[Any], words: str
) -> None:
    """What each asks for is compared, and not what comes of it; nothing is made."""
    ONE.cut(tmp_path / "passes")

    errors = ranks_pool.errors(2, OPEN, folder=str(tmp_path), asked=asked)

    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert errors[0][0] == "RankError"
    assert errors[0][1].startswith(f"ranks differ in {words}")
    assert not (tmp_path / "model.tc").exists()


def test_thresholds_say_where_tables_stand(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Of the bytes of a table's rows in its largest pass; equal rules on all ranks go on."""
    passes = ONE.cut(tmp_path / "passes")
    size = max(one.rows("users") for one in passes) * ONE.tables[0].row_bytes
    rules: dict[str, Any] = {"strategy": "basic", "kinds": {"items": "table"}}
    for name, given, kind in (
        ("", 0, "table"),
        ("replicate_threshold", size, "replicate"),
        ("replicate_threshold", size - 1, "table"),
        ("column_threshold", size - 1, "column"),
        ("row_threshold", f"{size - 1}", "row"),
        ("row_threshold", "1MiB", "table"),
    ):
        asked = {"rules": rules | ({name: given} if name else {})}
        told = ranks_pool.run(2, OPEN, folder=str(tmp_path), asked=[asked])
        assert told == [{"users": kind, "items": "table"}] * 2, (name, given)


def test_costs_say_where_tables_stand(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Where every piece from another rank costs much, tables stand on one rank whole."""
    ONE.cut(tmp_path / "passes")
    for seconds, kind in ((1e-6, "row"), (1.0, "table")):
        asked = {"rules": {}, "costs": {"piece_seconds": seconds}}
        assert ranks_pool.run(2, OPEN, folder=str(tmp_path), asked=[asked]) == [{"users": kind, "items": kind}] * 2


def test_numbers_on_the_wire_count_as_the_cache_sends_them(tmp_path: Path) -> None:
    """Where the costs say nothing of them."""
    schema = tc.Schema(tables=(table("t", 64),), features=(tc.Feature(name="f", table="t"),))
    passes = write_dataset(tmp_path, schema, [RawBatch.of(schema, {"f": np.arange(4096) % 500})])
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
        ({"row_threshold": "much"}, "row_threshold of the sharding rules: 'much' is no size"),
        ({"column_threshold": 0}, "column_threshold of the sharding rules: 0 is no size"),
        (
            {"replicate_threshold": "2MiB", "row_threshold": "1MiB"},
            "replicate_threshold is 2 MiB and row_threshold 1 MiB: they must not fall from replicate_threshold to",
        ),
        ({"column_threshold": 5, "row_threshold": 4}, "column_threshold is 5 bytes and row_threshold 4 bytes"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, Any], words: str) -> None:
    """When they are made."""
    with pytest.raises(ValueError, match=words):
        tc.ShardingRules(**rules)


@pytest.mark.parametrize("number", [0, -1, float("nan"), float("inf"), "fast", True, None])
def test_costs_are_numbers_above_0(number: Any) -> None:
    """Only the bytes of a number may be left to the cache."""
    with pytest.raises(ValueError, match=r"link_bytes_per_second of the cost model is .*: it must be a number"):
        tc.CostModel(link_bytes_per_second=number)
    assert tc.CostModel(number_bytes=None).number_bytes is None


def test_what_is_no_sharding_is_refused(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """On every rank, with what it may be; also kinds and tables that there are not, in rules."""
    ONE.cut(tmp_path / "passes")
    for asked, words in (
        (5, "sharding is 5: it must be a strategy, kinds by table, ShardingRules or a ShardingPlan"),
        ({"rules": {"kinds": {"users": "rows"}}}, "to be sharded by 'rows': it must be one of 'row', 'table'"),
        ({"rules": {"kinds": {"user": "row"}}}, "unknown table 'user': the tables are"),
    ):
        errors = ranks_pool.errors(2, OPEN, folder=str(tmp_path), asked=[asked])
        assert all(error is not None and words in error[1] for error in errors), errors
