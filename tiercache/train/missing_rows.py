"""Rows of a batch's own for keys that the sub-dataset lacks: looked up beside those of the pass, and never trained.

Legend: of a group in a batch: R rows of the pass that it looks up, M rows for keys that are missing, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.data.raw_batch import OOV_KEY
from tiercache.kernels.cpu.unique_keys import UniqueKeys
from tiercache.rows.backends.saved_gradients import places_of
from tiercache.rows.device import group_rows
from tiercache.rows.prefetch import initial_vectors
from tiercache.store.store_errors import KeyMissingError
from tiercache.train.row_gradients import RowGradients
from tiercache.train.row_view import RowView
from tiercache.values.ids import FeatureIds
from tiercache.values.lookups import UNSEEN, GroupRows, RowRequest, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from tiercache.data.raw_batch import FeatureKeys
    from tiercache.rows.backends.base import Backend
    from tiercache.schema import Schema
    from tiercache.store import Store
    from tiercache.store.table import Group, Table
    from tiercache.train.anchors import Arrival
    from tiercache.train.raw_samples import Missing
    from tiercache.train.row_optimizer import RowOptimizer
    from tiercache.values.batch import Batch
    from tiercache.values.ids import FoundIds
    from tiercache.values.lookups import RowReader, SavedGradient, Unseen


class CommittedRows:
    """Reads rows of a whole store, at its commit: without asking the ranks that train them."""

    unseen: Unseen = "initial"

    def __init__(self, store: Store) -> None:
        self._store = store

    def fill(self, table_name: str, keys: NDArray[np.int64], out: tuple[NDArray[np.float32], ...]) -> None:
        """Write the vectors of ``keys``, each given once, to the first array of ``out``."""
        table = next(one for one in self._store.tables if one.name == table_name)
        try:
            found = self._store.lookup(table_name, keys)["vector"]
        except KeyMissingError as error:
            gone = np.isin(keys, error.keys)
            found = np.empty((keys.size, table.dim), np.float32)
            found[~gone] = self._store.lookup(table_name, keys[~gone])["vector"]
            try:
                found[gone] = self._store.lookup(table_name, np.array([OOV_KEY]))["vector"]
            except KeyMissingError:
                found[gone] = unseen_vectors(table, keys[gone], self.unseen)
        out[0][...] = found


def check_unseen(unseen: str) -> None:
    """Raise ValueError for what is none of ``UNSEEN``."""
    if unseen not in UNSEEN:
        raise ValueError(f"invalid unseen {unseen!r}: expected one of {', '.join(map(repr, UNSEEN))}")


def unseen_vectors(table: Table, keys: NDArray[np.int64], unseen: Unseen) -> NDArray[np.float32]:
    """Return the vectors (n, dim) of keys that were never trained, of a table without an out-of-vocabulary row.

    Raises KeyMissingError where such keys are errors.
    """
    if unseen == "error":
        raise KeyMissingError(
            f"table {table.name!r} has no row for {keys.size:,} of the keys, of which the first is {int(keys[0])}: "
            "leave them out, or give unseen='initial' or 'zeros'",
            table=table.name,
            keys=keys,
        )
    return np.zeros((keys.size, table.dim), np.float32) if unseen == "zeros" else initial_vectors(table, keys)


class MissingRows:
    """Gives batches rows for their missing keys; on the training thread."""

    def __init__(self, schema: Schema, groups: Sequence[Group], optimizer: RowOptimizer, backend: Backend) -> None:
        """optimizer: counts how often rows were stepped."""
        self._schema, self._groups, self._optimizer, self._backend = schema, tuple(groups), optimizer, backend

    def no_rows(self, name: str) -> RowView:
        """Return a view without a row, of which all keys are missing, and without gradients."""
        empty = [
            group_rows(
                group, (self._backend.empty((0, group.dim), np.float32),), self._backend.empty((0,), np.int32),
                np.zeros(len(group.tables) + 1, np.int64), dtype="float32",
            )
            for group in self._groups
        ]  # fmt: skip
        view = RowView(empty, None, name, self._backend)
        view.schema = self._schema
        return view

    def add(
        self,
        made: Batch,
        features: dict[str, FeatureKeys],
        places: dict[str, NDArray[np.int32]],
        missing: Missing,
        reader: RowReader | None,
    ) -> Batch:
        """Return a batch with rows of its own in the groups with missing keys, whose local ids are -1.

        features, places: the keys and local ids of the features that it has. reader: where "load" finds rows.
        """
        rows = made.rows
        lacking = {name for name, found in places.items() if found.size and int(found.min()) < 0}
        ids, added = dict(made.ids), dict[int, _GatheredRows]()
        for g, group in enumerate(self._groups):
            tables = {table.name for table in group.tables}
            mine = [f for f in self._schema.features if f.table in tables and f.name in places]
            if not any(f.name in lacking for f in mine):
                continue
            view = rows.groups[g]
            positions = UniqueKeys()
            vectors: list[NDArray[np.float32]] = []
            numbers = {f.name: np.full(places[f.name].size, -1, np.int32) for f in mine}
            for f in mine:
                here = places[f.name] >= 0
                held = places[f.name][here] + np.int64(view.first[f.table])
                found = np.empty(held.size, np.int32)
                positions.add(held, found)
                numbers[f.name][here] = found
            held_R = positions.keys().astype(np.int32)
            if missing == "zero":
                vectors.append(np.zeros((1, group.dim), np.float32))
                for f in mine:
                    numbers[f.name][places[f.name] < 0] = held_R.size
            else:
                count = held_R.size
                for table in group.tables:
                    count += self._number_missing(table, [f.name for f in mine if f.table == table.name], features,
                                                  places, numbers, count, missing, vectors, reader)  # fmt: skip
            added[g] = _GatheredRows(group, rows, g, held_R, np.concatenate(vectors), self._optimizer)
            ids |= {f.name: FeatureIds(numbers[f.name], ids[f.name].offsets, ids[f.name].weights) for f in mine}
        return replace(made, ids=ids, rows=_RawRows(rows, added, features)) if added else made

    def _number_missing(
        self,
        table: Table,
        names: list[str],
        features: dict[str, FeatureKeys],
        places: dict[str, NDArray[np.int32]],
        numbers: dict[str, NDArray[np.int32]],
        first: int,
        missing: Missing,
        vectors: list[NDArray[np.float32]],
        reader: RowReader | None,
    ) -> int:
        """Number the missing keys of one table from ``first`` on and append their vectors; returns how many."""
        unique = UniqueKeys()
        for name in names:
            gone = places[name] < 0
            found = np.empty(int(np.count_nonzero(gone)), np.int32)
            unique.add(features[name].keys[gone], found)
            numbers[name][gone] = found + first
        keys = unique.keys()
        if keys.size:
            if missing == "load":
                vectors.append(np.empty((keys.size, table.dim), np.float32))
                assert reader is not None, "keys are loaded and nothing reads them"
                reader.fill(table.name, keys, (vectors[-1],))
            else:
                vectors.append(initial_vectors(table, keys))
        return keys.size


class _GatheredRows:
    """The vectors that one batch looks up in one group, in float32: those of the pass, then those of missing keys.

    What the pass's rows are is read again after each step, when it is asked for: a batch may wait for its turn.
    """

    def __init__(
        self, group: Group, trained: RowView, index: int, positions_R: NDArray[np.int32],
        missing_MD: NDArray[np.float32], optimizer: RowOptimizer,
    ) -> None:  # fmt: skip
        self._optimizer, self._read_at, self.num_held = optimizer, -1, positions_R.size
        self._backend = backend = trained.backend
        count = positions_R.size + missing_MD.shape[0]
        vectors = backend.empty((count, group.dim), np.float32)
        backend.tensor(vectors)[self.num_held :] = backend.tensor(backend.to_device(missing_MD))
        self.slots_R = backend.empty(positions_R.shape, np.int32)
        """The slot of each row of the pass, on the device, once ``now`` was called."""
        self._trained, self._index = trained, index  # not its rows: they go when the pass ends
        self._held = backend.to_device(positions_R), self.slots_R, vectors[: self.num_held]
        starts, locals_ = np.zeros(len(group.tables) + 1, np.int64), np.arange(count, dtype=np.int32)
        view = group_rows(group, (vectors,), backend.to_device(locals_), starts, dtype="float32")
        self._view = replace(view, num_local=dict.fromkeys(view.num_local, count))

    def now(self) -> GroupRows:
        """Return them as they are now."""
        if self.num_held and self._read_at != self._optimizer.steps:
            self._backend.find([RowRequest(self._trained.groups[self._index], *self._held)])
            self._read_at = self._optimizer.steps
        return self._view


class _RawRows(RowView):
    """What a batch with missing keys looks up: the pass's rows, but for groups where rows were gathered for it."""

    def __init__(self, trained: RowView, added: dict[int, _GatheredRows], features: Mapping[str, FeatureKeys]) -> None:
        gradients = None if trained.gradients is None else _HeldGradients(trained.gradients, added, trained.backend)
        super().__init__((), gradients, trained.name, trained.backend)
        self.groups = _Groups(trained, added)
        self._trained, self.schema, self._features = trained, trained.schema, features

    def is_key(self, feature: str, ids: FeatureIds | FoundIds, key: int) -> NDArray[np.bool_]:
        """Look among the batch's raw keys."""
        return np.asarray(self._features[feature].keys == key)

    def check(self) -> None:
        """Raise RuntimeError where the pass has ended."""
        self._trained.check()

    def look_up(self, end: int, *, trains: bool = True) -> None:
        """Look rows of the pass up."""
        self._trained.look_up(end, trains=trains)


