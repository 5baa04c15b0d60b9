"""The CUDA backend: torch tensors, CUDA kernels, and host memory that both sides access."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from tiercache.errors import BudgetError
from tiercache.kernels.arrays import NONE_F4, NONE_I4, view_of
from tiercache.kernels.cpu.pooling import MAX
from tiercache.kernels.cuda import rows as cuda_rows
from tiercache.kernels.cuda.gathering import Gathered, Mapped, gather
from tiercache.kernels.cuda.initial import fill_rows, initial_rows, set_streams
from tiercache.kernels.cuda.pooling import Features, Ids, PoolPlan
from tiercache.kernels.cuda.sorting import sort_groups
from tiercache.kernels.cuda.update import plan_rows, update_many
from tiercache.kernels.pieces import Pieces
from tiercache.kernels.step import Rule, Step, Vectors
from tiercache.rows.backends.base import RowArrays
from tiercache.rows.backends.cuda_runtime import (
    TORCH_DTYPES,
    CudaKeyIndex,
    PinnedRing,
    PinnedUpload,
    aligned,
    index_bytes,
)
from tiercache.rows.backends.optimizer_step import kernel_gradients, vectors_of
from tiercache.sizes import format_bytes
from tiercache.store.initializer import Constant, Uniform, Zeros, initializer_code
from tiercache.values.lookups import LookedUp, SortedSlots
from tiercache.values.torch_internals import below_autograd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike, NDArray

    from tiercache.kernels.arrays import View
    from tiercache.kernels.cuda.sorting import Runs
    from tiercache.rows.backends.base import Layout
    from tiercache.rows.backends.cuda_runtime import CudaRuntime
    from tiercache.rows.backends.optimizer_step import OptimizerStep
    from tiercache.store.table import Table
    from tiercache.values.ids import Array
    from tiercache.values.lookups import FeatureRuns, GroupRows, LookupIds, LookupParts, RowRequest, SavedGradient


_Plan = TypeVar("_Plan")
_CORES = 8  # with at least so many, two more threads cost nothing
_MOST_PLANS = 64
_CHUNK_BYTES = 16 << 20  # of rows that are made on the host


class CudaBackend:
    """Looks up and steps rows by CUDA kernels on torch's current stream, in few launches for any number of groups."""

    ahead = 4 if len(os.sched_getaffinity(0)) >= _CORES else 2  # one thread per batch: a read may outlast several steps
    queues = True

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime, self.streams, self.device = runtime, runtime, runtime.device
        self.pin, self.unpin = runtime.pin, runtime.unpin
        self.random_state, self.set_random_state = runtime.random_state, runtime.set_random_state
        self.name = f"{runtime.name} (CUDA)"
        self._plans: OrderedDict[Any, Any] = OrderedDict()
        self._ring = PinnedRing(runtime)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the ring."""
        return self._ring.num_bytes

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of plans; memory of a step returns to torch's caching allocator."""
        return sum(plan.nbytes for plan in self._plans.values() if isinstance(plan, PoolPlan))

    def prepare(self, tables: Sequence[Table]) -> None:
        """Compile the kernels for this GPU, once."""
        self._runtime.prepare()

    def drop_scratch(self) -> None:
        """Drop the plans of lookups and steps, and free the blocks of batches."""
        self._plans.clear()
        self._ring.resize(0)

    # -- arrays --------------------------------------------------------------------------------------------

    def array(self, tensor: torch.Tensor) -> Array:
        """Return the tensor."""
        return tensor.detach().contiguous() if tensor.requires_grad or not tensor.is_contiguous() else tensor

    def gradient(self, tensor: torch.Tensor) -> Array:
        """Return the tensor if its columns are next to each other, as those of a slice of columns are."""
        tensor = tensor.detach() if tensor.requires_grad else tensor
        is_slice = tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1]
        return tensor if is_slice else tensor.contiguous()

    def tensor(self, array: Array) -> torch.Tensor:
        """Return the tensor."""
        assert isinstance(array, torch.Tensor)
        return array

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Take it from torch's caching allocator."""
        return self._runtime.tensor(shape, TORCH_DTYPES[np.dtype(dtype)])

    def to_device(self, array: NDArray[Any]) -> Array:
        """Copy it to pinned memory, and from there."""
        pinned = self._runtime.pinned(array.shape, TORCH_DTYPES[array.dtype])
        pinned.numpy()[...] = array
        return self._runtime.upload(pinned)

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int32], Array]:
        """Join them in pinned memory, and copy from there."""
        pinned = self._runtime.pinned((sum(array.size for array in arrays),), torch.int32)
        host: NDArray[np.int32] = pinned.numpy()
        np.concatenate(arrays, out=host)
        return host, self._runtime.upload(pinned)

    def concat(self, arrays: Sequence[Array]) -> Array:
        """Join them on the device."""
        return arrays[0] if len(arrays) == 1 else torch.cat(tuple(arrays))

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Fill device memory, with parts from the host or the device."""
        out = self._runtime.tensor((size,), torch.float32).fill_(1.0)
        for first, last, values in parts:
            out[first:last].copy_(self.to_device(values) if isinstance(values, np.ndarray) else values)
        return out

    def upload(self) -> PinnedUpload:
        """Return an upload through the ring."""
        return PinnedUpload(self._runtime, self._ring)

    # -- lookups and steps ---------------------------------------------------------------------------------

    def pool(self, parts: LookupParts, out: Array) -> list[LookedUp]:
        """Pool all groups in one launch, by a plan that is made once per module and rows of a pass."""
        batch, found = [], []
        for _, e in parts:
            size = int(e.starts[-1])
            argmax, places, scales = NONE_I4, None, NONE_F4
            if e.offsets is not None:
                if (e.modes == MAX).any():
                    argmax = self.empty(tuple(out.shape), np.int32)
                places, scales = self.empty((size,), np.int64), self.empty((size,), np.float32)
            one = _looked_up(e, self.empty((size,), np.int32), argmax, places, scales)
            batch.append(Ids(e.ids, one.slots, e.offsets, e.weights, argmax, places, scales))
            found.append(one)
        self._plan_of(parts, out).pool(batch, out)
        return found

    def _plan_of(self, parts: LookupParts, out: torch.Tensor) -> PoolPlan:
        """Return the plan of a lookup."""
        see, width = self._runtime.kernels.describe, out.shape[1]
        key = width, *[(rows.place(see), e.bases.tobytes(), e.cols.tobytes(), e.modes.tobytes()) for rows, e in parts]
        features = [Features(rows.vectors, rows.slot_of_local, e.bases, e.cols, e.modes) for rows, e in parts]
        return self._kept(key, lambda: PoolPlan(self._runtime.kernels, features, width))

    def _kept(self, key: Any, make: Callable[[], _Plan]) -> _Plan:
        """Return the plan of a key, for this stream; it holds no references to arrays, so that they can be freed."""
        key = self._runtime.stream(), key
        if key not in self._plans:
            self._plans[key] = make()
            if len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        plan: _Plan = self._plans[key]
        return plan

    def gather(self, parts: LookupParts, *, apart: bool = False) -> tuple[list[Array], list[LookedUp]]:
        """Map the ids of all groups and gather their rows in one launch, one allocation per group."""
        gathered, found, outs = list[Gathered](), list[LookedUp](), list[torch.Tensor]()
        for rows, e in parts:
            dim, starts = rows.vectors.dim, e.starts.tolist()
            slots = self.empty((starts[-1],), np.int32)
            found.append(_looked_up(e, slots, NONE_I4, None, NONE_F4))
            for f, (first, last) in enumerate(pairwise(starts) if apart else ()):
                mapped = Mapped(e.ids[first:last], e.bases[f : f + 1], np.array([0, last - first]), rows.slot_of_local)
                outs.append(self.empty((last - first, dim), np.float32))
                gathered.append(Gathered(rows.vectors, slots[first:last], outs[-1], mapped))
            if apart:
                continue
            out = self.empty((starts[-1], dim), np.float32)
            mapped = Mapped(e.ids, e.bases, e.starts, rows.slot_of_local)
            gathered.append(Gathered(rows.vectors, slots, out, mapped))
            with below_autograd():  # no views to autograd: each may be changed in place
                outs += torch.split(out, [last - first for first, last in pairwise(starts)])
        gather(self._runtime.kernels, gathered)
        return outs, found

    def find(self, requests: Sequence[RowRequest]) -> None:
        """Map the positions of all groups and gather their rows in one launch."""
        found = []
        for rows, positions, slots, out in requests:
            mapped = Mapped(positions, np.zeros(1, np.int64), np.array([0, positions.shape[0]]), rows.slot_of_local)
            found.append(Gathered(rows.vectors, slots, out, mapped))
        gather(self._runtime.kernels, found)

    def slot_mask(self, slots: Sequence[Array], num_slots: int) -> NDArray[np.bool_] | None:
        """Mark them on the device, and wait for the marks."""
        marks = self._runtime.tensor((num_slots,), torch.int32).zero_()
        for part in slots:
            marks[part.long()] = 1
        mask: NDArray[np.bool_] = (marks != 0).cpu().numpy()  # synchronize!
        return None if mask.all() else mask

    def weight_gradient(self, rows: GroupRows, ids: LookupIds, found: LookedUp, gradient: Array) -> Array:
        """Launch it once."""
        out = self.empty((int(ids.starts[-1]),), np.float32)
        self._plan_of([(rows, ids)], gradient).weight_gradient(found.slots, ids.offsets, gradient, out)
        return out

    def sum(self, saved: Sequence[SavedGradient], scale: float, out: Array) -> None:
        """Step rows of zeros."""
        assert isinstance(out, torch.Tensor)
        (runs,) = sort_groups(self._runtime.kernels, [([one.slots for one in saved], out.shape[0])])
        vectors, gradients = Vectors(out.zero_(), out.shape[1]), kernel_gradients(saved)
        update_many(self._runtime.kernels, [Step(vectors, (), runs, gradients, Rule("sgd", -scale))])

    def step(self, groups: Sequence[OptimizerStep]) -> None:
        """Sort the entries of all unsorted groups at once, then step all groups in few launches."""
        kernels, runs_G = self._runtime.kernels, [_sorted_runs(one) for one in groups]
        unsorted = [
            ([saved.slots for saved in one.saved], one.rows.vectors.values.shape[0])
            for one, runs in zip(groups, runs_G, strict=True)
            if runs is None
        ]
        newly_sorted = iter(sort_groups(kernels, unsorted) if unsorted else ())
        steps = [
            one.kernel_step(kernel_gradients(one.saved), next(newly_sorted) if runs is None else runs)
            for one, runs in zip(groups, runs_G, strict=True)
        ]
        plans = [
            self._kept((one.rows.place(kernels.describe), step.rule.widths), partial(plan_rows, kernels, step))
            for one, step in zip(groups, steps, strict=True)
        ]
        update_many(kernels, steps, plans)

    def take_overflow(self) -> None:
        """Return None: reading a flag would wait for the GPU."""
        return None  # noqa: RET501 - the protocol's answer

    def index_bytes(self, num_keys: int, num_tables: int) -> int:
        """Return the bytes of places and of a slice of keys."""
        return index_bytes(num_keys, num_tables)

    def key_index(self, num_keys: int, table_ids: NDArray[np.uint64]) -> CudaKeyIndex | None:
        """Allocate it from torch's caching allocator; None if that is out of memory."""
        if self.index_bytes(num_keys, table_ids.size) > self._runtime.memory_info()[0]:
            return None
        try:
            return CudaKeyIndex(self._runtime, num_keys, table_ids)
        except torch.OutOfMemoryError:
            return None

    # -- moving rows ---------------------------------------------------------------------------------------

    def bytes_of(self, layouts: Sequence[Layout]) -> int:
        """Return the bytes of fields, two arrays of slots, one of keys and the streams, aligned to cache lines."""
        return sum(
            sum(aligned(4 * n.rows * width) for width in n.widths)
            + 2 * aligned(4 * n.positions) + aligned(8 * n.positions) + aligned(8 * n.rows * n.rounded)
            for n in layouts
        )  # fmt: skip

    def reserve(self, layouts: Sequence[Layout], what: str) -> list[RowArrays]:
        """Allocate once, from torch's caching allocator."""
        total, at = self.bytes_of(layouts), 0
        memory = self._allocate(total)
        if memory is None:
            gc.collect()  # reference cycles may hold memory
            memory = self._allocate(total)
        if memory is None:
            free, whole = self._runtime.memory_info()
            raise BudgetError(
                f"{what} need {format_bytes(total)} on the {self._runtime.name}, which has {format_bytes(free)} of "
                f"{format_bytes(whole)} free: cut passes again with a device budget of at most {free} bytes, minus the "
                "needs of the dense model and its batches"
            )

        def cut(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            nonlocal at
            num_bytes = rows * width * dtype.itemsize
            part = memory[at : at + num_bytes].view(dtype)
            at += aligned(num_bytes)
            return part

        def cut_all(n: Layout) -> RowArrays:
            fields = tuple(cut(n.rows, width, torch.float32).view(n.rows, width) for width in n.widths)
            slots, load_slots = (cut(n.positions, 1, torch.int32) for _ in range(2))
            keys = cut(n.positions, 1, torch.int64)  # of new rows, which are made after all others were dumped
            streams = cut(n.rows if n.rounded else 0, 1, torch.uint64)
            return RowArrays(fields, slots, load_slots, keys, keys.view(torch.int32), streams)

        return [cut_all(n) for n in layouts]

    def _allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Return ``num_bytes`` bytes, or None if the device does not have them."""
        if num_bytes > self._runtime.memory_info()[0]:
            return None
        try:
            return self._runtime.tensor((max(num_bytes, 1),), torch.uint8)  # a rank may own no row at all
        except torch.OutOfMemoryError:
            return None

    def scratch(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return pinned memory."""
        scratch: NDArray[np.uint8] = self._runtime.pinned((num_bytes,), torch.uint8).numpy()
        return scratch

    def place(self, indices: NDArray[np.int32], into: Array) -> Array:
        """Copy them, without waiting if they are pinned."""
        return self._copy(indices, into, lasting=True)

    def pieces(self, row_floats: int) -> Pieces:
        """Return an empty collection; pieces are in pinned host memory, which kernels access over the link."""
        return Pieces(row_floats, self._pinned_memory)

    def _pinned_memory(self, data: NDArray[np.float32]) -> View:
        return view_of(data)._replace(address=self._runtime.address_of(data))

    def pack(self, fields: tuple[Array, ...], slots: Array, order: Array, pieces: Pieces) -> None:
        """Launch it once for all fields and pieces."""
        cuda_rows.pack(self._runtime.kernels, fields, slots, order, pieces)

    def unpack(self, fields: tuple[Array, ...], slots: Array, pieces: Pieces) -> None:
        """Launch it once for all fields and pieces."""
        cuda_rows.unpack(self._runtime.kernels, fields, slots, pieces)

    def generates(self, table: Table) -> bool:
        """True if the kernel has the CPU's bits: not for normal numbers, which take logarithms, or column slices."""
        return table.whole_dim is None and isinstance(table.initializer, (Uniform, Zeros, Constant))

    def generate(self, table: Table, keys: NDArray[np.int64], vectors: Array, slots: Array | None,
                 key_buffer: Array | None) -> None:  # fmt: skip
        """Launch it once."""
        how = table.table_id, table.seed, *initializer_code(table.initializer)
        out = vectors_of(vectors, table.dim, table.dtype)
        initial_rows(self._runtime.kernels, self._keys(keys, key_buffer), *how, out, slots)

    def write_streams(self, table: Table, keys: NDArray[np.int64], streams: Array, slots: Array | None,
                  key_buffer: Array | None) -> None:  # fmt: skip
        """Launch it once."""
        seed = table.seed ^ table.first_column
        set_streams(self._runtime.kernels, streams, slots, self._keys(keys, key_buffer), table.table_id, seed)

    def set_rows(self, field: Array, slots: Array | None, value: float) -> None:
        """Launch it once."""
        if slots is None:
            field.fill_(value)
        else:
            fill_rows(self._runtime.kernels, value, field, slots)

    def write(self, rows: Array, fill: Callable[[NDArray[np.float32], slice], None]) -> None:
        """Let ``fill`` write to pinned memory, 16 MiB at a time."""
        count, width = rows.shape
        step = max(1, _CHUNK_BYTES // (4 * max(1, width)))
        buffer = self._runtime.pinned((min(step, count), width), torch.float32)
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            words = buffer[: part.stop - first]
            fill(words.numpy(), part)
            self._runtime.copy(words, rows[part])

    def read(self, field: Array, slots: NDArray[np.int32] | slice) -> NDArray[np.float32]:
        """Gather on the device and copy. Waits."""
        if isinstance(slots, slice):
            found = field[slots]
        else:
            found = self._runtime.tensor((slots.size, field.shape[1]), torch.float32)
            device_slots = self._copy(slots, self._runtime.tensor((slots.size,), torch.int32))
            gather(self._runtime.kernels, [Gathered(Vectors(field, field.shape[1]), device_slots, found)])
        return self._runtime.download(found)

    def _keys(self, keys: NDArray[np.int64], buffer: Array | None) -> Array:
        """Copy keys to the first elements of ``buffer``, see `generate`; None: to memory outside of the budget."""
        to = self._runtime.tensor(keys.shape, torch.int64) if buffer is None else buffer
        return self._copy(keys, to, lasting=buffer is not None)

    def _copy(self, host: NDArray[Any], to: Array, *, lasting: bool = False) -> Array:
        """Copy a host array to the first elements of a tensor; it may change once this returns, or is ``lasting``."""
        part = to[: host.size]
        source = torch.from_numpy(host if host.flags.writeable else host.copy())
        self._runtime.copy(source, part, lasting=lasting and host.flags.writeable)
        return part


def _looked_up(ids: LookupIds, slots: Array, argmax: Array, places: Array | None, scales: Array) -> LookedUp:
    """Return the result of a lookup, with the order of its slots if it is known."""
    return LookedUp(slots, None if ids.runs is None else SortedSlots(slots, ids.runs), argmax, places, scales)


def _sorted_runs(step: OptimizerStep) -> Runs | None:
    """Return the order of the entries of a step if exactly these were sorted together."""
    first: FeatureRuns | None = step.saved[0].pairs
    if first is None or len(step.saved) != first.num_parts:
        return None
    for number, saved in enumerate(step.saved):
        pairs: FeatureRuns | None = saved.pairs
        if pairs is None or pairs.runs is not first.runs or pairs.number != number:
            return None
    runs: Runs = first.runs
    if runs.size != sum(saved.slots.shape[0] for saved in step.saved):
        return None
    return runs._replace(slot_of=step.rows.slot_of_local)
