"""InMemoryCache: the same training with every row in memory; the baseline, and the oracle of the tiers."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.backends.base import Layout
from tiercache.backends.opening import open_backend
from tiercache.dist.communicator import LocalCommunicator
from tiercache.errors import DatasetError, StateError
from tiercache.kernels.cpu.unique_keys import UniqueKeys
from tiercache.planning.overlap import order_rule
from tiercache.planning.positions import Positions
from tiercache.planning.schedule import Schedule
from tiercache.store.table import group_tables
from tiercache.store.vectors import from_words
from tiercache.tiers.first_vectors import first_vectors
from tiercache.tiers.rows import GroupRows, RowView
from tiercache.training.batch_pipeline import BatchPipeline
from tiercache.training.convert import refuse_weights
from tiercache.training.evaluation import Evaluation
from tiercache.training.exchange import LocalExchange
from tiercache.training.held_keys import HeldKeys
from tiercache.training.matching import check_features, check_modules
from tiercache.training.missing_rows import unseen_vectors
from tiercache.training.passes import Pass, check_epochs
from tiercache.training.plain_keys import PlainKeys
from tiercache.training.progress import prepare_kernels
from tiercache.training.rate_watch import RateWatch
from tiercache.training.raw_batch import RawKeys
from tiercache.training.row_optimizer import RowOptimizer
from tiercache.training.step_hooks import StepHooks, named_objects, unwrapped_objects
from tiercache.training.stepped_cache import SteppedCache
from tiercache.training.table_module import table_modules
from tiercache.training.threads import share_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from numpy.typing import NDArray
    from torch import nn

    from tiercache.backends.base import Backend
    from tiercache.data.dataset import PassDataset
    from tiercache.store.table import Group, Table
    from tiercache.training.missing_rows import Unseen


class InMemoryCache(SteppedCache):
    """Trains a dataset with all rows in arrays on the device: no store, no budgets, no commits.

    With the same seeds it trains the same batches as a TierCache, to the same bits. Use it if your tables fit, or to
    measure what the tiers cost. ``register`` and ``passes`` work as in TierCache, but nothing is saved.
    """

    eval_bytes = sys.maxsize
    """There is no budget for the rows of an evaluation."""

    def __init__(
        self,
        passes: PassDataset,
        *,
        model: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        device: str | torch.device | Backend = "cpu",
        seed: int = 0,
        order: Sequence[int] | str | None = None,
        order_seed: int | None = None,
    ) -> None:
        self._backend = open_backend(device, passes.tables)
        prepare_kernels(passes.tables)
        share_threads()
        self.dataset = passes
        self._seed = seed
        self._groups = group_tables(passes.tables)
        self._positions = Positions.of(passes, self._groups)
        rule = order_rule(passes, order, order_seed)
        self._schedule = Schedule(num_passes=len(passes.passes), dataset_digest=passes.digest, order=rule)
        self._keys: dict[str, NDArray[np.int64]] = {}
        self._first: dict[str, int] = {}
        self._held: dict[str, HeldKeys] = {}
        self._slots_PG: list[list[NDArray[np.int32]]] = [
            [np.empty(self._positions.num_rows(p, g), dtype=np.int32) for g in range(len(self._groups))]
            for p in range(len(passes.passes))
        ]
        rows_G = [self._number(g) for g in range(len(self._groups))]
        self._arrays_G = self._backend.reserve(
            [
                Layout(
                    rows,
                    tuple(field.words for field in group.fields),
                    max(p[group.index].size for p in self._slots_PG),
                    group.dtype != "float32",
                )
                for rows, group in zip(rows_G, self._groups, strict=True)
            ],
            "an InMemoryCache holds all rows of all passes, which",
        )
        for g in range(len(self._groups)):
            self._fill(g)
        self._row_optimizer = rows = RowOptimizer(self._groups, self._backend)
        self.optimizer = rows.joint
        self._pipeline, self._hooks = BatchPipeline(self._backend), StepHooks(self, rows)
        alone = LocalCommunicator(self._backend.device)
        self._exchange = LocalExchange(alone, self._backend, rows, self.live_rows)
        self._raw = RawKeys(passes.schema, self._groups, self._exchange, rows, self._backend)
        self._pass: Pass | None = None
        self._ahead: Pass | None = None
        """The next one, where the loop asked for it before that was trained to its end."""
        self._plain = PlainKeys(self._raw, self)
        self._trained, self._rate_watch = 0, RateWatch(rows)
        self._closed = False
        self.register(**named_objects(model=model, optimizer=optimizer))

    def _number(self, g: int) -> int:
        """Number the keys of a group over all passes and return how many there are."""
        group, rows = self._groups[g], 0
        for i, table in enumerate(group.tables):
            most = sum(p.rows(table.name) for p in self.dataset.passes)
            names = UniqueKeys(room=most)
            for p, source in enumerate(self.dataset.passes):
                starts = self._positions.table_starts(p, g)
                numbers = self._slots_PG[p][g][starts[i] : starts[i + 1]]
                names.add(np.ascontiguousarray(source.keys(table.name)), numbers)
                numbers += rows
            self._first[table.name] = rows
            self._keys[table.name] = names.keys()
            rows += names.count
        return rows

    def _fill(self, g: int) -> None:
        """Make the initial rows of a group."""
        group, arrays, backend = self._groups[g], self._arrays_G[g], self._backend
        for values, field in zip(arrays.fields[1:], group.fields[1:], strict=True):
            backend.set_rows(values, None, field.initial)
        for table in group.tables:
            keys, first = self._keys[table.name], self._first[table.name]
            mine = slice(first, first + keys.size)
            vectors = arrays.fields[0][mine]
            if backend.generates(table):
                backend.generate(table, keys, vectors, None, None)
            else:
                backend.write(vectors, _first_vectors(table, keys))
            if group.dtype != "float32":
                backend.note_keys(table, keys, arrays.streams[mine], None, None)

    def register(self, **objects: Any) -> None:
        """Have ``cache.optimizer`` step the optimizers among these objects; nothing is saved.

        Raises DatasetError for a module that was made with other features or tables than those of the dataset.
        """
        self._check_open()
        refuse_weights(objects.values())
        objects = unwrapped_objects(objects, self.optimizer)
        check_modules(objects, self.dataset)
        self._hooks.follow(objects.values())
        for module in table_modules(objects.values()):
            module.take_keys(weakref.WeakMethod(self._plain.batch))

    def passes(self, epochs: int) -> Iterator[Pass]:
        """Yield the passes up to the end of epoch ``epochs``, from the first not trained yet."""
        self._check_open()
        check_epochs(epochs)
        share_threads()
        self._finish()
        self._rate_watch.begin()
        end = epochs * self._schedule.num_passes
        try:
            while self._trained < end:
                current = self._ahead = self._make(self._trained)
                if self._pass is None or self._pass.is_trained:
                    self._bring()
                yield current
                self._check_open()
                if current.ledger.is_stopped or (self._pass is not None and self._pass.ledger.is_stopped):
                    return
                try:
                    current.ledger.check_made(current.samples_done)
                except StateError:
                    self._row_optimizer.check_stepped(f"pass {current.index}")
                    raise
                if self._ahead is current:  # no batch of it was looked up
                    self._bring()
                self._row_optimizer.check_stepped(f"pass {current.index}")
                current.rows.leave()
                self._trained += 1
            if self._pass is not None and self._pass.is_trained:
                self._finish()
        finally:
            if self._trained < end:
                self._end_pass(is_dropped=True)

    def _finish(self) -> None:
        """End the last pass of a loop that has ended. Raises StateError if it was not trained."""
        try:
            if self._pass is not None and self._pass.rows.is_left:
                self._check_trained(self._pass)
        finally:
            self._end_pass()

    def _check_trained(self, current: Pass) -> None:
        """Raise StateError if a pass whose loop went on was not trained: the next loop begins with it."""
        self._rate_watch.check()
        try:
            current.ledger.check_trained()
        except StateError:
            self._trained = current.index
            raise

    def _make(self, index: int) -> Pass:
        """Return a pass whose rows are not shown yet."""
        p = self._schedule.sub_dataset_of(index)
        rows = RowView((), self._row_optimizer.gradients, f"pass {index}", self._backend, self._bring)
        return Pass(
            index=index, epoch=self._schedule.epoch_of(index), source=self.dataset.passes[p], rows=rows,
            seed=self._seed, raw=self._raw, exchange=self._exchange, pipeline=self._pipeline,
        )  # fmt: skip

    def _bring(self) -> None:
        """End the pass that was trained, and show the rows of the one that the loop has asked for."""
        if self._pass is not None:
            assert self._ahead is not None
            self._pass.check_ends(self._ahead)
            self._row_optimizer.check_stepped(f"pass {self._pass.index}")
            self._check_trained(self._pass)
            self._pass.end()
        self._pass, self._ahead = self._ahead, None
        assert self._pass is not None
        self._row_optimizer.anchors.ledger = self._pass.ledger
        self._pass.rows.show(self._rows_of(self._pass.sub_dataset))

    def _current(self) -> Pass | None:
        return self._pass

    def _newest(self) -> Pass | None:
        return self._ahead or self._pass

    def _end_pass(self, *, is_dropped: bool = False) -> None:
        for one in (self._pass, self._ahead):
            if one is not None:
                one.end(is_dropped=is_dropped)
        self._pass = self._ahead = None
        self._row_optimizer.discard()

    def _rows_of(self, p: int) -> list[GroupRows]:
        """Return what lookups see of a pass."""
        return [
            GroupRows.of(
                group,
                self._arrays_G[g].fields,
                self._backend.place(self._slots_PG[p][g], self._arrays_G[g].slots),
                self._positions.table_starts(p, g),
                streams=self._arrays_G[g].streams,
            )
            for g, group in enumerate(self._groups)
        ]

    def close(self) -> None:
        """Free all memory. After this, anything that asks the cache for rows raises StateError.

        A cache that is no longer referred to frees its memory without this. Raises StateError if the last pass of a
        loop was not trained.
        """
        self._close(failed=False)

    def __enter__(self) -> InMemoryCache:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(failed=error is not None)

    def _close(self, *, failed: bool) -> None:
        self._closed = True
        try:
            (self._end_pass if failed else self._finish)()
        finally:
            self._hooks.remove()
            self._raw.close()
            self._backend.drop_scratch()
            self._arrays_G, self._slots_PG = [], []
            self._held.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this cache is closed, and its rows are gone: read them before close()")

    def keys(self, table_name: str) -> NDArray[np.int64]:
        """Return all keys of a table, in the order of ``fields``."""
        return self._keys[table_name]

    def fields(self, table_name: str) -> tuple[NDArray[np.float32], ...]:
        """Return the vectors and each optimizer state of a table, float32 (rows, width).

        They are views on a CPU, except for 16-bit vectors, and copies from a GPU.
        """
        return self._read(table_name, None, None)

    def _read(
        self, table_name: str, at: NDArray[np.int64] | None, num_fields: int | None
    ) -> tuple[NDArray[np.float32], ...]:
        """Return the first fields of some rows, given by their places in ``keys``; None: of all, and all."""
        self._check_open()
        g, first = self._place(table_name)[0], self._first[table_name]
        slots = slice(first, first + self._keys[table_name].size) if at is None else (first + at).astype(np.int32)
        fields, arrays = self._groups[g].fields[:num_fields], self._arrays_G[g].fields[:num_fields]
        return from_words(fields, [self._backend.read(words, slots) for words in arrays])

    def _held_keys(self, table_name: str) -> HeldKeys:
        """Return where the keys of a table are found, made when somebody asks for the first time."""
        self._check_open()
        if table_name not in self._held:
            g, i = self._place(table_name)
            cuts_P = [self._positions.table_starts(p, g)[i : i + 2] for p in range(len(self._slots_PG))]
            slots_P = [slots_G[g][slice(*cuts)] for slots_G, cuts in zip(self._slots_PG, cuts_P, strict=True)]
            self._held[table_name] = HeldKeys(self._keys[table_name], self._first[table_name], slots_P)
        return self._held[table_name]

    def _place(self, table_name: str) -> tuple[int, int]:
        """Return the group of a table, and which of its tables it is."""
        return next(
            (g, i) for g, group in enumerate(self._groups) for i, t in enumerate(group.tables) if t.name == table_name
        )

    @property
    def device(self) -> torch.device:
        """The device on which rows are trained."""
        return self._backend.device

    def evaluate(self, passes: PassDataset) -> Iterator[Evaluation]:
        """Yield read-only slices of another dataset, at any moment between batches, as `TierCache.evaluate` does.

        A slice is a whole sub-dataset, because there is no budget. Raises DatasetError for other tables or features.
        """
        self._check_open()
        check_features(self.dataset, passes)
        if different := {table.name for table in {*passes.tables} ^ {*self.tables}}:
            raise DatasetError(
                f"the dataset {passes.path} was extracted for other tables than those trained here (they differ in "
                f"{', '.join(sorted(different))}): extract it with the schema of {self.dataset.path}"
            )
        yield from Evaluation.slices(
            passes, self.live_rows(), sys.maxsize, self._exchange, self._pipeline, self._backend
        )

    def live_rows(self) -> InMemoryRows:
        """Return a reader of any rows as of now."""
        self._check_open()
        return InMemoryRows(self.groups, self._held_keys, self._read, self._trained_sub_datasets())

    def _trained_sub_datasets(self) -> list[int]:
        """Return the sub-datasets trained so far, that of the pass included."""
        last = self._trained if self._pass is None else self._pass.index + 1
        return sorted(
            {self._schedule.sub_dataset_of(index) for index in range(min(last, 2 * self._schedule.num_passes))}
        )

    @property
    def tables(self) -> tuple[Any, ...]:
        """The tables trained."""
        return self._positions.tables

    @property
    def groups(self) -> tuple[Any, ...]:
        """The groups of tables with the same row layout."""
        return self._groups

    @property
    def schema(self) -> Any:
        """The schema of the dataset."""
        return self.dataset.schema


class InMemoryRows:
    """Reads rows as of now, with the promises of LiveRows: a key that was not trained yet has no row of its own."""

    def __init__(
        self,
        groups: tuple[Group, ...],
        held: Callable[[str], HeldKeys],
        read: Callable[[str, NDArray[np.int64], int], tuple[NDArray[np.float32], ...]],
        trained: list[int],
    ) -> None:
        self.groups = groups
        self._tables = {table.name: table for group in groups for table in group.tables}
        self._held, self._read, self._trained_sub_datasets = held, read, trained
        self.unseen: Unseen = "initial"
        """As of LiveRows."""

    def fill(self, table_name: str, keys: NDArray[np.int64], out: tuple[NDArray[np.float32], ...]) -> None:
        """Write the first fields of ``keys`` to the arrays of ``out``, (n, width) each; no other row is read."""
        table = self._tables[table_name]
        at, found = self._held(table_name).find(keys, self._trained_sub_datasets)
        if found.any():
            for to, have in zip(out, self._read(table_name, at[found], len(out)), strict=True):
                to[found] = have
        if not found.all():
            rest = np.nonzero(~found)[0]
            out[0][rest] = unseen_vectors(table, keys[rest], self.unseen)
            for to, field in zip(out[1:], table.fields[1:], strict=False):
                to[rest] = field.initial


def _first_vectors(table: Table, keys: NDArray[np.int64]) -> Callable[[NDArray[np.float32], slice], None]:
    """Return what makes the initial vectors of some of ``keys``."""
    return lambda words, part: first_vectors(table, keys[part], words)
