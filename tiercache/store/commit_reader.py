"""The one commit that a store for reading stays at, and what keeps its blocks from being freed meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import warnings
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from tiercache.store.commit import COMMIT, History
from tiercache.store.directory import MANIFEST, MARKER
from tiercache.store.recovery import check_blocks, kept_ids, recover
from tiercache.store.store_errors import CommitMissingError, CorruptStoreError, StoreClosedError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tiercache.store.commit import Commit, Snapshot
    from tiercache.store.commit_writer import CommitWriter
    from tiercache.store.engines.engine import Engine
    from tiercache.store.table import Group


class UseCount:
    """Lets uses through until it is closed; from any thread."""

    def __init__(self, label: str) -> None:
        """``label`` is the store in the words of a message."""
        self._label = label
        self._changed = threading.Condition()
        self._uses: Counter[int] = Counter()
        """By thread."""
        self._closed = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the engine open until this ends. Raises StoreClosedError."""
        with self._changed:
            if self._closed:
                raise StoreClosedError(f"{self._label} is closed: open it again")
            self._uses[threading.get_ident()] += 1
        try:
            yield
        finally:
            with self._changed:
                self._uses[threading.get_ident()] -= 1
                self._uses = +self._uses
                self._changed.notify_all()

    def check_outside(self) -> None:
        """Raise StoreError if this thread is inside a use: closing would wait for itself."""
        with self._changed:
            if threading.get_ident() in self._uses:
                raise StoreError(
                    f"{self._label} cannot be closed inside a function that it calls, such as progress=: raise an "
                    "error there to stop the method, and close the store afterward"
                )

    def close(self) -> None:
        """Let nothing more through, and wait for what goes on."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._uses)


def warn_unclosed(what: object, label: str) -> None:
    """Warn of ``what`` nobody can close any more, and which closes itself: with its lock, leases and files."""
    message = f"{label} was never closed: close it, or open it in a with statement"
    warnings.warn(message, ResourceWarning, stacklevel=3, source=what)


class Lease:
    """A shared lock on the file of a commit, until ``release``."""

    def __init__(self, path: Path, handle: int) -> None:
        """Only ``take`` calls this."""
        self._path = path
        self._handle: int | None = handle
        _held.add(self)

    @classmethod
    def take(cls, folder: Path, commit: int) -> Lease | None:
        """Return a lease of ``commit``, which may be gone by now; None where the folder takes none."""
        path = folder / str(commit)
        try:
            folder.mkdir(exist_ok=True)
            while True:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
                try:
                    fcntl.flock(handle, fcntl.LOCK_SH)
                    if os.fstat(handle).st_nlink:
                        return cls(path, handle)
                except BaseException:
                    os.close(handle)
                    raise
                os.close(handle)  # the writer took it for one that was left behind
        except OSError:
            return None

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Give it up, and delete its file where nobody else has a lease; a second time does nothing."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(self._path.stat(), os.fstat(self._handle)):  # the store may be elsewhere by now
                    self._path.unlink()
            self.drop()

    def drop(self) -> None:
        """Close the file, and leave it to whoever else has it open."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def leased_commits(folder: Path) -> set[int]:
    """Return the commits that are leased; deletes what ended leases left. A lease that cannot be looked at counts."""
    found: set[int] = set()
    try:
        names = [path.name for path in folder.iterdir() if path.name.isdecimal()]
    except OSError:
        return found
    for name in names:
        path = folder / name
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        except OSError:
            found.add(int(name))
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):  # of another user, in a folder where only they may delete it
                path.unlink()
        except OSError:
            found.add(int(name))
        finally:
            os.close(handle)
    return found


_held: weakref.WeakSet[Lease] = weakref.WeakSet()


def _drop_in_child() -> None:
    """Close a forked child's copies, which would keep the lease for as long as the child lives."""
    for lease in list(_held):
        lease.drop()


os.register_at_fork(after_in_child=_drop_in_child)


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
    def pinned_in(cls, writer: CommitWriter, engine: Engine, label: str, at: int) -> CommitReader:
        """Hold a commit of a writer in this process. Raises CommitMissingError."""
        holds = ExitStack()
        snapshot = holds.enter_context(writer.pinned(at))
        reader = cls(engine, label, History((snapshot,)), snapshot)
        reader._holds = holds
        return reader

    @property
    def commit(self) -> Commit | None:
        """It."""
        return self.snapshot.commit

    @contextmanager
    def pinned(self) -> Iterator[Snapshot]:
        """Yield the snapshot; it is held anyway."""
        yield self.snapshot

    def explain(self, error: CorruptStoreError) -> StoreError:
        """Return what to raise for damage that was seen: where the commit is gone, nothing is damaged."""
        folder = None if self._engine.lease_folder is None else self._engine.lease_folder.parent
        if folder is not None and (folder / MANIFEST).exists() and not (folder / MARKER).exists():
            return StoreError(f"{self._label} was sharded while it was read: open it again")
        if self._is_there() or self.commit is None:
            return error
        longer = (
            "have its writer keep what is free for longer (keep_for)"
            if self._engine.lease_folder is None
            else "let readers write to its folder"
        )
        return CommitMissingError(
            f"{self._label} was opened at commit {self.commit.id}, which its writer has given up since, as no lease "
            f"could be taken: open the store again, or {longer}"
        )

    def close(self) -> None:
        """Give the commit up; a second time does nothing."""
        self._holds.close()

    def _take(self) -> bool:
        """Take a lease, where the engine has a folder for it; False where it came too late.

        A commit that is not kept any more may lack blocks, though its record is there while others read it.
        """
        if self.commit is None or self._engine.lease_folder is None:
            return True
        lease = Lease.take(self._engine.lease_folder, self.commit.id)
        if lease is None:
            return True
        self._holds.callback(lease.release)
        return self.commit.id in kept_ids(self._engine.records(), self._label)

    def _is_there(self) -> bool:
        """Whether the newest records still have the commit."""
        if self.commit is None:
            return True
        try:
            return f"{COMMIT}{self.commit.id}" in self._engine.records()
        except StoreError:
            return True
