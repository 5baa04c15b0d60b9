"""The commit that a store for reading stays at, and the lease that keeps its blocks from being freed."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from tiercache.store.commit import COMMIT, History
from tiercache.store.locks import MARKER, Lease
from tiercache.store.openers import SHARD_MANIFEST
from tiercache.store.recovery import check_blocks, kept_ids, recover
from tiercache.store.store_errors import CommitMissingError, CorruptStoreError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from tiercache.store.commit import Snapshot
    from tiercache.store.engines.engine import Engine
    from tiercache.store.table import Group


_TRIES, _PAUSE_SECONDS = 100, 0.01
"""How often commits may give up the one that is about to be read."""


class CommitReader:
    """A commit, leased from a writer in another process or held in this one, until it is closed."""

    def __init__(self, engine: Engine, label: str, history: History, snapshot: Snapshot) -> None:
        """``snapshot`` is held by who calls this, or by what the class methods add."""
        self._engine, self._label = engine, label
        self.history, self.snapshot = history, snapshot
        self.digests = engine.digests()
        """The SHA-256 of each record of the commit, by name."""
        self._holds = ExitStack()

    @classmethod
    def leased(cls, engine: Engine, groups: Sequence[Group], label: str, at: int | None = None) -> CommitReader:
        """Take a lease of commit ``at``, the newest where not said, as far as leases can be taken.

        Raises CommitMissingError and CorruptStoreError.
        """
        for _ in range(_TRIES):
            found = recover(engine.records(), groups, label, at=at)
            reader = cls(engine, label, found.history, found.history.newest)
            try:
                if reader._take():
                    check_blocks(engine, reader.snapshot, groups, label)
                    return reader
            except CorruptStoreError:
                if reader._is_there():
                    reader.close()
                    raise
            except BaseException:
                reader.close()
                raise
            reader.close()  # a commit gave it up meanwhile
            time.sleep(_PAUSE_SECONDS)
        raise CommitMissingError(f"commits of {label} are given up faster than they can be read: keep more (retention)")

    @classmethod
    def pinned_in(cls, engine: Engine, label: str, pinned: AbstractContextManager[Snapshot]) -> CommitReader:
        """Hold a commit that a writer in this process pins until this is closed. Raises CommitMissingError."""
        holds = ExitStack()
        snapshot = holds.enter_context(pinned)
        reader = cls(engine, label, History((snapshot,)), snapshot)
        reader._holds = holds
        return reader

    @contextmanager
    def pinned(self) -> Iterator[Snapshot]:
        """Yield the snapshot; it is held anyway."""
        yield self.snapshot

    def explain(self, error: CorruptStoreError) -> StoreError:
        """Return what to raise for damage that was seen: where the commit is gone, nothing is damaged."""
        folder = None if self._engine.lease_folder is None else self._engine.lease_folder.parent
        if folder is not None and (folder / SHARD_MANIFEST).exists() and not (folder / MARKER).exists():
            return StoreError(f"{self._label} was sharded while it was read: open it again")
        if self._is_there() or self.snapshot.commit is None:
            return error
        longer = (
            "have its writer keep what is free for longer (keep_for)"
            if self._engine.lease_folder is None
            else "let readers write to its folder"
        )
        return CommitMissingError(
            f"{self._label} was opened at commit {self.snapshot.commit.id}, which its writer has given up since, as no "
            f"lease could be taken: open the store again, or {longer}"
        )

    def close(self) -> None:
        """Give the commit up; a second time does nothing."""
        self._holds.close()

    def _take(self) -> bool:
        """Take a lease, where the engine has a folder for it; False where it came too late.

        A commit that is not kept any more may lack blocks, though its record is there while others read it.
        """
        if self.snapshot.commit is None or self._engine.lease_folder is None:
            return True
        lease = Lease.take(self._engine.lease_folder, self.snapshot.commit.id)
        if lease is None:
            return True
        self._holds.callback(lease.release)
        return self.snapshot.commit.id in kept_ids(self._engine.records(), self._label)

    def _is_there(self) -> bool:
        """Whether the newest records still have the commit."""
        if self.snapshot.commit is None:
            return True
        try:
            return f"{COMMIT}{self.snapshot.commit.id}" in self._engine.records()
        except StoreError:
            return True
