"""What the kernel benchmark runs, and the bytes that each operation must move. Legend as in `kernel_batch`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.kernel_batch import DTYPES, RULES, Case, Rows, gradients_of
from benchmarks.kernel_lookups import lookups
from tiercache.kernels.cpu.initial import UNIFORM
from tiercache.kernels.cpu.key_index import KeySet
from tiercache.kernels.step import Step, Vectors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.kernel_batch import Batch
    from benchmarks.kernel_machines import Machine
    from tiercache.kernels.step import Rule

__all__ = ["PIECE_BYTES", "id_cases", "row_cases"]

PIECE_BYTES = 4 << 20


def row_cases(machine: Machine, batch: Batch, dim: int) -> Iterator[Case]:
    """Yield the operations on rows of one dim, first of float32; arrays go when the iterator does."""
    for dtype in DTYPES:
        rows = Rows.of(machine, batch.size.num_slots, dim, dtype)
        yield from lookups(machine, batch, rows)
        if not rows.tail:
            yield _sort(machine, batch)
        yield from _updates(machine, batch, rows)
        yield from _moves(machine, batch, rows)
        if not rows.tail:
            yield _first_rows(machine, batch, rows.vectors)


def _sorted(machine: Machine, batch: Batch) -> Callable[[], Any]:
    """Return what sorts the slots of the batch of the updates, into the same buffers again and again."""
    return lambda: machine.kernels.sort(batch.skewed, batch.size.num_slots)


def _sort(machine: Machine, batch: Batch) -> Case:
    return Case("sort", 12 * batch.size.num_entries, _sorted(machine, batch))


def _updates(machine: Machine, batch: Batch, rows: Rows) -> Iterator[Case]:
    size, dim = batch.size, rows.dim
    entries = size.num_entries
    described, sort = gradients_of(machine, size, dim), _sorted(machine, batch)
    first, second = (machine.empty((size.num_slots, dim), np.float32) for _ in range(2))
    single = machine.empty((size.num_slots, 1), np.float32)
    all_states: tuple[tuple[str, tuple[Any, ...], int], ...] = (
        ("sgd", (), 0), ("adagrad", (first,), dim), ("rowwise", (single,), 1), ("adam", (first, second), 2 * dim),
    )  # fmt: skip

    def update(rule: Rule, states: tuple[Any, ...], pairs: Any = None) -> None:
        taken = sort() if pairs is None else pairs
        machine.kernels.step(Step(rows.vectors, states, taken, described, rule, rows.rounding))

    of_stream = 8 if rows.vectors.is_narrow else 0
    for name, states, state_floats in all_states:
        of_row = 2 * (rows.vector_bytes + 4 * state_floats) + of_stream
        moved = 4 * entries * dim + batch.distinct * of_row
        alone = functools.partial(update, RULES[name], states, sort())
        yield Case(f"update_{name}{rows.tail}", 8 * entries + moved, alone)
        yield Case(
            f"sorted_update_{name}{rows.tail}",
            4 * entries + moved,
            functools.partial(update, RULES[name], states),
        )


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
        lambda: machine.kernels.unpack(fields, batch.order, pieces),  # places among the slots, no two the same
    )  # fmt: skip


def _first_rows(machine: Machine, batch: Batch, vectors: Vectors) -> Case:
    moved, dim = batch.moved, vectors.dim
    keys = machine.place(np.random.default_rng(5).integers(-(2**62), 2**62, moved))
    if machine.on_device:
        return Case(
            "initial_rows", 12 * moved + 4 * moved * dim,
            lambda: machine.kernels.initial_rows(keys, 5, 6, UNIFORM, -0.1, 0.1, vectors, batch.order),
        )  # fmt: skip
    # the CPU makes them side by side; `unpack` brings them to their slots
    return Case(
        "initial_rows", 8 * moved + 4 * moved * dim,
        lambda: machine.kernels.initial_rows(keys, 5, 6, UNIFORM, -0.1, 0.1, Vectors(vectors.values[:moved], dim)),
    )  # fmt: skip


def id_cases(machine: Machine, batch: Batch) -> Iterator[Case]:
    """Yield the operations on ids, which know no dim."""
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
