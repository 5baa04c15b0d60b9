"""Initial rows from a counter-based generator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import DIMS, same_bits
from tests.kernels.stochastic import philox
from tiercache.kernels.cpu.hashing import mix
from tiercache.kernels.cpu.initial import CONSTANT, NORMAL, UNIFORM, ZEROS, initial_rows

MASK = 2**64 - 1
LOW = 2**32 - 1

# Known answers published with the generator (Random123, kat_vectors): counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((LOW,) * 4, (LOW,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words_of(key: int, table_id: int, seed: int, dim: int) -> np.ndarray:
    """Return the word of every element of a row, by the definition."""
    stream = mix((seed ^ table_id) & MASK)
    key &= MASK
    words: list[int] = []
    for block in range(-(-dim // 4)):
        words += philox((key & LOW, key >> 32, block & LOW, block >> 32), (stream & LOW, stream >> 32))
    return np.array(words[:dim], np.uint64)


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], wanted: tuple[int, ...]
) -> None:
    """The slow definition, to which the words of rows are held."""
    assert philox(counter, key) == wanted


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    table_id=st.integers(0, MASK),
    seed=st.integers(-(2**63), MASK),
    dim=st.sampled_from(DIMS),
    low=st.floats(-10, 0, width=32),
    high=st.floats(0, 10, width=32),
)
def test_uniform_rows_follow_their_definition_bit_for_bit(
    keys: list[int], table_id: int, seed: int, dim: int, low: float, high: float
) -> None:
    """Low + (word >> 8) * 2^-24 * (high - low) in float32, each operation rounded: nothing fused."""
    out = np.full((len(keys), dim), np.nan, np.float32)
    initial_rows(np.array(keys, np.int64), table_id, seed, UNIFORM, low, high, out)
    f4 = np.float32
    for row, key in zip(out, keys, strict=True):
        unit = (words_of(key, table_id, seed, dim) >> np.uint64(8)).astype(f4) * f4(2.0**-24)
        assert same_bits(row, f4(low) + unit * (f4(high) - f4(low)))


@settings(max_examples=30, deadline=None)
@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), dim=st.sampled_from(DIMS))
def test_normal_rows_are_box_mullers(keys: list[int], dim: int) -> None:
    """Pairs of words become radius and angle; float32 arithmetic stays within 1e-5 of float64's."""
    out = np.full((len(keys), dim), np.nan, np.float32)
    initial_rows(np.array(keys, np.int64), 5, 6, NORMAL, 1.0, 2.0, out)
    for row, key in zip(out, keys, strict=True):
        words = (words_of(key, 5, 6, dim + dim % 2) >> np.uint64(8)).astype(np.float64)
        radius, angle = np.sqrt(-2 * np.log((words[::2] + 1) / 2**24)), 2 * np.pi * words[1::2] / 2**24
        wanted = 1 + 2 * np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:dim]
        np.testing.assert_allclose(row, wanted, rtol=0, atol=2e-5)


def test_normal_rows_have_the_moments_and_tails_of_a_normal() -> None:
    """Mean, deviation, kurtosis and two-sigma share of a million numbers."""
    out = np.empty((16_000, 64), np.float32)
    initial_rows(np.arange(16_000), 1, 2, NORMAL, 0.0, 1.0, out)
    values = out.astype(np.float64)
    assert abs(values.mean()) < 0.005
    assert abs(values.std() - 1) < 0.005
    assert abs((values**4).mean() - 3) < 0.05
    assert abs((np.abs(values) > 2).mean() - 0.0455) < 0.002
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.03


@pytest.mark.parametrize("kind", [UNIFORM, NORMAL])
def test_a_row_depends_on_table_seed_and_key_only(kind: int) -> None:
    """Any order, any batch: the same bits; another table or seed: other rows."""
    keys = np.random.default_rng(0).integers(-(2**62), 2**62, 300)
    whole, single, other = (np.empty((300, 33), np.float32) for _ in range(3))
    initial_rows(keys, 9, 8, kind, -1.0, 1.0, whole)
    for i in np.random.default_rng(1).permutation(300):
        initial_rows(keys[i : i + 1], 9, 8, kind, -1.0, 1.0, single[i : i + 1])
    assert same_bits(whole, single)
    for table_id, seed in ((10, 8), (9, 9)):
        initial_rows(keys, table_id, seed, kind, -1.0, 1.0, other)
        assert not np.any(np.all(other == whole, axis=1))


def test_a_longer_row_begins_like_a_shorter_one() -> None:
    """Elements are counted from the row's start: dim changes nothing before it."""
    short, long = np.empty((5, 30), np.float32), np.empty((5, 130), np.float32)
    for out in (short, long):
        initial_rows(np.arange(5), 1, 1, UNIFORM, 0.0, 1.0, out)
    assert np.array_equal(short, long[:, :30])


def test_zeros_and_constants_are_what_they_say() -> None:
    """No generator at all; no keys at all."""
    out = np.full((3, 5), np.nan, np.float32)
    initial_rows(np.arange(3), 1, 1, ZEROS, 7.0, 7.0, out)
    assert (out == 0).all()
    initial_rows(np.arange(3), 1, 1, CONSTANT, 0.25, 7.0, out)
    assert (out == 0.25).all()
    initial_rows(np.empty(0, np.int64), 1, 1, NORMAL, 0.0, 1.0, out[:0])


def test_an_unknown_kind_or_a_wrong_length_is_refused() -> None:
    """A sentence, and nothing written."""
    out = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="kind 4"):
        initial_rows(np.arange(2), 0, 0, 4, 0.0, 0.0, out)
    with pytest.raises(ValueError, match="one length"):
        initial_rows(np.arange(3), 0, 0, UNIFORM, 0.0, 1.0, out)
