"""Rows between slots and pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import use_threads
from tiercache.kernels.cpu.rows import Pieces, pack, unpack


def pieces_of(sizes: list[int], width: int, gap: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Lay pieces out one behind the other, `gap` floats apart."""
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    offset = (first[:-1] * width + gap * np.arange(len(sizes))).astype(np.int64)
    return first, offset, int(first[-1]) * width + gap * len(sizes)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    widths=st.lists(st.sampled_from([1, 2, 3, 15, 16, 17, 64, 65, 130]), min_size=1, max_size=3),
    arrays=st.lists(st.lists(st.sampled_from([0, 1, 2, 30, 700]), min_size=1, max_size=6), min_size=1, max_size=3),
    gap=st.sampled_from([0, 5]),
    others=st.sampled_from([3, 5000]),
    num_threads=st.sampled_from([1, 2]),
)
def test_pack_is_field_major_in_each_piece_and_unpack_reverses_it(
    seed: int, widths: list[int], arrays: list[list[int]], gap: int, others: int, num_threads: int
) -> None:
    """A piece holds all vectors, then all of each state, in whatever array; what lies between stays as it is.

    Whether it has the rows of most slots or of few.
    """
    rng = np.random.default_rng(seed)
    num_rows, row_floats = sum(map(sum, arrays)), sum(widths)
    fields = tuple(rng.standard_normal((num_rows + others, w)).astype(np.float32) for w in widths)
    slots = rng.permutation(num_rows + others).astype(np.int32)
    order = rng.permutation(num_rows + others)[:num_rows].astype(np.int32)
    packing, unpacking, packed, wanted, begun = Pieces(row_floats), Pieces(row_floats), [], [], 0
    begins, counts, offsets, frozen = list[int](), [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], []
    for sizes in arrays:
        first, offset, size = pieces_of(sizes, row_floats, gap)
        out, expected = np.full(size, np.nan, np.float32), np.full(size, np.nan, np.float32)
        for p in range(len(sizes)):
            rows = slots[order[begun + first[p] : begun + first[p + 1]]]
            piece = np.concatenate([field[rows].reshape(-1) for field in fields])
            expected[offset[p] : offset[p] + piece.size] = piece
        packing.add(begun, np.diff(first), offset, out)
        packed.append(out)
        wanted.append(expected)
        counts.append(np.diff(first))
        begins.append(begun)
        offsets.append(offset)
        frozen.append(out.view())
        frozen[-1].flags.writeable = False
        begun += int(first[-1])
    cuts = np.cumsum([0, *(len(sizes) for sizes in arrays)])
    unpacking.add_each(np.array(begins), np.concatenate(counts), np.concatenate(offsets), frozen, cuts)
    with use_threads(num_threads):
        pack(fields, slots, order, packing)
        back = tuple(np.full_like(field, -1) for field in fields)
        unpack(back, slots[order], unpacking)
    for out, expected in zip(packed, wanted, strict=True):
        assert np.array_equal(out, expected, equal_nan=True)
    for field, copy in zip(fields, back, strict=True):
        assert np.array_equal(copy[slots[order]], field[slots[order]])
        assert (copy[np.setdiff1d(np.arange(num_rows + others), slots[order])] == -1).all()


@given(st.permutations(range(4)), st.integers(0, 2))
def test_pieces_in_any_order_with_places_left_out_are_packed(places: list[int], left_out: int) -> None:
    """A piece is filled with the rows that stand in its places of the order, wherever it was added."""
    field, rng = np.arange(40, dtype=np.float32).reshape(40, 1), np.random.default_rng(sum(places[:2]))
    slots, order = rng.permutation(40).astype(np.int32), rng.permutation(40).astype(np.int32)
    pieces, packed = Pieces(1), {}
    for place in places[left_out:]:
        packed[place] = np.zeros(10, np.float32)
        pieces.add(10 * place, np.array([10]), np.zeros(1, np.int64), packed[place])
    pack((field,), slots, order, pieces)
    for place, out in packed.items():
        assert np.array_equal(out, slots[order[10 * place : 10 * place + 10]])


