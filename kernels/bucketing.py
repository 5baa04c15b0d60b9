"""Entries of a batch by the rank that owns their row: what an all-to-all sends. Serial kernels.

Legend: E entries, F features, W owners (ranks), L local ids. Entries are feature-major, as ids of a batch are.

Owner r has the keys whose hash `mix(key ^ table id)` lies in [floor(r * 2^64 / W), floor((r + 1) * 2^64 / W)); an owner
may also be looked up by local id. Within an owner, entries stay in batch order.

Training asks `key_owners` alone: the unique rows that ranks exchange stand by owner already, in the order of their
hashes. The others are for an exchange of every id (docs/design/0017-exchange.md).
"""

import numpy as np
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect, same_length
from tiercache.kernels.bits import mix_word
from tiercache.kernels.jit import inlined, serial

__all__ = ["MOST_OWNERS", "bucket_ids", "bucket_keys", "key_owners"]

MOST_OWNERS = 1024

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@inlined
def _owner(hashed, num_owners):  # type: ignore[no-untyped-def]
    """Return the rank whose range has a hash.

    The high half of the product with W is the rank, or one less where the hash is the first of its range and the
    range's exact bound no whole number: adding W once more then passes 2^64.
    """
    product = (hashed & _LOW) * num_owners
    high = ((hashed >> _HALF) * num_owners + (product >> _HALF)) >> _HALF
    return np.int64(high) + (1 if hashed * num_owners > np.uint64(0) - num_owners else 0)


@serial
def _key_owners(keys, table_id, num_owners, owners):  # type: ignore[no-untyped-def]
    for i in range(keys.size):
        owners[i] = _owner(mix_word(np.uint64(keys[i]) ^ table_id), num_owners)


@serial
def _owners_of_entries(keys, table_ids, entry_starts, num_owners, owners):  # type: ignore[no-untyped-def]
    for f in range(table_ids.size):
        for e in range(entry_starts[f], entry_starts[f + 1]):
            owners[e] = _owner(mix_word(np.uint64(keys[e]) ^ table_ids[f]), num_owners)


@serial
def _owners_of_ids(ids, bases, limits, entry_starts, owner_of_local, num_owners, owners):  # type: ignore[no-untyped-def]
    for f in range(bases.size):
        for e in range(entry_starts[f], entry_starts[f + 1]):
            owner = np.int16(-1)
            if 0 <= ids[e] < limits[f]:
                owner = owner_of_local[bases[f] + ids[e]]
            owners[e] = owner if 0 <= owner < num_owners else num_owners


@serial
def _bucket(owners, num_owners, order, place, starts):  # type: ignore[no-untyped-def]
    before = np.zeros(num_owners + 2, np.int64)
    for e in range(owners.size):
        before[np.int64(owners[e]) + 1] += 1
    for r in range(num_owners + 1):
        before[r + 1] += before[r]
        starts[r] = before[r]
    for e in range(owners.size):
        owner = np.int64(owners[e])
        order[before[owner]] = e
        place[e] = before[owner]
        before[owner] += 1


def expect_buckets(
    num_entries: int, num_tables: int, entry_starts: NDArray[np.int64], num_owners: int
) -> NDArray[np.int64]:
    """Return the entry starts as they must be: they cover all entries, a stretch for each table.

    Raises ValueError.
    """
    starts = expect("entry_starts", entry_starts, np.int64)
    if starts.size != num_tables + 1 or (np.diff(starts) < 0).any() or starts[0] != 0 or starts[-1] != num_entries:
        raise ValueError(f"{num_tables} features and {num_entries} entries do not fit entry starts {starts.tolist()}.")
    if not 1 <= num_owners <= MOST_OWNERS:
        raise ValueError(f"{num_owners} owners: from 1 to {MOST_OWNERS} are possible.")
    if num_entries >= 1 << 31:
        raise ValueError(f"a batch of {num_entries:,} entries is too large: at most {(1 << 31) - 1:,} fit.")
    return starts


