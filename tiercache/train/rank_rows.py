"""RankRows: the rows that one rank trains, on the device, on the host and in its store, within its budgets."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.data.raw_batch import OOV_KEY
from tiercache.dist.budget_checks import plans_of
from tiercache.errors import BudgetError, StateError
from tiercache.kernels.cpu.key_sweeps import search_keys
from tiercache.planning.matching import check_schedule, check_tables
from tiercache.rows.device import DeviceTier
from tiercache.rows.pinned import PinnedArena
from tiercache.rows.switch import PassSwitcher
from tiercache.store.row_codec import from_words
from tiercache.train.commit_state import CommitState
from tiercache.train.missing_rows import unseen_vectors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.data.dataset import DatasetView
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.planning.budgets import Budgets
    from tiercache.planning.pass_plan import PassPlan
    from tiercache.planning.row_offsets import RowOffsets
    from tiercache.planning.schedule import OrderRule
    from tiercache.reporting.report import PassReport
    from tiercache.rows.backends.base import Backend
    from tiercache.rows.device import SlotAssignment
    from tiercache.rows.switch import StateBytes
    from tiercache.store import Store
    from tiercache.store.table import Group
    from tiercache.train.dense_state import RandomStates
    from tiercache.values.lookups import GroupRows, Unseen

_TRAINED_BY: weakref.WeakKeyDictionary[Store, weakref.ref[RankRows]] = weakref.WeakKeyDictionary()
"""The RankRows whose loop over passes is running, by store."""
_CHUNK_BYTES = 1 << 20  # bytes of rows in flight, with all their fields


class RankRows:
    """Plans and moves the rows of one rank; it owns a reader and a writer thread until ``close``."""

    closed = "this cache is closed: open another one on its store to continue"
    """The error message for calls after ``close``."""

    def __init__(
        self, store: Store, source: DatasetView, backend: Backend, budgets: Budgets, *, order: OrderRule,
        index_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Plan, and allocate the memory. ``index_bytes``: for an index of keys, from the device budget if they fit."""
        self.store, self.source, self.backend = store, source, backend
        self._tables = store.tables
        self.check_alone()
        check_tables(store, source)
        self.plans, self._uses = plans_of(budgets, source, store, order=order)
        self.schedule, self.budget = self.plans.schedule, self.plans.host
        self.positions = positions = self.plans.positions
        check_schedule(store, source, self.schedule)
        self.device = DeviceTier(positions, budgets.device_budget, backend, index_bytes=index_bytes)
        self._with_unknown: dict[int, bool] = {}  # whether the dataset has the out-of-vocabulary row, by table
        self._keys_of = positions.keys_of(source)  # nothing else in the cache refers to it, so dropping it frees it
        self._check_plans()  # so a budget that is too small fails here, not in the middle of a run
        self.memory = PinnedArena(self.budget.rows, self.budget.region, backend, pinned=self.budget.pinned)
        self.state = CommitState(store.groups, backend)
        self._lineage: tuple[tuple[int, int], ...] = ()  # commits dropped by rollbacks before the last restore
        self.transfer = PassSwitcher(
            store, self.device, backend, self.memory, self.budget, positions, self._keys_of, self._uses.of,
            schedule_digest=self.schedule.digest, environment=self.state.environment,
        )  # fmt: skip
        self.check, self.load_ahead = self.transfer.check, self.transfer.load_ahead
        self.check_process, self.eval_bytes = self.transfer.check_process, self.budget.evaluation
        self.capture, self.check_parameters = self.state.capture, self.state.check_parameters

    def _check_plans(self) -> None:
        """Plan an epoch. Raises BudgetError if a budget is too small, and then leaves no file."""
        commit = self.store.commit
        try:
            self.plans.passes(None)
            self.plans.check_store(lambda: 0 if commit is None else commit.state_bytes)
        except BudgetError:
            self._uses.discard()
            raise

    def restore(self, ranks: AnyCommunicator, *, is_loaded: bool = False) -> tuple[int, int]:
        """Restore the last commit, with tracked state, or make a first one; returns its pass and sample.

        is_loaded: the tracked state is that of the last commit, and stays as it is, unless the store was rolled back
        or objects were registered since the last call. Collective.
        """
        is_fresh = (commit := self.store.commit) is None
        lineage = () if commit is None else commit.abandoned
        is_same = is_loaded and lineage == self._lineage and self.state.dense.is_restored
        with ranks.raise_on_all("checking the last commit"):
            self.check_alone()
            if not is_fresh:
                self._check_tables()
                check_schedule(self.store, self.source, self.schedule)
        if is_fresh:
            self.state.optimizer.is_restored = True
        elif not ranks.all_reduce_min([is_same])[0]:
            self.state.restore(self.store, ranks)
        self.state.dense.keep_once(ranks)
        with ranks.raise_on_all("making the first commit" if is_fresh else "planning the store"):
            if is_fresh:
                self.transfer.publish_first(self.state.capture())
            self.plans.check_store(self.state.dense.most_bytes)
        self.state.dense.note_restored()
        self._lineage = lineage  # only now: a call that raised restored nothing
        return self.plans.cursor

    def _check_tables(self) -> None:
        if self.store.tables != self._tables:
            raise StateError(
                f"the tables of {self.store.label} changed while this cache was open, by alter or a rollback, and the "
                "cache still has the earlier settings: close it and open a new one"
            )

    @property
    def cursor(self) -> tuple[int, int]:
        """The pass and the sample after the last commit."""
        return self.plans.cursor

    def begin(self, end: int) -> None:
        """Begin with the next pass, up to ``end``; no other cache trains the store until ``stop``."""
        if self.store.mode != "a":
            raise StateError(
                f"{self.store.label} is open read-only: to train, pass a path, or a Store opened with mode='a'"
            )
        _TRAINED_BY[self.store] = weakref.ref(self)
        self.transfer.begin(self.plans.planner(end), end=end)

    def rows_of_pass(self, index: int) -> tuple[PassReport, Sequence[GroupRows]]:
        """Return the report and the rows of the pass that was loaded."""
        plan, report = self.transfer.plan, self.transfer.report
        assert plan is not None
        assert report is not None
        assert plan.pass_index == index
        return report, self.device.rows_of(plan.sub_dataset)

    def end_pass(self, state: StateBytes | None, *, last: bool) -> None:
        """End the trained pass: load the rows of the next one, or write the rows of the last."""
        assert state is not None
        (self.transfer.finish if last else self.transfer.switch)(state)

    def commit_within(self, sample: int, order: Mapping[str, object] | None, random: RandomStates | None) -> None:
        """Commit inside the pass, after ``sample`` samples in the given order. Returns when it is durable."""
        state, settings = self.state.capture(random)
        self.transfer.commit_within(sample, (state, settings | {"order": order}))

    def pin(self, name: str) -> int:
        """Pin the newest commit and return its id; with several ranks, publish it then."""
        commit = 0 if self.store.commit is None else self.store.commit.id  # without a commit, pin raises
        self.store.commit_on_all(lambda part: part.commit_writer.pin(name, commit), of_shard=True)
        return commit

    @property
    def batch_order(self) -> Any:
        """The order of batches that the last commit inside a pass was made in."""
        return None if self.store.commit is None else self.store.commit.settings.get("order")

    @property
    def plan(self) -> PassPlan | None:
        """The plan of the pass whose rows are on the device."""
        return self.transfer.plan

    def check_restored(self) -> None:
        """Raise StateError if a model is not the one that the last commit trained with its rows."""
        self.state.check_restored(self.store)

    def check_evaluated(self, passes: DatasetView) -> None:
        """Raise DatasetError for a dataset of other tables."""
        check_tables(self.store, passes)

    def drain(self, *, staged: bool = False) -> None:
        """Wait until every dump is durable and, with ``staged``, the rows of the next pass are prefetched."""
        self.transfer.drain()
        if staged:
            self.transfer.await_staging()

    def stop(self) -> None:
        """End a loop over the passes."""
        self.transfer.stop()
        if self._trained_by() is self:
            del _TRAINED_BY[self.store]

    @property
    def device_bytes(self) -> int:
        """Bytes of rows and slot maps."""
        return self.device.num_bytes

    @property
    def host_bytes_peak(self) -> int:
        """Peak bytes of rows on the host so far."""
        return self.memory.peak_bytes

    def current_rows(
        self, index: int | None, unknown: Mapping[str, Sequence[NDArray[np.float32]]] | None
    ) -> CurrentRows:
        """Return a reader of current rows, inside pass ``index`` or outside. Waits until every dump is durable."""
        self.transfer.drain()
        return CurrentRows(
            store=self.store, device=self.device, assignments=self.transfer.assignments,
            sub_dataset=None if index is None else self.schedule.sub_dataset_of(index), positions=self.positions,
            keys_of=self._keys_of, after=self.plans.cursor[0] - 1 if index is None else index,
            cached=self.transfer.cached_page, trains_unknown=self._trains_unknown, unknown=unknown,
        )  # fmt: skip

    def _trains_unknown(self, table: int) -> bool:
        """Return True if a pass has the out-of-vocabulary row of a table, given by its index."""
        if table not in self._with_unknown:
            unknown, place = np.array([OOV_KEY], dtype=np.int64), np.empty(1, dtype=np.int64)
            self._with_unknown[table] = False
            for p in range(len(self.source.passes)):
                search_keys(np.asarray(self._keys_of(p, table)), self.positions.tables[table].table_id, unknown, place)
                if place[0] >= 0:
                    self._with_unknown[table] = True
                    break
        return self._with_unknown[table]

    def close(self) -> None:
        """End both threads and free all memory; the store stays open."""
        if self._trained_by() is self:
            del _TRAINED_BY[self.store]
        self.transfer.close()

    def _trained_by(self) -> RankRows | None:
        return _TRAINED_BY.get(self.store, lambda: None)()

    def check_alone(self) -> None:
        """Raise StateError if another cache trains the store."""
        if self._trained_by() not in {None, self}:
            raise StateError(
                f"{self.store.label} is being trained by another TierCache: end its loop over passes(), or close it, "
                "before another one trains"
            )


