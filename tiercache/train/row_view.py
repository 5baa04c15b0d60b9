"""RowView: the rows of a pass, or of an evaluation, as its batches look them up."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.errors import StateError
from tiercache.kernels.cpu.key_sweeps import hash_range_bound
from tiercache.store.bits import hash_keys
from tiercache.train.arrivals import State
from tiercache.values.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.data.sub_dataset import EncodedBatch
    from tiercache.rows.backends.base import Backend
    from tiercache.schema import Schema
    from tiercache.train.arrivals import Arrival
    from tiercache.train.pass_ledger import PassLedger
    from tiercache.train.row_gradients import RowGradients
    from tiercache.train.row_optimizer import RowOptimizer
    from tiercache.values.ids import Array, FeatureIds, FoundIds
    from tiercache.values.lookups import GroupRows


class RowView:
    """The rows that batches of one pass look up, and their gradients; None in an evaluation."""

    def __init__(
        self,
        groups: Sequence[GroupRows],
        gradients: RowGradients | None,
        name: str,
        backend: Backend,
        load: Callable[[], None] | None = None,
    ) -> None:
        """load: ends the previous pass and sets the rows of this one, if they are not on the device yet."""
        self.groups: Sequence[GroupRows] = tuple(groups)
        self.backend = backend
        self.gradients = gradients
        self.name = name
        self.ended = self.is_closed = self.is_dropped = False
        self.schema: Schema | None = None  # the schema of the dataset, which modules are compared with
        self.ledger: PassLedger | None = None  # the record of the pass's batches
        self.spans: Mapping[str, slice] = {}  # of each table within its group, also before rows are loaded
        self.keys_of: Callable[[str], NDArray[np.int64]] | None = None
        """Returns the keys of a table in local id order, if there are local ids."""
        self._local_ids: dict[tuple[str, int], int] = {}
        self._load = load
        self._users: list[Callable[[], None]] = []
        self._copied: tuple[RowOptimizer, int] | None = None

    def is_key(self, feature: str, ids: FeatureIds | FoundIds, key: int) -> NDArray[np.bool_]:
        """Return a mask of the ids (E,) of a feature in one batch that are the given key."""
        found: NDArray[np.bool_] = ids.ids == self.local_id(feature, key)
        return found

    def local_id(self, feature: str, key: int) -> int:
        """Return the local id of a key of a feature; -1 if the pass lacks it."""
        assert self.schema is not None, f"{self.name} needs a schema"
        if self.keys_of is None:
            return -1
        table = self.schema.feature(feature).table
        if (table, key) not in self._local_ids:
            table_id = next(one.table_id for one in self.schema.tables if one.name == table)
            keys, hashed = self.keys_of(table), int(hash_keys(np.array([key]), table_id)[0])
            at = hash_range_bound(keys, table_id, hashed)
            self._local_ids[table, key] = at if at < keys.size and int(keys[at]) == key else -1
        return self._local_ids[table, key]

    def check(self) -> None:
        """Raise RuntimeError if the pass has ended: its local ids mean other rows now."""
        if self.ended:
            raise RuntimeError(self._has_ended)

    def check_open(self) -> None:
        """Raise RuntimeError if the pass makes no more batches."""
        if self.is_closed:
            raise RuntimeError(self._has_ended)

    @property
    def _has_ended(self) -> str:
        if self.is_dropped and self.ledger is not None:
            done, all_samples = self.ledger.samples_trained, self.ledger.num_samples
            return (
                f"{self.name} has ended after {done:,} of its {all_samples:,} samples because its loop was left, or "
                "the iterator of passes() was not kept: use batches inside `for p in cache.passes(...)`"
            )
        return f"this batch belongs to {self.name}, which has ended: use batches inside their own loop"

    def expire_with(self, optimizer: RowOptimizer) -> None:
        """Let lookups raise StateError after the next step: the rows are copies, and ``optimizer`` steps the rows."""
        self._copied = optimizer, optimizer.steps

    def set_groups(self, groups: Sequence[GroupRows]) -> None:
        """Set the rows that lookups find."""
        self.groups, self._load = tuple(groups), None

    @property
    def is_loaded(self) -> bool:
        """True if the rows are on the device; if not, the previous pass has not ended."""
        return self._load is None

    def load(self) -> None:
        """Load the rows, if they are not on the device yet: this ends the previous pass."""
        if self._load is not None:
            self._load()

    def look_up(self, end: int, *, trains: bool = True) -> None:
        """Check that a module may look up the rows of a batch, which ends at sample ``end``, and load them.

        trains: False for a frozen module. Raises RuntimeError if the pass has ended, StateError if the previous one was
        not trained to its end or if the rows are copies from before a step.
        """
        self.check()
        if self._copied is not None and self._copied[0].steps != self._copied[1]:
            raise StateError(
                f"the rows of {self.name} were read before the last step and are not current: finish an evaluation "
                "before you step, or make its batches again after the step"
            )
        if self.gradients is None:
            return
        gradients = torch.is_grad_enabled()
        self.load()
        if self.ledger is not None:
            self.ledger.look_up(end, gradients=gradients, trains=gradients and trains)
        if gradients:
            self.gradients.awaits_backward = True
            self.gradients.unstepped.add(end)

    def close(self) -> None:
        """Make no more batches; batches that were made can still be looked up."""
        self.is_closed = True
        for close in list(self._users):
            close()

    def end(self) -> None:
        """End the pass, after iterators that prefetch: its ids mean other rows now. Batches keep no memory of rows."""
        self.ended = True
        self.close()
        self.groups, self._load = (), None

    @contextmanager
    def in_use(self, close: Callable[[], None]) -> Iterator[None]:
        """Call ``close`` when the pass closes, or else at the end of the body."""
        self._users.append(close)
        try:
            yield
        finally:
            self._users.remove(close)
            close()


@dataclass(slots=True)
class Pooled:
    """A feature of one batch that the owner of its table pools: its module finds vectors, but no ids."""

    mode: str  # "sum" or "mean"
    vectors: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.float32, device="cpu"))
    """(N, dim) float32, once the batch is looked up; zeros for an empty bag."""
    pending: list[tuple[Arrival, slice]] = field(default_factory=list)  # by lookup, with columns in it
    gradients: list[torch.Tensor] = field(default_factory=list)  # the gradients that the step adds up and applies

    def collect(self) -> None:
        """Move the gradients that the step applies to ``gradients``, as `RowGradients.collect` does."""
        self.take([arrival for arrival, _ in self.pending if arrival.state is State.STEPPING])
        self.pending[:] = [(arrival, columns) for arrival, columns in self.pending if arrival.is_pending]

    def take(self, arrivals: Collection[Arrival]) -> None:
        """Copy the gradients of ``arrivals`` to ``gradients``; they stay pending."""
        for arrival in arrivals:
            arrival.check_unchanged()
        found = [(one.gradients[0], columns) for one, columns in self.pending if one in arrivals]
        self.gradients[:] = [gradient[:, columns] for gradient, columns in found if gradient is not None]


def make_batch(
    samples: EncodedBatch,
    rows: RowView,
    *,
    ids: Mapping[str, FeatureIds] | None = None,
    weight: float = 1.0,
    end: int = 0,
    pooled: Mapping[str, Pooled] | None = None,
    collations: Any = None,
    to_device: Callable[[NDArray[Any]], Array] | None = None,
) -> Batch:
    """Return a batch on the device of ``rows``. ``ids`` replace the samples' local ids.

    collations: `Collations` of the batch. to_device: copies label and dense, instead of the backend's method.
    """
    label = np.empty(0, dtype=np.float32) if samples.label is None else samples.label
    to_device = to_device or rows.backend.to_device
    return Batch(
        label=rows.backend.tensor(to_device(label)),
        dense=rows.backend.tensor(to_device(samples.dense)),
        ids=samples.ids if ids is None else ids,
        rows=rows,
        num_samples=samples.num_samples,
        weight=weight,
        end=end,
        pooled=pooled or {},
        collations=collations,
        columns={name: rows.backend.tensor(to_device(column)) for name, column in samples.columns.items()},
    )
