"""Bits that must not drift: table ids, the order of keys, and initial rows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache.kernels.cpu.initial as kernels
from tiercache.store import Adam, Constant, Normal, Table, Uniform, Zeros, initializer_code, xxh64
from tiercache.store.row_codec import initial_rows


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
    assert xxh64(data) == expected


def test_xxh64_reads_every_byte_and_the_seed() -> None:
    """No two of all prefixes of 100 bytes, of their one-bit changes, or of two seeds have the same hash."""
    data = bytes(range(100))
    seen = {xxh64(data[:n], seed) for n in range(101) for seed in (0, 1)}
    seen |= {xxh64(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]) for i in range(100)}
    assert len(seen) == 302


STARTS = st.one_of(
    st.just(Zeros()),
    st.builds(Constant, value=st.floats(-2, 2, width=32)),
    st.builds(Uniform, low=st.floats(-3, 0, width=32), high=st.floats(0, 3, width=32)),
    st.builds(Normal, mean=st.floats(-1, 1, width=32), std=st.floats(0, 2, width=32)),
)


@settings(max_examples=80, deadline=None)
@given(
    start=STARTS,
    dim=st.integers(1, 21),
    seed=st.integers(0, 2**64 - 1),
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9),
)
def test_first_rows_have_the_bits_that_training_starts_from(
    start: Zeros | Constant | Uniform | Normal, dim: int, seed: int, keys: list[int]
) -> None:
    """NumPy and the kernels compute the same vectors; optimizer state begins at its constant."""
    table = Table(name="item", dim=dim, optimizer=Adam(learning_rate=0.1), initializer=start, seed=seed)
    numbers = np.array(keys, np.int64)
    wanted = np.empty((len(keys), dim), np.float32)
    kernels.initial_rows(numbers, table.table_id, seed, *initializer_code(start), wanted)
    vectors, *states = initial_rows(table, numbers)
    assert np.array_equal(vectors.view(np.uint32), wanted.view(np.uint32))
    for field, state in zip(table.fields[1:], states, strict=True):
        assert state.shape == (len(keys), field.width)
        assert np.all(state == np.float32(field.initial))


@settings(max_examples=60, deadline=None)
@given(start=STARTS, dim=st.integers(1, 13), first=st.integers(0, 9), after=st.integers(0, 5), seed=st.integers(0, 9))
def test_first_rows_of_a_column_slice_are_columns_of_the_whole_rows(
    start: Zeros | Constant | Uniform | Normal, dim: int, first: int, after: int, seed: int
) -> None:
    """Wherever it begins, also between the two numbers that a Normal computes together."""
    whole = Table(name="item", dim=first + dim + after + 1, optimizer=Adam(), initializer=start, seed=seed)
    part = replace(whole, dim=dim, first_column=first, whole_dim=whole.dim)
    keys = np.array([0, -5, 2**63 - 1, 17], np.int64)
    assert np.array_equal(initial_rows(part, keys)[0], initial_rows(whole, keys)[0][:, first : first + dim])
