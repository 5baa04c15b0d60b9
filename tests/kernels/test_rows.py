"""Rows between slots and pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import use_threads
from tiercache.kernels.rows import pack, unpack


def pieces_of(sizes: list[int], width: int, gap: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Lay pieces out one behind the other, `gap` floats apart."""
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    offset = (first[:-1] * width + gap * np.arange(len(sizes))).astype(np.int64)
    return first, offset, int(first[-1]) * width + gap * len(sizes)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    widths=st.lists(st.sampled_from([1, 2, 3, 15, 16, 17, 64, 65, 130]), min_size=1, max_size=3),
    sizes=st.lists(st.sampled_from([0, 1, 2, 30, 700]), min_size=1, max_size=6),
    gap=st.sampled_from([0, 5]),
    num_threads=st.sampled_from([1, 2]),
)
def test_pack_is_field_major_in_each_piece_and_unpack_reverses_it(
    seed: int, widths: list[int], sizes: list[int], gap: int, num_threads: int
) -> None:
    """A piece holds all vectors, then all of each state; what lies between pieces stays as it is."""
    rng = np.random.default_rng(seed)
    num_rows = sum(sizes)
    fields = tuple(rng.standard_normal((num_rows + 3, w)).astype(np.float32) for w in widths)
    slots = rng.permutation(num_rows + 3)[:num_rows].astype(np.int32)
    first, offset, size = pieces_of(sizes, sum(widths), gap)
    out, wanted = np.full(size, np.nan, np.float32), np.full(size, np.nan, np.float32)
    for p in range(len(sizes)):
        rows = slots[first[p] : first[p + 1]]
        piece = np.concatenate([field[rows].reshape(-1) for field in fields])
        wanted[offset[p] : offset[p] + piece.size] = piece
    with use_threads(num_threads):
        pack(fields, slots, first, offset, out)
        back = tuple(np.full_like(field, -1) for field in fields)
        out.flags.writeable = False
        unpack(back, slots, first, offset, out)
    assert np.array_equal(out, wanted, equal_nan=True)
    for field, copy in zip(fields, back, strict=True):
        assert np.array_equal(copy[slots], field[slots])
        rest = np.setdiff1d(np.arange(num_rows + 3), slots)
        assert (copy[rest] == -1).all()


def test_no_pieces_move_nothing() -> None:
    """A stream without rows has no pieces."""
    empty = np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, np.int64)
    pack((np.zeros((3, 4), np.float32),), *empty, np.zeros(0, np.float32))


def test_pieces_that_do_not_fit_are_refused() -> None:
    """Too few floats, or rows that the pieces do not name, are a sentence."""
    field, slots = (np.zeros((3, 4), np.float32),), np.arange(3, dtype=np.int32)
    with pytest.raises(ValueError, match="ends behind the 11 floats"):
        pack(field, slots, np.array([0, 3]), np.array([0]), np.zeros(11, np.float32))
    with pytest.raises(ValueError, match="2 first rows from 0 to the 3 rows"):
        pack(field, slots, np.array([0, 2]), np.array([0]), np.zeros(12, np.float32))
