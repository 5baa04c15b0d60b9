"""A batch's requests to owners, for rows and for pooling, against the slow definition."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.cases import table
from tiercache.dist.pooled import PoolableFeature, PooledBlock, encode_block, pooled_by_bytes, split_by_rank
from tiercache.dist.pooled_output import PooledBatch, ServedPart
from tiercache.dist.requests import RequestBuilder
from tiercache.dist.shard_layout import Destination, Owners, ShardLayout, out_of_bounds
from tiercache.kernels.cpu.sorting import SortBuffers
from tiercache.kernels.step import Vectors
from tiercache.store.table import group_tables
from tiercache.train.batch_rows import tensors_of
from tiercache.values.ids import FeatureIds
from tiercache.values.lookups import GroupRows, LookedUp, LookupIds

TABLES = tuple(sorted((table(name, dim) for name, dim in (("a", 4), ("b", 6), ("c", 4))), key=lambda t: t.table_id))
GROUPS = group_tables(TABLES)


def owners_of(rows: list[int], cuts: list[list[int]], kinds: list[str]) -> Owners:
    """Build the owners of a pass on two ranks: ``cuts`` are the starts of each table's second half."""
    group_of = {one.name: (group.index, i) for group in GROUPS for i, one in enumerate(group.tables)}
    bounds = np.array([[0, cut, count] for (cut,), count in zip(cuts, rows, strict=True)], dtype=np.int64)
    low, high = bounds[:, :2].copy(), bounds[:, 1:].copy()
    group = np.array([[group_of[one.name][0]] * 2 for one in TABLES], dtype=np.int32)
    first = np.zeros((len(TABLES), 2), dtype=np.int64)
    for t, one in enumerate(TABLES):
        before = [u for u, other in enumerate(TABLES) if group_of[other.name] < group_of[one.name]]
        same = [u for u in before if group[u, 0] == group[t, 0]]
        first[t] = (high - low)[same].sum(axis=0)
    found = tuple(
        tuple(
            Destination(w, int(low[t, w]), int(high[t, w]), int(group[t, w]), int(first[t, w]), 0, one.dim)
            for w in range(2)
        )
        for t, one in enumerate(TABLES)
    )
    return Owners(0, TABLES, tuple(kinds), bounds[:, 2], low, high, group, first, found)  # type: ignore[arg-type]


def check(owners: Owners, rank: int, ids: dict[str, list[int]]) -> None:
    """Decode a request and compare it with the requested ids."""
    layout = ShardLayout(owners, GROUPS, rank, len(GROUPS))
    given_ids = {name: FeatureIds(np.array(some, np.int32), None, None) for name, some in ids.items()}
    request, renamed = RequestBuilder().request(layout, given_ids, {name: name for name in ids}, "a pass")
    asked: list[tuple[int, int, int, int]] = []
    at = 0
    for owner in (1 - rank, rank):
        for split, count in enumerate(request.counts_WS[owner].tolist()):
            group = split % len(GROUPS)
            for address in request.addresses[at : at + count].tolist():
                for t, one in enumerate(owners.tables):
                    first, low, high = owners.first_TW[t, owner], owners.low_TW[t, owner], owners.high_TW[t, owner]
                    if owners.group_TW[t, owner] == group and first <= address < first + high - low:
                        replicated = owners.kinds[t] == "data_parallel"
                        assert replicated == (split >= len(GROUPS))
                        asked.append((owner, t, int(address - first + low), group))
                        assert one.name in ids
            at += count
    assert at == request.addresses.size
    wanted = {(owners.index(name), i) for name, some in ids.items() for i in some}
    assert sorted((t, i) for _, t, i, _ in asked) == sorted(wanted)  # each once
    replicated = {(t, int(i)): slot + k for t, slot, local in request.replicated for k, i in enumerate(local)}
    place: dict[tuple[int, int], int] = {}
    for group in range(len(GROUPS)):
        here = [(t, i) for _, t, i, g in asked if g == group and (t, i) not in replicated]
        place |= {row: slot for slot, row in enumerate(here)}
    place |= replicated
    for name, some in ids.items():
        slots = request.slots_U[renamed[name].ids].tolist()
        assert slots == [place[owners.index(name), i] for i in some]
    for group in GROUPS:
        rows = [place[row] for row in wanted if owners.tables[row[0]].name in {one.name for one in group.tables}]
        assert sorted(rows) == list(range(int(request.num_rows_G[group.index])))


