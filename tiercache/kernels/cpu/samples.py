"""Gathering samples from the mapped arrays of a sub-dataset, and replacing numbers by local ids.

All kernels are serial and run without the GIL, so that any thread may call them.
Legend: n requested samples, N samples of the sub-dataset, S features with one id.
"""

import numpy as np

from tiercache.kernels.arrays import I4, I8, U8, Matrix, Word, Written
from tiercache.kernels.cpu.compile import inlined, serial
from tiercache.kernels.cpu.hashing import mix_word

ONES, STEPS, NO_LIMIT = -1, -2, -1
"""Special first words of a copy: float32 ones; int64 steps. And the limit of numbers that are not ids."""


@serial
def gather_samples(
    words: I4,  # of a file
    samples: I8,  # (n,) each below N
    copies: Matrix[I8],  # (C, 5): first word, words of a sample there and here, first word of out, limit of ids
    out: Written[I4],
) -> int:
    """Copy the words of each sample, copy by copy, and return a negative number if an id is not in [0, limit).

    ONES writes them; STEPS writes first, first + step, ... (n + 1 int64), given as the words of a sample.
    """
    wrong = 0
    for c in range(copies.shape[0]):
        source, first, step, to = copies[c, 0], copies[c, 1], copies[c, 2], copies[c, 3]
        if source == ONES:
            for i in range(samples.size * step):
                out[to + i] = 0x3F800000
        elif source == STEPS:
            for i in range(samples.size + 1):
                number = first + i * step
                out[to + 2 * i], out[to + 2 * i + 1] = number & 0xFFFFFFFF, number >> 32
    # Tiles of 16 samples: the lines that a tile reads stay in the first cache while each copy writes one line.
    for begin in range(0, samples.size, 16):
        end = min(samples.size, begin + 16)
        for c in range(copies.shape[0]):
            source, width, count, to, limit = copies[c, 0], copies[c, 1], copies[c, 2], copies[c, 3], copies[c, 4]
            if source < 0:
                continue
            for i in range(begin, end):
                at = source + samples[i] * width
                for w in range(count):
                    out[to + i * count + w] = words[at + w]
            if limit >= 0:
                for i in range(begin * count, end * count):
                    number = np.int64(out[to + i])
                    wrong |= number | (limit - 1 - number)
    return wrong


@serial
def gather_offsets(
    longs: I8,  # (N + 1,) the start of each list of the sub-dataset
    count: int,  # values of all lists
    samples: I8,  # (n,)
    begins: Written[I8],  # (n,) the start of each list
    offsets: Written[I8],  # (n + 1,) offsets of the gathered lists
) -> int:
    """Read the starts of lists and lay the lists out one after another.

    Return the first of the n whose list is not within the values, or -1.
    """
    offsets[0] = 0
    for i in range(samples.size):
        begin, end = longs[samples[i]], longs[samples[i] + 1]
        if not 0 <= begin <= end <= count:
            return i
        begins[i] = begin
        offsets[i + 1] = offsets[i] + end - begin
    return -1


@serial
def gather_lists(
    words: I4,  # values of all lists
    begins: I8,  # (n,)
    offsets: I8,  # (n + 1,)
    out: Written[I4],  # (offsets[n],)
) -> None:
    """Copy the lists that `gather_offsets` laid out."""
    for i in range(begins.size):
        at = begins[i]
        for e in range(offsets[i + 1] - offsets[i]):
            out[offsets[i] + e] = words[at + e]


@serial
def permute_columns(
    numbers: I4,  # (S * n,) of each feature in turn
    positions: I4,  # positions of all tables, one table after another
    bases: I8,  # (S,) the start of each feature's table in positions
    ids: Written[Matrix[I4]],  # (n, S)
) -> None:
    """Write `positions[bases[s] + number]` for each number of feature s: ids are sample-major."""
    samples = ids.shape[0]
    for first in range(0, samples, 1024):  # ids of a tile stay in the second-level cache for all features
        last = min(samples, first + 1024)
        for s in range(bases.size):
            base, row = bases[s], s * samples
            for n in range(first, last):
                ids[n, s] = positions[base + numbers[row + n]]


_STEP = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64's state
_LEAST_BITS = 8  # with fewer, six rounds leave some orders of a few samples far more likely than others


@inlined
def _permuted(x, low_bits, high_mask, low_mask, keys):  # type: ignore[no-untyped-def]
    high, low = x >> low_bits, x & low_mask
    for j in range(0, 6, 2):
        high ^= mix_word(low ^ keys[j]) & high_mask
        low ^= mix_word(high ^ keys[j + 1]) & low_mask
    return high << low_bits | low


@serial
def _shuffled(state: Word, count: Word, first: Word, out: Written[U8]) -> None:
    one, bits = np.uint64(1), np.uint64(_LEAST_BITS)
    while one << bits < count:
        bits += one
    high_bits = bits >> one
    low_bits = bits - high_bits
    high_mask, low_mask = (one << high_bits) - one, (one << low_bits) - one
    keys = np.empty(6, np.uint64)
    for j in range(6):
        keys[j] = mix_word(np.uint64(state) + np.uint64(j + 1) * _STEP)
    for i in range(out.size):
        out[i] = _permuted(first + np.uint64(i), low_bits, high_mask, low_mask, keys)
    for i in range(out.size):  # a separate loop: the one above has no branch and runs several samples at once
        while out[i] >= count:
            out[i] = _permuted(out[i], low_bits, high_mask, low_mask, keys)


def shuffled(state: int, count: int, first: int, last: int) -> I8:
    """Return the elements [first, last) of the permutation of 0..count-1 given by `state` (uint64).

    Takes time and memory only for these elements. For shuffling, not for secrets. Raises ValueError unless they are
    within [0, count).
    """
    if not 0 <= first <= last <= count:
        raise ValueError(f"invalid range {first} to {last}: expected it within 0 to {count}.")
    out = np.empty(last - first, np.uint64)
    _shuffled(state, count, first, out)
    return out.view(np.int64)
