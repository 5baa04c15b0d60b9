"""Initial rows on a CUDA device: `initial`, with the same meaning of every argument, straight into slots too.

Zeros, constants and uniform rows have the CPU's bits; normal ones are not promised to.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tiercache.kernels.bits import mix
from tiercache.kernels.cuda_vectors import RowsAt, by_width, rows_at
from tiercache.kernels.initial import CONSTANT, NORMAL, UNIFORM, ZEROS
from tiercache.kernels.launch import Device, access, launch_parts, part_struct, view

__all__ = ["CONSTANT", "NORMAL", "UNIFORM", "ZEROS", "NewRows", "fill_rows", "initial_many", "initial_rows"]

NEW_PART = part_struct(
    ("keys", "p"), ("slots", "p"), ("out", "p"), ("rows", "l"), ("stream", "p"),
    ("dim", "i"), ("vec", "i"), ("kind", "i"), ("a", "f"), ("b", "f"), ("is_half", "i"),
)  # fmt: skip
_TASK = 32  # rows


class NewRows(NamedTuple):
    """One table's part of `initial_many`."""

    keys: Any
    """(n,) int64."""
    table_id: int
    seed: int
    kind: int
    a: float
    b: float
    out: Any
    """(n, dim), or (S, dim) where there are slots: float32, or Vectors, which are rounded to the nearest."""
    slots: Any = None
    """(n,) int32, no two the same: where each row goes; -1 is passed over. None: row i goes to place i."""


def initial_rows(
    device: Device, keys: Any, table_id: int, seed: int, kind: int, a: float, b: float, out: Any, slots: Any = None
) -> None:
    """Write the initial vector of each key to `out`.

    Without `slots`, `out` is (n, dim); with them it is (S, dim), and the vector of key i goes to `out[slots[i]]`.
    `kind` is ZEROS, CONSTANT (a), UNIFORM (low a, high b) or NORMAL (mean a, standard deviation b).
    """
    initial_many(device, [NewRows(keys, table_id, seed, kind, a, b, out, slots)])


def initial_many(device: Device, tables: Sequence[NewRows]) -> None:
    """Do `initial_rows` for several tables, which may have different dims, in one launch, or one for each width."""
    parts = []
    for table in tables:
        keys = view(device, "keys", table.keys, np.int64)
        parts.append(_part(device, table, keys.address, keys.size))
    _launch(device, parts)


def fill_rows(device: Device, value: float, out: Any, slots: Any) -> None:
    """Write `value` to every element of the rows of `out` (S, dim) in `slots` (n,): a new row's optimizer state."""
    rows = NewRows(None, 0, 0, CONSTANT, value, 0.0, out, slots)
    _launch(device, [_part(device, rows, 0, view(device, "slots", slots, np.int32).size)])


def _part(device: Device, table: NewRows, keys: int, size: int) -> tuple[RowsAt, tuple[Any, ...], int]:
    if table.kind not in (ZEROS, CONSTANT, UNIFORM, NORMAL):
        raise ValueError(f"initializer kind {table.kind} is unknown: 0 zeros, 1 constant, 2 uniform, 3 normal.")
    out = rows_at(device, table.out, "out", written=True)
    slots = 0
    if table.slots is not None:
        seen = view(device, "slots", table.slots, np.int32)
        slots = seen.address
        if seen.size != size:
            raise ValueError(f"{size} keys have {seen.size} slots: give one each.")
    elif out.num_slots != size:
        raise ValueError(f"out has {out.num_slots} rows for {size} keys: give one each.")
    stream = mix((table.seed ^ table.table_id) & ((1 << 64) - 1))
    a, b = np.float32(table.a), np.float32(table.b)
    if table.kind == UNIFORM:
        b = np.float32(b - a)  # the span, as the CPU rounds it
    dim, size = out.dim, size if out.dim else 0
    vec = access(dim, *out.wide, narrow=out.narrow)[0]
    part = keys, slots, out.address, size, stream, dim, vec, table.kind, a, b, out.is_half
    return out, part, -(-size // _TASK)


def _launch(device: Device, parts: list[tuple[RowsAt, tuple[Any, ...], int]]) -> None:
    for suffix, some, tasks in by_width(parts):
        launch_parts(device, f"initial.initial_rows{suffix}", NEW_PART, some, tasks)
