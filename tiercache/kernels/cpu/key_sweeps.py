"""The next use of keys, and their positions: sweeps and searches over key sets in hash order. Serial kernels."""

import numpy as np

from tiercache.kernels.arrays import I4, I8, Word, Written, same_length
from tiercache.kernels.cpu.compile import inlined, serial
from tiercache.kernels.cpu.hashing import mix_word
from tiercache.kernels.cpu.simd import prefetch

_AHEAD = 8  # queries between prefetching memory and using it


@serial
def _sweep(
    numbers: I4,
    pass_starts: I8,
    before: I8,
    order: I8,
    after: I8,
    next_distance: Written[I4],
    prev_distance: Written[I4],
    seen: Written[I8],
) -> None:
    places = order.size
    seen[:] = -1
    for place in range(places):
        p = before[place]
        for i in range(pass_starts[p], pass_starts[p + 1]):
            seen[numbers[i]] = place
    for place in range(places):
        p = order[place]
        pass_index = places + place
        for i in range(pass_starts[p], pass_starts[p + 1]):
            number = numbers[i]
            prev_distance[i] = pass_index - seen[number]
            seen[number] = pass_index
    for place in range(places - 1, -1, -1):
        p = after[place]
        for i in range(pass_starts[p], pass_starts[p + 1]):
            seen[numbers[i]] = 2 * places + place
    for place in range(places - 1, -1, -1):
        p = order[place]
        pass_index = places + place
        for i in range(pass_starts[p], pass_starts[p + 1]):
            number = numbers[i]
            next_distance[i] = seen[number] - pass_index
            seen[number] = pass_index


def sweep_uses(
    numbers: I4, pass_starts: I8, num_keys: int, before: I8, order: I8, after: I8, next_distance: I4, prev_distance: I4
) -> None:
    """Write the passes to the next use and since the last use of every key of every sub-dataset, for one epoch.

    numbers (K,): the number of each key, below `num_keys`, for one sub-dataset after another; sub-dataset p has entries
    `pass_starts[p]` to `pass_starts[p + 1]`. before, order, after (P,): the sub-dataset at each place of the previous
    epoch, of this one and of the next one. A sub-dataset is in each epoch once, so both distances exist and are below 2
    P.
    """
    same_length(numbers=numbers, next_distance=next_distance, prev_distance=prev_distance)
    _sweep(numbers, pass_starts, before, order, after, next_distance, prev_distance, np.empty(num_keys, np.int64))


@inlined
def _first_at_least(keys, table_id, wanted, low, high):  # type: ignore[no-untyped-def]
    """Return the first place in [low, high) whose hash is not below `wanted`, or `high`."""
    while low < high:
        middle = (low + high) >> 1
        if mix_word(np.uint64(keys[middle]) ^ table_id) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@serial
def _bound(keys: I8, table_id: Word, upper: Word) -> int:
    return _first_at_least(keys, table_id, upper, np.int64(0), np.int64(keys.size))  # type: ignore[no-any-return]


def hash_range_bound(keys: I8, table_id: int, upper: int) -> int:
    """Return the number of `keys`, in hash order, with a hash below `upper` (0 to 2^64)."""
    return _bound(keys, table_id, upper) if upper < 1 << 64 else int(keys.size)


@inlined
def _guess(wanted, size):  # type: ignore[no-untyped-def]
    """Return the share of `size` keys that a uniform hash below `wanted` has."""
    return np.int64(np.float64(wanted >> np.uint64(11)) * 2.0**-53 * np.float64(size))


@inlined
def _place(keys, table_id, wanted, size):  # type: ignore[no-untyped-def]
    """Return the first place whose hash is not below `wanted`, by interpolation: four probes for millions of keys."""
    place = _guess(wanted, size)
    for _ in range(3):
        place = min(max(place, 0), size - 1)
        missing = np.float64(wanted) - np.float64(mix_word(np.uint64(keys[place]) ^ table_id))
        place += np.int64(missing * 2.0**-64 * np.float64(size))
    place = min(max(place, 0), size)
    steps = 0
    while place > 0 and steps < 64 and mix_word(np.uint64(keys[place - 1]) ^ table_id) >= wanted:
        place -= 1
        steps += 1
    while place < size and steps < 64 and mix_word(np.uint64(keys[place]) ^ table_id) < wanted:
        place += 1
        steps += 1
    if steps == 64:  # adversarial keys: clustered hashes
        place = _first_at_least(keys, table_id, wanted, np.int64(0), size)
    return place


@serial
def _search(keys: I8, table_id: Word, queries: I8, out: Written[I8]) -> None:
    size = np.int64(keys.size)
    for i in range(queries.size):
        if i + _AHEAD < queries.size:
            prefetch(keys, _guess(mix_word(np.uint64(queries[i + _AHEAD]) ^ table_id), size))
        place = _place(keys, table_id, mix_word(np.uint64(queries[i]) ^ table_id), size) if size else size
        out[i] = place if place < size and keys[place] == queries[i] else -1


def search_keys(keys: I8, table_id: int, queries: I8, out: I8) -> None:
    """Write to `out` the position of each query among `keys`, in hash order; -1 if it is missing."""
    same_length(queries=queries, out=out)
    _search(keys, table_id, queries, out)
