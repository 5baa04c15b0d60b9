"""Key sets of the n-grams of tokens, without the model and without samples."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiercache.data.extraction_resources import Workers
from tiercache.data.keyset import key_schema
from tiercache.data.manifest import Recording
from tiercache.data.ngrams import NGrams
from tiercache.data.pass_builder import device_bytes
from tiercache.data.recording import RecordedBatch, RecordingPlan, write_recording
from tiercache.kernels.cpu.unique_keys import UniqueKeys
from tiercache.sizes import parse_bytes
from tiercache.store.files import local_path
from tiercache.store.records import positive
from tiercache.store.table import Table, group_tables

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterable, Mapping

    from numpy.typing import NDArray

    from tiercache.data.dataset import PassDataset
    from tiercache.data.extraction_progress import ExtractionProgress
    from tiercache.data.token_files import TokenFiles

_LARGEST_BLOCK = 1 << 20  # tokens
_BLOCKS_OF_PASS = 8  # at least, if every n-gram is unique


def record_ngrams(
    tokens: TokenFiles,
    grams: NGrams | Mapping[str, NGrams],
    out: str | os.PathLike[str],
    *,
    tables: Table | Iterable[Table],
    device_budget: int | str,
    batch_multiple: int = 1,
    min_count: int = 1,
    devices: int = 1,
    memory_limit: int | str = "1GiB",
    progress: bool | Callable[[ExtractionProgress], None] = True,
) -> PassDataset:
    """Write a dataset with the unique n-gram keys and the sequence indices of each pass, as `record_key_sets` does.

    A sub-dataset has as many sequences, in their order, as fit the device budget; ``Pass.loader(tokens, batch_size)``
    yields exactly these in training. The model looks up ``grams(x)`` of each batch ``x``, or of part of its tokens.

    Args:
        tokens: the sequences. They must not change.
        grams: the n-gram keys; by table if there are several.
        out: the directory for the dataset.
        tables: the tables, each with one feature of the same name; ``tc.Embedding(data.schema, name)`` looks it up.
        device_budget: the device memory for the rows of a pass, their optimizer state and slot maps, as in `extract`.
        batch_multiple: every pass but the last has a multiple of this many sequences: the sequences of a step, if
            gradients are accumulated over several batches.
        min_count: keys with fewer occurrences share the out-of-vocabulary row of their table. Tokens are read twice.
        devices: the number of devices with that budget that train a pass together, as in `extract`.
        memory_limit: host memory for counting keys, with ``min_count``.
        progress: True shows a bar, False nothing; a function is called with each ExtractionProgress.

    Memory: up to 100 bytes for each key of a sub-dataset, and two blocks. After a kill, the same call resumes from the
    last closed sub-dataset; a finished dataset of the same arguments is returned unchanged. Not collective.

    Raises:
        ValueError: a token is outside a vocabulary, or an argument is invalid.
        BudgetError: the n-grams of one block of sequences, at least ``batch_multiple``, exceed the budget.
        ExtractionError: ``out`` holds a dataset of other arguments, or another process writes it.
    """
    listed = (tables,) if isinstance(tables, Table) else tuple(tables)
    names = [one.name for one in listed]
    by_table = dict.fromkeys(names, grams) if isinstance(grams, NGrams) else dict(grams)
    if sorted(by_table) != sorted(names) or (isinstance(grams, NGrams) and len(names) != 1):
        raise ValueError(
            f"n-grams were given for {', '.join(by_table) or 'no table'}, but the tables are {', '.join(names)}: "
            "pass a dict with the NGrams of each table"
        )
    batch_multiple, min_count = positive(batch_multiple, "batch_multiple"), positive(min_count, "min_count")
    devices = positive(devices, "devices")
    schema = key_schema(listed)
    budget, row_bytes = parse_bytes(device_budget), max(map(device_bytes, group_tables(schema.tables)))
    most_keys = sum(one.num_heads for one in by_table.values())
    block_tokens = min(_LARGEST_BLOCK, budget * devices // (row_bytes * most_keys * _BLOCKS_OF_PASS))
    block = max(1, block_tokens // (tokens.sequence_length * batch_multiple)) * batch_multiple
    recording = Recording(
        batches=0, lookups=0, batch_size=1, first_batch=0, dataset_length=len(tokens), seed=0, same_draws=False
    )
    facts = {"block": block, "ngrams": {name: _digest(one) for name, one in by_table.items()}, **tokens.facts}
    plan = RecordingPlan(
        schema=schema, device_bytes=budget, devices=devices, min_count=min_count,
        memory_bytes=parse_bytes(memory_limit), facts=facts, recording=recording, has_large_batches=True,
        batch_name=f"of {block:,} sequences",
        smaller="use shorter sequences, n-grams with fewer heads, or a smaller batch_multiple",
    )  # fmt: skip
    folder = local_path(out, "a dataset that one machine writes")
    return write_recording(folder, plan, partial(_blocks, tokens, by_table, block), progress)


def _digest(grams: NGrams) -> str:
    """Return a digest that distinguishes keys of n-grams from other keys."""
    facts = {one.name: getattr(grams, one.name) for one in fields(grams) if one.init and one.name != "token_map"}
    content = b"" if grams.token_map is None else grams.token_map.tobytes()
    return hashlib.sha256(repr(sorted(facts.items())).encode() + content).hexdigest()[:32]


def _blocks(
    tokens: TokenFiles, grams: Mapping[str, NGrams], block: int, first: int,
    skipped: Callable[[NDArray[np.int64]], None],
) -> Generator[RecordedBatch, None, None]:  # fmt: skip
    """Yield the unique keys of blocks of sequences with their occurrences, as a `BatchSource`."""
    with closing(Workers()) as workers:
        for begin in range(0, len(tokens), block):
            indices = np.arange(begin, min(len(tokens), begin + block))
            if begin < first * block:
                skipped(indices)
                continue
            numbers = tokens.read(begin, begin + indices.size)
            found = {name: _unique_keys(one, numbers, workers) for name, one in grams.items()}
            yield RecordedBatch(
                keys={name: keys for name, (keys, _) in found.items()}, digests=(), num_samples=indices.size,
                indices=indices, times={name: times for name, (_, times) in found.items()},
            )  # fmt: skip


def _unique_keys(
    grams: NGrams, tokens: NDArray[np.int64], workers: Workers
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the keys of unique n-grams, and the occurrences of each. A key may repeat if two n-grams have it."""
    mixed_ON = grams.mixed(grams.checked(tokens))
    keys, times = ([np.empty(0, np.int64) for _ in grams.orders] for _ in range(2))

    def spread(order: int) -> None:
        mixed = mixed_ON[order]
        unique = UniqueKeys(expected=mixed.size // 2)
        unique.add(mixed, np.empty(mixed.size, np.int32))
        distinct, counts, _ = unique.sorted(with_positions=False)
        of_order = grams.keys_of(order, distinct)
        keys[order], times[order] = of_order.reshape(-1), np.repeat(counts, of_order.shape[1])

    workers.run(partial(spread, order) for order in range(len(keys)))
    return np.concatenate(keys), np.concatenate(times)
