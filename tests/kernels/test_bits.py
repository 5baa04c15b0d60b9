"""Hashes whose bits must not drift."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.kernels.cpu.hashing import hash_keys, mix, xxh64_strings, xxh64_words

MASK = 2**64 - 1
PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)

# The sanity table of the reference implementation: XXH64 of the first `length` bytes of its test buffer.
REFERENCE = [
    (0, 0, 0xEF46DB3751D8E999),
    (0, 0x9E3779B1, 0xAC75FDA2929B17EF),
    (1, 0, 0xE934A84ADB052768),
    (1, 0x9E3779B1, 0x5014607643A9B4C3),
    (4, 0, 0x9136A0DCA57457EE),
    (14, 0, 0x8282DCC4994E35C8),
    (14, 0x9E3779B1, 0xC3BD6BF63DEB6DF0),
    (222, 0, 0xB641AE8CB691C174),
    (222, 0x9E3779B1, 0x20CB8AB7AE10C14A),
]


def reference_buffer(size: int) -> bytes:
    """Return the pseudo-random bytes of the reference implementation's self-test."""
    state, out = 2654435761, bytearray()
    for _ in range(size):
        out.append(state >> 56)
        state = state * 11400714785074694797 & MASK
    return bytes(out)


def xxh64(data: bytes, seed: int = 0) -> int:
    """Return the kernel's XXH64 of one text."""
    return int(xxh64_strings(np.frombuffer(data, np.uint8), np.array([0, len(data)]), seed)[0])


def slow_xxh64(data: bytes, seed: int) -> int:
    """XXH64 with Python's integers, from the published description."""
    p1, p2, p3, p4, p5 = PRIMES

    def rotate(x: int, n: int) -> int:
        return (x << n | x >> (64 - n)) & MASK

    def round_(lane: int, word: int) -> int:
        return rotate((lane + word * p2) & MASK, 31) * p1 & MASK

    def word(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    at = 0
    if len(data) >= 32:
        lanes = [(seed + p1 + p2) & MASK, (seed + p2) & MASK, seed, (seed - p1) & MASK]
        while at + 32 <= len(data):
            lanes = [round_(lane, word(at + 8 * i, 8)) for i, lane in enumerate(lanes)]
            at += 32
        digest = sum(rotate(lane, n) for lane, n in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            digest = ((digest ^ round_(0, lane)) * p1 + p4) & MASK
    else:
        digest = (seed + p5) & MASK
    digest = (digest + len(data)) & MASK
    while at + 8 <= len(data):
        digest = (rotate(digest ^ round_(0, word(at, 8)), 27) * p1 + p4) & MASK
        at += 8
    if at + 4 <= len(data):
        digest = (rotate(digest ^ (word(at, 4) * p1 & MASK), 23) * p2 + p3) & MASK
        at += 4
    for byte in data[at:]:
        digest = rotate(digest ^ (byte * p5 & MASK), 11) * p1 & MASK
    digest = (digest ^ digest >> 33) * p2 & MASK
    digest = (digest ^ digest >> 29) * p3 & MASK
    return digest ^ digest >> 32


@pytest.mark.parametrize(("length", "seed", "wanted"), REFERENCE)
def test_xxh64_gives_the_published_values(length: int, seed: int, wanted: int) -> None:
    """The reference implementation's own sanity values."""
    assert xxh64(reference_buffer(length), seed) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("", 0xEF46DB3751D8E999), ("a", 0xD24EC4F1A98C6E5B), ("abc", 0x44BC2CF5AD770999)],
)
def test_xxh64_of_short_texts_is_what_everyone_prints(text: str, wanted: int) -> None:
    """Values found in the documentation of several libraries."""
    assert xxh64(text.encode()) == wanted


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=100), max_size=8), st.integers(0, MASK))
def test_xxh64_of_many_strings_is_that_of_each(texts: list[bytes], seed: int) -> None:
    """Any length from 0 to beyond several blocks, any alignment, any seed, against Python's integers."""
    offsets = np.concatenate([[0], np.cumsum([len(t) for t in texts])]).astype(np.int64)
    data = np.frombuffer(b"".join(texts), np.uint8)
    assert xxh64_strings(data, offsets, seed).tolist() == [slow_xxh64(t, seed) for t in texts]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 6), st.integers(0, 5), st.integers(0, 2**32))
def test_xxh64_of_words_is_that_of_their_little_endian_bytes(rows: int, width: int, seed: int) -> None:
    """A cross is hashed as the bytes of its words."""
    words = np.random.default_rng(seed).integers(0, MASK, (rows, width), np.uint64, endpoint=True)
    wanted = [slow_xxh64(b"".join(int(w).to_bytes(8, "little") for w in row), 0) for row in words]
    assert xxh64_words(words).tolist() == wanted


def test_offsets_that_leave_the_data_are_refused() -> None:
    """Neither decreasing, nor negative, nor beyond the bytes, nor missing."""
    data = np.zeros(5, np.uint8)
    for offsets in ([0, 6], [3, 2], [-1, 2], []):
        with pytest.raises(ValueError, match="offsets"):
            xxh64_strings(data, np.array(offsets, np.int64))


def test_mix_gives_splitmix64s_published_stream() -> None:
    """The outputs of splitmix64 from state 1234567 are mix of the state after each step."""
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [mix(1234567 + (i + 1) * 0x9E3779B97F4A7C15 & MASK) for i in range(5)] == wanted


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(0, MASK))
def test_a_keys_hash_is_mix_of_key_and_table(keys: list[int], table_id: int) -> None:
    """Keys are taken as unsigned; read-only arrays are fine."""
    array = np.array(keys, np.int64)
    array.flags.writeable = False
    assert hash_keys(array, table_id).tolist() == [mix((key & MASK) ^ table_id) for key in keys]


def test_hashes_of_one_table_are_distinct() -> None:
    """Mix is a bijection: no two keys share a place in the order."""
    keys = np.arange(-50_000, 50_000)
    assert np.unique(hash_keys(keys, 77)).size == keys.size
