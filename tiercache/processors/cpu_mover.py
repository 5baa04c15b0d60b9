"""How rows move where the device is the CPU: from one place in host memory to another."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.kernels.arrays import NONE_I4, NONE_I8, NONE_U8, aligned_zeros
from tiercache.kernels.rounding import set_streams
from tiercache.kernels.rows import Pieces, pack, unpack
from tiercache.processors.processor import RowArrays

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from tiercache.processors.entries import Array
    from tiercache.processors.processor import Layout, Mark
    from tiercache.store.table import Table


class Done:
    """A moment that is over: nothing runs behind anybody's back on a CPU."""

    def wait(self) -> None:
        """Return at once."""


class CpuMover:
    """Moves rows within host memory: nothing is locked, staged or waited for."""

    def reserve(self, layouts: Sequence[Layout], what: str) -> list[RowArrays]:
        """Allocate zeros, whose pages come when they are used."""
        return [
            RowArrays(
                tuple(aligned_zeros(n.rows, width) for width in n.widths), NONE_I4, NONE_I4, NONE_I8, NONE_I4,
                np.zeros(n.rows, np.uint64) if n.rounded else NONE_U8,
            )
            for n in layouts
        ]  # fmt: skip

    def bytes_of(self, layouts: Sequence[Layout]) -> int:
        """Return the bytes of fields and streams."""
        return sum(n.rows * (4 * sum(n.widths) + 8 * n.rounded) for n in layouts)

    def lock(self, address: int, num_bytes: int) -> None:
        """Nothing: all pages are the processor's."""

    def unlock(self, address: int) -> None:
        """Nothing, likewise."""

    def scratch(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return fresh memory."""
        return np.empty(num_bytes, dtype=np.uint8)

    def dumping(self) -> AbstractContextManager[None]:
        """Nothing: calls are done when they return."""
        return nullcontext()

    def dumped(self) -> Done:
        """Return a moment that is over."""
        return Done()

    def loading(self) -> AbstractContextManager[None]:
        """Nothing, likewise."""
        return nullcontext()

    def behind(self, dumped: Mark) -> None:
        """Nothing, likewise."""

    def loaded(self) -> Done:
        """Return a moment that is over."""
        return Done()

    def trained(self) -> Done:
        """Return a moment that is over."""
        return Done()

    def indices(self, count: int) -> NDArray[np.int32]:
        """Return fresh memory."""
        return np.empty(count, dtype=np.int32)

    def place(self, indices: NDArray[np.int32], into: Array) -> Array:
        """Return the indices as they are."""
        return indices

    def pieces(self, row_floats: int) -> Pieces:
        """Return the kernel's pieces."""
        return Pieces(row_floats)

    def pack(self, fields: tuple[Array, ...], slots: Array, order: Array, pieces: Any) -> None:
        """Do it on all cores."""
        pack(fields, slots, order, pieces)

    def unpack(self, fields: tuple[Array, ...], slots: Array, pieces: Any) -> None:
        """Do it on all cores."""
        unpack(fields, slots, pieces)

    def generates(self, table: Table) -> bool:
        """No: the reader thread makes new rows ahead of time."""
        return False

    def generate(self, table: Table, keys: NDArray[np.int64], vectors: Array, slots: Array | None,
                 keys_there: Array | None) -> None:  # fmt: skip
        """Never called."""
        raise AssertionError("the reader makes the rows of a CPU")

    def note_keys(self, table: Table, keys: NDArray[np.int64], streams: Array, slots: Array | None,
                  keys_there: Array | None) -> None:  # fmt: skip
        """Write them in place, reading keys as they come."""
        set_streams(streams, slots, keys, table.table_id, table.seed ^ table.first_column)

    def set_rows(self, field: Array, slots: Array | None, value: float) -> None:
        """Write in place; zeros of a fresh array are there already."""
        if slots is not None:
            field[slots] = value
        elif value:
            field.fill(value)

    def write(self, rows: Array, fill: Callable[[NDArray[np.float32], slice], None]) -> None:
        """Have them made in place, in one part."""
        fill(rows, slice(0, rows.shape[0]))

    def read(self, field: Array, slots: NDArray[np.int32] | slice) -> NDArray[np.float32]:
        """Index the field."""
        return np.asarray(field[slots])

    def rest(self) -> None:
        """Return at once."""

    def enter_thread(self) -> None:
        """Nothing: all threads use it."""
