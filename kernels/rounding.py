"""The random bits of stochastic rounding: a function of a row's table, seed and key and of the step (docs/format.md).

A row's *stream* is its key with the table's `mix(seed ^ table id)`, so that tables of a group need not be told apart.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.kernels.arrays import NONE_U8, expect, same_length
from tiercache.kernels.bits import mix
from tiercache.kernels.initial import philox
from tiercache.kernels.jit import inlined

__all__ = ["NO_ROUNDING", "Rounding", "draw", "make_rounding", "set_streams"]

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_NO_BLOCK_OF_INITIAL_ROWS = np.uint64(1 << 31)
_CHUNK = 1 << 16


class Rounding(NamedTuple):
    """What decides the random bits of a step."""

    streams: NDArray[np.uint64]
    """(S,): of the row in each slot."""
    low: np.uint64
    high: np.uint64
    """The generator's key: the halves of `mix(step)`."""


NO_ROUNDING = Rounding(NONE_U8, np.uint64(0), np.uint64(0))


def make_rounding(streams: NDArray[np.uint64], step: int) -> Rounding:
    """Return what rounds the rows with `streams` (S,) in a step, which is counted over the whole training."""
    key = mix(step)
    return Rounding(expect("streams", streams, np.uint64), np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32))


def set_streams(
    streams: NDArray[np.uint64], slots: NDArray[np.int32], keys: NDArray[np.int64], table_id: int, seed: int
) -> None:
    """Write the streams of rows of one table to their slots (n,); a few keys (n,) at a time are brought in memory."""
    same_length(slots=slots, keys=keys)
    table = np.uint64(mix((seed ^ table_id) & ((1 << 64) - 1)))
    for first in range(0, slots.size, _CHUNK):
        part = slice(first, first + _CHUNK)
        streams[slots[part]] = np.asarray(keys[part], np.int64).view(np.uint64) ^ table


@inlined
def draw(rounding, slot, dim, noise, at):  # type: ignore[no-untyped-def]
    """Write 16 random bits for each number of a row to `noise` (words) from word `at` on, eight numbers a block."""
    stream = rounding.streams[slot]
    low, high = stream & _LOW, stream >> _HALF
    for block in range((dim + 7) // 8):
        words = philox(low, high, np.uint64(block), _NO_BLOCK_OF_INITIAL_ROWS, rounding.low, rounding.high)
        place = at + 4 * block
        noise[place] = np.uint32(words[0])
        noise[place + 1] = np.uint32(words[1])
        noise[place + 2] = np.uint32(words[2])
        noise[place + 3] = np.uint32(words[3])
