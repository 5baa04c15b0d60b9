"""Batches of raw keys: int64 keys become local ids of the pass being trained, or rows of their own where it lacks them.

Legend: of a group in a batch: R rows of the visit that it looks up, M rows for keys that are missing, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import numpy as np
import torch

from tiercache.errors import BudgetError, KeyNotInPassError
from tiercache.kernels.numbering import KeyNumbers
from tiercache.passes.samples import FeatureIds
from tiercache.processors.entries import Wanted
from tiercache.sizes import format_bytes
from tiercache.tiers.first_vectors import initial_vectors
from tiercache.tiers.rows import GroupRows, RowView
from tiercache.training.batch import Batch
from tiercache.training.key_finder import KeyFinder
from tiercache.training.raw_keys import feature_keys
from tiercache.training.row_optimizer import RowGradients

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from tiercache.passes.keybatch import FeatureKeys
    from tiercache.passes.passset import Pass
    from tiercache.processors.entries import FoundIds, Pending
    from tiercache.processors.processor import Processor
    from tiercache.schema import Schema
    from tiercache.store.table import Group, Table

Missing = Literal["error", "zero", "init", "load"]
SCRATCH_BYTES = 40  # for each row that is read, beside it
MISSING = ("error", "zero", "init", "load")


class RowReader(Protocol):
    """Reads rows as of now, of any keys: RowsNow has it."""

    def fill(self, table_name: str, keys: NDArray[np.int64], out: tuple[NDArray[np.float32], ...]) -> None:
        """Write the vectors of ``keys``, each given once, to the first array of ``out``."""
        ...


class RawKeys:
    """Makes the batches of raw keys of one cache; on the training thread."""

    def __init__(
        self,
        schema: Schema,
        groups: Sequence[Group],
        rows_now: Callable[[], RowReader],
        steps: Callable[[], int],
        processor: Processor,
        index_room: int | None = None,
    ) -> None:
        """rows_now: a reader of rows as of now. steps: how often rows were stepped so far.

        index_room: bytes that an index of keys may take on the device, None: any number.
        """
        self._schema, self._groups = schema, tuple(groups)
        self._rows_now, self._steps, self._processor = rows_now, steps, processor
        self._table_of = {feature.name: feature.table for feature in schema.features}
        self._finder = KeyFinder([table for group in groups for table in group.tables], processor, index_room)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of keys."""
        return self._finder.index_bytes

    def batch(
        self,
        source: Pass,
        rows: RowView,
        keys: Mapping[str, Any],
        *,
        number: int,
        missing: Missing,
        weights: Mapping[str, Any] | None = None,
        label: Any = None,
        dense: Any = None,
    ) -> Batch:
        """Return batch ``number`` of the visit that trains ``source`` with ``rows``: ``Visit.batch`` promises it."""
        if missing not in MISSING:
            raise ValueError(f"missing is {missing!r}: it must be one of {', '.join(map(repr, MISSING))}")
        num_samples, features = feature_keys(self._schema, keys, weights)
        found, ids = self._finder.find(source, features, self._table_of)
        made = self._made(num_samples, ids, rows, label, dense)
        lost = found.missing()  # all is on its way: what is waited for is the search
        if not lost.count:
            return made
        if missing == "error":
            self._refuse(lost.first, features, ids, rows, number)
        return self._with_missing(made, features, {name: one.ids for name, one in ids.items()}, rows, missing)

    def evaluate(
        self,
        keys: Mapping[str, Any],
        budget: int,
        *,
        weights: Mapping[str, Any] | None = None,
        label: Any = None,
        dense: Any = None,
    ) -> Batch:
        """Return a batch outside any visit: ``TierCache.evaluation_batch`` promises it."""
        num_samples, features = feature_keys(self._schema, keys, weights)
        wanted = 0
        for group in self._groups:
            for table in group.tables:
                mine = [features[name].keys for name, looked_up in self._table_of.items() if looked_up == table.name]
                wanted += np.unique(np.concatenate(mine)).size * (4 * table.dim + SCRATCH_BYTES) if mine else 0
        if wanted > budget:
            raise BudgetError(
                f"the rows of {num_samples:,} samples take {format_bytes(wanted)}, but eval_budget is "
                f"{format_bytes(budget)}: give smaller batches, or raise eval_budget (and host_budget, which holds it)"
            )
        empty = [
            GroupRows.of(
                group, (self._processor.empty((0, group.dim), np.float32),), self._processor.empty((0,), np.int32),
                np.zeros(len(group.tables) + 1, np.int64), dtype="float32",
            )
            for group in self._groups
        ]  # fmt: skip
        nowhere = {name: np.full(feature.keys.size, -1, np.int32) for name, feature in features.items()}
        ids = {name: FeatureIds(nowhere[name], feature.offsets, feature.weights) for name, feature in features.items()}
        rows = RowView(empty, None, "an evaluation of raw keys", self._processor)
        made = self._made(num_samples, ids, rows, label, dense)
        return self._with_missing(made, features, nowhere, rows, "load")

    def _made(
        self, num_samples: int, ids: Mapping[str, FeatureIds | FoundIds], rows: RowView, label: Any, dense: Any
    ) -> Batch:
        """Return the batch of keys with these local ids."""
        return Batch(
            label=self._bring("label", label, torch.empty(0), (num_samples,)),
            dense=self._bring("dense", dense, torch.empty(num_samples, 0), (num_samples, -1)),
            ids=ids,
            rows=rows,
            num_samples=num_samples,
        )

    def _bring(self, what: str, given: Any, absent: torch.Tensor, shape: tuple[int, int] | tuple[int]) -> torch.Tensor:
        """Return numbers on the device; ``absent`` where none were given."""
        found = absent if given is None else _numbers(what, given, shape)
        if found.device == self._processor.device:
            return found
        return self._processor.tensor(self._processor.bring(found.numpy()))

    def _refuse(
        self, entry: int, features: dict[str, FeatureKeys], ids: dict[str, FoundIds], rows: RowView, number: int
    ) -> NoReturn:
        """Raise KeyNotInPassError of an entry, counted over all features."""
        name, found = next((name, found) for name, found in ids.items() if found.first <= entry < found.last)
        at, table = entry - found.first, self._table_of[name]
        key = int(features[name].keys[at])
        raise KeyNotInPassError(
            f"batch {number} of {rows.name} has the key {key} of table {table!r} at entry {at} of feature "
            f"{name!r}, and the key set of its pass lacks it: give samples of this pass, write key sets that have "
            "all keys, or choose missing='load', 'init' or 'zero', which train no row for it",
            table=table,
            key=key,
            batch=number,
        )

    def _with_missing(
        self,
        made: Batch,
        features: dict[str, FeatureKeys],
        places: dict[str, NDArray[np.int32]],
        rows: RowView,
        missing: Missing,
    ) -> Batch:
        """Return a batch with rows of its own in the groups with missing keys, whose local ids are -1."""
        lacking = {name for name, found in places.items() if found.size and int(found.min()) < 0}
        ids, added = dict(made.ids), dict[int, _GatheredRows]()
        for g, group in enumerate(self._groups):
            tables = {table.name for table in group.tables}
            mine = [f for f in self._schema.features if f.table in tables]
            if not any(f.name in lacking for f in mine):
                continue
            view = rows.groups[g]
            positions = KeyNumbers()
            vectors: list[NDArray[np.float32]] = []
            numbers = {f.name: np.full(places[f.name].size, -1, np.int32) for f in mine}
            for f in mine:
                here = places[f.name] >= 0
                held = places[f.name][here] + np.int64(view.first[f.table])
                found = np.empty(held.size, np.int32)
                positions.insert(held, found)
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
                                                  places, numbers, count, missing, vectors)  # fmt: skip
            added[g] = _GatheredRows(group, rows, g, held_R, np.concatenate(vectors), self._steps)
            ids |= {f.name: FeatureIds(numbers[f.name], ids[f.name].offsets, ids[f.name].weights) for f in mine}
        return replace(made, ids=ids, rows=_RawRows(rows, added)) if added else made

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
    ) -> int:
        """Number the missing keys of one table from ``first`` on and append their vectors; returns how many."""
        unique = KeyNumbers()
        for name in names:
            gone = places[name] < 0
            found = np.empty(int(np.count_nonzero(gone)), np.int32)
            unique.insert(features[name].keys[gone], found)
            numbers[name][gone] = found + first
        keys = unique.keys().copy()
        if keys.size:
            if missing == "load":
                vectors.append(np.empty((keys.size, table.dim), np.float32))
                self._rows_now().fill(table.name, keys, (vectors[-1],))
            else:
                vectors.append(initial_vectors(table, keys))
        return keys.size


