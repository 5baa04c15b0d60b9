"""Going back to an older commit of a sharded store, from which its ranks go on."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tiercache.ranks.record import Record
from tiercache.ranks.shard_folder import Mark, open_part
from tiercache.ranks.sharded_folder import LOCK, check_there
from tiercache.store import StoreError
from tiercache.store.commit_writer import keep, release
from tiercache.store.directory import WriterLock

if TYPE_CHECKING:
    import os

    from tiercache.ranks.common_commit import CommonCommit
    from tiercache.store import Store

__all__ = ["rollback_sharded"]


def rollback_sharded(path: str | os.PathLike[str], to: int) -> CommonCommit:
    """Make a commit with the rows, states and cursor of commit ``to``, which is kept, and drop those in between.

    For one process, which takes the right to write to every part, so all must be where it can reach them. Ranks that
    open the store next go on from there. What was not published is dropped, too. Ids are not used again: the new commit
    has the next one. One record makes it the store's: killed at any moment the store stands where it stood, or there.

    Raises CommitMissingError, StoreInUseError while ranks train, StoreFullError, and what ``ShardedStore.open`` raises:
    the store stands where it stood.
    """
    place = Path(path)
    check_there(place)
    label = f"the sharded store at {place}"
    with ExitStack() as stack:
        stack.callback(WriterLock(place, LOCK).release)
        record = Record.read(place)
        assert record is not None, "there was one, and this process alone may replace it now"
        target = record.find(to, label)
        parts = [stack.enter_context(_opened(place, record, rank, label)) for rank in range(record.num_ranks)]
        commits = [part.rollback(id_).id for part, id_ in zip(parts, target.parts, strict=True)]
        record = record.back_at(target, commits)
        record.write(place)
        for rank, part in enumerate(parts):
            keep(part, record.of_part(rank))
            with suppress(StoreError):  # what stays goes with the next commit
                release(part)
    assert record.newest is not None
    return record.newest


def _opened(place: Path, record: Record, rank: int, label: str) -> Store:
    """Open a part for writing, which keeps what the record names. Raises where it is not what the record says."""
    folder = record.folder(place, rank)
    Mark(store=record.id, generation=record.generation, rank=rank).check(folder, label)
    part = open_part(folder, None, engine=record.engine, store_budget=None, retention=record.retention + 1)
    try:
        record.check_part(part, rank, label)
        keep(part, record.of_part(rank))
    except BaseException:
        part.close()
        raise
    return part
