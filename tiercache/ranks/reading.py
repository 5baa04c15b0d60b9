"""Opening the parts of a sharded store for reading: all that is asked for must be there, and nothing else."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from tiercache.ranks.shard_folder import Mark
from tiercache.store import CommitMissingError, CorruptStoreError, Store, StoreError

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.ranks.common_commit import CommonCommit
    from tiercache.ranks.record import Record

__all__ = ["commits_of", "open_parts"]


def open_parts(path: Path, record: Record, only: CommonCommit | None) -> tuple[Store, ...]:
    """Open every part at its commit of ``only``, or, None, with all its commits, at least the record's newest.

    Damage that other commits alone need is none of these: a part that does not open with all opens at the newest.
    Raises what is wrong with the first part of which that cannot be read.
    """
    label, parts = f"the sharded store at {path}", list[Store]()
    with ExitStack() as stack:
        for rank in range(record.num_ranks):
            folder = record.folder(path, rank)
            Mark(store=record.id, generation=record.generation, rank=rank).check(folder, label)
            part = _open_at(folder, record, rank, only) if only is not None else _open(folder, record, rank)
            parts.append(stack.enter_context(part))
            record.check_part(part, rank, label, [only or record.commits[-1]])
        stack.pop_all()
    return tuple(parts)


def commits_of(record: Record, parts: tuple[Store, ...]) -> tuple[CommonCommit, ...]:
    """Return the commits of a record that all ``parts`` have."""
    kept = [{commit.id: commit.cursor for commit in part.commits} for part in parts]
    return tuple(
        commit
        for commit in record.commits
        if all(cursors.get(id_) == commit.cursor for id_, cursors in zip(commit.parts, kept, strict=True))
    )


def _open(folder: Path, record: Record, rank: int) -> Store:
    try:
        return Store.open(folder, mode="r")
    except CorruptStoreError as error:
        try:
            return _open_at(folder, record, rank, record.commits[-1])
        except StoreError:
            raise error from None


def _open_at(folder: Path, record: Record, rank: int, commit: CommonCommit) -> Store:
    try:
        return Store.open(folder, mode="r", commit=commit.parts[rank])
    except CommitMissingError as error:
        try:
            return Store.open(folder, mode="r")  # the record says which commits it lacks, and why that may be
        except StoreError:
            raise error from None
