"""A GPU: torch tensors, the CUDA kernels, host memory that both sides see."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.kernels import cuda_rounding, cuda_sorting, cuda_update
from tiercache.kernels.arrays import NONE_F4, NONE_I4
from tiercache.kernels.cuda_gathering import Gathered, gather_many, map_slots
from tiercache.kernels.cuda_pooling import MAX, Bags, pool_many, weight_gradient
from tiercache.kernels.cuda_vectors import Vectors
from tiercache.kernels.optimizers import ADAGRAD, ROWWISE, adam_rule, make_rule
from tiercache.kernels.optimizers import SGD as PLAIN
from tiercache.processors import cuda_key_index
from tiercache.processors.cuda_mover import CudaMover
from tiercache.processors.gpu import TORCH_DTYPES
from tiercache.processors.pinned_delivery import PinnedDelivery
from tiercache.processors.runs import Run
from tiercache.store.table import (
    SGD,
    Adagrad,
    Adam,
    RowWiseAdagrad,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import DTypeLike, NDArray

    from tiercache.kernels.optimizers import Rule
    from tiercache.processors.entries import Array, Entries, GroupStep, Pending, Wanted
    from tiercache.processors.gpu import Gpu
    from tiercache.store.table import Table
    from tiercache.tiers.rows import GroupRows

_CORES = 8  # from which on two more threads are nothing
_SUMS = -1
"""Whose scratch is that of sums; groups count from 0."""


class CudaProcessor:
    """Lookups and steps by the CUDA kernels on torch's current stream: at most one launch for all groups."""

    ahead = 4 if len(os.sched_getaffinity(0)) >= _CORES else 2  # a thread each: one may take longer than some steps do
    queues = True

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self.device, self.mover = gpu, gpu.device, CudaMover(gpu)
        self.name = f"{gpu.name} (CUDA)"
        self._sorting: dict[int, cuda_sorting.SortBuffers] = {}
        self._updates: dict[int, cuda_update.UpdateBuffers] = {}

    @property
    def scratch_bytes(self) -> int:
        """Buffers of sorting and stepping; outputs and gradients are torch's."""
        sorting = sum(held.nbytes for held in self._sorting.values())
        return sorting + sum(held.nbytes for held in self._updates.values())

    def drop_scratch(self) -> None:
        """Give it to torch's caching allocator."""
        self._sorting.clear()
        self._updates.clear()

    def exchanging(self) -> AbstractContextManager[None]:
        """Do it on the stream of exchanges."""
        return self._gpu.exchanging()

    def exchanged(self) -> Any:
        """Note how far that has come."""
        return self._gpu.exchanged()

    def receive(self, exchanged: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Order the current stream behind it."""
        self._gpu.receive(exchanged, tensors)

    def bounds(self, values: Array) -> Callable[[], tuple[int, int]]:
        """Look on the device; who asks waits for no more than that."""
        if not values.shape[0]:
            return lambda: (0, -1)
        fetched = self._gpu.fetch(torch.stack(values.aminmax()))

        def found() -> tuple[int, int]:
            low, high = fetched().tolist()
            return low, high

        return found

    def delivery(self) -> PinnedDelivery:
        """Return one by way of pinned memory."""
        return PinnedDelivery(self._gpu)

    def prepare(self, tables: Sequence[Table]) -> None:
        """Compile the kernels for this GPU, once."""
        self._gpu.prepare()

    def array(self, tensor: torch.Tensor) -> Array:
        """Return the tensor."""
        return tensor.detach().contiguous()

    def tensor(self, array: Array) -> torch.Tensor:
        """Return the tensor."""
        assert isinstance(array, torch.Tensor)
        return array

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Take it from torch's caching allocator."""
        return self._gpu.tensor(shape, TORCH_DTYPES[np.dtype(dtype)])

    def bring(self, array: NDArray[Any]) -> Array:
        """Copy it to pinned memory, and from there."""
        pinned = self._gpu.pinned(array.shape, TORCH_DTYPES[array.dtype])
        pinned.numpy()[...] = array
        return self._gpu.upload(pinned)

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[list[Run], Array]:
        """Join them in pinned memory, and copy from there."""
        pinned = self._gpu.pinned((sum(array.size for array in arrays),), torch.int32)
        host: NDArray[np.int32] = pinned.numpy()
        np.concatenate(arrays, out=host)
        return [Run(0, len(arrays), host)], self._gpu.upload(pinned)

    def together(self, arrays: Sequence[Array]) -> Array:
        """Join them on the device."""
        return arrays[0] if len(arrays) == 1 else torch.cat(tuple(arrays))

    def index_bytes(self, num_keys: int, num_tables: int) -> int:
        """Return those of places and of the slice of keys that is on its way."""
        return cuda_key_index.bytes_for(num_keys, num_tables)

    def key_index(self, num_keys: int, table_ids: NDArray[np.uint64]) -> cuda_key_index.CudaKeyIndex | None:
        """Take it from torch's caching allocator; None where that has not so much."""
        if self.index_bytes(num_keys, table_ids.size) > self._gpu.room()[0]:
            return None
        try:
            return cuda_key_index.CudaKeyIndex(self._gpu, num_keys, table_ids)
        except torch.OutOfMemoryError:
            return None

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Fill pinned memory where all are the data's, else the device's."""
        if all(isinstance(values, np.ndarray) for _, _, values in parts):
            pinned = self._gpu.pinned((size,), torch.float32).fill_(1.0)
            for first, last, values in parts:
                pinned.numpy()[first:last] = values
            return self._gpu.upload(pinned)
        out = self._gpu.tensor((size,), torch.float32).fill_(1.0)
        for first, last, values in parts:
            out[first:last].copy_(self.bring(values) if isinstance(values, np.ndarray) else values)
        return out

    def pool(self, parts: Sequence[tuple[GroupRows, Entries]], out: Array) -> None:
        """Pool all groups in one launch."""
        groups = []
        for rows, e in parts:
            size, vectors = int(e.starts[-1]), _vectors(rows)
            e.slots = self.empty((size,), np.int32)
            if e.offsets is None:
                groups.append(Bags(vectors, rows.slot_of_local, e.ids, e.bases, e.cols, e.slots))
                continue
            if (e.modes == MAX).any():
                e.argmax = self.empty(tuple(out.shape), np.int32)
            e.places, e.scales = self.empty((size,), np.int64), self.empty((size,), np.float32)
            groups.append(
                Bags(
                    vectors, rows.slot_of_local, e.ids, e.bases, e.cols, e.slots, e.offsets, e.weights, e.modes,
                    e.argmax, e.places, e.scales,
                )
            )  # fmt: skip
        pool_many(self._gpu.kernels, groups, out)

    def gather(self, parts: Sequence[tuple[GroupRows, Entries]]) -> list[Array]:
        """Map one group's ids after the other, and gather all features of all groups in one launch."""
        found: list[Gathered] = []
        for rows, e in parts:
            vectors, dim, starts = _vectors(rows), rows.vectors.dim, e.starts.tolist()
            e.slots = self.empty((starts[-1],), np.int32)
            map_slots(self._gpu.kernels, e.ids, e.bases, e.starts, rows.slot_of_local, e.slots)
            found.extend(
                Gathered(vectors, e.slots[first:last], self.empty((last - first, dim), np.float32))
                for first, last in pairwise(starts)
            )
        gather_many(self._gpu.kernels, found)
        return [one.out for one in found]

    def find(self, wanted: Sequence[Wanted]) -> None:
        """Map one group's after the other, and gather all in one launch."""
        for rows, positions, slots, _ in wanted:
            starts = np.array([0, positions.shape[0]], dtype=np.int64)
            map_slots(
                self._gpu.kernels, positions, np.zeros(1, dtype=np.int64), starts, rows.slot_of_local, slots
            )  # fmt: skip
        found = [Gathered(_vectors(one.rows), one.slots, one.out) for one in wanted if one.out is not None]
        if found:
            gather_many(self._gpu.kernels, found)

    def named(self, slots: Sequence[Array], num_slots: int) -> NDArray[np.bool_] | None:
        """Mark them on the device, and wait for the marks."""
        seen = self._gpu.tensor((num_slots,), torch.int32).zero_()
        for some in slots:
            seen[some.long()] = 1
        marks: NDArray[np.bool_] = (seen != 0).cpu().numpy()  # synchronize!
        return None if marks.all() else marks

    def weight_gradient(self, rows: GroupRows, entries: Entries, gradient: Array) -> Array:
        """Launch it once."""
        out = self.empty((int(entries.starts[-1]),), np.float32)
        weight_gradient(
            self._gpu.kernels, _vectors(rows), entries.slots, entries.offsets, entries.modes, entries.cols,
            gradient, out,
        )  # fmt: skip
        return out

    def step(self, groups: Sequence[GroupStep], number: int) -> None:
        """Sort group by group, then step all in one launch for each optimizer and one more."""
        kernels, steps = self._gpu.kernels, []
        for one in groups:
            vectors, states = _vectors(one.rows), one.rows.states
            sorting, updates = self._scratch(one.group.index)
            slots, gradients = self._together(one.pending)
            pairs = cuda_sorting.sort_slots(kernels, slots, vectors.words.shape[0], sorting)
            first, second = (states[i] if i < len(states) else None for i in range(2))
            noise = cuda_rounding.NO_ROUNDING
            if vectors.dtype != "float32":
                noise = cuda_rounding.make_rounding(kernels, one.rows.streams, number)
            rule = _rule(one, number)
            steps.append(cuda_update.Step(vectors, first, second, pairs, gradients, updates, rule, noise))
        cuda_update.update_many(kernels, steps)

    def sum(self, pending: list[Pending], scale: float, out: Array) -> None:
        """Step rows of zeros."""
        assert isinstance(out, torch.Tensor)
        slots, gradients = self._together(pending)
        sorting, updates = self._scratch(_SUMS)
        pairs = cuda_sorting.sort_slots(self._gpu.kernels, slots, out.shape[0], sorting)
        rule, vectors = make_rule(PLAIN, -scale, 0.0, 0.0), Vectors(out.zero_(), out.shape[1], "float32")
        step = cuda_update.Step(vectors, None, None, pairs, gradients, updates, rule, cuda_rounding.NO_ROUNDING)
        cuda_update.update_many(self._gpu.kernels, [step])

    def _scratch(self, group: int) -> tuple[cuda_sorting.SortBuffers, cuda_update.UpdateBuffers]:
        if group not in self._sorting:
            self._sorting[group] = cuda_sorting.SortBuffers(self._gpu.kernels)
            self._updates[group] = cuda_update.UpdateBuffers(self._gpu.kernels)
        return self._sorting[group], self._updates[group]

    def _together(self, pending: list[Pending]) -> tuple[Array, cuda_update.Gradients]:
        """Return all entries of a group as one step's; one lookup is passed on as it is."""
        if len(pending) == 1:
            one = pending[0]
            gradient = one.gradient.reshape(one.num_samples, one.width)
            if one.places is None:
                return one.slots, cuda_update.one_id_gradients(self._gpu.kernels, gradient, one.cols)
            argmax = one.argmax.reshape(gradient.shape) if one.argmax.shape[0] else NONE_I4
            return one.slots, cuda_update.bag_gradients(self._gpu.kernels, gradient, one.places, one.scales, argmax)
        scaled, argmaxed = any(p.scales.shape[0] for p in pending), any(p.argmax.shape[0] for p in pending)
        shared: dict[tuple[int, int], int] = {}  # lookups of one module share their gradient
        flats, places, scales, argmaxes, size, first = [], [], [], [], 0, 0
        for p in pending:
            place = p.gradient.data_ptr(), p.gradient.shape[0]
            if place in shared and not p.argmax.shape[0]:  # an element of the gradient has one maximum
                start = shared[place]
            else:
                shared.setdefault(place, size)
                start, size = size, size + p.gradient.shape[0]
                flats.append(p.gradient)
                argmaxes.append(
                    p.argmax + first if p.argmax.shape[0] else self._gpu.tensor((size - start,), torch.int32).fill_(-1)
                )
            mine = self.places(p)
            places.append(torch.where(mine >= 0, mine + start, mine - start))  # ~(x + start) == ~x - start
            count = p.slots.shape[0]
            scales.append(p.scales if p.scales.shape[0] else self._gpu.tensor((count,), torch.float32).fill_(1.0))
            first += count
        gradients = cuda_update.bag_gradients(
            self._gpu.kernels, torch.cat(flats).reshape(1, -1), torch.cat(places),
            torch.cat(scales) if scaled else NONE_F4,
            torch.cat(argmaxes).reshape(1, -1) if argmaxed else NONE_I4,
        )  # fmt: skip
        return torch.cat([p.slots for p in pending]), gradients

    def places(self, pending: Pending) -> torch.Tensor:
        """Write them to a tensor where there are none."""
        if pending.places is not None:
            assert isinstance(pending.places, torch.Tensor)
            return pending.places
        samples = torch.arange(pending.num_samples, device=self.device) * pending.width
        return (self.tensor(self.bring(pending.cols))[:, None] + samples[None, :]).reshape(-1)

    def random_state(self) -> torch.Tensor | None:
        """Copy that of torch's generator of the device."""
        return self._gpu.random_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Put it back."""
        self._gpu.set_random_state(state)


def _vectors(rows: GroupRows) -> Vectors:
    """Return the vectors of rows as the kernels take them."""
    values, dim, is_half = rows.vectors
    if values.dtype == torch.float32:
        return Vectors(values, dim, "float32")
    return Vectors(values.view(torch.float32), dim, "float16" if is_half else "bfloat16")


def _rule(one: GroupStep, number: int) -> Rule:
    decay, rate = one.group.optimizer.decay, one.learning_rate
    match one.group.optimizer:
        case Adagrad(eps=eps):
            return make_rule(ADAGRAD, rate, eps, decay)
        case RowWiseAdagrad(eps=eps):
            return make_rule(ROWWISE, rate, eps, decay)
        case Adam(beta1=beta1, beta2=beta2, eps=eps):
            return adam_rule(number, rate, beta1, beta2, eps, decay)
        case SGD():
            return make_rule(PLAIN, rate, 0.0, decay)
    raise AssertionError(f"there is no kernel for {one.group.optimizer}")
