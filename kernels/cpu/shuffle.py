"""The order of shuffled samples, of which any stretch is made by itself (docs/format/bits.md, "Orders").

A Feistel network of six rounds (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom
functions", 1988) permutes the numbers of a power of two; it is walked until it gives one below N (cycle walking: Black
and Rogaway, "Ciphers with arbitrary finite domains", 2002). The kernel is serial and runs without the GIL.
"""

import numpy as np

from tiercache.kernels.arrays import I8, U8, Word, Written
from tiercache.kernels.cpu.hashing import mix_word
from tiercache.kernels.cpu.jit import inlined, serial

_STEP = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64's state
_LEAST_BITS = 8  # in fewer, six rounds leave some orders of a few samples far more likely than others


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
    for i in range(out.size):  # a loop of its own: the one above has no branch and runs several samples at once
        while out[i] >= count:
            out[i] = _permuted(out[i], low_bits, high_mask, low_mask, keys)


def shuffled(state: int, count: int, first: int, last: int) -> I8:
    """Return what stands at the places [first, last) of a permutation of 0..count-1 that `state` (uint64) decides.

    Takes time and memory for these places alone, wherever they are. For shuffling, not for secrets. Raises ValueError
    for places that are not within [0, count).
    """
    if not 0 <= first <= last <= count:
        raise ValueError(f"places {first} to {last} were asked for: they must be within 0 to {count}.")
    out = np.empty(last - first, np.uint64)
    _shuffled(state, count, first, out)
    return out.view(np.int64)
