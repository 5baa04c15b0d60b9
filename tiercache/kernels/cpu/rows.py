"""Copies of rows between slots and pieces, for pass switches.

Legend: S slots, R rows, P pieces, W width of a field.
"""

from typing import Any

import numpy as np

from tiercache.kernels.arrays import F4, I4, I8, NONE_I4, Matrix, Written, address_of, aligned_zeros
from tiercache.kernels.cpu.compile import inlined, serial, worker
from tiercache.kernels.cpu.kernel_threads import on_all_cores
from tiercache.kernels.cpu.simd import atomic_next, fence, load, prefetch_span, store, stream
from tiercache.kernels.pieces import Pieces

_TASK = 512  # rows a thread takes at a time
_AHEAD = 8  # rows between prefetching memory and copying it
_LOOKUP = 64  # rows per lookup entry, which has the piece of the first one
_ORIGIN = aligned_zeros(1, 1)[0]  # memory offsets are counted from here, in floats


@inlined
def _copy(source, start, target, at, width, past_caches):  # type: ignore[no-untyped-def]
    whole = width - width % 16
    if past_caches:
        for d in range(0, whole, 16):
            stream(target, at + d, load(source, start + d, 16))
    else:
        for d in range(0, whole, 16):
            store(target, at + d, load(source, start + d, 16), 16)
        if whole < width:
            store(target, at + whole, load(source, start + whole, width - whole), width - whole)


@worker
def _move_tasks(values, slots, order, so_far, first, place, before, memory, packing, past_caches, counter):  # type: ignore[no-untyped-def]
    """Move rows, 512 at a time, so that all threads also share one large piece.

    Rows of whole cache lines are written past the caches, because the target is not read first, nor soon after.
    """
    width = values.shape[1]
    asking = packing or not past_caches
    num_rows = so_far[-1]
    task = atomic_next(counter)
    while task * _TASK < num_rows:
        row, last = task * _TASK, min(task * _TASK + _TASK, num_rows)
        piece = np.searchsorted(so_far, row, side="right") - 1
        while row < last:
            rows_of_piece = so_far[piece + 1] - so_far[piece]
            at = place[piece] + before * rows_of_piece + (row - so_far[piece]) * width
            here = first[piece] - so_far[piece]  # from rows to indices in `slots`
            end = min(so_far[piece + 1], last)
            for r in range(row, end):
                if asking and r + _AHEAD < end:
                    prefetch_span(values, np.int64(_slot(slots, order, here + r + _AHEAD)) * width, width)
                start = np.int64(_slot(slots, order, here + r)) * width
                if packing:
                    _copy(values, start, memory, at, width, past_caches and at % 16 == 0)
                else:
                    _copy(memory, at, values, start, width, past_caches)
                at += width
            row = end
            piece += 1
        task = atomic_next(counter)
    fence()


@inlined
def _slot(slots, order, i):  # type: ignore[no-untyped-def]
    return slots[order[i]] if order.size else slots[i]


@serial
def _move(
    values: Written[Matrix[F4]],
    slots: I4,
    order: I4,
    so_far: I8,
    first: I8,
    place: I8,
    before: int,
    memory: Written[F4],
    packing: bool,
    past_caches: bool,
    counter: Written[I8],
) -> None:
    _move_tasks(values, slots, order, so_far, first, place, before, memory, packing, past_caches, counter)


