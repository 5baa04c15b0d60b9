"""Batches of raw keys: int64 keys become local ids of the pass being trained, or rows of their own beside it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from tiercache.passes.samples import FeatureIds
from tiercache.training.batch import Batch
from tiercache.training.missing_rows import MissingRows
from tiercache.training.raw_samples import RawReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tiercache.backends.base import Backend
    from tiercache.passes.passset import Pass
    from tiercache.schema import Schema
    from tiercache.store.table import Group
    from tiercache.tiers.rows import RowView
    from tiercache.training.missing_rows import RowReader
    from tiercache.training.row_optimizer import RowOptimizer


class RawKeys:
    """Makes the batches of raw keys of one cache; on the training thread."""

    def __init__(
        self,
        schema: Schema,
        groups: Sequence[Group],
        rows_now: Callable[[], RowReader],
        optimizer: RowOptimizer,
        backend: Backend,
        index_room: int | None = None,
    ) -> None:
        """rows_now: a method of the cache that has this, which it does not keep alive: a reader of rows as of now.

        optimizer: counts how often rows were stepped. index_room: bytes that an index of keys may take on the device,
        None: any number.
        """
        self._rows_of_cache = weakref.WeakMethod(rows_now)
        self._reader = RawReader(schema, [table for group in groups for table in group.tables], backend, index_room)
        self._missing = MissingRows(schema, groups, optimizer, backend)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of keys."""
        return self._reader.index_bytes

    def close(self) -> None:
        """Let go of the index."""
        self._reader.close()

    def batch(self, source: Pass, rows: RowView, keys: Mapping[str, Any], **given: Any) -> Batch:
        """Return a batch of the visit that trains ``source`` with ``rows``: ``Visit.batch`` promises it.

        given: as of ``RawReader.read``.
        """
        samples = self._reader.read(source, rows.name, keys, **given)
        made = Batch(samples.label, samples.dense, samples.ids, rows, samples.num_samples)
        if not samples.lacking:
            return made
        return self._missing.add(made, samples.features, samples.places(), given["missing"], self._rows_now)

    def evaluate(self, keys: Mapping[str, Any], budget: int, **given: Any) -> Batch:
        """Return a batch outside any visit: ``TierCache.evaluation_batch`` promises it."""
        samples = self._reader.read(None, "", keys, **given)
        self._reader.check_budget(samples.num_samples, self._reader.keys_of(samples), budget)
        places = samples.places()
        ids = {name: FeatureIds(places[name], one.offsets, one.weights) for name, one in samples.features.items()}
        rows = self._missing.no_rows("an evaluation of raw keys")
        made = Batch(samples.label, samples.dense, ids, rows, samples.num_samples)
        return self._missing.add(made, samples.features, places, "load", self._rows_now)

    def _rows_now(self) -> RowReader:
        rows_now = self._rows_of_cache()
        assert rows_now is not None, "a batch was asked for of a cache that is gone"
        return rows_now()