class _Groups(Sequence[GroupRows]):
    """The rows of each group, those that were gathered as of now; not to be sliced."""

    def __init__(self, trained: RowView, added: dict[int, _GatheredRows]) -> None:
        self._trained, self._added = trained, added

    def __len__(self) -> int:
        return len(self._trained.groups)

    def __getitem__(self, g: int) -> GroupRows:  # type: ignore[override]
        return self._added[g].now() if g in self._added else self._trained.groups[g]


class _HeldGradients(RowGradients):
    """Passes the gradients of rows of the pass on, under their slots; those of missing keys go nowhere."""

    def __init__(self, trained: RowGradients, added: dict[int, _GatheredRows], backend: Backend) -> None:
        super().__init__(0, trained.anchors)
        self._trained, self._added, self._backend = trained, added, backend

    def defer(self, group: int, save: Callable[..., SavedGradient], arrival: Arrival) -> None:
        """Add the gradient of one lookup. Waits for a GPU."""
        if group not in self._added:
            self._trained.defer(group, save, arrival)
            return
        saved = save(gradient=arrival.flat(self._backend.array))
        added = self._added[group]
        seen, given = self._backend.tensor, self._backend.array
        numbers = seen(saved.slots).long()
        kept = (numbers < added.num_held).nonzero()[:, 0]
        if not len(kept):
            return
        slots = given(seen(added.slots_R)[numbers[kept]])
        if len(kept) == len(numbers):
            self._trained.defer(group, partial(replace, saved, slots=slots, looked_up=None), arrival)
            return
        argmax, scales = saved.argmax, saved.scales
        if argmax.shape[0]:  # it names entries by their numbers, which change; without a maximum it is anything
            argmax = seen(argmax)
            number = torch.full((len(numbers) + 1,), -1, dtype=torch.int32, device=argmax.device)
            number[kept] = torch.arange(len(kept), dtype=torch.int32, device=argmax.device)
            named = (argmax >= 0) & (argmax < len(numbers))
            argmax = given(number[torch.where(named, argmax, len(numbers)).long()])
        if scales.shape[0]:
            scales = given(seen(scales)[kept])
        places = given(seen(places_of(self._backend, saved))[kept])
        spans = None if saved.spans is None else partial(_kept_spans, saved.spans, kept)
        kinds: dict[str, Any] = {"slots": slots, "places": places, "scales": scales, "argmax": argmax, "spans": spans}
        self._trained.defer(group, partial(replace, saved, looked_up=None, **kinds), arrival)


def _kept_spans(spans: Callable[[], list[Span]], kept: torch.Tensor) -> list[Span]:
    """Return the spans of the entries ``kept``, ascending, among all. Waits for a GPU."""
    found = spans()
    ends = torch.tensor([span.last for span in found], device=kept.device)
    last = torch.searchsorted(kept, ends).tolist()
    return [Span(span.table, *at) for span, at in zip(found, zip([0, *last], last, strict=False), strict=True)]
