"""Resident rows: all rows of a dataset in arrays on the device, for a cache without a store."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import numpy as np

from tiercache.data.raw_batch import OOV_KEY
from tiercache.errors import DatasetError, StateError
from tiercache.kernels.cpu.unique_keys import UniqueKeys
from tiercache.planning.row_offsets import RowOffsets
from tiercache.planning.schedule import Schedule
from tiercache.reporting.report import PassReport
from tiercache.rows.backends.base import Layout
from tiercache.rows.device import group_rows
from tiercache.rows.prefetch import first_vectors
from tiercache.store.row_codec import from_words
from tiercache.store.table import group_tables
from tiercache.train.commit_state import CommitState
from tiercache.train.missing_rows import unseen_vectors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.data.dataset import DatasetView
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.planning.schedule import OrderRule
    from tiercache.rows.backends.base import Backend
    from tiercache.store.table import Group, Table
    from tiercache.values.lookups import GroupRows, Unseen


class ResidentRows:
    """Holds the rows of all passes, instead of `RankRows`: switching passes moves no rows, nothing is committed."""

    eval_bytes = sys.maxsize  # evaluations have no budget
    host_bytes_peak = 0
    closed = "this cache is closed, and its rows are gone: read them before close()"
    """The error message for calls after ``close``."""

    def __init__(self, source: DatasetView, backend: Backend, order: OrderRule) -> None:
        """Allocate memory, and make the initial rows. Raises BudgetError if the device has too little."""
        self.source, self.backend = source, backend
        self.groups = group_tables(source.tables)
        self.positions = RowOffsets.of(source, self.groups)
        self.schedule = Schedule.of(source, order)
        self.state = CommitState(self.groups, backend)
        self.trained = 0  # passes trained so far
        self._begun = 0  # passes begun so far; rows of an unfinished pass have been trained too
        self.keys: dict[str, NDArray[np.int64]] = {}  # all keys by table, in the order of rows
        self._place = {t.name: (g, i) for g, group in enumerate(self.groups) for i, t in enumerate(group.tables)}
        self._first: dict[str, int] = {}
        self._finders: dict[str, ResidentKeys] = {}
        self._slots_PG: list[list[NDArray[np.int32]]] = [
            [np.empty(self.positions.num_rows(p, g), dtype=np.int32) for g in range(len(self.groups))]
            for p in range(len(source.passes))
        ]
        rows_G = [self._number(g) for g in range(len(self.groups))]
        self._arrays_G = backend.reserve(
            [
                Layout(
                    rows,
                    tuple(field.words for field in group.fields),
                    max(p[group.index].size for p in self._slots_PG),
                    group.dtype != "float32",
                )
                for rows, group in zip(rows_G, self.groups, strict=True)
            ],
            "an InMemoryCache holds all rows of all passes, which",
        )
        for g in range(len(self.groups)):
            self._fill(g)

    def _number(self, g: int) -> int:
        """Number the keys of a group over all passes and return how many there are."""
        group, rows = self.groups[g], 0
        for i, table in enumerate(group.tables):
            most = sum(p.rows(table.name) for p in self.source.passes)
            names = UniqueKeys(expected=most)
            for p, source in enumerate(self.source.passes):
                starts = self.positions.table_starts(p, g)
                numbers = self._slots_PG[p][g][starts[i] : starts[i + 1]]
                names.add(np.ascontiguousarray(source.keys(table.name)), numbers)
                numbers += rows
            self._first[table.name] = rows
            self.keys[table.name] = names.keys()
            rows += names.count
        return rows

    def _fill(self, g: int) -> None:
        group, arrays, backend = self.groups[g], self._arrays_G[g], self.backend
        for values, field in zip(arrays.fields[1:], group.fields[1:], strict=True):
            backend.set_rows(values, None, field.initial)
        for table in group.tables:
            keys, first = self.keys[table.name], self._first[table.name]
            slots = slice(first, first + keys.size)
            vectors = arrays.fields[0][slots]
            if backend.generates(table):
                backend.generate(table, keys, vectors, None, None)
            else:
                backend.write(vectors, _first_vectors(table, keys))
            if group.dtype != "float32":
                backend.write_streams(table, keys, arrays.streams[slots], None, None)

    batch_order = plan = None

    def check(self, *_: object, **__: object) -> None:
        """Do nothing, because nothing is committed and no thread moves rows."""

    check_parameters = check_process = check_restored = load_ahead = begin = capture = commit_within = drain = stop = (
        check
    )

    def restore(self, ranks: AnyCommunicator, *, is_loaded: bool = False) -> tuple[int, int]:
        """Return the first pass that was not trained to its end, and its first sample."""
        return self.cursor

    @property
    def cursor(self) -> tuple[int, int]:
        """The first pass that was not trained to its end, and its first sample."""
        return self.trained, 0

    def rows_of_pass(self, index: int) -> tuple[PassReport, Sequence[GroupRows]]:
        """Return the report of a pass, which moves nothing, and its rows."""
        self._begun = max(self._begun, index + 1)
        p = self.schedule.sub_dataset_of(index)
        rows = self.positions.num_rows(p)
        report = PassReport(
            pass_index=index, epoch=self.schedule.epoch_of(index), sub_dataset=p, rows=rows, rows_kept=rows,
            rows_generated=0, rows_from_host=0, rows_read=0, rows_read_planned=0, bytes_loaded=0, bytes_read=0,
            bytes_read_planned=0, durable=threading.Event(),
        )  # fmt: skip
        report.durable.set()  # there is nothing to write
        return report, [
            group_rows(
                group,
                self._arrays_G[g].fields,
                self.backend.place(self._slots_PG[p][g], self._arrays_G[g].slots),
                self.positions.table_starts(p, g),
                streams=self._arrays_G[g].streams,
            )
            for g, group in enumerate(self.groups)
        ]

    def end_pass(self, state: object, *, last: bool) -> None:
        """Count a pass as trained."""
        self.trained += 1

    @property
    def device_bytes(self) -> int:
        """Bytes of rows and slot maps."""
        arrays = [array for one in self._arrays_G for array in (*one.fields, one.slots, one.streams)]
        return sum(array.nbytes for array in arrays)

    def check_evaluated(self, passes: DatasetView) -> None:
        """Raise DatasetError for a dataset of other tables."""
        if different := {table.name for table in {*passes.tables} ^ {*self.source.tables}}:
            raise DatasetError(
                f"the dataset {passes.path} was extracted for different tables than those trained here (they differ in "
                f"{', '.join(sorted(different))}): extract it with the schema of {self.source.path}"
            )

    def current_rows(
        self, index: int | None, unknown: Mapping[str, Sequence[NDArray[np.float32]]] | None = None
    ) -> InMemoryRows:
        """Return a reader of any current rows, inside pass ``index`` or outside."""
        last = min(self._begun, 2 * self.schedule.num_passes)
        trained = {self.schedule.sub_dataset_of(index) for index in range(last)}
        return InMemoryRows(self, sorted(trained))

    def key_finder(self, table_name: str) -> ResidentKeys:
        """Return the keys of a table, sorted at the first call."""
        self._check_open()
        if table_name not in self._finders:
            g, i = self._place[table_name]
            cuts_P = [self.positions.table_starts(p, g)[i : i + 2] for p in range(len(self._slots_PG))]
            slots_P = [slots_G[g][slice(*cuts)] for slots_G, cuts in zip(self._slots_PG, cuts_P, strict=True)]
            self._finders[table_name] = ResidentKeys(self.keys[table_name], self._first[table_name], slots_P)
        return self._finders[table_name]

    def read(
        self, table_name: str, at: NDArray[np.int64] | None = None, num_fields: int | None = None
    ) -> tuple[NDArray[np.float32], ...]:
        """Return the first fields of rows at positions in ``keys``; None: of all, on a CPU as views unless 16-bit."""
        self._check_open()
        g, first = self._place[table_name][0], self._first[table_name]
        slots = slice(first, first + self.keys[table_name].size) if at is None else (first + at).astype(np.int32)
        fields, arrays = self.groups[g].fields[:num_fields], self._arrays_G[g].fields[:num_fields]
        return from_words(fields, [self.backend.read(words, slots) for words in arrays])

    def close(self) -> None:
        """Free all memory."""
        self._arrays_G, self._slots_PG = [], []
        self._finders.clear()

    def _check_open(self) -> None:
        if not self._arrays_G:
            raise StateError(self.closed)


class ResidentKeys:
    """Finds the rows of a table by key. It sorts keys once, and marks the keys that a pass trains once."""

    def __init__(self, keys: NDArray[np.int64], first: int, slots_P: Sequence[NDArray[np.int32]]) -> None:
        """slots_P: by pass, the slots of the keys that it trains; ``first`` is the slot of the first key."""
        self._keys, self._first, self._slots_P = keys, first, slots_P
        self._order = np.argsort(keys)
        self._shared = np.nonzero(keys == OOV_KEY)[0]
        self._trained = np.zeros(keys.size, dtype=bool)
        self._marked: set[int] = set()

    def find(self, keys: NDArray[np.int64], trained: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the position of each key, or of the shared row, and which were trained in sub-datasets ``trained``."""
        if not self._keys.size:
            return np.zeros(keys.size, np.int64), np.zeros(keys.size, dtype=bool)
        self._mark(set(trained))
        at = self._order[np.minimum(np.searchsorted(self._keys, keys, sorter=self._order), self._keys.size - 1)]
        found = (self._keys[at] == keys) & self._trained[at]
        if self._shared.size:
            return np.where(found, at, self._shared[0]), np.ones(keys.size, dtype=bool)
        return at, found

    def _mark(self, trained: set[int]) -> None:
        if not trained >= self._marked:  # by a reader made before the last passes
            self._trained[:], self._marked = False, set()
        for p in trained - self._marked:
            self._trained[self._slots_P[p] - self._first] = True
        self._marked = trained