@settings(deadline=None)
@given(st.data(), st.integers(0, 1))
def test_a_request_asks_each_owner_for_each_of_its_rows_once(data: st.DataObject, rank: int) -> None:
    """For any cuts between two owners, ids, and replicated tables; slots of a group are numbered without gaps."""
    rows = data.draw(st.lists(st.integers(0, 30), min_size=3, max_size=3))
    cuts = [[data.draw(st.integers(0, count))] for count in rows]
    kinds = data.draw(st.lists(st.sampled_from(["row_wise", "data_parallel"]), min_size=3, max_size=3))
    ids = {
        one.name: data.draw(st.lists(st.integers(0, count - 1), max_size=40)) if count else []
        for one, count in zip(TABLES, rows, strict=True)
    }
    check(owners_of(rows, cuts, kinds), rank, ids)


def test_a_pass_may_have_more_rows_than_an_int32_counts() -> None:
    """A rank's group may not, but all ranks together: tables are numbered in several batches."""
    rows = [2**31 - 1, 2**31 - 1, 1_500_000_000]
    cuts = [[2**30], [2**30], [700_000_000]]
    ids = {
        one.name: [0, count - 1, cut - 1, cut, 5, count - 1, 77]
        for one, count, (cut,) in zip(TABLES, rows, cuts, strict=True)
    }
    owners = owners_of(rows, cuts, ["row_wise", "row_wise", "row_wise"])
    assert len(ShardLayout(owners, GROUPS, 0, len(GROUPS)).sets) == 3
    for rank in range(2):
        check(owners, rank, ids)


def test_ids_of_no_feature_are_no_rows() -> None:
    check(owners_of([3, 3, 3], [[1], [1], [1]], ["row_wise"] * 3), 0, {})


@pytest.mark.parametrize("id_", [-1, 3, 2**31 - 1])
def test_an_id_outside_its_table_is_refused_by_name(id_: int) -> None:
    """The smallest wrong entry, in the words of a lookup."""
    layout = ShardLayout(owners_of([3, 3, 3], [[1], [1], [1]], ["row_wise"] * 3), GROUPS, 0, len(GROUPS))
    ids = {"f": FeatureIds(np.array([0, 2, id_, id_], np.int32), None, None)}
    with pytest.raises(
        IndexError, match=rf"feature 'f' has local id {id_} at entry 2 .* table 'b' .* 0 to 2 in pass 3"
    ):
        RequestBuilder().request(layout, ids, {"f": "b"}, "pass 3")


@pytest.mark.parametrize(("low", "high"), [(0, 5), (-1, 3), (2, 2147483647)])
def test_numbers_that_are_no_rows_are_named(low: int, high: int) -> None:
    said = str(out_of_bounds(2, np.array([low, high], np.int32), 5, "of a table"))
    assert f"rank 2 was asked for rows {low:,} to {high:,} of a table: start all" in said
    assert out_of_bounds(2, np.array([0, 4], np.int32), 5, "of a table") is None
    assert out_of_bounds(2, np.empty(0, np.int32), 0, "of an empty table") is None


# -- which features are pooled by their owners ---------------------------------------------------------------

WHOLE = (Destination(1, 0, 1000, 0, 40, 0, 16),)
HALVES = (Destination(2, 0, 1000, 1, 0, 0, 8), Destination(0, 0, 1000, 0, 7, 8, 16))
RAGGED = PoolableFeature("f", "t", None, False, 16, 1000, WHOLE)


def bags(ids: list[int], lengths: list[int] | None, weights: list[float] | None = None) -> FeatureIds:
    offsets = None if lengths is None else np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    given = None if weights is None else np.array(weights, np.float32)
    return FeatureIds(np.array(ids, np.int32), offsets, given)


def is_pooled(
    one: PoolableFeature, some: FeatureIds, num_samples: int, *, item_bytes: int = 4, trained: bool = True
) -> bool:
    found = pooled_by_bytes(
        [one], {"f": some}, {"f": "sum"}, num_samples, item_bytes=item_bytes, trained=trained, where="a test",
        sorting=SortBuffers(),
    )  # fmt: skip
    return found == [0]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("owners", [WHOLE, HALVES])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("length", [None, 8])
