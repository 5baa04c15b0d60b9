"""Cases of the kernel benchmark: a batch's ids and slots, the rows of one dim and dtype, and the operations on them.

Legend: F features, N samples, E = F * N lookups, D dim, S slots, U distinct rows of a batch, P rows of a switch.
Vectors are float32, or 16-bit with their state in float32: then the names of operations end in `_bf16` or `_fp16`.
Lookups are uniform over the rows, so that caches help little; the batch of the updates follows a power law of 1.05.
`benchmarks.kernels` lists the bytes that each operation must move.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import tiercache as tc
from benchmarks.drawn_passes import permuted_power_law
from benchmarks.kernel_machines import Machine
from tiercache.kernels import step as stepping
from tiercache.kernels.arrays import NONE_F4
from tiercache.kernels.cpu.initial import UNIFORM
from tiercache.kernels.cpu.key_index import KeySet
from tiercache.kernels.cpu.pooling import MAX, MEAN, SUM
from tiercache.rows.backends.optimizer_step import rule_of
from tiercache.store.bits import to_bits
from tiercache.store.optimizer import Optimizer

DTYPES = {"float32": "", "bfloat16": "_bf16", "float16": "_fp16"}
"""Dtypes of vectors, and the suffixes of operations on them."""

RATE, BAG, PIECE_BYTES = 1e-6, 2, 4 << 20
_NO_ARGMAX = np.empty((0, 0), np.int32)
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": tc.optim.SGD(),
    "momentum": tc.optim.SGD(momentum=0.9),
    "adagrad": tc.optim.Adagrad(),
    "rowwise": tc.optim.RowWiseAdagrad(),
    "adam": tc.optim.Adam(),
    "rowwise_adam": tc.optim.RowWiseAdam(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of the batch and its tables."""

    num_samples: int
    rows: int
    """Rows of each table."""
    dims: tuple[int, ...] = (16, 32, 64, 128)
    num_features: int = 26
    moved_rows: int = 1_000_000
    """Upper limit of P."""
    samples: int = 7
    """Timed samples of each operation; the median is reported."""

    @property
    def num_entries(self) -> int:
        """Return E."""
        return self.num_features * self.num_samples

    @property
    def num_slots(self) -> int:
        """Return S."""
        return self.num_features * self.rows


FULL = Size(num_samples=65_536, rows=100_000)
QUICK = Size(num_samples=8_192, rows=10_000, moved_rows=200_000, samples=3)
TINY = Size(num_samples=48, rows=20, dims=(16, 32), moved_rows=300, samples=1)


@dataclass(frozen=True, slots=True)
class Case:
    """One operation."""

    name: str
    num_bytes: float
    call: Callable[[], Any]


