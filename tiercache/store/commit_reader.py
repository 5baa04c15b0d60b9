"""The commit that a store for reading stays at, and the lease that keeps what it needs from being dropped."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from tiercache.store.locks import Lease
from tiercache.store.snapshot import History, Snapshot
from tiercache.store.store_errors import CommitMissingError, CorruptStoreError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tiercache.store.commit import Commit
    from tiercache.store.engines.engine import Engine
    from tiercache.store.recovery import CommitLoader


_TRIES, _PAUSE_SECONDS = 100, 0.01
"""How many times a commit may disappear before it is read, and the pause between tries."""


class CommitReader:
    """A commit, leased from a writer in another process or held in this one, until it is closed."""

    def __init__(self, engine: Engine, loader: CommitLoader, snapshot: Snapshot, *, alone: bool) -> None:
        """``snapshot`` is held by who calls this, or by what the class methods add; ``alone``: it was asked for."""
        self._engine, self._loader, self._alone = engine, loader, alone
        self._label = loader.label
        self.snapshot = snapshot
        self._holds = ExitStack()

    @classmethod
    def leased(cls, engine: Engine, loader: CommitLoader, at: int | None = None) -> CommitReader:
        """Take a lease of commit ``at``, the newest where not said, as far as leases can be taken.

        Raises CommitMissingError and CorruptStoreError.
        """
        for _ in range(_TRIES):
            head, reader = engine.newest(), None
            try:
                newest = loader.newest()
                snapshot = newest if at is None or newest.commit is None else loader.find(newest.commit, at)
                if at is not None and newest.commit is None:
                    raise CommitMissingError(f"{loader.label} has no commit {at}: it has none yet")
                reader = cls(engine, loader, snapshot, alone=at is not None)
                if reader._take():
                    return reader
                reader.close()
            except BaseException as error:
                if reader is not None:
                    reader.close()
                if not isinstance(error, CorruptStoreError) or engine.newest() == head:
                    raise
            time.sleep(_PAUSE_SECONDS)  # a commit gave it up meanwhile
        raise CommitMissingError(
            f"commits of {loader.label} are given up faster than they can be read: keep more (retention)"
        )

    @classmethod
    def pinned_in(cls, engine: Engine, loader: CommitLoader, pinned: AbstractContextManager[Snapshot]) -> CommitReader:
        """Hold a commit that a writer in this process pins until this is closed. Raises CommitMissingError."""
        holds = ExitStack()
        reader = cls(engine, loader, holds.enter_context(pinned), alone=True)
        reader._holds = holds
        return reader

    @classmethod
    def of_rank(cls, loader: CommitLoader, commit: Commit) -> CommitReader:
        """Read what a commit lists of a rank; somebody else holds the commit. Raises CorruptStoreError."""
        assert commit.head is not None, "it is written"
        return cls(loader.commits, loader, Snapshot(loader.read(commit.head), loader.groups), alone=True)

    @cached_property
    def history(self) -> History:
        """The commits that are kept; of one that was asked for, only that. Raises CorruptStoreError."""
        commit = self.snapshot.commit
        if commit is None:
            return History()
        found: list[Snapshot] = []
        for kept in () if self._alone else commit.kept:
            try:
                found.append(self._loader.kept(kept))
            except CorruptStoreError:
                if self._is_kept(kept.id):
                    raise
        return History((*found, self.snapshot))

    @contextmanager
    def pinned(self) -> Iterator[Snapshot]:
        """Yield the snapshot; it is held anyway."""
        yield self.snapshot

    def explain(self, error: CorruptStoreError) -> StoreError:
        """Return what to raise for damage that was seen: where the commit is gone, nothing is damaged."""
        if self.snapshot.commit is None or self._is_kept(self.snapshot.commit.id, unknown=True):
            return error
        if self._newest_folders() != self.snapshot.commit.folders:
            return StoreError(f"{self._label} was divided among other ranks while it was read: open it again")
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

        A commit that is not kept any more may lack blobs, though its own is there while others read it.
        """
        if self.snapshot.commit is None or self._engine.lease_folder is None:
            return True
        lease = Lease.take(self._engine.lease_folder, self.snapshot.commit.id)
        if lease is None:
            return True
        self._holds.callback(lease.release)
        return self._is_kept(self.snapshot.commit.id)

    def _is_kept(self, id_: int, *, unknown: bool = False) -> bool:
        """Return True if the newest commit keeps this one, or, with ``unknown``, if that cannot be read."""
        try:
            newest = self._loader.newest_record()
        except StoreError:
            if unknown:
                return True
            raise
        return newest is not None and (
            newest.values["id"] == id_ or any(one.id == id_ for one in newest.values["kept"])
        )

    def _newest_folders(self) -> tuple[str, ...]:
        """Return the folders of the ranks that the store has now."""
        try:
            newest = self._loader.newest_record()
        except StoreError:
            newest = None
        return () if newest is None else newest.folders
