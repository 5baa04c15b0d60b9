"""CacheFacts: tables, device and bytes of an open cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.errors import StateError
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    import torch

    from tiercache.data.dataset import PassDataset
    from tiercache.store.sharding import ShardingPlan
    from tiercache.train.cache_parts import CacheParts


class CacheFacts:
    """The read-only properties of a `TierCache`. None of them is collective."""

    dataset: PassDataset
    _parts: CacheParts

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the cache itself, for a copy of a module that has it as an attribute. Raises TypeError otherwise."""
        return self if memo else self.__getstate__()

    def __getstate__(self) -> Any:
        """Raise TypeError."""
        raise TypeError(
            "a cache cannot be copied or pickled, because its rows are on the device and in its store: copy the model, "
            "or keep a commit with cache.keep(name)"
        )

    @property
    def tables(self) -> tuple[Any, ...]:
        """All tables, whole, in the order of table ids."""
        return tuple(table for group in self.groups for table in group.tables)

    @property
    def groups(self) -> tuple[Any, ...]:
        """The tables in groups of the same row layout."""
        return group_tables(self.dataset.tables)

    @property
    def schema(self) -> Any:
        """The schema of the dataset."""
        return self.dataset.schema

    @property
    def sharding(self) -> ShardingPlan | None:
        """The sharding of the tables; None for a plain store."""
        return self._parts.training_store.sharding

    @property
    def is_restored(self) -> bool:
        """False if a registered model is not the one that the last commit trained: call ``restore`` first."""
        try:
            self._parts.rows.check_restored()
        except StateError:
            return False
        return True

    @property
    def device(self) -> torch.device:
        """The device on which this rank's rows are trained."""
        return self._parts.backend.device

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of rows, slot maps, replicated tables and, after raw keys, the index of keys."""
        return self._parts.rows.device_bytes + self._parts.exchange.device_bytes + self._parts.raw.index_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes on the device, besides ``device_bytes``, that are kept between batches, with prefetched batches."""
        return self._parts.backend.scratch_bytes + self._parts.pipeline.device_bytes

    @property
    def pinned_batch_bytes(self) -> int:
        """Bytes of pinned memory of prefetched batches, not in ``host_budget``; 0 on a CPU."""
        return self._parts.backend.pinned_bytes

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other ranks so far, for batches and steps."""
        return self._parts.exchange.bytes_sent

    @property
    def eval_bytes(self) -> int:
        """Bytes of host memory that are reserved for the rows of an evaluation."""
        return self._parts.rows.eval_bytes

    @property
    def host_bytes_peak(self) -> int:
        """Peak bytes of rows on the host so far."""
        return self._parts.rows.host_bytes_peak