class Batch:
    """Ids and slots of a batch, the same for every dim."""

    def __init__(self, size: Size, machine: Machine) -> None:
        rng = np.random.default_rng(3)
        self.size = size
        slot_of_local = rng.permutation(size.num_slots).astype(np.int32)
        self.bases = np.arange(size.num_features, dtype=np.int64) * size.rows
        self.ids_FN = rng.integers(0, size.rows, (size.num_features, size.num_samples)).astype(np.int32)
        skewed_ids = permuted_power_law(rng, size.rows, self.ids_FN.size).astype(np.int32)
        self.skewed_FN = skewed_ids.reshape(self.ids_FN.shape)
        uniform, skewed = (
            slot_of_local[(ids + self.bases[:, None]).reshape(-1)] for ids in (self.ids_FN, self.skewed_FN)
        )
        self.distinct = int(np.unique(skewed).size)
        self.moved = min(size.num_slots, size.moved_rows)
        self.slot_of_local, self.ids = machine.place(slot_of_local), machine.place(self.ids_FN.reshape(-1))
        self.skewed_ids = machine.place(skewed_ids)
        self.uniform, self.skewed = machine.place(uniform), machine.place(skewed)
        self.order = machine.place(rng.permutation(size.num_slots)[: self.moved].astype(np.int32))


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one dim and dtype, one in each slot."""

    dim: int
    tail: str
    words: Any
    """(S, W): the 4-byte words of vectors, as switches move them."""
    vectors: stepping.Vectors
    """The same vectors, as lookups and steps take them."""
    rounding: stepping.Rounding
    """The rounding of a step."""

    @classmethod
    def of(cls, machine: Machine, num_slots: int, dim: int, dtype: str) -> Rows:
        """Create rows of 0.01."""
        if dtype == "float32":
            words = machine.place(np.full((num_slots, dim), 0.01, np.float32))
            return cls(dim, DTYPES[dtype], words, stepping.Vectors(words, dim), stepping.NO_ROUNDING)
        bits = to_bits(np.full(dim, 0.01, np.float32), dtype)
        words = machine.place(np.tile(bits, (num_slots, 1)).view(np.float32))
        vectors = stepping.Vectors.of(words, dim, dtype)
        streams = machine.place(np.arange(num_slots, dtype=np.uint64))
        return cls(dim, DTYPES[dtype], words, vectors, stepping.make_rounding(streams, 3))

    @property
    def vector_bytes(self) -> int:
        """Bytes of a vector."""
        return 4 * int(self.words.shape[1])


def row_cases(machine: Machine, batch: Batch, dim: int) -> Iterator[Case]:
    """Yield the operations on rows of one dim, float32 first; arrays are freed with the iterator."""
    for dtype in DTYPES:
        rows = Rows.of(machine, batch.size.num_slots, dim, dtype)
        yield from _lookups(machine, batch, rows)
        yield from _updates(machine, batch, rows)
        yield from _moves(machine, batch, rows)
        if not rows.tail:
            yield _first_rows(machine, batch, rows.vectors)


def _updates(machine: Machine, batch: Batch, rows: Rows) -> Iterator[Case]:
    size, dim = batch.size, rows.dim
    entries = size.num_entries
    flat = machine.place(np.full(entries * dim, 1e-3, np.float32))
    gradient = stepping.Gradients(flat, size.num_samples, size.num_features * dim, np.arange(size.num_features) * dim)
    held = [{width: machine.empty((size.num_slots, width), np.float32) for width in (dim, 1)} for _ in range(2)]

    def sort() -> Any:
        return machine.kernels.sort(batch.skewed, size.num_slots)

    def update(rule: stepping.Rule, pairs: Any = None) -> None:
        pairs = sort() if pairs is None else pairs
        states = [one[width] for one, width in zip(held, rule.widths, strict=False)]
        machine.kernels.step(stepping.Step(rows.vectors, states, pairs, gradient, rule, rows.rounding))

    if not rows.tail:
        yield Case("sort", 12 * entries, sort)
    of_stream = 8 if rows.vectors.is_narrow else 0
    for name, optimizer in OPTIMIZERS.items():
        rule = rule_of(optimizer, dim, RATE, 3)  # of the third step
        of_row = 2 * (rows.vector_bytes + 4 * sum(rule.widths)) + of_stream
        moved = 4 * entries * dim + batch.distinct * of_row
        yield Case(f"update_{name}{rows.tail}", 8 * entries + moved, functools.partial(update, rule, sort()))
        yield Case(f"sorted_update_{name}{rows.tail}", 4 * entries + moved, functools.partial(update, rule))


def _moves(machine: Machine, batch: Batch, rows: Rows) -> Iterator[Case]:
    moved = batch.moved
    fields = (rows.words, machine.empty((batch.size.num_slots, rows.dim), np.float32))
    row_bytes = rows.vector_bytes + 4 * rows.dim
    of_piece, row_floats = max(1, PIECE_BYTES // row_bytes), row_bytes // 4
    first_row = np.append(np.arange(0, moved, of_piece), moved)
    data = machine.empty((moved * row_floats,), np.float32)
    pieces = machine.kernels.pieces(row_floats)
    pieces.add(0, np.diff(first_row), first_row[:-1] * row_floats, data)
    yield Case(
        f"pack{rows.tail}", 2 * moved * row_bytes + 8 * moved,
        lambda: machine.kernels.pack(fields, batch.slot_of_local, batch.order, pieces),
    )  # fmt: skip
    yield Case(
        f"unpack{rows.tail}", 2 * moved * row_bytes + 4 * moved,
        lambda: machine.kernels.unpack(fields, batch.order, pieces),  # distinct random slots
    )  # fmt: skip


def _first_rows(machine: Machine, batch: Batch, vectors: stepping.Vectors) -> Case:
    moved, dim = batch.moved, vectors.dim
    keys = machine.place(np.random.default_rng(5).integers(-(2**62), 2**62, moved))
    more: tuple[Any, ...] = (batch.order,)
    if not machine.on_device:  # the CPU creates them adjacent; `unpack` moves them to their slots
        vectors, more = stepping.Vectors(vectors.values[:moved], dim), ()
    return Case(
        "initial_rows", (8 + 4 * len(more)) * moved + 4 * moved * dim,
        lambda: machine.kernels.initial_rows(keys, 5, 6, UNIFORM, -0.1, 0.1, vectors, *more),
    )  # fmt: skip


def id_cases(machine: Machine, batch: Batch) -> Iterator[Case]:
    """Yield the operations on ids, which do not depend on dim."""
    size = batch.size
    entries = size.num_entries
    table_ids = np.random.default_rng(1).integers(0, 2**64, size.num_features, np.uint64)
    starts = np.arange(size.num_features + 1) * size.num_samples
    raw = np.random.default_rng(2).integers(-(2**62), 2**62, size.rows)
    keys = machine.place(raw[batch.ids_FN.reshape(-1)])
    place = machine.empty((entries,), np.int32)
    index = machine.kernels.index(size.num_slots, table_ids)
    key_set = machine.place(raw)
    key_sets = [KeySet(t, key_set, t * size.rows) for t in range(size.num_features)]

    def build() -> None:
        index.clear()
        index.extend(key_sets)

    yield Case("index_build", 24 * size.num_slots + 16 * index.capacity, build)
    tables = np.arange(size.num_features)
    yield Case("index_find", 28 * entries, lambda: index.find(keys, starts, tables, place))


def _lookups(machine: Machine, batch: Batch, rows: Rows) -> Iterator[Case]:
    """Yield the lookups of rows, and the gradient of weights."""
    size, dim, vectors = batch.size, rows.dim, rows.vectors
    entries = size.num_entries
    flat = machine.empty((entries, dim), np.float32)
    yield Case(
        f"gather{rows.tail}", 4 * entries + entries * (rows.vector_bytes + 4 * dim),
        lambda: machine.kernels.gather(vectors, batch.uniform, flat),
    )  # fmt: skip
    slots = machine.empty((entries,), np.int32)
    cols, wide = np.arange(size.num_features) * dim, flat.reshape(size.num_samples, size.num_features * dim)
    one_bytes = 12 * entries + entries * (rows.vector_bytes + 4 * dim)
    yield Case(
        f"pool_one{rows.tail}", one_bytes,
        lambda: machine.kernels.pool_one(vectors, batch.slot_of_local, batch.ids, batch.bases, cols, wide, slots),
    )  # fmt: skip
    starts = np.arange(size.num_features + 1) * size.num_samples

    def pool_none() -> None:
        machine.kernels.map_slots(batch.ids, batch.bases, starts, batch.slot_of_local, slots)
        machine.kernels.gather(vectors, slots, flat)

    yield Case(f"pool_none{rows.tail}", one_bytes, pool_none)
    yield from _bags(machine, batch, rows, slots)


def _bags(machine: Machine, batch: Batch, rows: Rows, slots: Any) -> Iterator[Case]:
    size, dim, entries = batch.size, rows.dim, batch.size.num_entries
    features = size.num_features // BAG
    bags, cols = features * size.num_samples, np.arange(features) * dim
    offsets = machine.place(np.arange(bags + 1) * BAG)
    out = machine.empty((size.num_samples, features * dim), np.float32)
    argmax = machine.empty(out.shape, np.int32)
    place, scale = machine.empty((entries,), np.int64), machine.empty((entries,), np.float32)
    weights = machine.place(np.full(entries, 0.5, np.float32))

    def pool(mode: int, weights: Any, argmax: Any, scale: Any) -> None:
        machine.kernels.pool_bags(
            rows.vectors, batch.slot_of_local, batch.ids, batch.bases[:features], offsets, weights,
            np.full(features, mode, np.int8), cols, out, slots, argmax, place, scale,
        )  # fmt: skip

    read = 8 * bags + entries * rows.vector_bytes  # starts of bags, and rows
    pooled = 20 * entries + read + 4 * bags * dim
    for name, num_bytes, arguments in (
        ("pool_sum", pooled, (SUM, NONE_F4, _NO_ARGMAX, NONE_F4)),
        ("pool_mean", pooled + 4 * entries, (MEAN, NONE_F4, _NO_ARGMAX, scale)),
        ("pool_max", pooled + 4 * bags * dim, (MAX, NONE_F4, argmax, NONE_F4)),
        ("pool_weighted", pooled + 8 * entries, (SUM, weights, _NO_ARGMAX, scale)),
    ):
        yield Case(name + rows.tail, num_bytes, functools.partial(pool, *arguments))
    gradient = machine.place(np.full((size.num_samples, features * dim), 1e-3, np.float32))
    modes = np.full(features, SUM, np.int8)
    yield Case(
        f"weight_gradient{rows.tail}", 8 * entries + read + 4 * bags * dim,
        lambda: machine.kernels.weight_gradient(
            rows.vectors, batch.uniform, offsets, modes, cols, gradient, scale
        ),
    )  # fmt: skip