class CurrentRows:
    """Reads current rows: device, then host, then store, then the initial row. Writes nothing."""

    def __init__(
        self,
        *,
        store: Store,
        positions: RowOffsets,
        device: DeviceTier | None = None,
        assignments: list[SlotAssignment] | None = None,
        sub_dataset: int | None = None,
        keys_of: Callable[[int, int], NDArray[np.int64]],
        after: int,
        cached: Callable[[int, int, int], NDArray[np.uint8] | None] | None = None,
        trains_unknown: Callable[[int], bool] = lambda _: False,
        unknown: Mapping[str, Sequence[NDArray[np.float32]]] | None = None,
    ) -> None:
        """unknown: by table the fields, (1, width) each, of an out-of-vocabulary row that is kept elsewhere."""
        self._store, self._positions, self._device = store, positions, device
        self.groups: tuple[Group, ...] = positions.groups
        self._assignments, self._sub_dataset = assignments or [], sub_dataset
        self._keys_of, self._after, self._cached, self._trains_unknown = keys_of, after, cached, trains_unknown
        self._shared: dict[str, bool] = {}
        self._unknown = unknown or {}
        self.unseen: Unseen = "initial"  # the value of keys that were never trained
        self._place = {
            table.name: (g, positions.first_table(g) + i, i)
            for g, group in enumerate(positions.groups)
            for i, table in enumerate(group.tables)
        }

    def fields(self, table_name: str, keys: NDArray[np.int64]) -> tuple[NDArray[np.float32], ...]:
        """Return all fields (n, width) of ``keys``, in their order: any int64, trained or not, each once."""
        group = self._positions.groups[self._place[table_name][0]]
        out = tuple(np.empty((keys.size, field.width), dtype=np.float32) for field in group.fields)
        self.fill(table_name, keys, out)
        return out

    def fill(self, table_name: str, keys: NDArray[np.int64], out: tuple[NDArray[np.float32], ...]) -> None:
        """Like ``fields``, but write the first ``len(out)`` fields to ``out``, with little extra memory."""
        g, table, i = self._place[table_name]
        spec = self._positions.tables[table]
        missing = np.ones(keys.size, dtype=bool)
        if self._device is not None and self._sub_dataset is not None:
            places = np.empty(keys.size, dtype=np.int64)
            mine = self._keys_of(self._sub_dataset, table)
            search_keys(np.asarray(mine), spec.table_id, keys, places)
            found = np.nonzero(places >= 0)[0]
            first = int(self._positions.table_starts(self._sub_dataset, g)[i])
            slots = self._assignments[g].slots_K[places[found] + first]
            for f, (field, to) in enumerate(zip(spec.fields, out, strict=False)):
                for part in _chunks(found.size, 4 * field.width):
                    (to[found[part]],) = from_words((field,), (self._device.read(g, f, slots[part]),))
            missing[found] = False
        self._from_store(table_name, g, keys, out, missing)
        rest = np.nonzero(missing)[0]
        if rest.size:
            self._untrained(table_name, keys, rest, out)

    def _from_store(
        self,
        name: str,
        group: int,
        keys: NDArray[np.int64],
        out: tuple[NDArray[np.float32], ...],
        missing: NDArray[np.bool_],
    ) -> None:
        ask = np.nonzero(missing)[0]
        if ask.size == 0:
            return
        segment_ids, rows = self._store.locate(name, keys[ask], after=self._after)
        by_id = {segment.id: segment for segment in self._store.segments}
        for segment_id in np.unique(segment_ids[segment_ids >= 0]):
            mine = np.nonzero(segment_ids == segment_id)[0]
            mine = mine[np.argsort(rows[mine])]  # to read each page once
            for chunk in _chunks(mine.size, self._positions.groups[group].row_bytes):
                part = mine[chunk]
                fields = self._store.read_rows(by_id[int(segment_id)], group, rows[part], cached=self._cached)
                for to, have in zip(out, fields, strict=False):
                    to[ask[part]] = have
            missing[ask[mine]] = False

    def _untrained(
        self, name: str, keys: NDArray[np.int64], rest: NDArray[np.int64], out: tuple[NDArray[np.float32], ...]
    ) -> None:
        g, table, _ = self._place[name]
        stand_in, is_alone = keys[rest], not self.shares_unknown(name)
        if name in self._unknown:
            for to, have in zip(out, self._unknown[name], strict=False):
                to[rest] = have
            return
        if not is_alone:
            if OOV_KEY not in stand_in:
                shared = self.fields(name, np.array([OOV_KEY], dtype=np.int64))
                for to, have in zip(out, shared, strict=False):
                    to[rest] = have
                return
            stand_in = np.full(rest.size, OOV_KEY, dtype=np.int64)
        table_spec = self._positions.tables[table]
        for part in _chunks(rest.size, 4 * table_spec.dim):
            out[0][rest[part]] = unseen_vectors(table_spec, stand_in[part], self.unseen if is_alone else "initial")
        for to, field in zip(out[1:], self._positions.groups[g].fields[1:], strict=False):
            to[rest] = field.initial

    def shares_unknown(self, table_name: str) -> bool:
        """Return True if a table has an out-of-vocabulary row here: in the dataset, or from earlier training."""
        if table_name not in self._shared:
            found = self._trains_unknown(self._place[table_name][1])
            if not found:
                segments, _ = self._store.locate(table_name, np.array([OOV_KEY], dtype=np.int64), after=self._after)
                found = bool(segments[0] >= 0)
            self._shared[table_name] = found
        return self._shared[table_name]


def _chunks(count: int, item_bytes: int) -> Iterator[slice]:
    """Cut ``count`` items into slices of at most ``_CHUNK_BYTES``."""
    step = max(1, _CHUNK_BYTES // max(1, item_bytes))
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))
