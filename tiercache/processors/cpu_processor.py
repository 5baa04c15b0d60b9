"""The CPU: NumPy arrays and numba kernels, in place and without copies."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.kernels.arrays import NONE_F4, NONE_I4
from tiercache.kernels.key_index import bytes_for
from tiercache.kernels.pooling import (
    MAX,
    can_spread,
    gather,
    map_slots,
    pool_bags,
    pool_one,
    spread_one,
    weight_gradient,
)
from tiercache.kernels.rounding import make_rounding
from tiercache.kernels.sorting import SortBuffers, sort_slots
from tiercache.kernels.unique import mark_slots
from tiercache.kernels.update import (
    Gradients,
    UpdateBuffers,
    bag_gradients,
    one_id_gradients,
    sum_rows,
    update_adagrad,
    update_adam,
    update_rowwise_adagrad,
    update_sgd,
)
from tiercache.processors.buffers import POOL
from tiercache.processors.cpu_mover import CpuMover
from tiercache.processors.delivery import HostDelivery
from tiercache.processors.entries import SortedSlots
from tiercache.processors.host_key_index import HostKeyIndex
from tiercache.processors.runs import Run, runs_of
from tiercache.store.table import SGD, Adagrad, Adam, RowWiseAdagrad

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import DTypeLike, NDArray

    from tiercache.processors.entries import Array, Entries, GroupStep, Pending, Wanted
    from tiercache.store.table import Table
    from tiercache.tiers.rows import GroupRows

_FROM_0 = np.zeros(1, dtype=np.int64)
_MANY_IDS = 1 << 18


class CpuProcessor:
    """Lookups and steps by the numba kernels, with as many threads as torch has. For the training thread."""

    name = ""
    device = torch.device("cpu")
    ahead = 0  # a thread beside those of the kernels would take their cores
    queues = False

    def __init__(self) -> None:
        self.mover = CpuMover()
        self.drop_scratch()

    def drop_scratch(self) -> None:
        """Begin with empty buffers; those of the pool are of all trainings."""
        self._sorting, self._updates = SortBuffers(), UpdateBuffers()

    @property
    def scratch_bytes(self) -> int:
        """Buffers of the pool, which all trainings of a process share."""
        return POOL.num_bytes

    def exchanging(self) -> AbstractContextManager[None]:
        """Nothing: the thread that calls does it."""
        return nullcontext()

    def exchanged(self) -> None:
        """Nothing: it is done."""

    def receive(self, exchanged: None, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing: they are."""

    def bounds(self, values: Array) -> Callable[[], tuple[int, int]]:
        """Look at once."""
        found = (int(values.min()), int(values.max())) if values.size else (0, -1)
        return lambda: found

    def delivery(self) -> HostDelivery:
        """Return one that has nothing to do."""
        return HostDelivery(self)

    def prepare(self, tables: Sequence[Table]) -> None:
        """Nothing: the kernels are compiled by `kernels.compile.prepare`, whatever the device."""

    def array(self, tensor: torch.Tensor) -> Array:
        """Return its memory."""
        return tensor.detach().contiguous().numpy()

    def tensor(self, array: Array) -> torch.Tensor:
        """Return its memory."""
        return torch.from_numpy(array)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Take it from the pool."""
        return POOL.take(shape, dtype)

    def bring(self, array: NDArray[np.generic]) -> Array:
        """Return it as it is."""
        return array

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[list[Run], Array]:
        """Join them where they do not lie so already; few ids are copied in less time than that is seen."""
        size = sum(array.size for array in arrays)
        runs = runs_of(arrays) if len(arrays) == 1 or size > _MANY_IDS else []
        joined = runs[0].values if len(runs) == 1 else np.concatenate(arrays)
        return [Run(0, len(arrays), joined)], joined

    def together(self, arrays: Sequence[Array]) -> Array:
        """Join them."""
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def index_bytes(self, num_keys: int, num_tables: int) -> int:
        """Return those of the kernels' index."""
        return bytes_for(num_keys, num_tables)

    def key_index(self, num_keys: int, table_ids: NDArray[np.uint64]) -> HostKeyIndex:
        """Make the kernels' index."""
        return HostKeyIndex(num_keys, table_ids)

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Fill a fresh array."""
        out = np.ones(size, dtype=np.float32)
        for first, last, values in parts:
            out[first:last] = values
        return out

    def pool(self, parts: Sequence[tuple[GroupRows, Entries]], out: Array) -> None:
        """Pool group after group."""
        for rows, e in parts:
            e.slots = POOL.take((e.ids.size,), np.int32)
            if e.offsets is None:
                if e.trained and can_spread(out, e.cols, rows.vectors.dim):
                    map_slots(e.ids, e.bases, e.starts, rows.slot_of_local, e.slots)
                    e.sorted = SortedSlots(e.slots, POOL.take((e.ids.size,), np.uint64))
                    e.sorted.pairs[:] = sort_slots(e.slots, rows.vectors.values.shape[0], self._sorting)
                    spread_one(rows.vectors, e.sorted.pairs, e.cols, out.shape[0], out)
                else:
                    pool_one(
                        rows.vectors, rows.slot_of_local, e.ids, e.bases, e.cols, out.shape[0], out, e.slots
                    )  # fmt: skip
                continue
            if (e.modes == MAX).any():
                e.argmax = POOL.take(out.shape, np.int32)
            e.places = POOL.take((e.ids.size,), np.int64)
            e.scales = POOL.take((e.ids.size,), np.float32)
            pool_bags(
                rows.vectors, rows.slot_of_local, e.ids, e.bases, e.starts, e.offsets, e.weights, e.modes, e.cols,
                out, e.slots, e.argmax, e.places, e.scales,
            )  # fmt: skip

    def gather(self, parts: Sequence[tuple[GroupRows, Entries]]) -> list[Array]:
        """Gather feature after feature."""
        outs = []
        for rows, e in parts:
            e.slots = POOL.take((e.ids.size,), np.int32)
            map_slots(e.ids, e.bases, e.starts, rows.slot_of_local, e.slots)
            for first, last in zip(e.starts[:-1], e.starts[1:], strict=True):
                out = POOL.take((int(last - first), rows.vectors.dim), np.float32)
                gather(rows.vectors, e.slots[first:last], out)
                outs.append(out)
        return outs

    def find(self, wanted: Sequence[Wanted]) -> None:
        """Find one group's after the other."""
        for rows, positions, slots, out in wanted:
            map_slots(positions, _FROM_0, np.array([0, positions.size]), rows.slot_of_local, slots)
            if out is not None:
                gather(rows.vectors, slots, out)

    def named(self, slots: Sequence[Array], num_slots: int) -> NDArray[np.bool_] | None:
        """Mark them one after the other, until all are."""
        seen, left = np.zeros(num_slots, dtype=np.bool_), num_slots
        for some in slots:
            left -= mark_slots(some, seen)
        return seen if left else None

    def weight_gradient(self, rows: GroupRows, entries: Entries, gradient: Array) -> Array:
        """Write it to a fresh array."""
        assert entries.offsets is not None, "features with weights are looked up as bags"
        out = np.empty(entries.ids.size, dtype=np.float32)
        weight_gradient(
            rows.vectors, entries.slots, entries.starts, entries.offsets, entries.modes, entries.cols, gradient, out
        )  # fmt: skip
        return out

    def places(self, pending: Pending) -> Array:
        """Write them to a fresh array where there are none."""
        return _places_of(pending)

    def sum(self, pending: list[Pending], scale: float, out: Array) -> None:
        """Write the sums, reading nothing of ``out``."""
        slots, gradients = _together(pending, out.shape[1])
        pairs = self._sorted(pending, slots, out.shape[0])
        sum_rows(out, pairs, gradients, self._updates, scale=scale)

    def step(self, groups: Sequence[GroupStep], number: int) -> None:
        """Step group after group."""
        for one in groups:
            slots, gradients = _together(one.pending, one.group.dim)
            vectors, states = one.rows.vectors, one.rows.states
            pairs, buffers = self._sorted(one.pending, slots, vectors.values.shape[0]), self._updates
            shared: dict[str, Any] = {"learning_rate": one.learning_rate, "decay": one.group.optimizer.decay}
            if one.rows.streams.size:
                shared["rounding"] = make_rounding(one.rows.streams, number)
            match one.group.optimizer:
                case SGD():
                    update_sgd(vectors, pairs, gradients, buffers, **shared)
                case Adagrad(eps=eps):
                    update_adagrad(vectors, states[0], pairs, gradients, buffers, eps=eps, **shared)
                case RowWiseAdagrad(eps=eps):
                    update_rowwise_adagrad(vectors, states[0], pairs, gradients, buffers, eps=eps, **shared)
                case Adam(beta1=beta1, beta2=beta2, eps=eps):
                    shared |= {"step": number, "beta1": beta1, "beta2": beta2, "eps": eps}
                    update_adam(vectors, states[0], states[1], pairs, gradients, buffers, **shared)

    def _sorted(self, pending: list[Pending], slots: NDArray[np.int32], num_slots: int) -> NDArray[np.uint64]:
        """Return the slots of all entries sorted: by the lookup, where there was one and it did that."""
        pairs = pending[0].pairs if len(pending) == 1 else None
        if pairs is None or (pairs.size and int(pairs[-1]) >> 32 >= num_slots):  # the sort says which slot is wrong
            return sort_slots(slots, num_slots, self._sorting)
        return np.asarray(pairs)

    def random_state(self) -> torch.Tensor | None:
        """None: a commit keeps the CPU's generators anyway."""
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        """Nothing: there is no generator more."""


