"""What a batch asks its owners for, against the slow definition, and for passes that no int32 counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.cases import table
from tiercache.data.encoded_batch import FeatureIds
from tiercache.ranks.bounds import out_of_bounds
from tiercache.ranks.owners import Destination, Owners
from tiercache.ranks.requests import Requester
from tiercache.ranks.stretches import Stretches
from tiercache.store.table import group_tables

TABLES = tuple(sorted((table(name, dim) for name, dim in (("a", 4), ("b", 6), ("c", 4))), key=lambda t: t.table_id))
GROUPS = group_tables(TABLES)


def owners_of(rows: list[int], cuts: list[list[int]], kinds: list[str]) -> Owners:
    """Build the owners of a pass on two ranks: ``cuts`` is where each table's second half begins."""
    group_of = {one.name: (group.index, i) for group in GROUPS for i, one in enumerate(group.tables)}
    bounds = np.array([[0, cut, count] for (cut,), count in zip(cuts, rows, strict=True)], dtype=np.int64)
    low, high = bounds[:, :2].copy(), bounds[:, 1:].copy()
    group = np.array([[group_of[one.name][0]] * 2 for one in TABLES], dtype=np.int32)
    first = np.zeros((len(TABLES), 2), dtype=np.int64)
    for t, one in enumerate(TABLES):
        before = [u for u, other in enumerate(TABLES) if group_of[other.name] < group_of[one.name]]
        same = [u for u in before if group[u, 0] == group[t, 0]]
        first[t] = (high - low)[same].sum(axis=0)
    columns = np.array([[[0, one.dim]] * 2 for one in TABLES], dtype=np.int32)
    found = tuple(
        tuple(
            Destination(w, int(low[t, w]), int(high[t, w]), int(group[t, w]), int(first[t, w]), 0, one.dim)
            for w in range(2)
        )
        for t, one in enumerate(TABLES)
    )
    return Owners(0, TABLES, tuple(kinds), bounds[:, 2], low, high, group, first, columns, found)  # type: ignore[arg-type]


def check(owners: Owners, rank: int, ids: dict[str, list[int]]) -> None:
    """Decode a request and compare it with what was asked for."""
    stretches = Stretches(owners, GROUPS, rank, len(GROUPS))
    given_ids = {name: FeatureIds(np.array(some, np.int32), None, None) for name, some in ids.items()}
    request, renamed = Requester().request(stretches, given_ids, {name: name for name in ids}, "a pass")
    asked: list[tuple[int, int, int, int]] = []
    at = 0
    for owner in (1 - rank, rank):
        for section, count in enumerate(request.counts_WS[owner].tolist()):
            group = section % len(GROUPS)
            for address in request.addresses[at : at + count].tolist():
                for t, one in enumerate(owners.tables):
                    first, low, high = owners.first_TW[t, owner], owners.low_TW[t, owner], owners.high_TW[t, owner]
                    if owners.group_TW[t, owner] == group and first <= address < first + high - low:
                        mirrored = owners.kinds[t] == "replicate"
                        assert mirrored == (section >= len(GROUPS))
                        asked.append((owner, t, int(address - first + low), group))
                        assert one.name in ids
            at += count
    assert at == request.addresses.size
    wanted = {(owners.index(name), i) for name, some in ids.items() for i in some}
    assert sorted((t, i) for _, t, i, _ in asked) == sorted(wanted)  # each once
    mirrored = {(t, int(i)): slot + k for t, slot, local in request.mirrored for k, i in enumerate(local)}
    place: dict[tuple[int, int], int] = {}
    for group in range(len(GROUPS)):
        here = [(t, i) for _, t, i, g in asked if g == group and (t, i) not in mirrored]
        place |= {row: slot for slot, row in enumerate(here)}
    place |= mirrored
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
    kinds = data.draw(st.lists(st.sampled_from(["row", "replicate"]), min_size=3, max_size=3))
    ids = {
        one.name: data.draw(st.lists(st.integers(0, count - 1), max_size=40)) if count else []
        for one, count in zip(TABLES, rows, strict=True)
    }
    check(owners_of(rows, cuts, kinds), rank, ids)


def test_a_pass_may_have_more_rows_than_an_int32_counts() -> None:
    """A rank's group may not, but all ranks together: tables are numbered in several goes."""
    rows = [2**31 - 1, 2**31 - 1, 1_500_000_000]
    cuts = [[2**30], [2**30], [700_000_000]]
    ids = {
        one.name: [0, count - 1, cut - 1, cut, 5, count - 1, 77]
        for one, count, (cut,) in zip(TABLES, rows, cuts, strict=True)
    }
    owners = owners_of(rows, cuts, ["row", "row", "row"])
    assert len(Stretches(owners, GROUPS, 0, len(GROUPS)).sets) == 3
    for rank in range(2):
        check(owners, rank, ids)


def test_ids_of_no_feature_are_no_rows() -> None:
    """A rank may ask for nothing at all."""
    check(owners_of([3, 3, 3], [[1], [1], [1]], ["row"] * 3), 0, {})


@pytest.mark.parametrize("id_", [-1, 3, 2**31 - 1])
def test_an_id_outside_its_table_is_refused_by_name(id_: int) -> None:
    """The smallest entry that is wrong, in the words of a lookup."""
    stretches = Stretches(owners_of([3, 3, 3], [[1], [1], [1]], ["row"] * 3), GROUPS, 0, len(GROUPS))
    ids = {"f": FeatureIds(np.array([0, 2, id_, id_], np.int32), None, None)}
    with pytest.raises(
        IndexError, match=rf"feature 'f' has local id {id_} at entry 2 .* table 'b' .* 0 to 2 in pass 3"
    ):
        Requester().request(stretches, ids, {"f": "b"}, "pass 3")


@pytest.mark.parametrize(("low", "high"), [(0, 5), (-1, 3), (2, 2147483647)])
def test_numbers_that_are_no_rows_are_named(low: int, high: int) -> None:
    """With the rank that was asked, and what they are of."""
    said = str(out_of_bounds(2, np.array([low, high], np.int32), 5, "of a table"))
    assert f"rank 2 was asked for rows {low:,} to {high:,} of a table: start all" in said


def test_rows_that_are_there_may_be_asked_for() -> None:
    """All of them, and none of an empty table."""
    assert out_of_bounds(2, np.array([0, 4], np.int32), 5, "of a table") is None
    assert out_of_bounds(2, np.empty(0, np.int32), 0, "of an empty table") is None
