"""Pieces: where rows stand in memory, for one launch that moves them all.

Legend: P pieces, A arrays. A piece is field-major: all its vectors, then all of each state.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Memory", "PieceTable"]

_LEAST = np.minimum.reduce  # `min` goes by way of Python, with the interpreter's lock


class Memory(NamedTuple):
    """Floats one after another, where the kernel sees them; `owner` keeps them alive."""

    address: int
    num_floats: int
    owner: Any
    writable: bool = True


class PieceTable:
    """Pieces in any number of arrays, which one launch moves: it costs as much as the rows of many pieces.

    row_floats: floats of a row, all fields that are moved. Arrays are held until this object goes.
    """

    def __init__(self, row_floats: int) -> None:
        self.row_floats, self.num_rows, self.writable, self.highest = row_floats, 0, True, 0
        self._address: list[NDArray[np.int64]] = []
        self._rows: list[NDArray[np.int64]] = []
        self._first: list[NDArray[np.int64]] = []
        self._owners: list[Any] = []

    def _memory_of(self, data: Any) -> Memory:
        """Return where an array of float32 lies. Raises ValueError for any other."""
        raise NotImplementedError

    def add(self, first: int, first_row: NDArray[np.int64], offset: NDArray[np.int64], data: Any) -> None:
        """Add pieces in one array, as `add_each` does."""
        self.add_each(first, first_row, offset, [data], np.array([0, offset.size]))

    def add_each(
        self,
        first: int,
        first_row: NDArray[np.int64],
        offset: NDArray[np.int64],
        data: Sequence[Any],
        cuts: NDArray[np.int64],
    ) -> None:
        """Add pieces in several arrays: pieces `cuts[a]` to `cuts[a + 1]` (A + 1, from 0 to P) lie in `data[a]`.

        Piece p has rows `first_row[p]` to `first_row[p + 1]` (P + 1 entries, the first 0), begins at float `offset[p]`
        (P) of its array, and its rows stand in the order of moving from `first` + `first_row[p]` on.
        Raises ValueError, and adds nothing, where they do not lie within their arrays.
        """
        memories = [self._memory_of(one) for one in data]
        if first_row.size != offset.size + 1 or first_row[0] != 0:
            raise ValueError(f"{offset.size} pieces need {offset.size + 1} first rows from 0 on, not {first_row.size}.")
        counts = cuts[1:] - cuts[:-1]
        if cuts.size != len(memories) + 1 or cuts[0] != 0 or cuts[-1] != offset.size or (counts < 0).any():
            raise ValueError(f"{len(data)} arrays and cuts {cuts.tolist()} do not fit {offset.size} pieces.")
        if first < 0:
            raise ValueError(f"the pieces begin at place {first}: places are counted from 0.")
        for memory in memories:
            if memory.address % 4:
                raise ValueError(f"data lies at address {memory.address:#x}: give an address that is a multiple of 4.")
        last = int(first_row[-1])
        if last == 0:
            return
        size = np.array([memory.num_floats for memory in memories]).repeat(counts)
        rows = first_row[1:] - first_row[:-1]
        left = size - offset - rows * self.row_floats
        if min(_LEAST(rows), _LEAST(offset), _LEAST(left)) < 0:
            bad = int(np.argmax((rows < 0) | (offset < 0) | (left < 0)))
            raise ValueError(f"piece {bad} does not lie within the {int(size[bad])} floats of its array.")
        self._address.append(np.array([memory.address for memory in memories]).repeat(counts) + 4 * offset)
        self._rows.append(rows)
        self._first.append(first_row[:-1] + first)
        self._owners += [memory.owner for memory in memories]
        self.writable &= all(memory.writable for memory in memories)
        self.num_rows += last
        self.highest = max(self.highest, first + last)

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return address, rows and first place of every piece, (P,) each."""
        return np.concatenate(self._address), np.concatenate(self._rows), np.concatenate(self._first)