def expect_rooms(num_entries: int, num_owners: int, order: int, place: int, starts: int) -> None:
    """Raise ValueError where what is written has another number of elements."""
    if (order, place, starts) != (num_entries, num_entries, num_owners + 1):
        raise ValueError(
            f"order, place and starts have {order}, {place} and {starts} elements: {num_entries} entries "
            f"of {num_owners} owners need {num_entries}, {num_entries} and {num_owners + 1}."
        )


def _expect_places(
    num_entries: int, num_owners: int, order: NDArray[np.int32], place: NDArray[np.int32], starts: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    order, place = (expect(n, a, np.int32, written=True) for n, a in (("order", order), ("place", place)))
    starts = expect("starts", starts, np.int64, written=True)
    expect_rooms(num_entries, num_owners, order.size, place.size, starts.size)
    return order, place, starts


def key_owners(keys: NDArray[np.int64], table_id: int, num_owners: int, owners: NDArray[np.int16]) -> None:
    """Write the owner of each key (n,) to `owners` (n,)."""
    keys, owners = expect("keys", keys, np.int64), expect("owners", owners, np.int16, written=True)
    same_length(keys=keys, owners=owners)
    expect_buckets(0, 0, np.zeros(1, np.int64), num_owners)
    _key_owners(keys, np.uint64(table_id), np.uint64(num_owners), owners)


def bucket_keys(
    keys: NDArray[np.int64],
    table_ids: NDArray[np.uint64],
    entry_starts: NDArray[np.int64],
    num_owners: int,
    order: NDArray[np.int32],
    place: NDArray[np.int32],
    starts: NDArray[np.int64],
) -> None:
    """Order entries by the owner of their key.

    keys (E,); the entries of feature f, of table `table_ids[f]`, are `entry_starts[f]` to `entry_starts[f + 1]`.
    Written: order (E,), entries by owner; starts (W + 1,): owner r has `order[starts[r]:starts[r + 1]]`; place (E,):
    where each entry stands in `order`, its inverse.
    """
    keys, table_ids = expect("keys", keys, np.int64), expect("table_ids", table_ids, np.uint64)
    entry_starts = expect_buckets(keys.size, table_ids.size, entry_starts, num_owners)
    order, place, starts = _expect_places(keys.size, num_owners, order, place, starts)
    owners = np.empty(keys.size, np.int16)
    _owners_of_entries(keys, table_ids, entry_starts, np.uint64(num_owners), owners)
    _bucket(owners, num_owners, order, place, starts)


def bucket_ids(
    ids: NDArray[np.int32],
    bases: NDArray[np.int64],
    limits: NDArray[np.int64],
    entry_starts: NDArray[np.int64],
    owner_of_local: NDArray[np.int16],
    num_owners: int,
    order: NDArray[np.int32],
    place: NDArray[np.int32],
    starts: NDArray[np.int64],
) -> None:
    """Order entries by the owner of their local id: `owner_of_local[bases[f] + id]`, id in [0, `limits[f]`).

    Written as by `bucket_keys`. An entry whose id is not in its table has no owner: it stands at the end, behind
    `starts[W]`.
    """
    ids, bases = expect("ids", ids, np.int32), expect("bases", bases, np.int64)
    limits, owner_of_local = expect("limits", limits, np.int64), expect("owner_of_local", owner_of_local, np.int16)
    same_length(bases=bases, limits=limits)
    entry_starts = expect_buckets(ids.size, bases.size, entry_starts, num_owners)
    if bases.size and (int(bases.min()) < 0 or int((bases + limits).max()) > owner_of_local.size):
        raise ValueError(f"a feature's table ends behind the {owner_of_local.size} local positions.")
    order, place, starts = _expect_places(ids.size, num_owners, order, place, starts)
    owners = np.empty(ids.size, np.int16)
    _owners_of_ids(ids, bases, limits, entry_starts, owner_of_local, num_owners, owners)
    _bucket(owners, num_owners, order, place, starts)
