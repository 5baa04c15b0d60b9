"""The CPU: NumPy arrays and numba kernels, in place and without copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.data.pass_builder import SLOT_MAP_BYTES
from tiercache.kernels.arrays import NONE_F4, NONE_I4, NONE_I8, NONE_U8, aligned_zeros
from tiercache.kernels.cpu.gathering import can_spread, gather, map_slots, pool_one, spread_one
from tiercache.kernels.cpu.key_index import KeyIndex, Missing, bytes_for
from tiercache.kernels.cpu.pooling import MAX, pool_bags, weight_gradient
from tiercache.kernels.cpu.rounding import set_streams
from tiercache.kernels.cpu.rows import pack, unpack
from tiercache.kernels.cpu.sorting import SortBuffers, sort_slots
from tiercache.kernels.cpu.unique import mark_slots
from tiercache.kernels.cpu.update import UpdateBuffers, step_rows
from tiercache.kernels.pieces import Pieces
from tiercache.kernels.step import Rule, Step, Vectors
from tiercache.rows.backends.base import RowArrays, Streams
from tiercache.rows.backends.host_arrays import POOL
from tiercache.rows.backends.optimizer_step import kernel_gradients
from tiercache.rows.backends.saved_gradients import merged
from tiercache.values.lookups import LookedUp, SortedSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike, NDArray

    from tiercache.kernels.cpu.key_index import KeySet
    from tiercache.kernels.cuda.sorting import SortPlan
    from tiercache.rows.backends.base import Layout
    from tiercache.rows.backends.optimizer_step import OptimizerStep
    from tiercache.store.table import Table
    from tiercache.values.ids import Array
    from tiercache.values.lookups import GroupRows, LookupIds, LookupParts, RowRequest, SavedGradient

_FROM_0 = np.zeros(1, dtype=np.int64)


class HostUpload:
    """The upload to a CPU: arrays are usable when they are made."""

    device_bytes = 0  # the pool counts them

    def __init__(self) -> None:
        self._memory = self._columns = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory from the pool."""
        self._memory = POOL.take((num_bytes,), np.uint8)
        return self._memory

    def send(self, column_bytes: int, num_bytes: int, sort: SortPlan | None) -> None:
        """Return no runs: lookups sort slots, which is as fast, on all threads."""
        self._columns = self._memory[:column_bytes].copy()

    def array(self, begin: int, count: int, dtype: DTypeLike) -> Array:
        """Return a view."""
        memory = self._columns if begin < self._columns.size else self._memory
        return memory[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)

    def receive(self) -> None:
        """Do nothing: all data is in place."""


class HostFound:
    """Local ids that were found on the host."""

    def __init__(self, host: NDArray[np.int32], device_ids: Array, missing: Missing | None = None) -> None:
        """device_ids: the same on the device. missing: None: not counted yet."""
        self._host, self.device_ids, self._missing = host, device_ids, missing

    def missing(self) -> Missing:
        """Return at once."""
        if self._missing is None:
            is_missing = self._host < 0
            count = int(np.count_nonzero(is_missing))
            self._missing = Missing(count, int(np.argmax(is_missing)) if count else -1)
        return self._missing

    def host(self) -> NDArray[np.int32]:
        """Return a read-only view."""
        view = self._host.view()
        view.flags.writeable = False
        return view


class HostKeyIndex:
    """The CPU's index, which reads mapped key sets in place."""

    def __init__(self, num_keys: int, table_ids: NDArray[np.uint64]) -> None:
        self._index = KeyIndex(num_keys, table_ids)
        self.capacity, self.num_bytes = self._index.capacity, self._index.nbytes

    def build(self, key_sets: Sequence[KeySet]) -> None:
        """Insert key by key."""
        self._index.clear()
        self._index.extend(key_sets)

    def find(
        self, keys: Sequence[NDArray[np.int64]], starts: NDArray[np.int64], tables: NDArray[np.int64]
    ) -> HostFound:
        """Search on all threads."""
        joined = keys[0] if len(keys) == 1 else np.concatenate(keys)
        found = np.empty(joined.size, np.int32)
        return HostFound(found, found, self._index.find(joined, starts, tables, found))


