"""What the kernel benchmark runs, and the bytes that each operation must move. Legend as in `kernel_batch`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.kernel_batch import DTYPES, RATE, Case, Rows
from benchmarks.kernel_lookups import lookups
from tiercache.kernels.cpu.initial import UNIFORM
from tiercache.kernels.cpu.key_index import KeySet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.kernel_batch import Batch
    from benchmarks.kernel_machines import Machine

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
    place = machine.empty((entries,), np.int32)
    index = machine.call("key_index", "KeyIndex", size.num_slots, table_ids)
    key_set = machine.place(raw)
    key_sets = [KeySet(t, key_set, t * size.rows) for t in range(size.num_features)]

    def build() -> None:
        index.clear()
        index.extend(key_sets)

    yield Case("index_build", 24 * size.num_slots + 16 * index.capacity, build)
    tables = np.arange(size.num_features)
    yield Case("index_find", 28 * entries, lambda: index.find(keys, starts, tables, place))
