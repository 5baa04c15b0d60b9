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
    """Floats one after another, held by `owner`."""

    address: int
    num_floats: int
    writable: bool
    owner: Any


class PieceTable:
    """Pieces in any number of arrays, checked as they come: a launch costs as much as the rows of many pieces.

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
        """Add pieces in one array.

        Piece p has rows `first_row[p]` to `first_row[p + 1]` (P + 1 entries, the first 0), begins at float `offset[p]`
        (P) of `data`, and its rows stand in the order of moving from `first` + `first_row[p]` on.
        Raises ValueError where they do not fit into `data`.
        """
        self._add(first, first_row, offset, [self._memory_of(data)], None)

    def add_each(
        self,
        first: int,
        first_row: NDArray[np.int64],
        offset: NDArray[np.int64],
        data: Sequence[Any],
        cuts: NDArray[np.int64],
    ) -> None:
        """Add pieces in several arrays, as `add` does: pieces `cuts[a]` to `cuts[a + 1]` (A + 1) lie in `data[a]`."""
        if len(data) + 1 != cuts.size or cuts[0] != 0 or cuts[-1] != offset.size:
            raise ValueError(f"{len(data)} arrays and cuts {cuts.tolist()} do not fit {offset.size} pieces.")
        self._add(first, first_row, offset, [self._memory_of(one) for one in data], cuts[1:] - cuts[:-1])

    def _add(
        self,
        first: int,
        first_row: NDArray[np.int64],
        offset: NDArray[np.int64],
        memories: Sequence[Memory],
        counts: NDArray[np.int64] | None,
    ) -> None:
        """Add pieces, of which each memory has a count; one has all."""
        if first_row.size != offset.size + 1 or first_row[0] != 0:
            raise ValueError(f"{offset.size} pieces need {offset.size + 1} first rows from 0 on, not {first_row.size}.")
        if first < 0:
            raise ValueError(f"the pieces begin at place {first}: places are counted from 0.")
        for memory in memories:
            if memory.address % 4:
                raise ValueError(f"data lies at address {memory.address:#x}: give an address that is a multiple of 4.")
        last = int(first_row[-1])
        if last == 0:
            return
        address, size = (np.array([memory[i] for memory in memories], np.int64) for i in range(2))
        if counts is not None:
            address, size = address.repeat(counts), size.repeat(counts)
        rows = first_row[1:] - first_row[:-1]
        left = size - offset - rows * self.row_floats
        if min(_LEAST(rows), _LEAST(offset), _LEAST(left)) < 0:
            bad = int(np.argmax((rows < 0) | (offset < 0) | (left < 0)))
            raise ValueError(f"piece {bad} ends behind the {int(size[bad % size.size])} floats of the data.")
        self._address.append(address + 4 * offset)
        self._rows.append(rows)
        self._first.append(first_row[:-1] + first)
        self._owners += [memory.owner for memory in memories]
        self.writable &= all(memory.writable for memory in memories)
        self.num_rows += last
        self.highest = max(self.highest, first + last)

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return address, rows and first place of every piece, (P,) each."""
        return np.concatenate(self._address), np.concatenate(self._rows), np.concatenate(self._first)
