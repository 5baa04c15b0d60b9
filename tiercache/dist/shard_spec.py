"""The shards that ranks open or make: their tables, sharding and folders, the same on all ranks."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

from tiercache.errors import StateError
from tiercache.store import group_tables
from tiercache.store.files import local_path
from tiercache.store.opening import ENGINES, compare_tables
from tiercache.store.shards.shard_manifest import HERE, ShardManifest, shard_name

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from tiercache.store import Table
    from tiercache.store.shards.sharding import ShardingPlan


class ShardOptions(TypedDict, total=False):
    """Options of shards, as in `TierCache`; what is left out stays as it is in the store."""

    engine: str | None
    shard_dirs: Sequence[str | os.PathLike[str]] | None
    """For each rank the folder of its shard; None: those of the manifest, of new shards the store's own."""
    retention: int | None


class ShardSpec:
    """The shards to open or make. Raises ValueError for tables, a sharding or options that make no sense."""

    def __init__(
        self,
        tables: Iterable[Table],
        sharding: ShardingPlan,
        num_ranks: int,
        *,
        engine: str | None = None,
        shard_dirs: Sequence[str | os.PathLike[str]] | None = None,
        retention: int | None = None,
    ) -> None:
        self.tables, self.sharding = tuple(sorted(tables, key=lambda table: table.table_id)), sharding
        self.engine, self.retention = engine, retention
        group_tables(self.tables)
        sharding.check(self.tables)
        if sharding.num_ranks != num_ranks:
            raise ValueError(f"the sharding is for {sharding.num_ranks} ranks and {num_ranks} were started")
        if engine is not None and engine not in ENGINES:
            raise ValueError(f"engine {engine!r} is unknown: it must be 'lmdb' or 'zarr'")
        if retention is not None and retention < 1:
            raise ValueError(f"retention is {retention}: at least the newest commit must be kept")
        if shard_dirs is not None and len(shard_dirs) != num_ranks:
            raise ValueError(
                f"shard_dirs= names {len(shard_dirs)} folders for {num_ranks} ranks: give one for each rank"
            )
        self._shard_dirs = (
            None if shard_dirs is None else [local_path(folder, "the folder of a shard") for folder in shard_dirs]
        )

    def manifest(self, path: Path, before: ShardManifest | None, *, plain: bool = False) -> ShardManifest:
        """Return the manifest of new shards of the store at ``path``, without a commit; ``plain``: of a plain store."""
        generation = 0 if before is None else before.next_generation
        compressed = any(table.compression for table in self.tables)
        return ShardManifest(
            id=uuid.uuid4().hex if before is None else before.id,
            generation=generation,
            engine=self.engine or (before.engine if before else "zarr" if compressed else "lmdb"),
            retention=self.retention or (before.retention if before else 1),
            tables=self.tables,
            sharding=self.sharding,
            shards=(HERE,) if plain else self._folders(path, generation),
            obsolete=() if before is None else (*before.obsolete, *before.shards),
            first_commit=0 if before is None else before.next_commit,
        )

    def check_manifest(self, found: ShardManifest, label: str) -> None:
        """Raise TableMismatchError for a store of other tables, ValueError for one of another engine.

        Compression that was not asked for is the store's from now on, where the engine stays and all tables of a group
        have the same.
        """
        compare_tables(found.tables, self.tables, label)
        if self.engine in {None, found.engine} and len(group_tables(found.tables)) == len(group_tables(self.tables)):
            self.tables = found.tables
        if self.engine not in {None, found.engine} and self.sharding == found.sharding:
            raise ValueError(
                f"{label} was made with engine {found.engine!r}, not {self.engine!r}: leave engine out, or give the "
                "path of a new store"
            )

    def check_sharding(self, found: ShardManifest, label: str) -> None:
        """Raise StateError for a store that has the shards of other ranks, or of another sharding."""
        if found.is_plain:
            raise StateError(f"{label} is a plain one: have its rows sharded first")
        if found.num_ranks != self.sharding.num_ranks:
            raise StateError(
                f"{label} has the shards of {found.num_ranks} ranks and {self.sharding.num_ranks} were started: start "
                f"{found.num_ranks}, or make shards for {self.sharding.num_ranks} first"
            )
        if found.sharding != self.sharding:
            raise StateError(f"{label} has another sharding than was given: give its own, or make shards for the other")

    def moved(self, path: Path, manifest: ShardManifest) -> ShardManifest:
        """Return the manifest with the folders and the retention that were asked for."""
        if self._shard_dirs is not None:
            manifest = replace(manifest, shards=self._folders(path, manifest.generation))
        return replace(manifest, retention=self.retention or manifest.retention)

    def _folders(self, path: Path, generation: int) -> tuple[str, ...]:
        names = [shard_name(generation, rank) for rank in range(self.sharding.num_ranks)]
        if self._shard_dirs is None:
            return tuple(names)
        return tuple(
            name if folder == path.absolute() else str(folder / name)
            for folder, name in zip(self._shard_dirs, names, strict=True)
        )
