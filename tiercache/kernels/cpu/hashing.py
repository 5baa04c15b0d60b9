"""The hashes whose bits must not drift: key order and XXH64 (docs/format/bits.md, "Bits").

Owner r of W has the keys with a hash in [floor(r * 2^64 / W), floor((r + 1) * 2^64 / W)).
All kernels here are serial and run without the GIL, so that the reader thread can call them.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from tiercache.kernels.arrays import I2, I8, U1, U8, Matrix, Word, Written, same_length
from tiercache.kernels.cpu.compile import inlined, serial
from tiercache.kernels.cpu.simd import Elements, emitted

MOST_OWNERS = 1024
_U64 = (1 << 64) - 1
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@inlined
def mix_word(x):  # type: ignore[no-untyped-def]
    """Return splitmix64's finalizer of a uint64: a bijection (Steele, Lea, Flood 2014; constants by Stafford)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@serial
def _hash_keys(keys: I8, table_id: Word, out: Written[U8]) -> None:
    for i in range(keys.size):
        out[i] = mix_word(np.uint64(keys[i]) ^ table_id)


def mix(value: int) -> int:
    """Return splitmix64's finalizer of an unsigned 64-bit integer."""
    out = np.empty(1, np.uint64)
    _hash_keys(np.array([value & _U64], np.uint64).view(np.int64), 0, out)
    return int(out[0])


def hash_keys(keys: I8, table_id: int) -> U8:
    """Return the hash of each key of a table, by which keys are ordered."""
    out = np.empty(keys.size, np.uint64)
    _hash_keys(keys, table_id, out)
    return out


@serial
def _hash_runs(keys: I8, table_ids: U8, counts: I8, out: Written[U8]) -> None:
    at = 0
    for run in range(counts.size):
        for i in range(at, at + counts[run]):
            out[i] = mix_word(np.uint64(keys[i]) ^ table_ids[run])
        at += counts[run]


def hash_runs(keys: I8, table_ids: U8, counts: I8) -> U8:
    """Return the hash of each key (n,): the first `counts[0]` are of the table `table_ids[0]`, and so on.

    Raises ValueError if the counts do not add up to the number of keys.
    """
    if counts.sum() != keys.size or (counts.size and counts.min() < 0):
        raise ValueError(f"counts add up to {counts.sum()} keys, but {keys.size} were given")
    out = np.empty(keys.size, np.uint64)
    _hash_runs(keys, table_ids, counts, out)
    return out


def _word_at(builder: Any, data: Elements, offset: Any, bits: int) -> Any:
    address = builder.bitcast(data.address(builder, offset), ir.IntType(bits).as_pointer())
    word = builder.load(address, align=1)
    return builder.zext(word, ir.IntType(64)) if bits < 64 else word


@emitted(types.uint64, Elements, types.intp)
def _read_u64(builder: Any, data: Elements, offset: Any) -> Any:
    return _word_at(builder, data, offset, 64)


@emitted(types.uint64, Elements, types.intp)
def _read_u32(builder: Any, data: Elements, offset: Any) -> Any:
    return _word_at(builder, data, offset, 32)


_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)


@inlined
def _rotate(x, left):  # type: ignore[no-untyped-def]
    return (x << np.uint64(left)) | (x >> np.uint64(64 - left))


@inlined
def _round(lane, word):  # type: ignore[no-untyped-def]
    return _rotate(lane + word * _P2, 31) * _P1


@inlined
def _merge(digest, lane):  # type: ignore[no-untyped-def]
    return (digest ^ _round(np.uint64(0), lane)) * _P1 + _P4


@inlined
def _xxh64(data, start, length, seed):  # type: ignore[no-untyped-def]
    at, end = start, start + length
    if length >= 32:
        a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        while at + 32 <= end:
            a = _round(a, _read_u64(data, at))
            b = _round(b, _read_u64(data, at + 8))
            c = _round(c, _read_u64(data, at + 16))
            d = _round(d, _read_u64(data, at + 24))
            at += 32
        digest = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        digest = _merge(_merge(_merge(_merge(digest, a), b), c), d)
    else:
        digest = seed + _P5
    digest += np.uint64(length)
    while at + 8 <= end:
        digest = _rotate(digest ^ _round(np.uint64(0), _read_u64(data, at)), 27) * _P1 + _P4
        at += 8
    if at + 4 <= end:
        digest = _rotate(digest ^ (_read_u32(data, at) * _P1), 23) * _P2 + _P3
        at += 4
    while at < end:
        digest = _rotate(digest ^ (np.uint64(data[at]) * _P5), 11) * _P1
        at += 1
    digest = (digest ^ (digest >> np.uint64(33))) * _P2
    digest = (digest ^ (digest >> np.uint64(29))) * _P3
    return digest ^ (digest >> np.uint64(32))


@serial
def _hash_spans(data: U1, offsets: I8, seed: Word, out: Written[U8]) -> None:
    for i in range(out.size):
        out[i] = _xxh64(data, offsets[i], offsets[i + 1] - offsets[i], seed)


@serial
def _hash_words(words: Matrix[U8], seed: Word, out: Written[U8]) -> None:
    data, width = words.reshape(words.size).view(np.uint8), 8 * words.shape[1]
    for i in range(out.size):
        out[i] = _xxh64(data, i * width, width, seed)


def xxh64_strings(data: U1, offsets: I8, seed: int = 0) -> U8:
    """Return XXH64 of each string `data[offsets[i]:offsets[i + 1]]`, with the published values.

    Raises ValueError if the offsets decrease or leave the data.
    """
    if offsets.size == 0:
        raise ValueError("offsets is empty: n strings have n + 1 offsets.")
    if offsets[0] < 0 or offsets[-1] > data.size or np.any(offsets[1:] < offsets[:-1]):
        raise ValueError(f"offsets must not decrease and must be within the {data.size} bytes of data.")
    out = np.empty(offsets.size - 1, np.uint64)
    _hash_spans(data, offsets, seed, out)
    return out


def xxh64_words(words: Matrix[U8], seed: int = 0) -> U8:
    """Return XXH64 of each row's k * 8 little-endian bytes; `words` is (n, k)."""
    out = np.empty(words.shape[0], np.uint64)
    _hash_words(words, seed, out)
    return out


@inlined
def _owner(hashed, num_owners):  # type: ignore[no-untyped-def]
    """Return the rank whose range has a hash.

    The high half of the product with W is the rank, or one less if the hash is the first of its range and the range's
    exact bound is not a whole number: adding W once more then passes 2^64.
    """
    product = (hashed & _LOW) * num_owners
    high = ((hashed >> _HALF) * num_owners + (product >> _HALF)) >> _HALF
    return np.int64(high) + (1 if hashed * num_owners > np.uint64(0) - num_owners else 0)


@serial
def _key_owners(keys: I8, table_id: Word, num_owners: Word, owners: Written[I2]) -> None:
    for i in range(keys.size):
        owners[i] = _owner(mix_word(np.uint64(keys[i]) ^ table_id), num_owners)


def key_owners(keys: I8, table_id: int, num_owners: int, owners: I2) -> None:
    """Write the owner of each key (n,) to `owners` (n,). Raises ValueError for too many owners."""
    same_length(keys=keys, owners=owners)
    if not 1 <= num_owners <= MOST_OWNERS:
        raise ValueError(f"invalid number of owners {num_owners}: expected 1 to {MOST_OWNERS}.")
    _key_owners(keys, table_id, num_owners, owners)
