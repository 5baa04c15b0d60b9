"""Rows between slots and pieces: what a pass switch copies.

Legend: S slots, R rows, P pieces, W width of a field. A piece is field-major: all its vectors, then all of each state.
"""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect
from tiercache.kernels.jit import inlined, parallel, threads, worker
from tiercache.kernels.lanes import ask, atomic_next, load, store

__all__ = ["pack", "unpack"]

_TASK = 512  # rows a thread takes at a time
_AHEAD = 8  # rows between asking for memory and copying it


@inlined
def _copy(source, start, target, at, width):  # type: ignore[no-untyped-def]
    for d in range(0, width, 16):
        store(target, at + d, load(source, start + d, width - d), width - d)


@worker
def _move_tasks(values, slots, first_row, offset, before, data, packing, counter):  # type: ignore[no-untyped-def]
    """Move rows, 512 at a time, so that one large piece is shared by all threads too."""
    width = values.shape[1]
    num_rows = first_row[-1]
    task = atomic_next(counter)
    while task * _TASK < num_rows:
        row, last = task * _TASK, min(task * _TASK + _TASK, num_rows)
        piece = np.searchsorted(first_row, row, side="right") - 1
        while row < last:
            rows_of_piece = first_row[piece + 1] - first_row[piece]
            at = offset[piece] + before * rows_of_piece + (row - first_row[piece]) * width
            for r in range(row, min(first_row[piece + 1], last)):
                if r + _AHEAD < last:
                    ask(values, np.int64(slots[r + _AHEAD]) * width, width)
                place = np.int64(slots[r]) * width
                if packing:
                    _copy(values, place, data, at, width)
                else:
                    _copy(data, at, values, place, width)
                at += width
            row = min(first_row[piece + 1], last)
            piece += 1
        task = atomic_next(counter)


@parallel
def _move(values, slots, first_row, offset, before, data, packing, counter, parts):  # type: ignore[no-untyped-def]
    for _ in prange(parts):
        _move_tasks(values, slots, first_row, offset, before, data, packing, counter)


def _move_fields(
    fields: tuple[NDArray[np.float32], ...],
    slots: NDArray[np.int32],
    piece_first_row: NDArray[np.int64],
    piece_offset: NDArray[np.int64],
    data: NDArray[np.float32],
    *,
    packing: bool,
) -> None:
    slots = expect("slots", slots, np.int32)
    first_row = expect("piece_first_row", piece_first_row, np.int64)
    offset = expect("piece_offset", piece_offset, np.int64)
    data = expect("data", data, np.float32, written=packing)
    if first_row.size != offset.size + 1 or first_row[0] != 0 or first_row[-1] != slots.size:
        raise ValueError(
            f"{offset.size} pieces need {offset.size + 1} first rows from 0 to the {slots.size} rows, "
            f"but have {first_row.size}."
        )
    width = sum(values.shape[1] for values in fields)
    if slots.size and int(offset[-1]) + int(first_row[-1] - first_row[-2]) * width > data.size:
        raise ValueError(f"the last piece ends behind the {data.size} floats of the data.")
    before, parts = 0, max(1, min(threads(), slots.size // _TASK))
    for values in fields:
        moved = expect("field", values, np.float32, 2, written=not packing)
        if slots.size and moved.shape[1]:
            _move(moved, slots, first_row, offset, before, data, packing, np.zeros(1, np.int64), parts)
        before += moved.shape[1]


def pack(
    fields: tuple[NDArray[np.float32], ...],
    slots: NDArray[np.int32],
    piece_first_row: NDArray[np.int64],
    piece_offset: NDArray[np.int64],
    out: NDArray[np.float32],
) -> None:
    """Write rows in dump order to pieces.

    fields: (S, W) each, in the order of a row's fields. slots (R,): the slot of each row. Piece p has rows
    `piece_first_row[p]` to `piece_first_row[p + 1]` (P + 1 entries) and begins at float `piece_offset[p]` (P) of `out`.
    One launch a field.
    """
    _move_fields(fields, slots, piece_first_row, piece_offset, out, packing=True)


def unpack(
    fields: tuple[NDArray[np.float32], ...],
    slots: NDArray[np.int32],
    piece_first_row: NDArray[np.int64],
    piece_offset: NDArray[np.int64],
    data: NDArray[np.float32],
) -> None:
    """Write the rows of pieces to their slots: the reverse of `pack`, slots distinct."""
    _move_fields(fields, slots, piece_first_row, piece_offset, data, packing=False)
