"""Keys over passes: next and last uses, searches in hash order, slots of the next pass, and the rank of each key."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_key_index import keys_of_hashes
from tiercache.kernels.cpu.hashing import hash_keys, key_owners
from tiercache.kernels.cpu.key_sweeps import hash_range_bound, search_keys
from tiercache.kernels.cpu.slots import assign_slots, stable_order_by_distance


@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([0, 1, 2, 100, 5000]),
    table_id=st.integers(0, 2**64 - 1),
    upper=st.integers(0, 2**64),
)
def test_a_hash_range_ends_before_the_first_hash_above_it(seed: int, size: int, table_id: int, upper: int) -> None:
    keys = np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, size))
    hashes = hash_keys(keys, table_id)
    keys = keys[np.argsort(hashes)]
    keys.flags.writeable = False
    assert hash_range_bound(keys, table_id, upper) == sum(int(h) < upper for h in hashes)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([0, 1, 2, 3, 100, 20_000]), table_id=st.integers(0, 2**64 - 1))
def test_a_key_is_found_at_its_place_and_others_are_not(seed: int, size: int, table_id: int) -> None:
    rng = np.random.default_rng(seed)
    keys = np.unique(rng.integers(-(2**62), 2**62, size))
    keys = keys[np.argsort(hash_keys(keys, table_id))]
    absent = rng.integers(2**62 + 1, 2**63 - 1, 200)
    queries = np.concatenate([keys, absent])
    order = rng.permutation(queries.size)
    out = np.empty(queries.size, np.int64)
    search_keys(keys, table_id, queries[order], out)
    assert np.array_equal(out, np.where(order < keys.size, order, -1))


def test_keys_whose_hashes_crowd_are_found_too() -> None:
    """Adversarial keys that mislead interpolation: the search falls back to bisection."""
    hashes = [*range(0, 9000, 3), *range(2**63, 2**63 + 900, 3), *range(2**64 - 3000, 2**64, 3)]
    keys, absent = keys_of_hashes(hashes, 0), keys_of_hashes([h + 1 for h in hashes], 0)
    out = np.empty(2 * keys.size, np.int64)
    search_keys(keys, 0, np.concatenate([keys, absent]), out)
    assert out.tolist() == [*range(keys.size), *([-1] * keys.size)]


def test_search_results_need_one_place_a_query() -> None:
    with pytest.raises(ValueError, match="the same length"):
        search_keys(np.arange(3), 0, np.arange(3), np.empty(2, np.int64))


def owner_by_definition(hashed: int, num_owners: int) -> int:
    bounds = [r * 2**64 // num_owners for r in range(num_owners + 1)]
    return int(np.searchsorted(np.array(bounds[1:], object), hashed, side="right"))


@pytest.mark.parametrize("num_owners", [1, 2, 3, 5, 7, 64, 100, 1000, 1023, 1024])
def test_a_key_belongs_to_the_rank_whose_range_has_its_hash(num_owners: int) -> None:
    bounds = [r * 2**64 // num_owners for r in range(1, num_owners)]
    some = bounds[:: max(1, num_owners // 25)]
    hashes = [0, 1, 2**64 - 1, 2**63, *(bound + step for bound in some for step in (-1, 0, 1))]
    keys, table_id = keys_of_hashes(hashes, 99), 99
    wanted = [owner_by_definition(h, num_owners) for h in hashes]
    owners = np.empty(keys.size, np.int16)
    key_owners(keys, table_id, num_owners, owners)
    assert owners.tolist() == wanted


def test_owners_that_cannot_be_are_refused() -> None:
    keys, owners = np.arange(3), np.zeros(3, np.int16)
    for num_owners in (0, 1025):
        with pytest.raises(ValueError, match=f"invalid number of owners {num_owners}: expected 1 to 1024"):
            key_owners(keys, 0, num_owners, owners)
    with pytest.raises(ValueError, match="the same length"):
        key_owners(keys, 0, 2, owners[:2])


LONGEST = 4


@st.composite
def next_pass(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    """Return slots and next gaps of a pass, previous gaps of the next one, and unused slots."""
    next_distance = np.array(draw(st.lists(st.integers(1, LONGEST), max_size=30)), np.int32)
    cached_code = int((next_distance == 1).sum())
    others = draw(st.lists(st.integers(2, LONGEST), max_size=30))
    prev_distance = np.array(draw(st.permutations([1] * cached_code + others)), np.int32)
    capacity = max(next_distance.size, prev_distance.size) + draw(st.integers(0, 5))
    slots = np.array(draw(st.permutations(range(capacity))), np.int32)
    return slots[: next_distance.size], next_distance, prev_distance, slots[next_distance.size :]


def by_gap(distances: np.ndarray) -> np.ndarray:
    order = np.empty(distances.size, np.int32)
    stable_order_by_distance(distances, LONGEST, order)
    return order


@given(next_pass())
def test_rows_take_spare_slots_and_then_those_of_departing_rows(given: tuple[np.ndarray, ...]) -> None:
    """Kept rows stay in place, in the order of both sides; unused slots become spare again."""
    old_slots, next_distance, prev_distance, spare = given
    stack = np.full(old_slots.size + spare.size + 1, -1, np.int32)
    stack[: spare.size], stack[-1] = spare, spare.size
    dump_order, load_order, slots = by_gap(next_distance), by_gap(prev_distance), np.empty(prev_distance.size, np.int32)
    cached_code = assign_slots(old_slots, next_distance, dump_order, prev_distance, load_order, stack, slots)
    assert cached_code == (next_distance == 1).sum()
    free = [*old_slots[dump_order[:cached_code]], *spare[::-1], *old_slots[dump_order[cached_code:]]]
    taken = [*range(cached_code), *range(cached_code, prev_distance.size)]
    assert slots[load_order].tolist() == [free[place] for place in taken]
    left = set(old_slots.tolist()) | set(spare.tolist())
    assert sorted(stack[: stack[-1]]) == sorted(left - set(slots.tolist()))


@given(next_pass())
def test_sides_that_keep_different_rows_are_told(given: tuple[np.ndarray, ...]) -> None:
    """By -1: a row would have the slot of another."""
    old_slots, next_distance, prev_distance, spare = given
    for one, other in ((np.append(prev_distance, 1), next_distance), (prev_distance, np.append(next_distance, 1))):
        mine, theirs = one.astype(np.int32), other.astype(np.int32)
        held = np.append(old_slots, old_slots.size + spare.size).astype(np.int32)[: theirs.size]
        stack = np.zeros(theirs.size + mine.size + 1, np.int32)
        stack[-1] = mine.size
        slots = np.empty(mine.size, np.int32)
        assert assign_slots(held, theirs, by_gap(theirs), mine, by_gap(mine), stack, slots) == -1
