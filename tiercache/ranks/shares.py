"""Shares: what one rank owns of a pass set, as the passes that its own part of the store is trained with."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from tiercache.kernels.cpu.next_use import hash_range_bound
from tiercache.ranks.owners import find_owners
from tiercache.ranks.placement import hash_bounds
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.passes.passset import Pass, PassSet
    from tiercache.passes.samples import SampleBuffers, Samples
    from tiercache.ranks.owners import Owners
    from tiercache.ranks.placement import Placement
    from tiercache.schema import Schema
    from tiercache.store.table import Group, Table

__all__ = ["Share", "SharedPass", "part_tables", "share_digest"]


def part_tables(tables: Iterable[Table], placement: Placement, rank: int) -> tuple[Table, ...]:
    """Return the tables of one rank's part, in the order of table ids: all of them, by name.

    One whose columns are divided has the rank's own. One that the rank owns no row of is whole: its rows are elsewhere.
    Raises ValueError where the placement is of other tables.
    """
    ordered = sorted(tables, key=lambda table: table.table_id)
    placement.check(ordered)
    parts = []
    for table in ordered:
        mine = placement.tables[table.name].slice_of(rank)
        if mine is None or mine.last - mine.first == table.dim:
            parts.append(table)
        else:
            parts.append(replace(table, dim=mine.last - mine.first, first_column=mine.first, whole_dim=table.dim))
    return tuple(parts)


def share_digest(passes: str, placement: Placement, rank: int) -> str:
    """Return the digest of the share that a rank has of the pass set with the digest ``passes``."""
    return hashlib.sha256(f"{passes}\0{placement.digest}\0{rank}".encode()).hexdigest()


class SharedPass:
    """One pass as one rank sees it: its own keys, and all samples with their local ids of the whole pass."""

    def __init__(self, whole: Pass, share: Share) -> None:
        self.index = whole.index
        """Its place in the pass set."""
        self.samples = whole.samples
        """How many samples the whole pass has."""
        self.whole = whole
        """The pass of all ranks."""
        self._share = share
        self._spans: dict[str, slice] = {}

    def span(self, table: str) -> slice:
        """Return the local ids, in the whole pass, of the rank's own rows of a table."""
        if table not in self._spans:
            self._spans[table] = self._find(table)
        return self._spans[table]

    def _find(self, table: str) -> slice:
        placement, rank = self._share.placement, self._share.rank
        placed, rows = placement.tables[table], self.whole.rows(table)
        if not placed.by_hash:
            return slice(0, 0 if placed.slice_of(rank) is None else rows)
        if placement.num_ranks == 1:
            return slice(0, rows)
        keys, table_id = self.whole.keys(table), self._share.table_ids[table]
        bounds = hash_bounds(placement.num_ranks)[rank : rank + 2]
        return slice(*(hash_range_bound(keys, table_id, bound) for bound in bounds))

    def check_samples(self) -> None:
        """Raise PassSetError where the pass has a key set alone."""
        self.whole.check_samples()

    def rows(self, table: str) -> int:
        """Return how many rows of a table the rank owns."""
        mine = self.span(table)
        return int(mine.stop - mine.start)

    def keys(self, table: str) -> NDArray[np.int64]:
        """Return the keys of a table that the rank owns, in hash order: mapped, read-only."""
        return self.whole.keys(table)[self.span(table)]

    def read(
        self,
        indices: NDArray[np.int64],
        into: SampleBuffers | None = None,
        *,
        features: Collection[str] | None = None,
    ) -> Samples:
        """Read the samples at ``indices``, in their order, with local ids of the whole pass."""
        return self.whole.read(indices, into, features=features)


class Share:
    """What one rank owns of a pass set: passes with its own keys, for the tables of its part.

    Its samples have local ids of the whole pass. Key sets are in hash order, so a rank's keys of a table
    placed by row are one stretch of them: nothing is copied.
    """

    def __init__(self, passes: PassSet, placement: Placement, rank: int) -> None:
        """Raises ValueError where the placement is of other tables, or has no such rank."""
        if not 0 <= rank < placement.num_ranks:
            raise ValueError(f"rank {rank} has no share: the placement has {placement.num_ranks} ranks, counted from 0")
        placement.check(passes.tables)
        self.whole, self.placement, self.rank = passes, placement, rank
        self.tables = part_tables(passes.tables, placement, rank)
        """The tables of the rank's part, in the order of table ids."""
        self.table_ids = {table.name: table.table_id for table in self.tables}
        """By name."""
        self.schema: Schema = replace(passes.schema, tables=self.tables)
        """That of the pass set, with the tables of the part."""
        self.passes = tuple(SharedPass(one, self) for one in passes.passes)

    @property
    def path(self) -> Path:
        """The folder of the pass set."""
        return self.whole.path

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of pass set, placement and rank."""
        return share_digest(self.whole.digest, self.placement, self.rank)

    @property
    def samples(self) -> int:
        """Samples of all passes."""
        return self.whole.samples

    @cached_property
    def groups_W(self) -> tuple[tuple[Group, ...], ...]:  # noqa: N802 - a shape stands in the name
        """The groups of every rank's part."""
        parts = (part_tables(self.whole.tables, self.placement, rank) for rank in range(self.placement.num_ranks))
        known: dict[tuple[Table, ...], tuple[Group, ...]] = {}  # ranks without columns of their own are alike
        return tuple(known[part] if part in known else known.setdefault(part, group_tables(part)) for part in parts)

    def owners(self, pass_index: int) -> Owners:
        """Find who owns each row of a pass; every rank finds the same. Hold it as long as the pass is trained."""
        keys = self.whole.passes[pass_index].keys
        return find_owners(self.placement, pass_index, self.whole.tables, self.groups_W, keys)

    def __iter__(self) -> Iterator[SharedPass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __repr__(self) -> str:
        return f"Share(rank {self.rank} of {self.placement.num_ranks}, {self.whole!r})"