def _places_of(pending: Pending) -> NDArray[np.int64]:
    """Return where each entry's gradient begins, written out."""
    if pending.places is not None:
        return np.asarray(pending.places)
    samples = np.arange(pending.num_samples, dtype=np.int64) * pending.width
    return (pending.cols[:, None] + samples[None, :]).reshape(-1)


def _together(pending: list[Pending], dim: int) -> tuple[NDArray[np.int32], Gradients]:
    """Return all entries of a group as one step's; one lookup is passed on as it is."""
    if len(pending) == 1:
        one = pending[0]
        gradient = one.gradient.reshape(one.num_samples, one.width)
        if one.places is None:
            return one.slots, one_id_gradients(gradient, one.cols)
        return one.slots, bag_gradients(gradient, one.places, one.scales, one.argmax)
    slots = np.concatenate([p.slots for p in pending])
    shared: dict[tuple[int, int], int] = {}  # lookups of one module share their gradient
    flats: list[NDArray[np.float32]] = []
    bases, size = [], 0
    for p in pending:
        place = p.gradient.ctypes.data, p.gradient.size
        if place in shared and not p.argmax.size:  # a maximum marks its places, which another may have marked
            bases.append(shared[place])
            continue
        shared.setdefault(place, size)
        bases.append(size)
        flats.append(p.gradient)
        size += p.gradient.size
    flat = flats[0] if len(flats) == 1 else np.concatenate(flats)
    offsets = np.empty(slots.size, dtype=np.int64)
    scaled, argmaxed = any(p.scales.size for p in pending), any(p.argmax.size for p in pending)
    scales = np.ones(slots.size, dtype=np.float32) if scaled else NONE_F4
    argmax = np.full(flat.size, -1, dtype=np.int32) if argmaxed else NONE_I4
    first = 0
    for p, start in zip(pending, bases, strict=True):
        last = first + p.slots.size
        mine = _places_of(p)
        offsets[first:last] = np.where(mine >= 0, mine + start, mine - start)  # ~(x + start) == ~x - start
        if p.scales.size:
            scales[first:last] = p.scales
        if p.argmax.size:
            places = np.unique(~mine[mine < 0])[:, None] + np.arange(dim)
            argmax[start + places] = p.argmax[places] + first
        first = last
    return slots, bag_gradients(flat.reshape(1, -1), offsets, scales, argmax)
