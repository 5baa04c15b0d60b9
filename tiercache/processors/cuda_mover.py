"""How rows come to a GPU and leave it: kernels that read and write locked host memory over the link."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from tiercache.errors import BudgetError
from tiercache.kernels import cuda_initial, cuda_rounding, cuda_rows
from tiercache.kernels.cuda_gathering import gather
from tiercache.kernels.cuda_vectors import Vectors
from tiercache.processors.processor import RowArrays
from tiercache.sizes import format_bytes
from tiercache.store.table import Constant, Uniform, Zeros, initializer_code

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.processors.entries import Array
    from tiercache.processors.gpu import Gpu
    from tiercache.processors.processor import Layout, Mark
    from tiercache.store.table import Table

_ALIGNED_BYTES = 128  # a cache line
_CHUNK_BYTES = 16 << 20  # of rows that are made on the host


class HostPieces:
    """Pieces in locked host memory, which kernels read and write over the link."""

    def __init__(self, gpu: Gpu, row_floats: int) -> None:
        self._gpu, self.there = gpu, cuda_rows.Pieces(gpu.kernels, row_floats)

    def add(self, first: int, rows: NDArray[np.int64], offset: NDArray[np.int64], data: NDArray[np.float32]) -> None:
        """Add pieces, whose ``data`` lies in locked or pinned memory."""
        self.there.add(first, rows, offset, self._mapped(data))

    def add_each(
        self,
        first: NDArray[np.int64],
        rows: NDArray[np.int64],
        offset: NDArray[np.int64],
        data: Sequence[NDArray[np.float32]],
        cuts: NDArray[np.int64],
    ) -> None:
        """Add pieces in several such arrays."""
        self.there.add_each(first, rows, offset, [self._mapped(one) for one in data], cuts)

    def _mapped(self, data: NDArray[np.float32]) -> cuda_rows.Memory:
        return cuda_rows.Memory(self._gpu.address_of(data), data.size, data, data.flags.writeable)


class CudaMover:
    """Moves rows over the link: kernels read and write locked blocks of host memory, in dump order."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.lock, self.unlock, self.enter_thread = gpu.lock, gpu.unlock, gpu.enter_thread

    def reserve(self, layouts: Sequence[Layout], what: str) -> list[RowArrays]:
        """Allocate once, from torch's caching allocator."""
        total, at = self.bytes_of(layouts), 0
        memory = self._allocate(total)
        if memory is None:
            gc.collect()  # what nobody uses any more may hold memory until its cycles are looked for
            memory = self._allocate(total)
        if memory is None:
            free, whole = self._gpu.room()
            raise BudgetError(
                f"{what} need {format_bytes(total)} on the {self._gpu.name}, which has {format_bytes(free)} of "
                f"{format_bytes(whole)} free: cut passes again with a device budget of at most {free} bytes, less what "
                "the dense model and its batches need"
            )

        def cut(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            nonlocal at
            num_bytes = rows * width * dtype.itemsize
            mine = memory[at : at + num_bytes].view(dtype)
            at += _aligned(num_bytes)
            return mine

        def cut_all(n: Layout) -> RowArrays:
            fields = tuple(cut(n.rows, width, torch.float32).view(n.rows, width) for width in n.widths)
            slots, load_slots = (cut(n.positions, 1, torch.int32) for _ in range(2))
            keys = cut(n.positions, 1, torch.int64)  # of new rows, which are made when all others have departed
            streams = cut(n.rows if n.rounded else 0, 1, torch.uint64)
            return RowArrays(fields, slots, load_slots, keys, keys.view(torch.int32), streams)

        return [cut_all(n) for n in layouts]

    def _allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Return so many bytes, None where they cannot be had."""
        if num_bytes > self._gpu.room()[0]:
            return None
        try:
            return self._gpu.tensor((max(num_bytes, 1),), torch.uint8)  # a rank may own no row at all
        except torch.OutOfMemoryError:
            return None

    def bytes_of(self, layouts: Sequence[Layout]) -> int:
        """Count fields, two arrays of slots, one of keys and the streams, each from a cache line on."""
        return sum(
            sum(_aligned(4 * n.rows * width) for width in n.widths)
            + 2 * _aligned(4 * n.positions) + _aligned(8 * n.positions) + _aligned(8 * n.rows * n.rounded)
            for n in layouts
        )  # fmt: skip

    def scratch(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return pinned memory."""
        scratch: NDArray[np.uint8] = self._gpu.pinned((num_bytes,), torch.uint8).numpy()
        return scratch

    def dumping(self) -> AbstractContextManager[None]:
        """Work on the stream of dumps."""
        return self._gpu.dumping()

    def dumped(self) -> Mark:
        """Record an event on it."""
        return self._gpu.dumped()

    def loading(self) -> AbstractContextManager[None]:
        """Work on the stream of loads."""
        return self._gpu.loading()

    def behind(self, dumped: Mark) -> None:
        """Have it wait for an event."""
        self._gpu.behind(dumped)

    def loaded(self) -> Mark:
        """Record an event on it."""
        return self._gpu.loaded()

    def trained(self) -> Mark:
        """Record an event on the current stream."""
        return self._gpu.trained()

    def rest(self) -> None:
        """Wait for all streams."""
        self._gpu.rest()

    def indices(self, count: int) -> NDArray[np.int32]:
        """Return pinned memory."""
        indices: NDArray[np.int32] = self._gpu.pinned((count,), torch.int32).numpy()
        return indices

    def place(self, indices: NDArray[np.int32], into: Array) -> Array:
        """Copy them; nobody waits where they are pinned."""
        return self._copy(indices, into, lasting=True)

    def pieces(self, row_floats: int) -> HostPieces:
        """Return none yet."""
        return HostPieces(self._gpu, row_floats)

    def pack(self, fields: tuple[Array, ...], slots: Array, order: Array, pieces: Any) -> None:
        """Launch it once for all fields and pieces."""
        cuda_rows.pack(self._gpu.kernels, fields, slots, order, pieces.there, over_link=True)

    def unpack(self, fields: tuple[Array, ...], slots: Array, pieces: Any) -> None:
        """Launch it once for all fields and pieces."""
        cuda_rows.unpack(self._gpu.kernels, fields, slots, pieces.there, over_link=True)

    def generates(self, table: Table) -> bool:
        """Where the kernel has the CPU's bits: not for normal numbers, which take logarithms, nor for column slices."""
        return table.whole_dim is None and isinstance(table.initializer, (Uniform, Zeros, Constant))

    def generate(self, table: Table, keys: NDArray[np.int64], vectors: Array, slots: Array | None,
                 keys_there: Array | None) -> None:  # fmt: skip
        """Launch it once."""
        how = table.table_id, table.seed, *initializer_code(table.initializer)
        out = Vectors(vectors, table.dim, table.dtype)
        cuda_initial.initial_rows(self._gpu.kernels, self._keys(keys, keys_there), *how, out, slots)

    def note_keys(self, table: Table, keys: NDArray[np.int64], streams: Array, slots: Array | None,
                  keys_there: Array | None) -> None:  # fmt: skip
        """Launch it once."""
        there = self._keys(keys, keys_there)
        seed = table.seed ^ table.first_column
        cuda_rounding.set_streams(self._gpu.kernels, streams, slots, there, table.table_id, seed)

    def set_rows(self, field: Array, slots: Array | None, value: float) -> None:
        """Launch it once."""
        if slots is None:
            field.fill_(value)
        else:
            cuda_initial.fill_rows(self._gpu.kernels, value, field, slots)

    def write(self, rows: Array, fill: Callable[[NDArray[np.float32], slice], None]) -> None:
        """Have them made in pinned memory, 16 MiB at a time."""
        count, width = rows.shape
        step = max(1, _CHUNK_BYTES // (4 * max(1, width)))
        room = self._gpu.pinned((min(step, count), width), torch.float32)
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            some = room[: part.stop - first]
            fill(some.numpy(), part)
            self._gpu.copy(some, rows[part])

    def read(self, field: Array, slots: NDArray[np.int32] | slice) -> NDArray[np.float32]:
        """Gather on the device and copy. Waits."""
        if isinstance(slots, slice):
            found = field[slots]
        else:
            found = self._gpu.tensor((slots.size, field.shape[1]), torch.float32)
            there = self._copy(slots, self._gpu.tensor((slots.size,), torch.int32))
            gather(self._gpu.kernels, field, there, found)
        return self._gpu.download(found)

    def _keys(self, keys: NDArray[np.int64], there: Array | None) -> Array:
        """Copy keys to the first elements of ``there``, None: beside the budget."""
        return self._copy(keys, self._gpu.tensor(keys.shape, torch.int64) if there is None else there)

    def _copy(self, host: NDArray[Any], there: Array, *, lasting: bool = False) -> Array:
        """Copy a host array to the first elements of a tensor; it may change once this returns, or is ``lasting``."""
        part = there[: host.size]
        source = torch.from_numpy(host if host.flags.writeable else host.copy())
        self._gpu.copy(source, part, lasting=lasting and host.flags.writeable)
        return part


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