class _GatheredRows:
    """The vectors that one batch looks up in one group, in float32: those of the visit, then those of missing keys.

    What the visit's rows are is read again after each step, when it is asked for: a batch may wait for its turn.
    """

    def __init__(
        self, group: Group, visit: RowView, index: int, positions_R: NDArray[np.int32],
        missing_MD: NDArray[np.float32], steps: Callable[[], int],
    ) -> None:  # fmt: skip
        self._steps, self._read_at, self.num_held = steps, -1, positions_R.size
        self._processor = processor = visit.processor
        count = positions_R.size + missing_MD.shape[0]
        vectors = processor.empty((count, group.dim), np.float32)
        processor.tensor(vectors)[self.num_held :] = processor.tensor(processor.bring(missing_MD))
        self.slots_R = processor.empty(positions_R.shape, np.int32)
        """The slot of each row of the visit, on the device, once ``now`` was called."""
        self._held = Wanted(
            visit.groups[index], processor.bring(positions_R), self.slots_R, vectors[: self.num_held]
        )  # fmt: skip
        starts, locals_ = np.zeros(len(group.tables) + 1, np.int64), np.arange(count, dtype=np.int32)
        view = GroupRows.of(group, (vectors,), processor.bring(locals_), starts, dtype="float32")
        self._view = replace(view, num_local=dict.fromkeys(view.num_local, count))

    def now(self) -> GroupRows:
        """Return them as they are now."""
        if self.num_held and self._read_at != self._steps():
            self._processor.find([self._held])
            self._read_at = self._steps()
        return self._view


