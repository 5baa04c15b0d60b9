"""Rows of single batches, for keys that the sub-dataset lacks: looked up with the rows of the pass, and never trained.

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
from tiercache.values.batch import Batch
from tiercache.values.ids import FeatureIds
from tiercache.values.lookups import GroupRows, RowRequest, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from tiercache.data.raw_batch import FeatureKeys
    from tiercache.rows.backends.base import Backend
    from tiercache.schema import Schema
    from tiercache.store import Store
    from tiercache.store.table import Group, Table
    from tiercache.train.arrivals import Arrival
    from tiercache.train.raw_samples import Missing, RawSamples
    from tiercache.train.row_gradients import Save
    from tiercache.train.row_optimizer import RowOptimizer
    from tiercache.values.ids import FoundIds
    from tiercache.values.lookups import RowReader, SavedGradient, Unseen


class CommittedRows:
    """Reads rows of a whole store at its commit, without the ranks that train them."""

    unseen: Unseen = "initial"

    def __init__(self, store: Store) -> None:
        self._store = store

    def fill(self, table_name: str, keys: NDArray[np.int64], out: tuple[NDArray[np.float32], ...]) -> None:
        """Write the vectors of ``keys``, each given once, to the first array of ``out``."""
        table = next(one for one in self._store.tables if one.name == table_name)
        try:
            found = self._store.lookup(table_name, keys)["vector"]
        except KeyMissingError as error:
            unseen = np.isin(keys, error.keys)
            found = np.empty((keys.size, table.dim), np.float32)
            found[~unseen] = self._store.lookup(table_name, keys[~unseen])["vector"]
            try:
                found[unseen] = self._store.lookup(table_name, np.array([OOV_KEY]))["vector"]
            except KeyMissingError:
                found[unseen] = unseen_vectors(table, keys[unseen], self.unseen)
        out[0][...] = found


def unseen_vectors(table: Table, keys: NDArray[np.int64], unseen: Unseen) -> NDArray[np.float32]:
    """Return the vectors (n, dim) of keys that were never trained. Raises KeyMissingError if such keys are errors."""
    if unseen == "error":
        raise KeyMissingError(
            f"table {table.name!r} has no row for {keys.size:,} of the keys (the first is {int(keys[0])}): "
            "leave them out, or pass unseen='initial' or 'zeros'",
            table=table.name,
            keys=keys,
        )
    return np.zeros((keys.size, table.dim), np.float32) if unseen == "zeros" else initial_vectors(table, keys)


class MissingRows:
    """Gives batches rows for their missing keys; on the training thread."""

    def __init__(self, schema: Schema, groups: Sequence[Group], optimizer: RowOptimizer, backend: Backend) -> None:
        """optimizer: counts how often rows were stepped."""
        self._schema, self._groups, self._optimizer, self._backend = schema, tuple(groups), optimizer, backend

    def read_only(
        self, samples: RawSamples, name: str, reader: RowReader, weight: float = 1.0, *, until_step: bool = False
    ) -> Batch:
        """Return a read-only batch outside any pass, of rows that ``reader`` finds; until_step: until the next step."""
        empty = [
            group_rows(
                group, (self._backend.empty((0, group.dim), np.float32),), self._backend.empty((0,), np.int32),
                np.zeros(len(group.tables) + 1, np.int64), dtype="float32",
            )
            for group in self._groups
        ]  # fmt: skip
        view = RowView(empty, None, name, self._backend)
        view.schema = self._schema
        if until_step:
            view.expire_with(self._optimizer)
        places = samples.places()
        ids = {name: FeatureIds(places[name], one.offsets, one.weights) for name, one in samples.features.items()}
        made = Batch(samples.label, samples.dense, ids, view, samples.num_samples, weight)
        return self.add(made, samples.features, places, "load", reader)

    def add(
        self,
        made: Batch,
        features: dict[str, FeatureKeys],
        places: dict[str, NDArray[np.int32]],
        missing: Missing,
        reader: RowReader | None,
    ) -> Batch:
        """Return a batch with rows for its missing keys, whose local ids are -1.

        features, places: the keys and local ids of its features. reader: finds rows if ``missing`` is "load".
        """
        rows = made.rows
        lacking = {name for name, found in places.items() if found.size and int(found.min()) < 0}
        ids, added = dict(made.ids), dict[int, _GatheredRows]()
        for g, group in enumerate(self._groups):
            tables = {table.name for table in group.tables}
            of_group = [f for f in self._schema.features if f.table in tables and f.name in places]
            if not any(f.name in lacking for f in of_group):
                continue
            numbers = {f.name: np.full(places[f.name].size, -1, np.int32) for f in of_group}
            first, trained = rows.groups[g].first, UniqueKeys()
            for f in of_group:
                found = places[f.name]
                _number(trained, found + np.int64(first[f.table]), found >= 0, numbers[f.name], 0)
            positions_R = trained.keys().astype(np.int32)
            count, vectors = positions_R.size, list[Any]()
            if missing == "zero":
                vectors.append(np.zeros((1, group.dim), np.float32))
                for name, of_name in numbers.items():
                    of_name[places[name] < 0] = count
            else:
                for table in group.tables:
                    unique = UniqueKeys()
                    for f in of_group:
                        if f.table == table.name:
                            _number(unique, features[f.name].keys, places[f.name] < 0, numbers[f.name], count)
                    if not (keys := unique.keys()).size:
                        continue
                    count += keys.size
                    if missing == "load":
                        assert reader is not None, "keys are loaded but nothing reads them"
                        vectors.append(np.empty((keys.size, table.dim), np.float32))
                        reader.fill(table.name, keys, (vectors[-1],))
                    else:
                        vectors.append(initial_vectors(table, keys))
            added[g] = _GatheredRows(group, rows, g, positions_R, np.concatenate(vectors), self._optimizer)
            ids |= {
                name: FeatureIds(of_name, ids[name].offsets, ids[name].weights) for name, of_name in numbers.items()
            }
        return replace(made, ids=ids, rows=_RawRows(rows, added, features)) if added else made


def _number(
    unique: UniqueKeys, keys: NDArray[np.int64], mask: NDArray[np.bool_], numbers: NDArray[np.int32], first: int
) -> None:
    """Add the keys of a mask to ``unique``, and write their numbers, from ``first`` on."""
    found = np.empty(int(np.count_nonzero(mask)), np.int32)
    unique.add(keys[mask], found)
    numbers[mask] = found + np.int32(first)


class _GatheredRows:
    """Float32 vectors of one group in a batch: rows of the pass, read again after each step, then missing ones."""

    def __init__(
        self, group: Group, trained: RowView, index: int, positions_R: NDArray[np.int32],
        missing_MD: NDArray[np.float32], optimizer: RowOptimizer,
    ) -> None:  # fmt: skip
        self._optimizer, self._read_at, self.num_trained = optimizer, -1, positions_R.size
        self._backend = backend = trained.backend
        count = positions_R.size + missing_MD.shape[0]
        vectors = backend.empty((count, group.dim), np.float32)
        backend.tensor(vectors)[self.num_trained :] = backend.tensor(backend.to_device(missing_MD))
        self.slots_R = backend.empty(positions_R.shape, np.int32)
        """The slot of each row of the pass, on the device, once ``current`` was called."""
        self._trained, self._index = trained, index  # not its rows: they go when the pass ends
        self._request = backend.to_device(positions_R), self.slots_R, vectors[: self.num_trained]
        starts, locals_ = np.zeros(len(group.tables) + 1, np.int64), np.arange(count, dtype=np.int32)
        view = group_rows(group, (vectors,), backend.to_device(locals_), starts, dtype="float32")
        self._view = replace(view, num_local=dict.fromkeys(view.num_local, count))

    def current(self) -> GroupRows:
        """Return them with current values."""
        if self.num_trained and self._read_at != self._optimizer.steps:
            self._backend.find([RowRequest(self._trained.groups[self._index], *self._request)])
            self._read_at = self._optimizer.steps
        return self._view


class _RawRows(RowView):
    """The rows of a batch with missing keys: the rows of the pass, except in groups with rows that were gathered."""

    def __init__(self, trained: RowView, added: dict[int, _GatheredRows], features: Mapping[str, FeatureKeys]) -> None:
        gradients = None if trained.gradients is None else _GatheredGradients(trained.gradients, added, trained.backend)
        super().__init__((), gradients, trained.name, trained.backend)
        self.groups = _Groups(trained, added)
        self._trained, self.schema, self._features = trained, trained.schema, features

    def is_key(self, feature: str, ids: FeatureIds | FoundIds, key: int) -> NDArray[np.bool_]:
        """Look among the batch's raw keys."""
        return np.asarray(self._features[feature].keys == key)

    def check(self) -> None:
        """Raise RuntimeError if the pass has ended."""
        self._trained.check()

    def look_up(self, end: int, *, trains: bool = True) -> None:
        """Look up rows of the pass."""
        self._trained.look_up(end, trains=trains)


