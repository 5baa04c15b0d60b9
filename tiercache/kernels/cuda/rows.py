"""Rows between slots and pieces on a CUDA device: `kernels.cpu.rows`, with the same meaning of every argument.

One launch moves all fields of all pieces, which are in host memory. Slots are found on the CPU, ahead of time, by
`switch`: they depend on plans, not on rows, and are copied as 4 bytes per row.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tiercache.kernels.cuda.launch import Device, blocks_for, has_elements, struct, view
from tiercache.kernels.pieces import Pieces

_PIECE, _FIELD = struct("Piece", "rows"), struct("Field", "rows")
_TASK = 32  # rows
_LINK_BLOCKS = 2
"""Per SM, a quarter of its capacity: some MB in flight, although a link of 64 GB/s has only 0.1 MB in the 2 us that an
access takes. The rest is for rows that move the other way, and for other kernels."""


def _move(kernel: str, device: Device, fields: Sequence[Any], slots: Any, order: Any, pieces: Pieces) -> None:
    packing = kernel == "rows.pack"
    known, ordered = view(device, "slots", slots, np.int32), 0
    values = [view(device, "field", field, np.float32, ndim=2, written=not packing) for field in fields]
    num_rows = known.size
    if has_elements(order):
        seen = view(device, "order", order, np.int32)
        ordered, num_rows = seen.address, seen.size
    widths = [field.shape[1] for field in values]
    pieces.check(widths, num_rows, packing=packing)
    if pieces.num_rows == 0 or pieces.row_floats == 0:
        return
    before = np.cumsum([0, *widths])
    moved = [(field.address, width, at) for field, width, at in zip(values, widths, before[:-1], strict=True) if width]
    columns = pieces.columns()
    tasks = -(-columns[1] // _TASK) * len(moved)
    ends = np.cumsum(tasks)
    table, num_tasks = np.empty(tasks.size, _PIECE), int(ends[-1])
    for name, column in zip(("first_task", "data", "rows", "first"), (ends - tasks, *columns), strict=True):
        table[name] = column
    blocks = blocks_for(device, num_tasks, _LINK_BLOCKS)
    device.launch(kernel, blocks, (table, tasks.size, num_tasks, np.array(moved, _FIELD), known.address, ordered))


def pack(device: Device, fields: Sequence[Any], slots: Any, order: Any, pieces: Pieces) -> None:
    """Write rows to pieces, in an order.

    fields: (S, W) each, in the order of a row's fields; for Vectors, their words. order (R,): the row at each place of
    the pieces; slots: the slot of each row; -1 is packed as zeros.
    """
    _move("rows.pack", device, fields, slots, order, pieces)


def unpack(device: Device, fields: Sequence[Any], slots: Any, pieces: Pieces) -> None:
    """Write the rows of pieces to their slots. slots (R,): the slot of the row at each place, no two the same.

    A row whose slot is -1 is skipped.
    """
    _move("rows.unpack", device, fields, slots, None, pieces)
