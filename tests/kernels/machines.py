"""Machines that run the kernels: the CPU, or the CUDA sources on a device, with the same calls and arguments."""

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from tiercache.kernels.arrays import NONE_I8, View
from tiercache.kernels.cpu import gathering, initial, key_index, pooling, rounding, rows, sorting, update
from tiercache.kernels.cuda import gathering as cuda_gathering
from tiercache.kernels.cuda import initial as cuda_initial
from tiercache.kernels.cuda import key_index as cuda_key_index
from tiercache.kernels.cuda import rows as cuda_rows
from tiercache.kernels.cuda.pooling import Features, Ids, PoolPlan
from tiercache.kernels.cuda.sorting import STRETCH, Runs, sort_groups
from tiercache.kernels.cuda.update import update_many
from tiercache.kernels.pieces import Pieces
from tiercache.kernels.step import Gradients, Step, Vectors
from tiercache.store.bits import from_bits, to_bits

F4 = np.float32


def narrow(values: NDArray[np.float32], dtype: str) -> Vectors:
    """Return numbers (S, D), rounded to the nearest, as kernels hold 16-bit numbers: rows begin at a word."""
    slots, dim = values.shape
    bits = np.zeros((slots, dim + dim % 2), np.uint16)
    bits[:, :dim] = to_bits(values, dtype)
    return Vectors.of(bits.view(np.float32), dim, dtype)


def numbers(held: Vectors, dtype: str) -> NDArray[np.float32]:
    if dtype == "float32":
        return np.array(held.values)
    return np.array(from_bits(np.ascontiguousarray(held.values[:, : held.dim]), dtype))


class Machine:
    place: Any

    def vectors(self, values: Any, dtype: str = "float32") -> Vectors:
        """Return numbers (S, D), rounded to the nearest, as kernels hold them."""
        if dtype == "float32":
            return Vectors(self.place(values), values.shape[1])
        held = narrow(values, dtype)
        return held._replace(values=self.place(held.values))

    def one_id(self, gradient: NDArray[np.float32], cols: NDArray[np.int64] | None = None) -> Gradients:
        """Describe the gradient (N, T) of a lookup of one id a sample; without columns that of rows one by one."""
        cols = np.zeros(1, np.int64) if cols is None else cols
        return Gradients(self.place(gradient.reshape(-1)), *gradient.shape, cols)

    def of_bags(
        self, gradient: NDArray[np.float32], done: dict[str, Any], cols: NDArray[np.int64] = NONE_I8
    ) -> Gradients:
        """Describe the gradient (N, T) of a lookup of bags by what that wrote; ``cols``: their columns, if known."""
        flat, argmax = self.place(gradient.reshape(-1)), done["argmax"].reshape(-1)
        offsets, scales = done["entry_offset"], done["entry_scale"]
        return Gradients(flat, *gradient.shape, cols, offsets=offsets, scales=scales, argmax=argmax)


class Cpu(Machine):
    """The numba kernels; sorts and steps in the same buffers again and again."""

    kind = "cpu"

    def __init__(self) -> None:
        self.sorting, self.updates = sorting.SortBuffers(), update.UpdateBuffers()

    def place(self, array: Any) -> Any:
        return np.array(array, order="C")

    def read(self, array: Any) -> Any:
        return array.copy()

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        rubbish = np.empty(shape, dtype)
        rubbish.reshape(-1).view(np.uint8)[...] = 0xA5
        return rubbish

    def ids(self, ids: NDArray[np.int32], _dtype: type) -> Any:
        return ids

    gather = staticmethod(gathering.gather)
    map_slots = staticmethod(gathering.map_slots)
    pool_one = staticmethod(gathering.pool_one)
    pool_bags = staticmethod(pooling.pool_bags)
    weight_gradient = staticmethod(pooling.weight_gradient)
    pack, unpack, pieces = staticmethod(rows.pack), staticmethod(rows.unpack), Pieces
    set_streams = staticmethod(rounding.set_streams)
    index = key_index.KeyIndex

    def sort(self, slots: Any, num_slots: int) -> Any:
        return sorting.sort_slots(slots, num_slots, self.sorting)

    def step(self, *steps: Step) -> None:
        for step in steps:
            update.step_rows(step, self.updates)

    def initial_rows(self, keys: Any, *how: Any) -> None:
        *others, vectors = how
        initial.initial_rows(keys, *others, vectors.values)