class InMemoryRows:
    """Reads current rows like `CurrentRows`: a key that has not been trained yet reads as its initial row."""

    def __init__(self, rows: ResidentRows, trained: list[int]) -> None:
        """trained: the sub-datasets trained so far."""
        self.groups: tuple[Group, ...] = rows.groups
        self._tables = {table.name: table for group in rows.groups for table in group.tables}
        self._rows, self._trained_sub_datasets = rows, trained
        self.unseen: Unseen = "initial"  # see `CurrentRows`

    def fields(self, table_name: str, keys: NDArray[np.int64]) -> tuple[NDArray[np.float32], ...]:
        """Return the vector and every optimizer state of ``keys``, as `CurrentRows` does."""
        out = tuple(np.empty((keys.size, field.width), np.float32) for field in self._tables[table_name].fields)
        self.fill(table_name, keys, out)
        return out

    def shares_unknown(self, table_name: str) -> bool:
        """Return True if a table was trained with an out-of-vocabulary row."""
        return bool((self._rows.keys[table_name] == OOV_KEY).any())

    def fill(self, table_name: str, keys: NDArray[np.int64], out: tuple[NDArray[np.float32], ...]) -> None:
        """Write the first fields of ``keys`` to the arrays of ``out``, (n, width) each."""
        table = self._tables[table_name]
        at, found = self._rows.key_finder(table_name).find(keys, self._trained_sub_datasets)
        if found.any():
            for to, values in zip(out, self._rows.read(table_name, at[found], len(out)), strict=True):
                to[found] = values
        if not found.all():
            rest = np.nonzero(~found)[0]
            out[0][rest] = unseen_vectors(table, keys[rest], self.unseen)
            for to, field in zip(out[1:], table.fields[1:], strict=False):
                to[rest] = field.initial


def _first_vectors(table: Table, keys: NDArray[np.int64]) -> Callable[[NDArray[np.float32], slice], None]:
    """Return a function that writes the initial vectors of a slice of ``keys``."""
    return lambda words, part: first_vectors(table, keys[part], words)
