"""Pieces: locations of rows in memory, for one launch that moves them all.

Legend: P pieces, A arrays. A piece is field-major: all its vectors, then all of each state.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tiercache.kernels.arrays import F4, I8, View, expect, view_of

_LEAST = np.minimum.reduce  # `min` goes through Python, with the interpreter's lock


def host_floats(data: F4) -> View:
    """Return the view of a float32 array. Raises ValueError for any other."""
    expect("data", data, np.float32)
    return view_of(data)


class Pieces:
    """Pieces in any number of arrays, which one launch moves: it costs as much as the rows of many pieces.

    row_floats: floats of a row, all fields that are moved. locate: returns the view that kernels have of an array.
    Keeps references to the arrays.
    """

    def __init__(self, row_floats: int, locate: Callable[[Any], View] = host_floats) -> None:
        self.row_floats, self.num_rows, self.writable, self.highest = row_floats, 0, True, 0
        self._locate = locate
        self._address, self._rows, self._first = list[I8](), list[I8](), list[I8]()
        self._owners: list[Any] = []

    def add(self, first: int, rows: I8, offset: I8, data: Any) -> None:
        """Add pieces in one array, as `add_each` does."""
        self.add_each(np.array([first]), rows, offset, [data], np.array([0, rows.size]))

    def add_each(self, first: I8, rows: I8, offset: I8, data: Sequence[Any], cuts: I8) -> None:
        """Add pieces in several arrays: pieces `cuts[a]` to `cuts[a + 1]` (A + 1, from 0 to P) are in `data[a]`.

        Piece p has `rows[p]` rows and begins at float `offset[p]` (P each) of its array. In moving order the rows of
        array a begin at place `first[a]` (A), piece after piece.
        Raises ValueError, and adds nothing, if a piece is outside of its array.
        """
        views = [self._locate(one) for one in data]
        if rows.size != offset.size:
            raise ValueError(f"{rows.size} pieces need {rows.size} offsets, not {offset.size}.")
        counts = cuts[1:] - cuts[:-1]
        if not first.size == cuts.size - 1 == len(views) or cuts[0] != 0 or cuts[-1] != rows.size or (counts < 0).any():
            raise ValueError(
                f"{len(data)} arrays, {first.size} first places and cuts {cuts.tolist()} do not fit {rows.size} pieces."
            )
        if not rows.any():
            return
        if _LEAST(first) < 0:
            raise ValueError(f"the pieces begin at place {_LEAST(first)}: places are counted from 0.")
        address = np.array([one.address for one in views])
        if (address % 4).any():
            raise ValueError(
                f"data is at address {address[(address % 4).argmax()]:#x}: pass an address that is a multiple of 4."
            )
        size = np.array([one.size for one in views]).repeat(counts)
        left = size - offset - rows * self.row_floats
        if min(_LEAST(rows), _LEAST(offset), _LEAST(left)) < 0:
            bad = int(np.argmax((rows < 0) | (offset < 0) | (left < 0)))
            raise ValueError(f"piece {bad} is not within the {int(size[bad])} floats of its array.")
        so_far = np.zeros(rows.size + 1, np.int64)
        np.cumsum(rows, out=so_far[1:])
        place = (first - so_far[cuts[:-1]]).repeat(counts) + so_far[:-1]
        self._address.append(address.repeat(counts) + 4 * offset)
        self._rows.append(rows.copy())
        self._first.append(place)
        self._owners += data
        self.writable &= all(one.writable for one in views)
        self.num_rows += int(so_far[-1])
        self.highest = max(self.highest, int((place + rows).max()))

    def check(self, widths: Sequence[int], num_places: int, *, packing: bool) -> None:
        """Raise ValueError if rows of `num_places` places do not fit, or packing would write to a read-only array.

        widths: floats of each field of a row.
        """
        if sum(widths) != self.row_floats:
            raise ValueError(f"the pieces have rows of {self.row_floats} floats, but the fields have {sum(widths)}.")
        if self.num_rows and packing and not self.writable:
            raise ValueError("an array of the pieces is read-only, but packing writes to it: pass a writable array.")
        if self.highest > num_places:
            raise ValueError(f"the pieces have rows up to {self.highest}, but there are {num_places}.")

    def columns(self) -> tuple[I8, I8, I8]:
        """Return address, rows and first place of every piece, (P,) each."""
        return np.concatenate(self._address), np.concatenate(self._rows), np.concatenate(self._first)
