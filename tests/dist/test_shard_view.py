"""Shares of a dataset: every row, or slice of its columns, has one owner, and every rank knows it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.train.cases import Case, Spec, device_of_tests, table
from tests.train.devices import shim
from tiercache.dist.shard_layout import find_owners
from tiercache.dist.shard_view import ShardView
from tiercache.planning.row_offsets import RowOffsets
from tiercache.planning.sharding_planner import sliced
from tiercache.rows.backends.open_backend import open_backend
from tiercache.rows.device import DeviceTier, SlotAssignment
from tiercache.rows.prefetch import first_vectors, initial_vectors
from tiercache.store import MemoryEngine
from tiercache.store.bits import hash_keys
from tiercache.store.row_codec import from_words, initial_rows
from tiercache.store.sharding import ShardingPlan, Slice, TableSharding
from tiercache.store.table import group_tables

CASE = Case(
    tables=(table("a", 4), table("b", 4), table("c", 6, tc.optim.RowWiseAdagrad(learning_rate=0.1)), table("d", 4)),
    specs=(
        Spec(name="f", table="a"),
        Spec(name="g", table="b", hotness="ragged"),
        Spec(name="h", table="c"),
        Spec(name="i", table="d"),
        Spec(name="j", table="a", hotness="multi_hot"),
    ),
)
NAMES = [one.name for one in CASE.tables]
MIXED = ShardingPlan(
    4,
    {
        "a": TableSharding("row_wise"),
        "b": TableSharding("table_wise", (Slice(1, 0, 4),)),
        "c": sliced(6, [2, 0]),
        "d": TableSharding("data_parallel"),
    },
)
ONE_RANK = ShardingPlan(3, {one.name: sliced(one.dim, [1]) for one in CASE.tables})


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> tc.PassDataset:
    return CASE.cut(tmp_path_factory.mktemp("passes"))


@st.composite
def shardings(draw: st.DrawFn, tables: tuple[tc.Table, ...] = CASE.tables) -> ShardingPlan:
    ranks = draw(st.integers(1, 6))
    table_shardings = {}
    for one in tables:
        owners = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=one.dim))
        how = draw(st.sampled_from(["row_wise", "data_parallel", "slices"]))
        table_shardings[one.name] = sliced(one.dim, owners) if how == "slices" else TableSharding(cast("Any", how))
    return ShardingPlan(ranks, table_shardings)


def check_owners(
    tables: tuple[tc.Table, ...], sharding: ShardingPlan, keys: dict[str, np.ndarray[Any, Any]], p: int = 0
) -> None:
    """Hold owners to the slow definition: each column of each row once, at the position of the rank's own layout."""
    groups = [group_tables(sharding.shard_tables(tables, rank)) for rank in range(sharding.num_ranks)]
    owners = find_owners(sharding, p, tables, groups, keys.__getitem__)
    for t, whole in enumerate(tables):
        hashes, table_sharding = hash_keys(keys[whole.name], whole.table_id).tolist(), sharding.tables[whole.name]
        times = np.zeros((len(hashes), whole.dim), dtype=int)
        for rank in range(sharding.num_ranks):
            low, high = int(owners.low_TW[t, rank]), int(owners.high_TW[t, rank])
            if table_sharding.by_hash:
                begin, end = (n * 2**64 // sharding.num_ranks for n in (rank, rank + 1))
                assert [i for i, value in enumerate(hashes) if begin <= value < end] == list(range(low, high))
        owning = {d.rank for d in owners.destinations[t]}
        for rank in range(sharding.num_ranks):
            assert rank in owning or owners.low_TW[t, rank] == owners.high_TW[t, rank]
        for d in owners.destinations[t]:
            arrays = owners.low_TW, owners.high_TW, owners.group_TW, owners.first_TW
            assert (d.low, d.high, d.group, d.first) == tuple(array[t, d.rank] for array in arrays)
            times[d.low : d.high, d.first_column : d.last_column] += 1
            part = next(one for one in groups[d.rank][d.group].tables if one.name == whole.name)
            assert d.last_column - d.first_column == part.dim
            assert d.first_column == part.first_column
        assert (times == 1).all()
        assert owners.rows_T[t] == len(hashes)
    for rank, mine in enumerate(groups):
        for group in mine:
            at = 0
            for one in group.tables:
                t = owners.index(one.name)
                assert (owners.group_TW[t, rank], owners.first_TW[t, rank]) == (group.index, at)
                at += int(owners.high_TW[t, rank] - owners.low_TW[t, rank])


KEYS = st.sets(st.integers(-(2**63), 2**63 - 1), max_size=30)


@settings(max_examples=60, deadline=None)
@given(sharding=shardings(), sets=st.lists(KEYS, min_size=4, max_size=4))
def test_every_column_of_every_row_has_one_owner(sharding: ShardingPlan, sets: list[set[int]]) -> None:
    """Whatever tables, keys, sharding and number of ranks; and at its position in the owner's layout."""
    tables = tuple(sorted(CASE.tables, key=lambda one: one.table_id))
    keys = {}
    for one, some in zip(tables, sets, strict=True):
        array = np.array(sorted(some), dtype=np.int64)
        keys[one.name] = array[np.argsort(hash_keys(array, one.table_id))]
    check_owners(tables, sharding, keys)


@settings(max_examples=25, deadline=None)
@given(sharding=shardings())
def test_shares_of_all_ranks_are_the_dataset(passes: tc.PassDataset, sharding: ShardingPlan) -> None:
    shares = [ShardView(passes, sharding, rank) for rank in range(sharding.num_ranks)]
    layouts = [RowOffsets.of(share, group_tables(share.tables)) for share in shares]
    for p, one in enumerate(passes.passes):
        owners = shares[-1].owners(p)
        check_owners(passes.tables, sharding, {name: one.keys(name) for name in NAMES}, p)
        for t, whole in enumerate(passes.tables):
            for rank, share in enumerate(shares):
                low, high = int(owners.low_TW[t, rank]), int(owners.high_TW[t, rank])
                np.testing.assert_array_equal(share.passes[p].keys(whole.name), one.keys(whole.name)[low:high])
                assert share.passes[p].rows(whole.name) == high - low
                group = int(owners.group_TW[t, rank])
                place = layouts[rank].groups[group].place(whole.name)
                assert owners.first_TW[t, rank] == layouts[rank].table_starts(p, group)[place]
        whole_ids, mine = one.read(np.arange(9)), shares[0].passes[p].read(np.arange(9))
        for name, ids in whole_ids.ids.items():
            np.testing.assert_array_equal(mine.ids[name].ids, ids.ids)
    assert len({share.share for share in shares}) == sharding.num_ranks
    assert {share.digest for share in shares} == {passes.digest}


def test_a_share_says_what_it_is_of(passes: tc.PassDataset) -> None:
    share = ShardView(passes, MIXED, 2)
    assert share.share == ShardView(passes, ShardingPlan.from_record(MIXED.to_record()), 2).share
    assert share.share not in {ShardView(passes, *other).share for other in ((ONE_RANK, 2), (MIXED, 1))}
    assert {share.digest, ShardView(passes, ONE_RANK, 2).digest} == {passes.digest}
    assert share.schema.digest == passes.schema.digest
    assert {one.name: one.dim for one in share.schema.tables} == {"a": 4, "b": 4, "c": 3, "d": 4}
    assert (len(share), share.samples, share.path) == (len(passes), passes.samples, passes.path)
    assert [one.index for one in share] == list(range(len(passes)))
    assert repr(share).startswith("ShardView(rank 2 of 4, PassDataset(")
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=r"invalid rank .*: the sharding has ranks 0 to 3"):
            ShardView(passes, MIXED, rank)
    with pytest.raises(ValueError, match="differ in b, c, d"):
        ShardView(passes, ShardingPlan(2, {"a": TableSharding("row_wise")}), 0)


