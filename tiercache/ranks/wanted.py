"""What a rank asks of a sharded store when it opens one: all ranks ask for the same, but for their part's tables."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.errors import StateError
from tiercache.ranks.record import Record, part_name
from tiercache.store import group_tables
from tiercache.store.opening import ENGINES, compare_tables

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from tiercache.store import Table

__all__ = ["Wanted"]


class Wanted:
    """Tables, sharding and folders that are asked for. Raises ValueError for what makes no sense."""

    def __init__(
        self,
        tables: Iterable[Table],
        part_tables: Iterable[Table],
        sharding: Mapping[str, Any],
        num_ranks: int,
        engine: str | None,
        parts: Sequence[str | os.PathLike[str]] | None,
        retention: int | None,
        store_budget: int | None,
    ) -> None:
        self.tables, self.part_tables = tuple(sorted(tables, key=lambda table: table.table_id)), tuple(part_tables)
        self.sharding, self.store_budget = dict(sharding), store_budget
        self.engine, self.retention, self._num_ranks = engine, retention, num_ranks
        group_tables(self.tables)
        if engine is not None and engine not in ENGINES:
            raise ValueError(f"engine {engine!r} is unknown: it must be 'lmdb' or 'zarr'")
        if retention is not None and retention < 1:
            raise ValueError(f"retention is {retention}: at least the newest commit must be kept")
        if parts is not None and len(parts) != num_ranks:
            raise ValueError(f"shard_dirs= names {len(parts)} folders for {num_ranks} ranks: give one for each rank")
        self._parts = None if parts is None else [Path(part).absolute() for part in parts]

    def record(self, path: Path, before: Record | None) -> Record:
        """Return the record of new parts of the store at ``path``, without a commit."""
        generation = 0 if before is None else before.next_generation
        compressed = any(table.compression for table in self.tables)
        return Record(
            id=uuid.uuid4().hex if before is None else before.id,
            generation=generation,
            engine=self.engine or (before.engine if before else "zarr" if compressed else "lmdb"),
            retention=self.retention or (before.retention if before else 1),
            tables=self.tables,
            sharding=self.sharding,
            parts=tuple(self._place(path, generation, rank) for rank in range(self._num_ranks)),
            obsolete=() if before is None else (*before.obsolete, *before.parts),
            first_commit=0 if before is None else before.next_commit,
        )

    def check_record(self, found: Record, label: str) -> None:
        """Raise TableMismatchError for a store of other tables, ValueError for one of another engine."""
        compare_tables(found.tables, self.tables, label)
        if self.engine not in {None, found.engine} and self.sharding == found.sharding:
            raise ValueError(
                f"{label} was made with engine {found.engine!r}, not {self.engine!r}: leave engine out, or give the "
                "path of a new store"
            )

    def check_ways(self, found: Record, label: str) -> None:
        """Raise StateError for a store that has the parts of other ranks, or of another sharding."""
        if found.num_ranks != self._num_ranks:
            raise StateError(
                f"{label} has the parts of {found.num_ranks} ranks and {self._num_ranks} were started: start "
                f"{found.num_ranks}, or make parts for {self._num_ranks} first"
            )
        if found.sharding != self.sharding:
            raise StateError(f"{label} has another sharding than was given: give its own, or make parts for the other")

    def moved(self, path: Path, record: Record) -> Record:
        """Return the record with the folders and the retention that were asked for."""
        if self._parts is not None:
            parts = tuple(self._place(path, record.generation, rank) for rank in range(self._num_ranks))
            record = replace(record, parts=parts)
        return replace(record, retention=self.retention or record.retention)

    def _place(self, path: Path, generation: int, rank: int) -> str:
        name = part_name(generation, rank)
        if self._parts is None or self._parts[rank] == path.absolute():
            return name
        return str(self._parts[rank] / name)
