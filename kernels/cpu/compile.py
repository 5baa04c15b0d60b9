"""Compile every kernel before it is needed, and tell what is being compiled.

A kernel is compiled when it is first called with its types. All calls use one set of types, so one tiny call does it;
those that read or step rows have a second one for 16-bit dtypes, which is compiled where a table has such a dtype.
The compiled code is kept on disk, beside the package or in the user's cache, until a source file changes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core.registry import cpu_target

from tiercache.kernels.cpu import (
    bucketing,
    checksum,
    field_io,
    file_io,
    gathering,
    gradients,
    hashing,
    initial,
    key_index,
    next_use,
    pooling,
    rounding,
    rows,
    samples,
    shuffle,
    slots,
    sorting,
    unique,
    update,
)
from tiercache.kernels.cpu.jit import KERNELS
from tiercache.kernels.cpu.key_to_index import KeyToIndex
from tiercache.kernels.cpu.vectors import Vectors

__all__ = ["is_cached", "prepare"]

_F4 = np.zeros((2, 2), np.float32)
_I4 = np.zeros(2, np.int32)
_I8 = np.zeros(2, np.int64)
_BOUNDS = np.array([0, 2])
_BAGS = np.array([0, 1, 2])


def _number() -> None:
    numbers = KeyToIndex(1)
    numbers.insert(np.arange(40), np.empty(40, np.int32))
    numbers.uncount(_I4)
    numbers.truncate(1)


def _hash() -> None:
    hashing.hash_keys(_I8, 0)
    hashing.xxh64_strings(np.zeros(2, np.uint8), _BAGS)
    bucketing.key_owners(_I8, 0, 1, np.zeros(2, np.int16))
    hashing.xxh64_words(_I8.view(np.uint64).reshape(1, 2))


def _start_rows() -> None:
    for kind in (initial.UNIFORM, initial.NORMAL):
        initial.initial_rows(_I8, 0, 0, kind, 0.0, 1.0, _F4.copy())


def _look_up() -> None:
    pooling.check_ids(_I4, _BOUNDS, np.ones(1, np.int64))
    pooling.map_slots(_I4, _I8[:1], _BOUNDS, _I4, _I4.copy())
    pooling.gather(_F4, _I4, _F4.copy())
    pooling.pool_one(_F4, _I4, _I4, _I8[:1], _I8[:1], 2, _F4.copy(), _I4.copy())
    pooling.spread_one(_F4, sorting.sort_slots(_I4, 2, sorting.SortBuffers()), _I8[:1], 2, _F4.copy())


def _pool() -> None:
    modes, scale = np.zeros(1, np.int8), np.zeros(2, np.float32)
    pooling.pool_bags(
        _F4, _I4, _I4, _I8[:1], _BOUNDS, _BAGS, scale, modes, _I8[:1], _F4.copy(), _I4.copy(), _I4.reshape(1, 2),
        _I8.copy(), scale.copy(),
    )  # fmt: skip


def _weigh() -> None:
    modes, out = np.zeros(1, np.int8), np.zeros(2, np.float32)
    pooling.weight_gradient(_F4, _I4, _BOUNDS, _BAGS, modes, _I8[:1], _F4, out)


def _step() -> None:
    pairs = sorting.sort_slots(_I4, 2, sorting.SortBuffers())
    described = gradients.one_id_gradients(_F4, _I8[:1])
    update.update_sgd(_F4.copy(), pairs, described, update.UpdateBuffers(), learning_rate=0.0)


def _round_rows() -> None:
    """Compile what looks up and steps rows of 16-bit dtypes."""
    held = Vectors.of(np.zeros((2, 1), np.float32), 2, "bfloat16")
    modes, scale = np.zeros(1, np.int8), np.zeros(2, np.float32)
    pooling.gather(held, _I4, _F4.copy())
    pooling.pool_one(held, _I4, _I4, _I8[:1], _I8[:1], 2, _F4.copy(), _I4.copy())
    pairs = sorting.sort_slots(_I4, 2, sorting.SortBuffers())
    pooling.spread_one(held, pairs, _I8[:1], 2, _F4.copy())
    pooling.pool_bags(
        held, _I4, _I4, _I8[:1], _BOUNDS, _BAGS, scale, modes, _I8[:1], _F4.copy(), _I4.copy(), _I4.reshape(1, 2),
        _I8.copy(), scale.copy(),
    )  # fmt: skip
    pooling.weight_gradient(held, _I4, _BOUNDS, _BAGS, modes, _I8[:1], _F4, scale.copy())
    described, rounds = gradients.one_id_gradients(_F4, _I8[:1]), rounding.make_rounding(np.zeros(2, np.uint64), 1)
    update.update_sgd(held, pairs, described, update.UpdateBuffers(), learning_rate=0.0, rounding=rounds)


def _move() -> None:
    pieces = rows.Pieces(2)
    pieces.add(0, np.array([2]), np.zeros(1, np.int64), np.zeros(4, np.float32))
    rows.pack((_F4,), np.arange(2, dtype=np.int32), np.arange(2, dtype=np.int32), pieces)
    rows.pack((_F4,), _I4, _I4[:0], pieces)


def _check() -> None:
    if checksum.has_crc32c():
        checksum.crc32c([(np.zeros(8, np.uint8), np.array([0, 8]))])


def _read_files() -> None:
    if file_io.has_reads():
        part = (np.zeros(8, np.uint8), np.array([0, 8]))
        file_io.read_checked([(-1, False, 0)], [part])
        field_io.read_fields([(False, [("", 8, 0, 8)])], [part])


def _find_uses() -> None:
    passes = np.zeros(1, np.int64)
    next_use.sweep_uses(_I4, _BOUNDS, 1, passes, passes, passes, _I4.copy(), _I4.copy())
    next_use.hash_range_bound(_I8, 0, 1)
    next_use.search_keys(_I8, 0, _I8, _I8.copy())


def _switch() -> None:
    slots.stable_order_by_gap(np.ones(2, np.int32), 2, _I4.copy())
    slots.assign_slots(_I4, _I4, _I4, _I4, _I4, np.zeros(8, np.int32), _I4.copy())
    slots.take(_I4, _I4, _I4.copy())
    slots.count_gaps(_I4, 2, np.zeros(3, np.int64))


def _index() -> None:
    index = key_index.KeyIndex(2, _I8.view(np.uint64))
    index.extend([key_index.KeySet(0, _I8[:1], 0)])
    index.find(_I8, _BOUNDS, _I8[:1], _I4.copy())


def _name_once() -> None:
    pairs = sorting.sort_slots(_I4, 2, sorting.SortBuffers())
    unique.unique_slots(pairs, _I4.copy(), _I4.copy())
    unique.unique_positions(_I4, 64, _I8[:1].view(np.uint64).copy(), _I4[:1].copy(), _I4.copy(), _I4.copy())
    unique.lay_out(_I4, _I8[:1], _I8[:1], _I8[:1], _I8[:1], _I8[:1], _I4.copy(), _I4.copy())
    unique.mark_slots(_I4, np.zeros(2, np.bool_))


def _read_samples() -> None:
    words, starts, ids = np.zeros(8, np.int32), _I8[:1], _I4.copy()
    samples.gather_rows(words, starts, 16, _I8, np.empty((2, 2), np.int32))
    samples.gather_columns(words, starts, 16, _I8, 2, _I8, np.empty((2, 2), np.int32))
    samples.gather_offsets(np.zeros(4, np.int64), starts, starts, 16, _I8, _I8.copy(), np.empty(3, np.int64))
    samples.gather_lists(words, starts, 16, _I8, _I8, np.zeros(3, np.int64), np.empty(0, np.int32))
    samples.permute(ids, _I4)
    samples.permute_columns(np.zeros((2, 2), np.int32), _I4, _I8)
    shuffle.shuffled(0, 2, 0, 2)


_STAGES: tuple[tuple[str, Callable[[], None]], ...] = (
    ("hash keys", _hash),
    ("initial rows", _start_rows),
    ("number keys", _number),
    ("index keys", _index),
    ("unique rows", _name_once),
    ("read samples", _read_samples),
    ("find uses", _find_uses),
    ("switch passes", _switch),
    ("checksums", _check),
    ("read files", _read_files),
    ("move rows", _move),
    ("look up", _look_up),
    ("pool", _pool),
    ("weights", _weigh),
    ("step", _step),
)
_NARROW = ("16-bit rows", _round_rows)
_READING = (
    gathering._gather, gathering._pool_one, gathering._spread_one, pooling._pool_bags, pooling._weight_gradient,
    update._update,
)  # fmt: skip
"""The kernels that read vectors."""
_FOUND: set[bool] = set()
"""For which `narrow` all kernels were found: looking takes 50 files, and what is compiled stays so."""


def _is_compiled(kernel: Any, *, narrow: bool) -> bool:
    """Tell whether a kernel for float32, or for 16-bit dtypes, is compiled or lies compiled on disk."""
    return any(("uint16" in str(types)) == narrow for types in (*kernel.signatures, *_on_disk(kernel)))


def _on_disk(kernel: Any) -> list[Any]:
    """Return the types for which numba's cache holds the kernel as its source is now, for this processor."""
    try:
        index = kernel._cache._cache_file._load_index()
        processor = cpu_target.target_context.codegen().magic_tuple()
    except Exception:
        return []
    return [key[0] for key in index if key[1] == processor]


