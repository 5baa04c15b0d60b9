"""The key of a text or of a cross: the same bits as an extraction gives it (docs/format/bits.md)."""

from __future__ import annotations

import operator
import struct

from tiercache.data.raw_batch import NULL_KEY, RESERVED
from tiercache.store.hashing import xxh64


def key_of(*values: str | bytes | int | None, num_buckets: int | None = None) -> int:
    """Return the int64 key that extraction gives to a value, or to a cross of several values.

    One text or byte string: its hash, the key of a feature with ``key = "string"``. One integer: itself. Several
    values: the key of a cross of columns with these values, in the order of the schema. None is null, and so is a cross
    with a null: the key of the null row. ``num_buckets``: that of the feature in the schema, where it has one.

    >>> store.lookup("user", np.array([tc.key_of("alice")]))

    Raises ValueError for no value, for fewer than one bucket, for an integer beyond 64 bits and for a reserved one,
    TypeError for other types.
    """
    if num_buckets is not None and num_buckets < 1:
        raise ValueError(f"num_buckets is {num_buckets}: it must be at least 1, as in the schema")
    if not values:
        raise ValueError("key_of takes at least one value: a text, an integer, or the values of a cross")
    words = [_word(value) for value in values if value is not None]
    if len(words) < len(values):
        return NULL_KEY
    if len(values) > 1 or (num_buckets and not isinstance(values[0], str | bytes)):
        words = [xxh64(struct.pack(f"<{len(words)}Q", *words))]
    if num_buckets:
        return words[0] % num_buckets
    if len(values) > 1 or isinstance(values[0], str | bytes):
        return _off_reserved(words[0])
    if _signed(words[0]) <= RESERVED[1]:
        raise ValueError(f"key {values[0]} is reserved: keys start at {RESERVED[1] + 1}")
    return _signed(words[0])


def _word(value: str | bytes | int) -> int:
    """Return the 64 bits that stand for a value: an integer itself, a text's hash."""
    if isinstance(value, str):
        return xxh64(value.encode())
    if isinstance(value, bytes):
        return xxh64(value)
    number = operator.index(value)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"{number} is beyond 64 bits: a key is an integer of -2**63 to 2**63 - 1")
    return number & ((1 << 64) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _off_reserved(word: int) -> int:
    """Return a hash as a key; one that hits a reserved key is moved by 2."""
    key = _signed(word)
    return key + 2 if key <= RESERVED[1] else key
