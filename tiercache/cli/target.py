"""What a path is, and how commands open it: a store, a sharded store or a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tiercache.ranks.common_commit import CommonCommit
    from tiercache.ranks.sharded_store import ShardedStore
    from tiercache.store import Commit, Store

__all__ = ["describe_store", "kind_of", "open_store", "refuse_shards", "roll_back", "verify_store"]


def kind_of(path: Path) -> Literal["store", "dataset"]:
    """Return what a directory holds. Raises DatasetError for an unfinished dataset and NotAStoreError for neither."""
    from tiercache.data.dataset import PassDataset
    from tiercache.data.manifest import MANIFEST, UNFINISHED
    from tiercache.ranks.inspection import is_sharded
    from tiercache.store import NotAStoreError, StoreMissingError
    from tiercache.store.directory import MARKER

    if (path / MARKER).exists() or is_sharded(path):
        return "store"
    if (path / MANIFEST).exists():
        return "dataset"
    if (path / UNFINISHED).exists():
        PassDataset.open(path)  # says what is unfinished
    if not path.exists():
        raise StoreMissingError(f"there is nothing at {path}: give the directory of a store or a dataset")
    raise NotAStoreError(f"{path} is neither a store nor a dataset: give the directory of one")


def open_store(path: Path, commit: int | None = None) -> Store | ShardedStore:
    """Open a store for reading, at ``commit`` where one is given; a sharded one over all its shards."""
    from tiercache.ranks.inspection import is_sharded
    from tiercache.ranks.sharded_store import ShardedStore
    from tiercache.store import Store

    _refuse_dataset(path)
    return ShardedStore.open(path, commit=commit) if is_sharded(path) else Store.open(path, mode="r", commit=commit)


def describe_store(path: Path) -> dict[str, Any]:
    """Return what a store holds, as plain values; reads no row."""
    from tiercache.ranks.inspection import is_sharded, sharded_info
    from tiercache.store import info

    return sharded_info(path) if is_sharded(path) else info(path)


def verify_store(path: Path, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Read and check all of a store; ``progress(done, total)`` is called with bytes."""
    from tiercache.ranks.inspection import is_sharded, verify_sharded
    from tiercache.store import verify

    return verify_sharded(path, progress=progress) if is_sharded(path) else verify(path, progress=progress)


def roll_back(path: Path, to: int) -> Commit | CommonCommit:
    """Roll a store, or all shards of a sharded one, back to a commit. Raises ValueError for one shard alone."""
    from tiercache.ranks.inspection import is_sharded
    from tiercache.ranks.rollback import rollback_sharded
    from tiercache.store import Store
    from tiercache.store.part import is_part

    _refuse_dataset(path)
    if is_sharded(path):
        return rollback_sharded(path, to)
    if is_part(path):
        raise ValueError(
            f"{path} is a shard of a store, and all shards make commits together: give the path of the whole store, "
            "and one of its commits"
        )
    with Store.open(path) as store:
        return store.rollback(to)


def refuse_shards(path: Path, what: str) -> None:
    """Raise ValueError where ``path`` is a sharded store or a shard, whose commits belong together."""
    from tiercache.ranks.inspection import is_sharded
    from tiercache.store.part import is_part

    _refuse_dataset(path)
    if is_sharded(path) or is_part(path):
        raise ValueError(
            f"{path} is {'' if is_sharded(path) else 'a shard of '}a sharded store, whose shards make commits "
            f"together: {what} works on a store of one process"
        )


def _refuse_dataset(path: Path) -> None:
    if kind_of(path) == "dataset":
        raise ValueError(f"{path} is a dataset: give the directory of a store")
