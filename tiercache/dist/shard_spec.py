"""The ranks that will open or create a store: its tables, sharding and folders, the same on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from tiercache.errors import StateError
from tiercache.store import group_tables
from tiercache.store.commit import rank_folder
from tiercache.store.files import local_path
from tiercache.store.opening import ENGINES
from tiercache.store.records import checked_retention
from tiercache.store.sharding import ShardingPlan

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from tiercache.store import Table
    from tiercache.store.commit import CommitRecord


class ShardOptions(TypedDict, total=False):
    """Options of a store of several ranks, as in `TierCache`; omitted ones stay as they are in the store."""

    engine: str | None
    shard_dirs: Sequence[str | os.PathLike[str]] | None
    """Folders by rank, the store's first; None: existing folders stay, and new ones are made in the store."""
    retention: int | None


class ShardSpec:
    """The ranks to open or create. Raises ValueError for invalid tables, sharding or options."""

    def __init__(
        self,
        path: Path,
        tables: Iterable[Table],
        sharding: ShardingPlan,
        num_ranks: int,
        *,
        engine: str | None = None,
        shard_dirs: Sequence[str | os.PathLike[str]] | None = None,
        retention: int | None = None,
    ) -> None:
        self.tables, self.sharding = tuple(sorted(tables, key=lambda table: table.table_id)), sharding
        self.engine, self.retention = engine, None if retention is None else checked_retention(retention)
        group_tables(self.tables)
        sharding.check(self.tables)
        if sharding.num_ranks != num_ranks:
            raise ValueError(f"the sharding is for {sharding.num_ranks} ranks, but {num_ranks} were started")
        if engine is not None and engine not in ENGINES:
            raise ValueError(f"unknown engine {engine!r}: expected 'lmdb' or 'zarr'")
        self.new_folders = folders_of(num_ranks, path, shard_dirs)
        """Requested folders by rank, as commits name them."""
        self._is_given = shard_dirs is not None

    def folders(self, before: CommitRecord | None) -> tuple[str, ...]:
        """Return each rank's folder: those of the newest commit unless others were given."""
        return self.new_folders if self._is_given or before is None or not before.folders else before.folders

    def check_sharding(self, found: CommitRecord, label: str) -> None:
        """Raise StateError for a store with a different number of ranks or sharding."""
        sharding = found.sharding or ShardingPlan.of_one(found.tables)
        if sharding.num_ranks != self.sharding.num_ranks:
            raise StateError(
                f"{label} has the rows of {sharding.num_ranks} ranks, but {self.sharding.num_ranks} were started: "
                f"start {sharding.num_ranks}, or reshard it for {self.sharding.num_ranks} first"
            )
        if sharding.num_ranks > 1 and sharding != self.sharding:
            raise StateError(f"{label} has a different sharding: pass its own sharding, or reshard it first")


def folders_of(num_ranks: int, path: Path, shard_dirs: Sequence[str | os.PathLike[str]] | None) -> tuple[str, ...]:
    """Return the folders of new ranks, by rank, as a commit names them; each is in a folder of ``shard_dirs``, if any.

    Raises ValueError if they are not as many as the ranks, if rank 0 is not in the folder of the store itself, and for
    a folder that a commit cannot name.
    """
    if shard_dirs is None:
        return tuple(map(rank_folder, range(num_ranks)))
    given = [local_path(one, "the folder of a rank") for one in shard_dirs]
    if len(given) != num_ranks:
        raise ValueError(f"shard_dirs= names {len(given)} folders for {num_ranks} ranks: pass one for each rank")
    if given[0] != path.absolute():
        raise ValueError(f"shard_dirs[0] is {given[0]}: rank 0 has its rows in the store itself, so pass {path}")
    return tuple(rank_folder(rank) if rank == 0 or folder == path.absolute() else _named(folder, rank)
                 for rank, folder in enumerate(given))  # fmt: skip


def _named(folder: Path, rank: int) -> str:
    """Return the absolute path of a rank's folder that is not in the store."""
    place = folder.resolve() if ".." in folder.parts else folder
    if not str(place).isprintable():
        raise ValueError(f"shard_dirs[{rank}] is {str(folder)!r}: pass a folder with a printable name")
    return str(place / rank_folder(rank))