def test_a_feature_is_pooled_exactly_where_that_is_fewer_bytes(
    length: int | None, weighted: bool, owners: tuple[Destination, ...], item_bytes: int, trained: bool
) -> None:
    """One more unique row decides."""
    n, ids, times = 4, 32, 1 + trained
    words = ids * (1 + weighted) + (n if length is None else 0)
    pooled = 4 * words * len(owners) + times * n * 16 * item_bytes
    row = 4 * len(owners) + times * 16 * item_bytes
    most = pooled // row  # this many unique rows are not more bytes than vectors
    assert 1 <= most < ids
    one = replace(RAGGED, length=length, weighted=weighted, owners=owners)

    for unique, expected in ((most, False), (most + 1, True)):
        some = bags(sorted([*range(unique), *([0] * (ids - unique))]), [8] * n, [1.0] * ids if weighted else None)
        assert is_pooled(one, some, n, item_bytes=item_bytes, trained=trained) == expected


def test_one_id_a_sample_a_maximum_and_empty_bags_stay_rows() -> None:
    """Vectors of the samples are never fewer than their unique rows."""
    assert not is_pooled(replace(RAGGED, length=1), bags([1, 2, 3], None), 3)
    assert not is_pooled(RAGGED, bags([], [0, 0, 0]), 3)
    many = bags(list(range(64)), [64])
    assert is_pooled(RAGGED, many, 1)
    for mode in ("max", None):
        assert not pooled_by_bytes(
            [RAGGED], {"f": many}, {"f": mode}, 1, item_bytes=4, trained=True, where="a test", sorting=SortBuffers()
        )


def test_a_wrong_id_is_named() -> None:
    with pytest.raises(IndexError, match=r"feature 'f' has local id 1000 at entry 1 of the batch.* 0 to 999 in a test"):
        is_pooled(RAGGED, bags([3, 1000], [2]), 1)


def test_a_block_has_features_by_group_and_its_message_their_bags() -> None:
    """Lengths where bags may have any number of ids, then ids, then weights."""
    first = PoolableFeature("f", "t", None, True, 16, 1000, HALVES)
    second = PoolableFeature("g", "u", 2, False, 16, 1000, (replace(WHOLE[0], rank=2),))
    block = PooledBlock.of([first, second, RAGGED], np.array([3, 3, 0]), 2)

    assert (block.features, block.cols, block.width) == ((1, 0), (0, 16), 24)
    pieces = encode_block(block, [first, second], {"f": bags([4, 5, 6], [1, 2], [1, 2, 3]), "g": bags([7, 8], [2])})
    words = [7, 8, 1, 2, 4, 5, 6, *np.array([1, 2, 3], np.float32).view(np.int32).tolist()]
    assert np.concatenate(pieces).tolist() == words


def test_bags_of_all_ranks_are_divided_by_rank() -> None:
    every = {"f": bags([1, 2, 3, 4], [1, 0, 3], [1, 2, 3, 4]), "g": bags([5, 6, 7], None)}
    first, second = split_by_rank(every, [2, 1])

    assert first["f"].ids.tolist() == [1]
    assert first["g"].ids.tolist() == [5, 6]
    assert second["f"].ids.tolist() == [2, 3, 4]
    assert second["f"].offsets is not None
    assert second["f"].offsets.tolist() == [0, 3]
    assert second["f"].weights is not None
    assert second["f"].weights.tolist() == [2, 3, 4]


def test_every_tensor_of_a_batch_is_found_wherever_it_is() -> None:
    """In rows, entries and pooled vectors; arrays of the host are none."""
    all_ = [torch.full((2,), float(i)) for i in range(9)]
    host = np.zeros(1, np.int64)
    rows = GroupRows(Vectors(all_[0], 1, 0), (), all_[1], {"t": 0}, {"t": 1}, host)
    entries = LookupIds(ids=all_[2], starts=host, bases=host, modes=host.astype(np.int8), cols=host, offsets=all_[3],
                        weights=all_[4])  # fmt: skip
    left = LookedUp(all_[5], None, host, all_[6], all_[7])
    asked: Any = None
    pooled = PooledBatch({"f": all_[8]}, asked, ((ServedPart(asked, entries, left),),))
    found = tensors_of(([rows], pooled, None, "words", 3))
    assert {int(tensor[0]) for tensor in found} == set(range(9))