def test_a_group_of_more_rows_than_an_address_can_count_is_refused() -> None:
    class Many:
        size = 1 << 31

    tables = (table("a", 4),)
    sharding = ShardingPlan(2, {"a": sliced(4, [1])})
    groups = [group_tables(tables)] * 2
    with pytest.raises(ValueError, match="rank 1 owns 2,147,483,648 rows of one group in sub-dataset 3"):
        find_owners(sharding, 3, tables, groups, lambda _: cast("Any", Many()))


# -- column slices -------------------------------------------------------------------------------------------

STARTS: dict[str, Any] = {
    "uniform": tc.init.Uniform(low=-1.0, high=1.0),
    "normal": tc.init.Normal(std=0.5),
    "constant": tc.init.Constant(value=0.25),
    "zeros": tc.init.Zeros(),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("start", STARTS)
def test_every_maker_of_initial_rows_cuts_a_slice_out_of_the_whole_ones(start: str, dtype: str) -> None:
    """More keys than fit into one batch of the maker; slices that begin anywhere."""
    whole = table("t", 23, initializer=STARTS[start], dtype=dtype)
    keys = np.arange(-10, 7000, dtype=np.int64)
    wanted = initial_rows(whole, keys)[0]
    sharding = ShardingPlan(3, {"t": sliced(23, [2, 0, 1])})
    for rank in range(3):
        (part,) = sharding.shard_tables([whole], rank)
        mine = wanted[:, part.first_column : part.first_column + part.dim]
        np.testing.assert_array_equal(initial_vectors(part, keys[::-1])[::-1], mine)
        words = np.zeros((keys.size, part.fields[0].words), dtype=np.float32)
        first_vectors(part, keys, words)
        np.testing.assert_array_equal(from_words(part.fields[:1], [words])[0], mine)
        np.testing.assert_array_equal(initial_rows(part, keys)[0], mine)


def test_a_device_that_makes_rows_itself_leaves_slices_to_the_host() -> None:
    """Its kernel counts elements from the first of the whole row."""
    whole = table("t", 8)
    backend = shim()
    assert backend.generates(whole)
    assert not backend.generates(ShardingPlan(2, {"t": sliced(8, [0, 1])}).shard_tables([whole], 1)[0])


@pytest.mark.parametrize(("start", "dtype"), [("uniform", "float32"), ("normal", "bfloat16"), ("uniform", "float16")])
def test_the_parts_of_all_ranks_put_side_by_side_are_the_whole_rows(tmp_path: Path, start: str, dtype: str) -> None:
    """Trained without a step, in the store as in an evaluation, and after a reorganize that makes new rows."""
    case = Case(
        tables=(table("t", 7, initializer=STARTS[start], dtype=dtype), table("u", 4)),
        specs=(Spec(name="f", table="t"), Spec(name="g", table="u")),
    )
    passes = case.cut(tmp_path / "passes")
    others = replace(case, data_seed=1, num_keys=400).cut(tmp_path / "others")
    sharding = ShardingPlan(3, {"t": sliced(7, [2, 0, 1]), "u": sliced(4, [0, 0])})
    strange = np.array([10**12, -7], dtype=np.int64)
    for rank in range(3):
        share, other = (cast("tc.PassDataset", ShardView(some, sharding, rank)) for some in (passes, others))
        store = tc.Store.open(None, tables=share.tables, engine=MemoryEngine())
        with tc.TierCache(
            store, share, device=device_of_tests(), device_budget="1MiB", host_budget="8MiB", progress=False
        ) as cache:
            for p in cache.passes(1):
                p.skip()
            (part,) = (one for one in share.tables if one.name == "t")
            columns = slice(part.first_column, part.first_column + part.dim)
            now = cache.live_rows().fields("t", strange)[0]
            np.testing.assert_array_equal(now, initial_rows(case.tables[0], strange)[0][:, columns])
        tc.reorganize(store, other, progress=False)
        chunks = list(store.scan("t"))
        keys = np.concatenate([some for some, _ in chunks])
        vectors = np.concatenate([fields[0] for _, fields in chunks])
        both = np.union1d(*(np.concatenate([p.keys("t") for p in some.passes]) for some in (passes, others)))
        np.testing.assert_array_equal(np.sort(keys), both)
        np.testing.assert_array_equal(vectors, initial_rows(case.tables[0], keys)[0][:, columns])


@pytest.mark.parametrize("device", ["cpu", "shim"])
def test_slices_of_16_bits_round_by_numbers_of_their_own(device: str) -> None:
    """A slice's numbers count from its first one: with the whole table's stream all slices would round alike."""
    whole = table("t", 8, dtype="bfloat16")
    parts = [ShardingPlan(2, {"t": sliced(8, [0, 1])}).shard_tables([whole], rank)[0] for rank in range(2)]
    keys = np.arange(5, dtype=np.int64)
    streams = []
    for one in (whole, *parts):
        positions = RowOffsets(group_tables([one]), np.array([[0, keys.size]]))
        tier = DeviceTier(positions, 1 << 20, open_backend("cpu" if device == "cpu" else shim(), (one,)))
        slots = np.arange(keys.size, dtype=np.int32)
        loaded = np.array([0xFF], np.uint8)
        assignments = [SlotAssignment(slots, slots, slots, free=keys.size, departing=0, loaded_K=loaded)]
        tier.activate(assignments)
        tier.write_streams(0, assignments, lambda _p, _t: keys)
        streams.append(np.asarray(tier.rows_of(0)[0].streams).copy())
    np.testing.assert_array_equal(streams[0], streams[1])  # its first column is the whole one's
    assert not np.isin(streams[0], streams[2]).any()