class _RawRows(RowView):
    """What a batch with missing keys looks up: the visit's rows, but for groups where rows were gathered for it."""

    def __init__(self, visit: RowView, added: dict[int, _GatheredRows]) -> None:
        gradients = None if visit.gradients is None else _HeldGradients(visit.gradients, added, visit.processor)
        super().__init__((), gradients, visit.name, visit.processor)
        self.groups = _Groups(visit, added)
        self._visit = visit

    def check(self) -> None:
        """Raise RuntimeError where the visit has ended."""
        self._visit.check()


class _Groups(Sequence[GroupRows]):
    """The rows of each group, those that were gathered as of now; not to be sliced."""

    def __init__(self, visit: RowView, added: dict[int, _GatheredRows]) -> None:
        self._visit, self._added = visit, added

    def __len__(self) -> int:
        return len(self._visit.groups)

    def __getitem__(self, g: int) -> GroupRows:  # type: ignore[override]
        return self._added[g].now() if g in self._added else self._visit.groups[g]


class _HeldGradients(RowGradients):
    """Passes the gradients of rows of the visit on, under their slots; those of missing keys go nowhere."""

    def __init__(self, visit: RowGradients, added: dict[int, _GatheredRows], processor: Processor) -> None:
        super().__init__(0)
        self._visit, self._added, self._processor = visit, added, processor

    def add(self, group: int, pending: Pending) -> None:
        """Add the gradient of one lookup. Waits for a GPU."""
        if group not in self._added:
            self._visit.add(group, pending)
            return
        added = self._added[group]
        seen, given = self._processor.tensor, self._processor.array
        numbers = seen(pending.slots).long()
        kept = (numbers < added.num_held).nonzero()[:, 0]
        if not len(kept):
            return
        slots = given(seen(added.slots_R)[numbers[kept]])
        if len(kept) == len(numbers):
            self._visit.add(group, replace(pending, slots=slots))
            return
        argmax, scales = pending.argmax, pending.scales
        if argmax.shape[0]:  # it names entries by their numbers, which change; without a maximum it is anything
            argmax = seen(argmax)
            number = torch.full((len(numbers) + 1,), -1, dtype=torch.int32, device=argmax.device)
            number[kept] = torch.arange(len(kept), dtype=torch.int32, device=argmax.device)
            named = (argmax >= 0) & (argmax < len(numbers))
            argmax = given(number[torch.where(named, argmax, len(numbers)).long()])
        if scales.shape[0]:
            scales = given(seen(scales)[kept])
        places = given(seen(self._processor.places(pending))[kept])
        self._visit.add(group, replace(pending, slots=slots, places=places, scales=scales, argmax=argmax))


def _numbers(what: str, given: Any, shape: tuple[int, int] | tuple[int]) -> torch.Tensor:
    found = torch.as_tensor(given).detach().to(torch.float32)
    if found.ndim != len(shape) or any(s not in (-1, n) for s, n in zip(shape, found.shape, strict=True)):
        expected = "(N,)" if len(shape) == 1 else "(N, columns)"
        raise ValueError(f"{what} has shape {tuple(found.shape)}: give {expected} for the batch's {shape[0]} samples")
    return found