class CpuBackend:
    """Looks up and steps rows by the numba kernels, with as many threads as torch has. For the training thread."""

    name = ""
    device = torch.device("cpu")
    ahead = 0  # another thread would take cores from the kernels
    queues = False
    pinned_bytes = 0

    def __init__(self) -> None:
        self.streams = Streams()
        self.drop_scratch()

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of the buffer pool, which all caches of a process share."""
        return POOL.num_bytes

    def prepare(self, tables: Sequence[Table]) -> None:
        """Do nothing: `kernels.cpu.compile.prepare` compiles the kernels, whatever the device."""

    def drop_scratch(self) -> None:
        """Drop this backend's buffers; the pool belongs to all caches."""
        self._sorting, self._updates, self._has_overflow = SortBuffers(), UpdateBuffers(), False

    def random_state(self) -> torch.Tensor | None:
        """Return None: a commit includes the CPU's generators anyway."""
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        """Do nothing: the CPU has only the global generators."""

    # -- arrays --------------------------------------------------------------------------------------------

    def array(self, tensor: torch.Tensor) -> Array:
        """Return its memory."""
        return tensor.detach().contiguous().numpy()

    def gradient(self, tensor: torch.Tensor) -> Array:
        """Return its memory, or a contiguous copy."""
        return self.array(tensor)

    def tensor(self, array: Array) -> torch.Tensor:
        """Return its memory."""
        return torch.from_numpy(array)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Take it from the pool."""
        return POOL.take(shape, dtype)

    def to_device(self, array: NDArray[np.generic]) -> Array:
        """Return it as it is."""
        return array

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int32], Array]:
        """Concatenate them."""
        joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return joined, joined

    def concat(self, arrays: Sequence[Array]) -> Array:
        """Concatenate them."""
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Fill a fresh array."""
        out = np.ones(size, dtype=np.float32)
        for first, last, values in parts:
            out[first:last] = values
        return out

    def upload(self) -> HostUpload:
        """Return an upload that copies nothing."""
        return HostUpload()

    # -- lookups and steps ---------------------------------------------------------------------------------

    def pool(self, parts: LookupParts, out: Array) -> list[LookedUp]:
        """Pool group after group."""
        return [self._pool_bags(*part, out) if part[1].offsets is not None else self._pool_ids(*part, out)
                for part in parts]  # fmt: skip

    def _pool_ids(self, rows: GroupRows, e: LookupIds, out: Array) -> LookedUp:
        """Look up one id for each feature and sample."""
        slots, known = POOL.take((e.ids.size,), np.int32), None
        if e.trained and can_spread(out, e.cols, rows.vectors.dim):
            map_slots(e.ids, e.bases, e.starts, rows.slot_of_local, slots)
            known = SortedSlots(slots, POOL.take((e.ids.size,), np.uint64))
            known.pairs[:] = sort_slots(slots, rows.vectors.values.shape[0], self._sorting)
            spread_one(rows.vectors, known.pairs, e.cols, out)
        else:
            pool_one(rows.vectors, rows.slot_of_local, e.ids, e.bases, e.cols, out, slots)
        return LookedUp(slots, known, NONE_I4, None, NONE_F4)

    def _pool_bags(self, rows: GroupRows, e: LookupIds, out: Array) -> LookedUp:
        """Look up any number of ids."""
        assert e.offsets is not None, "bags have offsets"
        argmax = POOL.take(out.shape, np.int32) if (e.modes == MAX).any() else NONE_I4
        slots, places, scales = (POOL.take((e.ids.size,), dtype) for dtype in (np.int32, np.int64, np.float32))
        pool_bags(
            rows.vectors, rows.slot_of_local, e.ids, e.bases, e.offsets, e.weights, e.modes, e.cols, out, slots,
            argmax, places, scales,
        )  # fmt: skip
        return LookedUp(slots, None, argmax, places, scales)

    def gather(self, parts: LookupParts, *, apart: bool = False) -> tuple[list[Array], list[LookedUp]]:
        """Gather feature after feature."""
        outs, found = [], []
        for rows, e in parts:
            slots = POOL.take((e.ids.size,), np.int32)
            map_slots(e.ids, e.bases, e.starts, rows.slot_of_local, slots)
            found.append(LookedUp(slots, None, NONE_I4, None, NONE_F4))
            for first, last in zip(e.starts[:-1], e.starts[1:], strict=True):
                out = POOL.take((int(last - first), rows.vectors.dim), np.float32)
                gather(rows.vectors, slots[first:last], out)
                outs.append(out)
        return outs, found

    def find(self, requests: Sequence[RowRequest]) -> None:
        """Find group after group."""
        for rows, positions, slots, out in requests:
            map_slots(positions, _FROM_0, np.array([0, positions.size]), rows.slot_of_local, slots)
            if out is not None:
                gather(rows.vectors, slots, out)

    def slot_mask(self, slots: Sequence[Array], num_slots: int) -> NDArray[np.bool_] | None:
        """Mark them one after the other, until all are."""
        mask, unmarked = np.zeros(num_slots, dtype=np.bool_), num_slots
        for part in slots:
            unmarked -= mark_slots(part, mask)
        return mask if unmarked else None

    def weight_gradient(self, rows: GroupRows, ids: LookupIds, found: LookedUp, gradient: Array) -> Array:
        """Write it to a fresh array."""
        assert ids.offsets is not None, "features with weights are looked up as bags"
        out = np.empty(ids.ids.size, dtype=np.float32)
        weight_gradient(rows.vectors, found.slots, ids.offsets, ids.modes, ids.cols, gradient, out)
        return out

    def sum(self, saved: Sequence[SavedGradient], scale: float, out: Array) -> None:
        """Write the sums, reading nothing of ``out``."""
        one = merged(self, saved)
        vectors, pairs = Vectors(out, out.shape[1]), self._sorted(one, out.shape[0])
        step_rows(Step(vectors, (), pairs, kernel_gradients([one])[0], Rule("sum", scale)), self._updates)

    def step(self, groups: Sequence[OptimizerStep]) -> None:
        """Step group after group."""
        overflow = self._updates.counter[1:]
        overflow[0] = 0
        for one in groups:
            saved = merged(self, one.saved)
            pairs = self._sorted(saved, one.rows.vectors.values.shape[0])
            step_rows(one.kernel_step(kernel_gradients([saved])[0], pairs), self._updates)
        self._has_overflow |= bool(overflow[0])

    def take_overflow(self) -> bool:
        """Return what the kernels found."""
        found, self._has_overflow = self._has_overflow, False
        return found

    def _sorted(self, saved: SavedGradient, num_slots: int) -> NDArray[np.uint64]:
        """Return the sorted slots of all ids, or the lookup's if it sorted them."""
        pairs = saved.pairs
        if pairs is None or (pairs.size and int(pairs[-1]) >> 32 >= num_slots):  # the sort names the wrong slot
            return sort_slots(saved.slots, num_slots, self._sorting)
        return np.asarray(pairs)

    def index_bytes(self, num_keys: int, num_tables: int) -> int:
        """Return the bytes of the kernels' index."""
        return bytes_for(num_keys, num_tables)

    def key_index(self, num_keys: int, table_ids: NDArray[np.uint64]) -> HostKeyIndex:
        """Make the kernels' index."""
        return HostKeyIndex(num_keys, table_ids)

    # -- moving rows ---------------------------------------------------------------------------------------

    def reserve(self, layouts: Sequence[Layout], what: str) -> list[RowArrays]:
        """Allocate zeros, whose pages are allocated on first use."""
        return [
            RowArrays(
                tuple(aligned_zeros(n.rows, width) for width in n.widths), NONE_I4, NONE_I4, NONE_I8, NONE_I4,
                np.zeros(n.rows, np.uint64) if n.rounded else NONE_U8,
            )
            for n in layouts
        ]  # fmt: skip

    def bytes_of(self, layouts: Sequence[Layout]) -> int:
        """Return the bytes of fields and streams, and of slot maps, which are in host memory."""
        return sum(n.rows * (4 * sum(n.widths) + 8 * n.rounded) + SLOT_MAP_BYTES * n.positions for n in layouts)

    def pin(self, address: int, num_bytes: int) -> None:
        """Do nothing: the CPU has access to all pages."""

    def unpin(self, address: int) -> None:
        """Do nothing."""

    def scratch(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return fresh memory."""
        return np.empty(num_bytes, dtype=np.uint8)

    def place(self, indices: NDArray[np.int32], into: Array) -> Array:
        """Return the indices as they are."""
        return indices

    pieces, pack, unpack = Pieces, staticmethod(pack), staticmethod(unpack)

    def generates(self, table: Table) -> bool:
        """Return False: the reader thread generates new rows ahead of time."""
        return False

    def generate(self, table: Table, keys: NDArray[np.int64], vectors: Array, slots: Array | None,
                 key_buffer: Array | None) -> None:  # fmt: skip
        """Not called, see `generates`."""
        raise AssertionError("the reader generates the rows of a CPU")

    def write_streams(self, table: Table, keys: NDArray[np.int64], streams: Array, slots: Array | None,
                  key_buffer: Array | None) -> None:  # fmt: skip
        """Write them in place."""
        set_streams(streams, slots, keys, table.table_id, table.seed ^ table.first_column)

    def set_rows(self, field: Array, slots: Array | None, value: float) -> None:
        """Write in place; a fresh array is already zero."""
        if slots is not None:
            field[slots] = value
        elif value:
            field.fill(value)

    def write(self, rows: Array, fill: Callable[[NDArray[np.float32], slice], None]) -> None:
        """Make them in place, in one part."""
        fill(rows, slice(0, rows.shape[0]))

    def read(self, field: Array, slots: NDArray[np.int32] | slice) -> NDArray[np.float32]:
        """Index the field."""
        return np.asarray(field[slots])