class Cuda(Machine):
    kind = "cuda"

    def __init__(self, device: Any) -> None:
        self.device, self.place, self.read, self.array = device, device.place, device.read, device.array
        self.pack, self.unpack = partial(cuda_rows.pack, device), partial(cuda_rows.unpack, device)
        self.set_streams = partial(cuda_initial.set_streams, device)
        self.initial_rows = partial(cuda_initial.initial_rows, device)
        self.index = partial(cuda_key_index.KeyIndex, device)

    def slice_of(self, values: NDArray[np.float32], first: int) -> torch.Tensor:
        """Return a copy of values (N, T): columns from ``first`` on of a wider tensor, between others."""
        wide = np.full((len(values), first + values.shape[1] + 2), np.nan, F4)
        wide[:, first:-2] = values
        return torch.as_tensor(self.place(wide))[:, first:-2]

    def ids(self, ids: NDArray[np.int32], dtype: type) -> Any:
        return self.place(ids.astype(dtype))

    def gather(self, vectors: Vectors, slots: Any, out: Any) -> None:
        cuda_gathering.gather(self.device, [cuda_gathering.Gathered(vectors, slots, out)])

    def map_slots(self, ids: Any, bases: Any, entry_starts: Any, slot_of_local: Any, slots: Any) -> None:
        mapped = cuda_gathering.Mapped(ids, bases, entry_starts, slot_of_local)
        none = self.vectors(np.zeros((1, 1), F4))
        cuda_gathering.gather(self.device, [cuda_gathering.Gathered(none, slots, None, mapped)])

    def pool(self, groups: list[tuple[Features, Ids]], out: Any) -> None:
        plan = PoolPlan(self.device, [features for features, _ in groups], out.shape[1])
        plan.pool([ids for _, ids in groups], out)

    def pool_one(self, vectors: Vectors, local: Any, ids: Any, bases: Any, cols: Any, out: Any, slots: Any) -> None:
        self.pool([(Features(vectors, local, bases, cols, np.zeros(cols.size, np.int8)), Ids(ids, slots))], out)

    def pool_bags(
        self, vectors: Vectors, local: Any, ids: Any, bases: Any, offsets: Any, weights: Any, modes: Any, cols: Any,
        out: Any, slots: Any, *written: Any,
    ) -> None:  # fmt: skip
        """Pool bags; ``written``: argmax, entry_offset and entry_scale."""
        features = Features(vectors, local, bases, cols, modes)
        self.pool([(features, Ids(ids, slots, offsets, weights, *written))], out)

    def weight_gradient(
        self, vectors: Vectors, slots: Any, offsets: Any, modes: Any, cols: Any, gradient: Any, out: Any
    ) -> None:
        bases, local = np.zeros(cols.size, np.int64), self.device.empty(1, np.int32)  # not read
        features = Features(vectors, local, bases, cols, modes)
        plan = PoolPlan(self.device, [features], gradient.shape[1])
        plan.weight_gradient(slots, offsets, gradient, out)

    def sort(self, slots: Any, num_slots: int) -> Any:
        (runs,) = sort_groups(self.device, [([slots], num_slots)])
        return runs

    def pairs(self, runs: Runs) -> NDArray[np.uint64]:
        """Return runs as pairs: slot << 32 | entry, after checking their other data."""
        words = self.read(runs.memory).view(np.uint32)
        begin = (runs.address - self.device.describe(runs.memory).address) // 4
        places = np.split(words[begin:], np.cumsum([2 * (runs.size + 1), runs.size, -(-runs.size // STRETCH) + 1]))
        entries, run_at = places[1], places[2].astype(np.int64)
        if not runs.size:
            return entries.astype(np.uint64)
        starts = places[0].copy().view(np.uint64)[: run_at[-1] + 1]
        first, slots = (starts & np.uint64(2**32 - 1)).astype(np.int64), starts >> np.uint64(32)
        assert first[0] == 0
        assert first[-1] == runs.size
        assert (np.diff(first) > 0).all()
        assert (np.diff(slots[:-1].astype(np.int64)) > 0).all(), "a run has one slot, and no other has it"
        run_of_place = np.repeat(np.arange(len(first) - 1), np.diff(first))
        assert np.array_equal(run_at[:-1], run_of_place[::STRETCH])
        return slots[run_of_place] << np.uint64(32) | entries

    def step(self, *steps: Step) -> None:
        update_many(self.device, steps)

    def pieces(self, row_floats: int) -> Pieces:
        """Return no pieces yet: they are in arrays of the device, or at a `View`."""

        def locate(data: Any) -> View:
            if isinstance(data, View):
                return data
            seen: View = self.device.describe(data)
            seen.check("data", (F4,), 1, written=False)
            return seen

        return Pieces(row_floats, locate)
