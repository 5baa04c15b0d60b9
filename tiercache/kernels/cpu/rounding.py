"""The random bits of stochastic rounding: a function of a row's table, seed and key and of the step (docs/format).

A row's *stream* is its key with the table's `mix(seed ^ table id)`, so that tables of a group need not be told apart.
"""

import functools
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from tiercache.kernels.arrays import I4, I8, U8, same_length
from tiercache.kernels.cpu.compile import inlined
from tiercache.kernels.cpu.hashing import mix
from tiercache.kernels.cpu.simd import Elements, emitted

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_WORD = ir.IntType(32)
_WORDS = ir.VectorType(_WORD, 8)
_CHUNK = 1 << 16


def set_streams(streams: U8, slots: I4 | None, keys: I8, table_id: int, seed: int) -> None:
    """Write the streams of rows of one table to their slots (n,); None: the stream of key i to place i of (n,).

    Keys (n,) are prefetched a few at a time.
    """
    same_length(slots=streams if slots is None else slots, keys=keys)
    table = np.uint64(mix((seed ^ table_id) & ((1 << 64) - 1)))
    for first in range(0, keys.size, _CHUNK):
        part = slice(first, first + _CHUNK)
        streams[part if slots is None else slots[part]] = np.asarray(keys[part], np.int64).view(np.uint64) ^ table


def _eight(number: Any) -> Any:
    return ir.Constant(_WORDS, [number] * 8)


@emitted(types.void, Elements, types.intp, *[types.uint64] * 5)
def _draw_eight(
    builder: Any, noise: Elements, at: Any, low: Any, high: Any, block: Any, key_low: Any, key_high: Any
) -> None:
    """Write the 32 words of eight blocks, from `block` on, to `noise` from word `at` on."""
    low, high, first, k0, k1 = (builder.trunc(number, _WORD) for number in (low, high, block, key_low, key_high))
    every = functools.partial(_spread, builder)
    c0, c1, c3 = every(low), every(high), _eight(1 << 31)
    c2 = builder.add(every(first), ir.Constant(_WORDS, list(range(8))))
    for _ in range(10):
        high0, low0 = _product(builder, c0, 0xD2511F53)
        high1, low1 = _product(builder, c2, 0xCD9E8D57)
        c0, c1 = builder.xor(builder.xor(high1, c1), every(k0)), low1
        c2, c3 = builder.xor(builder.xor(high0, c3), every(k1)), low0
        k0, k1 = builder.add(k0, _WORD(0x9E3779B9)), builder.add(k1, _WORD(0xBB67AE85))
    pairs = [
        builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_WORD, 16), list(range(16))))
        for one, other in ((c0, c1), (c2, c3))
    ]
    order = ir.Constant(ir.VectorType(_WORD, 32), [8 * word + lane for lane in range(8) for word in range(4)])
    words = builder.shuffle_vector(*pairs, order)
    builder.store(words, builder.bitcast(noise.address(builder, at), words.type.as_pointer()), align=4)


def _spread(builder: Any, word: Any) -> Any:
    first = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, _WORD(0))
    return builder.shuffle_vector(first, ir.Constant(_WORDS, ir.Undefined), _eight(0))


def _product(builder: Any, words: Any, factor: int) -> tuple[Any, Any]:
    """Return upper and lower halves of products."""
    wide = ir.VectorType(ir.IntType(64), 8)
    product = builder.mul(builder.zext(words, wide), ir.Constant(wide, [factor] * 8))
    upper = builder.lshr(product, ir.Constant(wide, [32] * 8))
    return builder.trunc(upper, _WORDS), builder.trunc(product, _WORDS)


@inlined
def draw(rows, slot, dim, noise, at):  # type: ignore[no-untyped-def]
    """Write 16 random bits for each number of a row, and up to 63 more, to `noise` (words) from word `at` on.

    Eight blocks at a time, of eight numbers each.
    """
    stream, key = rows.streams[slot], rows.key
    low, high = stream & _LOW, stream >> _HALF
    for block in range(0, (dim + 7) // 8, 8):
        _draw_eight(noise, at + 4 * block, low, high, np.uint64(block), key & _LOW, key >> _HALF)
