"""The keys that are frequent enough for their own row: counts over all data, in bounded memory.

Counting fills a table of keys, which becomes a run on disk when it is full: a key set as for passes. The decision
merges the runs and the key sets of earlier datasets, one hash range at a time.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiercache.data.keyset import KeySet, open_key_set, write_key_set
from tiercache.data.raw_batch import NULL_KEY, OOV_KEY, FeatureKeys, RawBatch
from tiercache.kernels.cpu.hashing import hash_keys
from tiercache.kernels.cpu.key_sweeps import search_keys
from tiercache.kernels.cpu.unique_keys import UniqueKeys
from tiercache.store.files import publish

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.data.dataset import PassDataset
    from tiercache.data.extraction_resources import Workers
    from tiercache.data.manifest import SubDatasetRecord
    from tiercache.data.resume import ExtractionState
    from tiercache.schema import Schema
    from tiercache.store.table import Table

_MERGE_BYTES = 96
"""Host bytes for each key of a hash range while it is merged."""


class KeyCounter:
    """Counts keys until they fill their memory."""

    def __init__(self, schema: Schema, num_bytes: int, workers: Workers) -> None:
        self._schema, self._num_bytes, self._workers = schema, num_bytes, workers
        self._unique = self._empty_tables()

    def add(self, batch: RawBatch) -> bool:
        """Count the keys of a batch; return True if memory is full and a run should be written."""

        def count(table: str) -> None:
            for feature in self._schema.features:
                if feature.table == table:
                    keys = batch.features[feature.name].keys
                    self._unique[table].add(keys, np.empty(keys.size, np.int32))

        self._workers.run(partial(count, name) for name in self._unique)
        # Twice: while a table grows, the old one is still in memory, and sorting a run takes about as much.
        return 2 * sum(unique.nbytes for unique in self._unique.values()) > self._num_bytes

    def write_run(self, path: Path) -> SubDatasetRecord:
        """Write the counts as a key set, on disk on return, and start over."""
        rows = {name: unique.count for name, unique in self._unique.items()}
        columns = (unique.sorted()[:2] for unique in self._unique.values())
        record = _write_durably(path, self._schema.ordered_tables, rows, columns)
        self._unique = self._empty_tables()
        return record

    def _empty_tables(self) -> dict[str, UniqueKeys]:
        return {table.name: UniqueKeys(table.table_id) for table in self._schema.ordered_tables}


def count_keys(
    counter: KeyCounter,
    batches: Generator[tuple[RawBatch, int, int], None, None],
    state: ExtractionState,
    folder: Path,
) -> ExtractionState:
    """Count the keys of batches, each with the cursor after it, into runs on disk; write the state with every run."""

    def write_run(file_index: int, row: int, *, is_counted: bool) -> None:
        nonlocal state
        runs = (*state.runs, counter.write_run(_run_path(folder, len(state.runs))))
        state = replace(state, runs=runs, file_index=file_index, row=row, is_counted=is_counted)
        state.write(folder)

    with closing(batches) as made:
        for batch, file_index, row in made:
            if counter.add(batch):
                write_run(file_index, row, is_counted=False)
    write_run(0, 0, is_counted=True)
    return state


class FrequencyFilter:
    """Replaces every rare key by the out-of-vocabulary key. Null keys always keep their row."""

    def __init__(
        self, schema: Schema, state: ExtractionState, earlier: Sequence[PassDataset], *, min_count: int, folder: Path,
        num_bytes: int,
    ) -> None:  # fmt: skip
        """Merge the counts of a state's runs in ``folder`` and of earlier datasets, in about ``num_bytes`` of memory.

        A resumed extraction merges them again, so only the runs need to be durable.
        """
        self._schema, self._tables = schema, schema.ordered_tables
        runs = [open_key_set(_run_path(folder, index), self._tables, run) for index, run in enumerate(state.runs)]
        before: list[KeySet] = []
        for dataset in earlier:
            dataset.check_schema(schema)
            rare_keys = dataset.rare_keys()
            before += [one.key_set for one in dataset.passes] + ([] if rare_keys is None else [rare_keys])
        self._columns: list[list[NDArray[np.int64]]] = []
        """By table, all in hash order: the keys that occur at least ``min_count`` times in runs and earlier datasets
        together, the keys of the runs that do not, and the counts of these in the runs."""
        for index, table in enumerate(self._tables):
            paths = [folder / f"{kind}-{index:05d}.bin" for kind in ("admitted", "rare", "counts")]
            with paths[0].open("wb") as admitted, paths[1].open("wb") as rare, paths[2].open("wb") as rare_counts:
                for keys, counts, totals in _merged(table, runs, before, num_bytes):
                    is_frequent = totals >= min_count
                    admitted.write(keys[is_frequent].data)
                    is_rare = ~is_frequent & (counts > 0)
                    rare.write(keys[is_rare].data)
                    rare_counts.write(counts[is_rare].data)
            self._columns.append([_mapped(path) for path in paths])

    def apply(self, batch: RawBatch) -> RawBatch:
        """Return the batch with rare keys replaced."""
        features = dict(batch.features)
        for index, table in enumerate(self._tables):
            names = [f.name for f in self._schema.features if f.table == table.name]
            if not names:
                continue
            # Only the distinct keys are looked up, in hash order: the mapped file is swept once per batch.
            distinct = UniqueKeys(table.table_id)
            numbers = {name: np.empty(batch.features[name].keys.size, np.int32) for name in names}
            for name in names:
                distinct.add(batch.features[name].keys, numbers[name])
            keys, _, positions = distinct.sorted()
            admitted = np.empty(keys.size, np.int64)
            search_keys(self._columns[index][0], table.table_id, keys, admitted)
            kept = np.where((admitted >= 0) | (keys == NULL_KEY), keys, OOV_KEY)[positions]
            for name in names:
                entry = batch.features[name]
                features[name] = FeatureKeys(kept[numbers[name]], entry.offsets, entry.weights)
        return replace(batch, features=features)

    def write_rare(self, path: Path) -> SubDatasetRecord:
        """Write the rare keys of this data with their counts as a key set; it is on disk on return."""
        rows = {table.name: rare.size for table, (_, rare, _) in zip(self._tables, self._columns, strict=True)}
        return _write_durably(path, self._tables, rows, ((rare, counts) for _, rare, counts in self._columns))


def _write_durably(
    path: Path,
    tables: Sequence[Table],
    rows: dict[str, int],
    columns: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> SubDatasetRecord:
    """Write a key set in one step; it is on disk on return."""
    temporary = path.with_name(path.name + ".tmp")
    record = write_key_set(temporary, tables, rows, columns)
    publish(temporary, path)
    return record


def _merged(
    table: Table, runs: Sequence[KeySet], earlier: Sequence[KeySet], num_bytes: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Yield distinct keys in hash order with their counts in the runs and in all, one hash range at a time."""
    key_sets = [*runs, *earlier]
    ranges = 1 + sum(key_set.rows(table.name) for key_set in key_sets) * _MERGE_BYTES // max(1, num_bytes)
    begins = [0] * len(key_sets)
    for r in range(1, ranges + 1):
        ends = [key_set.place(table, (r << 64) // ranges) for key_set in key_sets]
        keys = np.concatenate([k.keys(table.name)[a:b] for k, a, b in zip(key_sets, begins, ends, strict=True)])
        totals = np.concatenate([k.counts(table.name)[a:b] for k, a, b in zip(key_sets, begins, ends, strict=True)])
        own = sum(b - a for a, b in list(zip(begins, ends, strict=True))[: len(runs)])
        counts = np.where(np.arange(keys.size) < own, totals, 0)
        begins = ends
        is_plain = keys > NULL_KEY  # reserved keys of earlier sets are not keys of the data
        keys, counts, totals = keys[is_plain], counts[is_plain], totals[is_plain]
        hashes = hash_keys(keys, table.table_id)
        order = np.argsort(hashes, kind="stable")
        firsts = np.flatnonzero(np.diff(hashes[order], prepend=~hashes[order[:1]]))
        if firsts.size:
            yield (keys[order[firsts]], np.add.reduceat(counts[order], firsts), np.add.reduceat(totals[order], firsts))


def _mapped(path: Path) -> NDArray[np.int64]:
    if path.stat().st_size == 0:
        return np.empty(0, np.int64)
    return np.memmap(path, np.int64, "r").view(np.ndarray)


def _run_path(folder: Path, index: int) -> Path:
    return folder / f"run-{index:05d}.safetensors"