def is_cached(*, narrow: bool = False) -> bool:
    """Tell whether every kernel is compiled or lies compiled on disk: if not, `prepare` takes up to a minute.

    `narrow`: also those for 16-bit dtypes.
    """
    if narrow not in _FOUND:
        left_out = [] if checksum.has_crc32c() else [checksum._crc32c]
        left_out += [] if file_io.has_reads() else [file_io._read_checked, field_io._read_fields]
        needed = [kernel for kernel in KERNELS if kernel not in left_out]
        if not all(_is_compiled(kernel, narrow=False) for kernel in needed):
            return False
        if narrow and not all(_is_compiled(kernel, narrow=True) for kernel in _READING):
            return False
        _FOUND.add(narrow)
    return True


def prepare(notify: Callable[[str, int, int], None] | None = None, *, narrow: bool = False) -> None:
    """Compile every kernel, or load it from disk; those for 16-bit dtypes where `narrow` says so.

    `notify` is called with what comes next, how many stages are done and how many there are, and once when all are.
    Call it on the training thread: it starts the threads of parallel kernels.
    """
    stages = (*_STAGES, _NARROW) if narrow else _STAGES
    for done, (name, stage) in enumerate(stages):
        if notify is not None:
            notify(name, done, len(stages))
        stage()
    if notify is not None:
        notify("done", len(stages), len(stages))
