"""Rows between slots and pieces on a CUDA device: `rows`, with the same meaning of every argument.

One launch moves all fields of all pieces. Slots are found on the CPU, ahead of time, by `switch`: they depend on plans,
not on rows, and travel as 4 bytes a row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.kernels.launch import Device, given, launch_parts, part_struct, view

__all__ = ["Mapped", "Pieces", "pack", "unpack"]

PIECE_PART = part_struct(("data", "p"), ("rows", "l"), ("first", "l"))
_FIELD = np.dtype([("values", np.uint64), ("width", np.int64), ("before", np.int64)])
_TASK = 32  # rows


class Mapped(NamedTuple):
    """Pinned host memory that the device sees: float32, at `address` there; `owner` keeps it alive."""

    address: int
    num_floats: int
    owner: Any
    writable: bool = True


class Pieces:
    """Pieces in any number of arrays, moved by one launch.

    row_floats: floats of a row, all fields that are moved. The arrays must live until the launch is done.
    """

    def __init__(self, device: Device, row_floats: int) -> None:
        self.row_floats, self.num_rows, self.writable, self.highest = row_floats, 0, True, 0
        self._device = device
        self._parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
        self._owners: list[Any] = []

    def add(self, first: int, first_row: NDArray[np.int64], offset: NDArray[np.int64], data: Any) -> None:
        """Add pieces in `data`: float32 on the device, or `Mapped`; held until this object goes.

        Piece p has rows `first_row[p]` to `first_row[p + 1]` (P + 1 entries, the first 0), begins at float `offset[p]`
        (P, rising) of `data`, and its rows stand in the order of moving from `first` + `first_row[p]` on.
        Raises ValueError where they do not fit into `data`.
        """
        if isinstance(data, Mapped):
            address, size, owner = data.address, data.num_floats, data.owner
            self.writable &= data.writable
            if address % 4:
                raise ValueError(f"data lies at address {address:#x}: give an address that is a multiple of 4.")
        else:
            seen = view(self._device, "data", data, np.float32)
            address, size, owner = seen.address, seen.size, seen.owner
            self.writable &= not getattr(owner, self._device.interface)["data"][1]
        if first_row.size != offset.size + 1 or first_row[0] != 0:
            raise ValueError(f"{offset.size} pieces need {offset.size + 1} first rows from 0 on, not {first_row.size}.")
        if first_row[-1] == 0:
            return
        rows = np.diff(first_row)
        if first < 0:
            raise ValueError(f"the pieces begin at place {first}: places are counted from 0.")
        if int(rows.min()) < 0 or int(offset[0]) < 0 or int((offset + rows * self.row_floats).max()) > size:
            raise ValueError(f"the last piece ends behind the {size} floats of the data.")
        self._parts.append((address + 4 * offset, rows, first_row[:-1] + first))
        self._owners.append(owner)
        self.num_rows += int(first_row[-1])
        self.highest = max(self.highest, first + int(first_row[-1]))

    def table(self) -> tuple[list[tuple[Any, ...]], NDArray[np.int64]]:
        """Return address, rows and first place of every piece, and their rows again as an array."""
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        return list(zip(*(column.tolist() for column in columns), strict=True)), columns[1]


def _move(kernel: str, device: Device, fields: Sequence[Any], slots: Any, order: Any, pieces: Pieces) -> None:
    packing = kernel == "rows.pack"
    known, ordered = view(device, "slots", slots, np.int32), 0
    values = [view(device, "field", field, np.float32, 2, written=not packing) for field in fields]
    num_rows = known.size
    if given(order):
        seen = view(device, "order", order, np.int32)
        ordered, num_rows = seen.address, seen.size
    widths = [field.shape[1] for field in values]
    if sum(widths) != pieces.row_floats:
        raise ValueError(f"the pieces have rows of {pieces.row_floats} floats, the fields of {sum(widths)}.")
    if pieces.num_rows == 0 or pieces.row_floats == 0:
        return
    if packing and not pieces.writable:
        raise ValueError("an array of the pieces is read-only, and packing writes to it: give a writable array.")
    if pieces.highest > num_rows:
        raise ValueError(f"the pieces have rows up to {pieces.highest}, and there are {num_rows}.")
    before = np.cumsum([0, *widths])
    moved = [(field.address, width, at) for field, width, at in zip(values, widths, before[:-1], strict=True) if width]
    described = device.put(np.array(moved, _FIELD).view(np.uint8))
    address = view(device, "fields", described, np.uint8).address
    parts, rows = pieces.table()
    tasks = (-(-rows // _TASK) * len(moved)).tolist()
    launch_parts(device, kernel, PIECE_PART, parts, tasks, address, known.address, ordered)


def pack(device: Device, fields: Sequence[Any], slots: Any, order: Any, pieces: Pieces) -> None:
    """Write rows to pieces, in an order.

    fields: (S, W) each, in the order of a row's fields; of Vectors, their words. order (R,): the row at each place of
    the pieces; slots: the slot of each row; -1 is packed as zeros.
    """
    _move("rows.pack", device, fields, slots, order, pieces)


def unpack(device: Device, fields: Sequence[Any], slots: Any, pieces: Pieces) -> None:
    """Write the rows of pieces to their slots. slots (R,): the slot of the row at each place, no two the same.

    A row whose slot is -1 is passed over.
    """
    _move("rows.unpack", device, fields, slots, None, pieces)