class _Groups(Sequence[GroupRows]):
    """The current rows of each group; not to be sliced."""

    def __init__(self, trained: RowView, added: dict[int, _GatheredRows]) -> None:
        self._trained, self._added = trained, added

    def __len__(self) -> int:
        return len(self._trained.groups)

    def __getitem__(self, g: int) -> GroupRows:  # type: ignore[override]
        return self._added[g].current() if g in self._added else self._trained.groups[g]


class _GatheredGradients(RowGradients):
    """Forwards the gradients of rows of the pass, under their slots, and drops gradients of missing keys."""

    def __init__(self, trained: RowGradients, added: dict[int, _GatheredRows], backend: Backend) -> None:
        super().__init__(0, trained.anchors)
        self._trained, self._added, self._backend = trained, added, backend

    def receive(self) -> None:
        """Record it for the rows of the pass, which await it."""
        self._trained.receive()

    def defer(self, group: int, save: Save, arrival: Arrival) -> None:
        """Add the gradients of one lookup. Waits for a GPU."""
        if group not in self._added:
            self._trained.defer(group, save, arrival)
            return
        flats = arrival.flats(self._backend.array)
        for output in range(len(flats)):
            only = partial(_of_output, save, output)
            for saved in only(flats):
                self._defer(group, only, saved, arrival)

    def _defer(self, group: int, save: Save, saved: SavedGradient, arrival: Arrival) -> None:
        """Add what ``save`` returns, now ``saved``."""
        added = self._added[group]
        tensor, array = self._backend.tensor, self._backend.array
        numbers = tensor(saved.slots).long()
        kept = (numbers < added.num_trained).nonzero()[:, 0]
        if not len(kept):
            return
        slots = array(tensor(added.slots_R)[numbers[kept]])
        if len(kept) == len(numbers):
            self._trained.defer(group, partial(_changed, save, {"slots": slots}), arrival)
            return
        argmax, scales = saved.argmax, saved.scales
        if argmax.shape[0]:  # numbers of entries, which change; undefined without a maximum
            argmax = tensor(argmax)
            number = torch.full((len(numbers) + 1,), -1, dtype=torch.int32, device=argmax.device)
            number[kept] = torch.arange(len(kept), dtype=torch.int32, device=argmax.device)
            named = (argmax >= 0) & (argmax < len(numbers))
            argmax = array(number[torch.where(named, argmax, len(numbers)).long()])
        if scales.shape[0]:
            scales = array(tensor(scales)[kept])
        places = array(tensor(places_of(self._backend, saved))[kept])
        spans = None if saved.spans is None else partial(_kept_spans, saved.spans, kept)
        changed: dict[str, Any] = {"slots": slots, "places": places, "scales": scales, "argmax": argmax, "spans": spans}
        self._trained.defer(group, partial(_changed, save, changed), arrival)


def _of_output(save: Save, output: int, gradients: Sequence[Any]) -> list[SavedGradient]:
    found = save([one if number == output else None for number, one in enumerate(gradients)])
    return [part for one in found for part in one.by_feature()]


def _changed(save: Save, changed: Mapping[str, Any], gradients: Sequence[Any]) -> list[SavedGradient]:
    return [replace(one, looked_up=None, **changed) for one in save(gradients)]


def _kept_spans(spans: Callable[[], list[Span]], kept: torch.Tensor) -> list[Span]:
    """Return the spans of the entries ``kept``, ascending, among all. Waits for a GPU."""
    found = spans()
    ends = torch.tensor([span.last for span in found], device=kept.device)
    last = torch.searchsorted(kept, ends).tolist()
    return [Span(span.table, *at) for span, at in zip(found, zip([0, *last], last, strict=False), strict=True)]