@pytest.mark.parametrize(
    ("slots", "order", "place"),
    [
        ([0, 1, 2], [0, 1, 1], 2),
        ([0, 0, 2], [2, 0, 1], 2),
        ([0, 1, 3], [0, 2, 1], 1),
        ([0, 1, 2], [3, 1, 2], 0),
    ],
)
def test_rows_without_a_slot_of_their_own_are_refused(slots: list[int], order: list[int], place: int) -> None:
    """A row at two places, two rows in a slot, a slot and a row that are not there: nothing is written."""
    pieces, out = Pieces(1), np.full(3, -1, np.float32)
    pieces.add(0, np.array([3]), np.zeros(1, np.int64), out)
    with pytest.raises(ValueError, match=f"row at place {place} has no slot of its own"):
        pack((np.zeros((3, 1), np.float32),), np.array(slots, np.int32), np.array(order, np.int32), pieces)
    assert (out == -1).all()


def test_no_pieces_move_nothing() -> None:
    """A stream without rows has no pieces."""
    pieces = Pieces(4)
    pieces.add(0, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))
    pack((np.zeros((3, 4), np.float32),), np.zeros(0, np.int32), np.zeros(0, np.int32), pieces)


def test_pieces_that_do_not_fit_are_refused() -> None:
    """Too few floats, rows that nothing names, or rows of another width are a sentence."""
    field, slots, of_three = (np.zeros((3, 4), np.float32),), np.arange(3, dtype=np.int32), np.array([3])
    pieces = Pieces(4)
    with pytest.raises(ValueError, match="within the 11 floats"):
        pieces.add(0, of_three, np.array([0]), np.zeros(11, np.float32))
    with pytest.raises(ValueError, match="within the 12 floats"):
        pieces.add(0, of_three, np.array([-1]), np.zeros(12, np.float32))
    with pytest.raises(ValueError, match="2 pieces need 2 offsets, not 1"):
        pieces.add(0, np.array([1, 2]), np.array([0]), np.zeros(12, np.float32))
    with pytest.raises(ValueError, match="begin at place -1"):
        pieces.add(-1, of_three, np.array([0]), np.zeros(12, np.float32))
    two, places = [np.zeros(12, np.float32), np.zeros(11, np.float32)], np.array([0, 3])
    with pytest.raises(ValueError, match="piece 2 does not lie within the 11 floats"):
        pieces.add_each(places, np.array([1, 2, 3]), np.array([0, 4, 0]), two, np.array([0, 2, 3]))
    with pytest.raises(ValueError, match=r"2 arrays, 2 first places and cuts .* do not fit 3 pieces"):
        pieces.add_each(places, np.array([1, 1, 1]), np.array([0, 4, 0]), two, np.array([0, 2]))
    with pytest.raises(ValueError, match=r"cuts \[0, 4, 3\] do not fit 3 pieces"):
        pieces.add_each(places, np.array([1, 1, 1]), np.array([0, 4, 0]), two, np.array([0, 4, 3]))
    with pytest.raises(ValueError, match="2 arrays, 1 first places"):
        pieces.add_each(places[:1], np.array([1, 1, 1]), np.array([0, 4, 0]), two, np.array([0, 2, 3]))
    assert pieces.num_rows == 0
    pieces.add(1, of_three, np.array([0]), np.zeros(12, np.float32))
    with pytest.raises(ValueError, match="rows up to 4, and there are 3"):
        unpack(field, slots, pieces)
    with pytest.raises(ValueError, match="rows of 4 floats, the fields of 8"):
        unpack(field * 2, slots, pieces)
    frozen = np.zeros(12, np.float32)
    frozen.flags.writeable = False
    pieces = Pieces(4)
    pieces.add(0, of_three, np.array([0]), frozen)
    with pytest.raises(ValueError, match="read-only"):
        pack(field, slots, slots, pieces)
