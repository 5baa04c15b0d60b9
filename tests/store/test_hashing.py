"""Bits that must not drift: table ids and the order of keys."""

import numpy as np
import pytest

from tiercache.store import hash_keys, mix, xxh64


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_xxh64_gives_the_published_values(data: bytes, expected: int) -> None:
    """Short input, and input of more than 32 bytes."""
    assert xxh64(data) == expected


def test_xxh64_reads_every_byte_and_the_seed() -> None:
    """No two of all prefixes of 100 bytes, or of their changes by one bit, or of two seeds, hash alike."""
    data = bytes(range(100))
    seen = {xxh64(data[:n], seed) for n in range(101) for seed in (0, 1)}
    seen |= {xxh64(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]) for i in range(100)}
    assert len(seen) == 302


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (0x9E3779B97F4A7C15, 0xE220A8397B1DCDAF),
        (1234567 + 0x9E3779B97F4A7C15, 6457827717110365317),
        (1234567 + 2 * 0x9E3779B97F4A7C15, 3203168211198807973),
    ],
)
def test_mix_gives_the_published_values_of_splitmix64(state: int, expected: int) -> None:
    """splitmix64 from seeds 0 and 1234567 adds its constant, then mixes."""
    assert mix(np.array([state % 2**64], dtype=np.uint64)).tolist() == [expected]


def test_mix_leaves_its_argument_alone() -> None:
    """It returns a new array."""
    values = np.arange(5, dtype=np.uint64)
    mix(values)
    assert values.tolist() == [0, 1, 2, 3, 4]


def test_hash_keys_mixes_key_and_table() -> None:
    """The hash of a key is mix(key xor table id), for negative keys too."""
    keys = np.array([0, 1, -1, np.iinfo(np.int64).min], dtype=np.int64)
    expected = mix(keys.view(np.uint64) ^ np.uint64(xxh64(b"user")))
    assert np.array_equal(hash_keys(keys, xxh64(b"user")), expected)