@worker
def _scatter_tasks(values, place_of_slot, so_far, piece_of_lookup, place, before, memory, past_caches, counter):  # type: ignore[no-untyped-def]
    """Write the row in each slot to its place, 512 slots at a time.

    Memory is read in order and written out of order: reads are waited for, and writes are not.
    """
    width = values.shape[1]
    task = atomic_next(counter)
    while task * _TASK < place_of_slot.size:
        for slot in range(task * _TASK, min(task * _TASK + _TASK, place_of_slot.size)):
            row = np.int64(place_of_slot[slot])
            if row < 0:
                continue
            piece = piece_of_lookup[row // _LOOKUP]
            while so_far[piece + 1] <= row:
                piece += 1
            rows_of_piece = so_far[piece + 1] - so_far[piece]
            at = place[piece] + before * rows_of_piece + (row - so_far[piece]) * width
            _copy(values, np.int64(slot) * width, memory, at, width, past_caches and at % 16 == 0)
        task = atomic_next(counter)
    fence()


@serial
def _scatter(
    values: Matrix[F4],
    place_of_slot: I4,
    so_far: I8,
    piece_of_lookup: I8,
    place: I8,
    before: int,
    memory: Written[F4],
    past_caches: bool,
    counter: Written[I8],
) -> None:
    _scatter_tasks(values, place_of_slot, so_far, piece_of_lookup, place, before, memory, past_caches, counter)


@serial
def _place_of_slot(slots: I4, order: I4, out: Written[I4]) -> int:
    """Write the place of the row in each slot, -1 if there is none; return the first place without its own, or -1."""
    out[:] = -1
    for place in range(order.size):
        if not 0 <= order[place] < slots.size:
            return place
        slot = slots[order[place]]
        if not 0 <= slot < out.size or out[slot] >= 0:
            return place
        out[slot] = place
    return -1


def _table(pieces: Pieces) -> tuple[I8, I8, I8]:
    """Return rows so far (P + 1), first index in the slots (P) and offset in memory (P), counted from `_ORIGIN`."""
    address, rows, first = pieces.columns()
    so_far = np.zeros(rows.size + 1, np.int64)
    np.cumsum(rows, out=so_far[1:])
    return so_far, first, (address - address_of(_ORIGIN)) // 4


def _move_fields(fields: tuple[Matrix[F4], ...], slots: I4, order: I4, pieces: Pieces, *, packing: bool) -> None:
    pieces.check([values.shape[1] for values in fields], order.size or slots.size, packing=packing)
    if pieces.num_rows == 0:
        return
    table, num_slots = _table(pieces), fields[0].shape[0]
    scattering = packing and 2 * order.size >= num_slots and _in_order(*table[:2])
    if scattering:
        place_of_slot = np.empty(num_slots, np.int32)
        wrong = _place_of_slot(slots, order[: pieces.num_rows], place_of_slot)
        if wrong >= 0:
            raise ValueError(
                f"the row at place {wrong} has an invalid or repeated slot: there are {slots.size} rows in "
                f"{num_slots} slots, each with one place."
            )
        lookup = np.searchsorted(table[0], np.arange(0, pieces.num_rows, _LOOKUP), side="right") - 1
    before, calls = 0, list[tuple[Any, ...]]()
    for moved in fields:
        if moved.shape[1]:
            past_caches = moved.shape[1] % 16 == 0 and (packing or address_of(moved) % 64 == 0)
            counter = np.zeros(1, np.int64)
            if scattering:
                calls.append((moved, place_of_slot, table[0], lookup, table[2], before, _ORIGIN, past_caches, counter))
            else:
                calls.append((moved, slots, order, *table, before, _ORIGIN, packing, past_caches, counter))
        before += moved.shape[1]
    on_all_cores(_scatter if scattering else _move, pieces.num_rows // _TASK, calls)


def _in_order(so_far: I8, first: I8) -> bool:
    """Return True if pieces follow one another, without a gap, from place 0 on."""
    return np.array_equal(so_far[:-1], first)


def pack(fields: tuple[Matrix[F4], ...], slots: I4, order: I4, pieces: Pieces) -> None:
    """Write rows to pieces, in an order.

    fields: (S, W) each, in the order of a row's fields. order (R,): the row at each place of the pieces, none at two;
    slots: the slot of each row, no two the same. One launch per field. Raises ValueError for pieces that do not fit
    and, if at least half of all slots are packed, for repeated rows or slots.
    """
    _move_fields(fields, slots, order, pieces, packing=True)


def unpack(fields: tuple[Matrix[F4], ...], slots: I4, pieces: Pieces) -> None:
    """Write the rows of pieces to their slots. slots (R,): the slot of the row at each place, no two the same."""
    _move_fields(fields, slots, NONE_I4, pieces, packing=False)
