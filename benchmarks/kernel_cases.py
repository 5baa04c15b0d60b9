"""What the kernel benchmark runs: operations of one dim, and the bytes that each must move.

Legend: F features, N samples, E = F * N lookups, D dim, S slots, U distinct rows of a batch, P rows of a switch.
Vectors are float32, or of 16 bits with their state in float32: then the names of operations end in `_bf16` or `_fp16`.
Lookups are uniform over the rows, so that caches help little; the batch of the updates is zipf 1.05, as clicks are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.zipf import Zipf
from tiercache.kernels import cuda_vectors
from tiercache.kernels.arrays import NONE_F4
from tiercache.kernels.initial import UNIFORM
from tiercache.kernels.key_index import KeySet
from tiercache.kernels.vectors import Vectors
from tiercache.store.vectors import to_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.kernel_machines import Machine

__all__ = ["DTYPES", "FULL", "QUICK", "TINY", "Batch", "Case", "Size", "id_cases", "row_cases"]

DTYPES = {"float32": "", "bfloat16": "_bf16", "float16": "_fp16"}
"""Dtypes of vectors, and what names of operations on them end in."""

RATE = 1e-6
NUM_OWNERS = 8
PIECE_BYTES = 4 << 20
BAG = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How large the batch and its tables are."""

    num_samples: int
    rows: int
    """Of each table."""
    dims: tuple[int, ...] = (16, 32, 64, 128)
    num_features: int = 26
    moved_rows: int = 1_000_000
    """P at most."""
    samples: int = 7
    """Times of each operation, of which the median counts."""

    @property
    def num_entries(self) -> int:
        """E."""
        return self.num_features * self.num_samples

    @property
    def num_slots(self) -> int:
        """S."""
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
        zipf = Zipf(size.rows, seed=7)
        self.skewed_FN = np.stack([zipf.permutation()[zipf.ranks(size.num_samples)] for _ in range(size.num_features)])
        uniform, skewed = (
            slot_of_local[(ids + self.bases[:, None]).reshape(-1)] for ids in (self.ids_FN, self.skewed_FN)
        )
        self.distinct = int(np.unique(skewed).size)
        self.moved = min(size.num_slots, size.moved_rows)
        self.slot_of_local, self.ids = machine.place(slot_of_local), machine.place(self.ids_FN.reshape(-1))
        self.skewed_ids = machine.place(self.skewed_FN.reshape(-1).astype(np.int32))
        self.uniform, self.skewed = machine.place(uniform), machine.place(skewed)
        self.order = machine.place(rng.permutation(size.num_slots)[: self.moved].astype(np.int32))


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one dim and dtype, one in each slot."""

    dim: int
    tail: str
    words: Any
    """(S, W): the 4-byte words of vectors, as switches move them."""
    vectors: Any
    """The same, as lookups and steps take them."""
    rounding: dict[str, Any]
    """What a step rounds them by."""

    @classmethod
    def of(cls, machine: Machine, num_slots: int, dim: int, dtype: str) -> Rows:
        """Make rows of 0.01."""
        if dtype == "float32":
            words = machine.place(np.full((num_slots, dim), 0.01, np.float32))
            return cls(dim, DTYPES[dtype], words, words, {})
        bits = to_bits(np.full(dim, 0.01, np.float32), dtype)
        words = machine.place(np.tile(bits, (num_slots, 1)).view(np.float32))
        vectors = cuda_vectors.Vectors(words, dim, dtype) if machine.on_device else Vectors.of(words, dim, dtype)
        streams = machine.place(np.arange(num_slots, dtype=np.uint64))
        return cls(
            dim, DTYPES[dtype], words, vectors, {"rounding": machine.call("rounding", "make_rounding", streams, 3)}
        )

    @property
    def vector_bytes(self) -> int:
        """Bytes of a vector."""
        return 4 * int(self.words.shape[1])


def row_cases(machine: Machine, batch: Batch, dim: int) -> Iterator[Case]:
    """Yield the operations on rows of one dim, first of float32; arrays go when the iterator does."""
    for dtype in DTYPES:
        rows = Rows.of(machine, batch.size.num_slots, dim, dtype)
        yield from _lookups(machine, batch, rows)
        if not rows.tail:
            yield _sort(machine, batch)
        yield from _updates(machine, batch, rows)
        yield from _moves(machine, batch, rows)
        if not rows.tail:
            yield _first_rows(machine, batch, rows.vectors)


def _lookups(machine: Machine, batch: Batch, rows: Rows) -> Iterator[Case]:
    size, dim, vectors = batch.size, rows.dim, rows.vectors
    entries = size.num_entries
    flat = machine.empty((entries, dim), np.float32)
    yield Case(
        f"gather{rows.tail}", 4 * entries + entries * (rows.vector_bytes + 4 * dim),
        lambda: machine.call("gathering", "gather", vectors, batch.uniform, flat),
    )  # fmt: skip
    slots = machine.empty((entries,), np.int32)
    cols, wide = np.arange(size.num_features) * dim, flat.reshape(size.num_samples, size.num_features * dim)
    yield Case(
        f"pool_one{rows.tail}", 12 * entries + entries * (rows.vector_bytes + 4 * dim),
        lambda: machine.call(
            "pooling", "pool_one", vectors, batch.slot_of_local, batch.ids, batch.bases, cols, size.num_samples, wide,
            slots,
        ),
    )  # fmt: skip
    features = size.num_features // BAG
    starts = np.arange(features + 1) * size.num_samples * BAG
    offsets = machine.place(np.arange(features * size.num_samples + 1) * BAG)
    out = machine.empty((size.num_samples, features * dim), np.float32)
    modes, argmax = np.zeros(features, np.int8), np.empty((0, 0), np.int32)
    place = machine.empty((entries,), np.int64)
    between = () if machine.on_device else (starts,)
    yield Case(
        f"pool_sum{rows.tail}",
        20 * entries + 8 * (entries // BAG) + entries * rows.vector_bytes + 4 * (entries // BAG) * dim,
        lambda: machine.call(
            "pooling", "pool_bags", vectors, batch.slot_of_local, batch.ids, batch.bases[:features], *between, offsets,
            NONE_F4, modes, cols[:features], out, slots, argmax, place, NONE_F4,
        ),
    )  # fmt: skip


def _sorted(machine: Machine, batch: Batch) -> Callable[[], Any]:
    """Return what sorts the slots of the batch of the updates, into the same buffers again and again."""
    sorting = machine.call("sorting", "SortBuffers")
    return lambda: machine.call("sorting", "sort_slots", batch.skewed, batch.size.num_slots, sorting)


def _sort(machine: Machine, batch: Batch) -> Case:
    return Case("sort", 12 * batch.size.num_entries, _sorted(machine, batch))


def _updates(machine: Machine, batch: Batch, rows: Rows) -> Iterator[Case]:
    size, dim = batch.size, rows.dim
    entries = size.num_entries
    gradient = machine.place(np.full((size.num_samples, size.num_features * dim), 1e-3, np.float32))
    described = machine.call("update", "one_id_gradients", gradient, np.arange(size.num_features) * dim)
    sort, scratch = _sorted(machine, batch), machine.call("update", "UpdateBuffers")
    first, second = (machine.empty((size.num_slots, dim), np.float32) for _ in range(2))
    single = machine.empty((size.num_slots, 1), np.float32)
    rules: tuple[tuple[str, str, tuple[Any, ...], int, dict[str, int]], ...] = (
        ("sgd", "update_sgd", (), 0, {}),
        ("adagrad", "update_adagrad", (first,), dim, {}),
        ("rowwise", "update_rowwise_adagrad", (single,), 1, {}),
        ("adam", "update_adam", (first, second), 2 * dim, {"step": 3}),
    )

    def update(function: str, states: tuple[Any, ...], options: dict[str, int], pairs: Any = None) -> None:
        taken = sort() if pairs is None else pairs
        machine.call(
            "update", function, rows.vectors, *states, taken, described, scratch, learning_rate=RATE, **options,
            **rows.rounding,
        )  # fmt: skip

    of_stream = 8 if rows.rounding else 0
    for name, function, states, state_floats, options in rules:
        of_row = 2 * (rows.vector_bytes + 4 * state_floats) + of_stream
        moved = 4 * entries * dim + batch.distinct * of_row
        alone = functools.partial(update, function, states, options, sort())
        yield Case(f"update_{name}{rows.tail}", 8 * entries + moved, alone)
        yield Case(
            f"sorted_update_{name}{rows.tail}",
            4 * entries + moved,
            functools.partial(update, function, states, options),
        )


def _moves(machine: Machine, batch: Batch, rows: Rows) -> Iterator[Case]:
    moved = batch.moved
    fields = (rows.words, machine.empty((batch.size.num_slots, rows.dim), np.float32))
    row_bytes = rows.vector_bytes + 4 * rows.dim
    of_piece, row_floats = max(1, PIECE_BYTES // row_bytes), row_bytes // 4
    first_row = np.append(np.arange(0, moved, of_piece), moved)
    data = machine.empty((moved * row_floats,), np.float32)
    pieces = machine.call("rows", "Pieces", row_floats)
    pieces.add(0, np.diff(first_row), first_row[:-1] * row_floats, data)
    yield Case(
        f"pack{rows.tail}", 2 * moved * row_bytes + 8 * moved,
        lambda: machine.call("rows", "pack", fields, batch.slot_of_local, batch.order, pieces),
    )  # fmt: skip
    yield Case(
        f"unpack{rows.tail}", 2 * moved * row_bytes + 4 * moved,
        lambda: machine.call("rows", "unpack", fields, batch.order, pieces),  # places among the slots, no two the same
    )  # fmt: skip


def _first_rows(machine: Machine, batch: Batch, vectors: Any) -> Case:
    moved, dim = batch.moved, int(vectors.shape[1])
    keys = machine.place(np.random.default_rng(5).integers(-(2**62), 2**62, moved))
    if machine.on_device:
        return Case(
            "initial_rows", 12 * moved + 4 * moved * dim,
            lambda: machine.call("initial", "initial_rows", keys, 5, 6, UNIFORM, -0.1, 0.1, vectors, batch.order),
        )  # fmt: skip
    # the CPU makes them side by side; `unpack` brings them to their slots
    return Case(
        "initial_rows", 8 * moved + 4 * moved * dim,
        lambda: machine.call("initial", "initial_rows", keys, 5, 6, UNIFORM, -0.1, 0.1, vectors[:moved]),
    )  # fmt: skip


def id_cases(machine: Machine, batch: Batch) -> Iterator[Case]:
    """Yield the operations on ids, which know no dim."""
    size = batch.size
    entries = size.num_entries
    table_ids = np.random.default_rng(1).integers(0, 2**64, size.num_features, np.uint64)
    starts = np.arange(size.num_features + 1) * size.num_samples
    raw = np.random.default_rng(2).integers(-(2**62), 2**62, size.rows)
    keys = machine.place(raw[batch.ids_FN.reshape(-1)])
    order, place = machine.empty((entries,), np.int32), machine.empty((entries,), np.int32)
    owner_starts = machine.empty((NUM_OWNERS + 1,), np.int64)
    buffers = (machine.call("bucketing", "BucketBuffers"),) if machine.on_device else ()
    yield Case(
        "bucket", 16 * entries,
        lambda: machine.call(
            "bucketing", "bucket_keys", keys, table_ids, starts, NUM_OWNERS, order, place, owner_starts, *buffers
        ),
    )  # fmt: skip
    index = machine.call("key_index", "KeyIndex", size.num_slots, table_ids)
    key_set = machine.place(raw)
    key_sets = [KeySet(t, key_set, t * size.rows) for t in range(size.num_features)]
    yield Case("index_build", 24 * size.num_slots + 16 * index.capacity, lambda: index.build(key_sets))
    tables = np.arange(size.num_features)
    yield Case("index_find", 28 * entries, lambda: index.find(keys, starts, tables, place))
