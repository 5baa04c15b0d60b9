"""Rows between slots and pieces on a CUDA device: `kernels.cpu.rows`, with the same meaning of every argument.

One launch moves all fields of all pieces. Slots are found on the CPU, ahead of time, by `switch`: they depend on plans,
not on rows, and travel as 4 bytes a row.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tiercache.kernels.cuda.launch import Device, has_elements, launch_table, struct, view
from tiercache.kernels.pieces import Pieces

_PIECE, _FIELD = struct("Piece", "rows"), struct("Field", "rows")
_TASK = 32  # rows
_LINK_BLOCKS = 2
"""For each SM, a quarter of what it holds: some MB on their way, where a link of 64 GB/s has 0.1 MB in the 2 us
that an access takes. The rest is for rows that move the other way, and for other kernels."""


def _move(
    kernel: str, device: Device, fields: Sequence[Any], slots: Any, order: Any, pieces: Pieces, over_link: bool
) -> None:
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
    table = np.array(moved, _FIELD)
    columns = pieces.columns()
    parts = list(zip(*(column.tolist() for column in columns), strict=True))
    tasks = (-(-columns[1] // _TASK) * len(moved)).tolist()
    blocks = {"blocks_per_sm": _LINK_BLOCKS} if over_link else {}
    launch_table(device, kernel, _PIECE, parts, tasks, table, known.address, ordered, **blocks)


def pack(
    device: Device, fields: Sequence[Any], slots: Any, order: Any, pieces: Pieces, *, over_link: bool = False
) -> None:
    """Write rows to pieces, in an order.

    over_link: the pieces are in host memory, and few blocks keep the link busy.

    fields: (S, W) each, in the order of a row's fields; of Vectors, their words. order (R,): the row at each place of
    the pieces; slots: the slot of each row; -1 is packed as zeros.
    """
    _move("rows.pack", device, fields, slots, order, pieces, over_link)


def unpack(device: Device, fields: Sequence[Any], slots: Any, pieces: Pieces, *, over_link: bool = False) -> None:
    """Write the rows of pieces to their slots. slots (R,): the slot of the row at each place, no two the same.

    A row whose slot is -1 is passed over. over_link: as of `pack`.
    """
    _move("rows.unpack", device, fields, slots, None, pieces, over_link)
