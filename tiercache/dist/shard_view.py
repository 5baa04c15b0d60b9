"""Shard views: the part of a dataset that one rank owns, as the sub-datasets that its shard is trained with."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from tiercache.dist.shard_layout import find_owners
from tiercache.kernels.cpu.key_sweeps import hash_range_bound
from tiercache.store.sharding import hash_bounds
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.data.block_layout import IdOrder
    from tiercache.data.dataset import PassDataset
    from tiercache.data.keyset import KeySet
    from tiercache.data.sub_dataset import EncodedBatch, SampleMemory, SubDataset
    from tiercache.dist.shard_layout import Owners
    from tiercache.schema import Schema
    from tiercache.store.sharding import ShardingPlan
    from tiercache.store.table import Group, Table


class ShardSubDataset:
    """A sub-dataset as one rank sees it: its own keys, and all samples, with local ids of the whole sub-dataset."""

    def __init__(self, whole: SubDataset, view: ShardView) -> None:
        self.index = whole.index
        """Its index in the dataset."""
        self.samples = whole.samples
        """Number of samples of the whole sub-dataset."""
        self.whole = whole
        """The sub-dataset of all ranks."""
        self._view = view
        self._spans: dict[str, slice] = {}

    def span(self, table: str) -> slice:
        """Return the local ids, in the whole sub-dataset, of the table's rows that this rank owns."""
        if table not in self._spans:
            self._spans[table] = self._find(table)
        return self._spans[table]

    def _find(self, table: str) -> slice:
        sharding, rank = self._view.sharding, self._view.rank
        table_sharding, rows = sharding.tables[table], self.whole.rows(table)
        if not table_sharding.by_hash:
            return slice(0, 0 if table_sharding.slice_of(rank) is None else rows)
        if sharding.num_ranks == 1:
            return slice(0, rows)
        keys, table_id = self.whole.keys(table), self._view.table_ids[table]
        bounds = hash_bounds(sharding.num_ranks)[rank : rank + 2]
        return slice(*(hash_range_bound(keys, table_id, bound) for bound in bounds))

    def check_samples(self) -> None:
        """Raise DatasetError if the sub-dataset has only a key set."""
        self.whole.check_samples()

    def rows(self, table: str) -> int:
        """Return the number of a table's rows that the rank owns."""
        span = self.span(table)
        return int(span.stop - span.start)

    def keys(self, table: str) -> NDArray[np.int64]:
        """Return the keys of a table that the rank owns, in hash order: mapped, read-only."""
        return self.whole.keys(table)[self.span(table)]

    def read(
        self,
        indices: NDArray[np.int64],
        into: SampleMemory | None = None,
        *,
        features: Collection[str] | None = None,
        orders: Sequence[IdOrder] = (),
    ) -> EncodedBatch:
        """Read the samples at ``indices``, in that order, with local ids of the whole sub-dataset."""
        return self.whole.read(indices, into, features=features, orders=orders)


class ShardView:
    """The part of a dataset that one rank owns: sub-datasets with its own keys, for the tables of its shard.

    Its samples have local ids of the whole sub-dataset. Key sets are in hash order, so a rank's keys of a table sharded
    row-wise are one slice of them: nothing is copied.
    """

    def __init__(self, passes: PassDataset, sharding: ShardingPlan, rank: int) -> None:
        """Raises ValueError if the sharding is for other tables, or does not have this rank."""
        if not 0 <= rank < sharding.num_ranks:
            raise ValueError(f"invalid rank {rank}: the sharding has ranks 0 to {sharding.num_ranks - 1}")
        sharding.check(passes.tables)
        self.whole, self.sharding, self.rank = passes, sharding, rank
        self.tables = sharding.shard_tables(passes.tables, rank)
        """The tables of the rank's shard, in the order of table ids."""
        self.table_ids = {table.name: table.table_id for table in self.tables}
        """The same by name."""
        self.schema: Schema = replace(passes.schema, tables=self.tables)
        """The dataset's schema, with the tables of the shard."""
        self.passes = tuple(ShardSubDataset(one, self) for one in passes.passes)

    @property
    def path(self) -> Path:
        """The folder of the dataset."""
        return self.whole.path

    @property
    def digest(self) -> str:
        """Hexadecimal digest of the dataset: all ranks follow one schedule."""
        return self.whole.digest

    @cached_property
    def share(self) -> str:
        """Hexadecimal digest of sharding and rank, which identify the rank's part of each key set."""
        return hashlib.sha256(f"{self.sharding.digest}\0{self.rank}".encode()).hexdigest()

    def rare_keys(self) -> KeySet | None:
        """Return the keys, of all ranks, that share the out-of-vocabulary row of their table."""
        return self.whole.rare_keys()

    @property
    def samples(self) -> int:
        """Number of samples in all sub-datasets."""
        return self.whole.samples

    @cached_property
    def groups_W(self) -> tuple[tuple[Group, ...], ...]:  # noqa: N802 - shape suffix
        """The groups of every rank's shard."""
        shards = (self.sharding.shard_tables(self.whole.tables, rank) for rank in range(self.sharding.num_ranks))
        known: dict[tuple[Table, ...], tuple[Group, ...]] = {}  # ranks without column slices are alike
        return tuple(known[one] if one in known else known.setdefault(one, group_tables(one)) for one in shards)

    def owners(self, sub_dataset: int) -> Owners:
        """Find the owner of each row of a sub-dataset; every rank finds the same. Keep it as long as the sub-dataset is
        trained.
        """
        keys = self.whole.passes[sub_dataset].keys
        return find_owners(self.sharding, sub_dataset, self.whole.tables, self.groups_W, keys)

    def __iter__(self) -> Iterator[ShardSubDataset]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __repr__(self) -> str:
        return f"ShardView(rank {self.rank} of {self.sharding.num_ranks}, {self.whole!r})"
