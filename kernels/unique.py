"""Each row of a batch once, in order, and where every entry finds it: what ranks ask one another for.

Legend: E entries, U unique slots, K stretches. A slot may be any number that `sort_slots` sorts: here it is the
position of a key in a pass.
"""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect, same_length
from tiercache.kernels.jit import parallel, serial, threads, worker

__all__ = ["lay_out", "mark_slots", "unique_slots"]

_PART_ENTRIES = 16384  # below this a second thread costs more than it saves
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@worker
def _count_firsts(part, parts, pairs, counts):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(pairs.size * part // parts, pairs.size * (part + 1) // parts):
        if i == 0 or (pairs[i] >> _HALF) != (pairs[i - 1] >> _HALF):
            count += 1
    counts[part] = count


@worker
def _number(part, parts, pairs, counts, unique, inverse):  # type: ignore[no-untyped-def]
    number = np.int64(-1)
    for before in range(part):
        number += counts[before]
    for i in range(pairs.size * part // parts, pairs.size * (part + 1) // parts):
        if i == 0 or (pairs[i] >> _HALF) != (pairs[i - 1] >> _HALF):
            number += 1
            unique[number] = np.int32(pairs[i] >> _HALF)
        inverse[pairs[i] & _LOW] = np.int32(number)


@worker
def _work(numbering, part, parts, pairs, counts, unique, inverse):  # type: ignore[no-untyped-def]
    if numbering:
        _number(part, parts, pairs, counts, unique, inverse)
    else:
        _count_firsts(part, parts, pairs, counts)


@parallel
def _unique(pairs, counts, unique, inverse):  # type: ignore[no-untyped-def]
    parts = counts.size
    for step in range(2):  # not two loops one behind the other: the compiler may merge what it sees no bond between
        if step == 1 or parts > 1:
            for part in prange(parts):
                _work(step == 1, part, parts, pairs, counts, unique, inverse)


def unique_slots(pairs: NDArray[np.uint64], unique: NDArray[np.int32], inverse: NDArray[np.int32]) -> int:
    """Write the slots of `pairs` (from `sort_slots`) once each, and which of them each entry has; return U.

    unique (E,): its first U elements are written, ascending. inverse (E,): entry e has slot `unique[inverse[e]]`.
    The same for any number of threads.
    """
    pairs = expect("pairs", pairs, np.uint64)
    unique, inverse = (expect(n, a, np.int32, written=True) for n, a in (("unique", unique), ("inverse", inverse)))
    if not same_length(pairs=pairs, unique=unique, inverse=inverse):
        return 0
    parts = max(1, min(threads(), pairs.size // _PART_ENTRIES))
    _unique(pairs, np.zeros(parts, np.int64), unique, inverse)
    return int(inverse[int(pairs[-1] & _LOW)]) + 1


@serial
def _lay_out(unique, first, last, shift, wire, slot, addresses, slots):  # type: ignore[no-untyped-def]
    for k in range(first.size):
        to, place = wire[k] - first[k], slot[k] - first[k]
        for u in range(first[k], last[k]):
            addresses[to + u] = np.int32(np.int64(unique[u]) + shift[k])
        if slot[k] >= 0:
            for u in range(first[k], last[k]):
                slots[u] = np.int32(place + u)


def lay_out(
    unique: NDArray[np.int32],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    shift: NDArray[np.int64],
    wire: NDArray[np.int64],
    slot: NDArray[np.int64],
    addresses: NDArray[np.int32],
    slots: NDArray[np.int32],
) -> None:
    """Write the addresses of K stretches of `unique` (U,) in the order of the wire, and the slots of their rows.

    Stretch k has the rows [first[k], last[k]) of `unique`. Their addresses, `unique + shift[k]`, go to `addresses` from
    `wire[k]` on; their slots count from `slot[k]` on in `slots` (U,), where it is not negative.
    """
    unique, first = expect("unique", unique, np.int32), expect("first", first, np.int64)
    last, shift = expect("last", last, np.int64), expect("shift", shift, np.int64)
    wire, slot = expect("wire", wire, np.int64), expect("slot", slot, np.int64)
    addresses = expect("addresses", addresses, np.int32, written=True)
    slots = expect("slots", slots, np.int32, written=True)
    same_length(unique=unique, slots=slots)
    if same_length(first=first, last=last, shift=shift, wire=wire, slot=slot) == 0:
        return
    rows = last - first
    if rows.min() < 0 or first.min() < 0 or last.max() > unique.size or wire.min() < 0:
        raise ValueError(f"stretches must lie in [0, {unique.size}), and none may end before it begins.")
    if (wire + rows).max() > addresses.size:
        raise ValueError(f"stretches reach to {(wire + rows).max()} of {addresses.size} addresses.")
    _lay_out(unique, first, last, shift, wire, slot, addresses, slots)


@serial
def _mark(slots, seen):  # type: ignore[no-untyped-def]
    count = np.int64(0)
    for i in range(slots.size):  # without a branch: whether a slot is new is anybody's guess
        count += 1 - int(seen[slots[i]])
        seen[slots[i]] = True
    return count


def mark_slots(slots: NDArray[np.int32], seen: NDArray[np.bool_]) -> int:
    """Set `seen` (S,) at every slot (E,), each in [0, S); return how many were not set before."""
    slots, seen = expect("slots", slots, np.int32), expect("seen", seen, np.bool_, written=True)
    if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < seen.size:
        raise ValueError(f"slots go from {slots.min()} to {slots.max()}, and there are {seen.size}.")
    return int(_mark(slots, seen))
