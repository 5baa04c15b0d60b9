"""Column slices: a rank that keeps some columns of a table makes, keeps and writes what the whole table has there."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import tiercache as tc
from tests.training.cases import Case, Spec, device_of_tests, table
from tests.training.devices import shim
from tiercache.backends.opening import open_backend
from tiercache.planning.positions import Positions
from tiercache.ranks.shares import Share
from tiercache.store import MemoryEngine
from tiercache.store.initial import initial_rows
from tiercache.store.shards.sharding import ShardingPlan, sliced
from tiercache.store.table import group_tables
from tiercache.store.vectors import from_words
from tiercache.tiers.device_tier import DeviceTier, SlotAssignment
from tiercache.tiers.first_vectors import first_vectors, initial_vectors

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("start", ["uniform", "normal"])
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
        share, other = (cast("tc.PassDataset", Share(some, sharding, rank)) for some in (passes, others))
        store = tc.Store.open(None, tables=share.tables, engine=MemoryEngine())
        with tc.TierCache(
            store, share, device=device_of_tests(), device_budget="1MiB", host_budget="8MiB", progress=False
        ) as cache:
            for _ in cache.passes(1):
                pass
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
        positions = Positions(group_tables([one]), np.array([[0, keys.size]]))
        tier = DeviceTier(positions, 1 << 20, open_backend("cpu" if device == "cpu" else shim(), (one,)))
        slots = np.arange(keys.size, dtype=np.int32)
        loaded = np.array([0xFF], np.uint8)
        assignments = [SlotAssignment(slots, slots, slots, free=keys.size, departing=0, loaded_K=loaded)]
        tier.activate(assignments)
        tier.note_keys(0, assignments, lambda _p, _t: keys)
        streams.append(np.asarray(tier.rows_of(0)[0].streams).copy())
    np.testing.assert_array_equal(streams[0], streams[1])  # it begins where the whole one does
    assert not np.isin(streams[0], streams[2]).any()
