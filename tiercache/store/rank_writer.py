"""The writers of the ranks of a store, and the commits that they make together.

Why a kill of one rank or of all loses nothing. Let c be the newest commit.

1. Each rank *prepares* the next commit t: it puts its dense state and its list of segments. A rank above 0 publishes
   the list in its own engine, so all that it names is durable. Nothing of c was touched: what was put uses free space.
2. When all ranks have prepared t, rank 0 publishes ``commits/t``, which names their lists. Now t exists. A kill before
   leaves c; each rank drops what no commit names when it is opened again, and none is ever rolled back.
3. Only then are the ranks told of t, and each frees what no kept, leased or pinned commit needs of it. A kill before
   leaves blobs that the next opening drops.
4. Ranks that begin anew, for another number of ranks or another sharding, keep what c lists until t exists.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.commit import Commit, CommitRecord, before_commits, head_of
from tiercache.store.commit_reader import read_whole
from tiercache.store.commit_writer import CommitWriter
from tiercache.store.engines.engine import Blob, ReadRequest
from tiercache.store.locks import leased_commits
from tiercache.store.snapshot import Snapshot
from tiercache.store.store_errors import BlockReadError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from tiercache.store.commit_reader import CommitLoader
    from tiercache.store.engines.engine import Counters, Engine, Head, MemoryEngine, Stored
    from tiercache.store.opening import RankPlace
    from tiercache.store.segment import Segment
    from tiercache.store.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The part of one rank in a commit that is not published yet."""

    commit: Commit
    """With the rank's list, and without those of the other ranks."""
    kept: tuple[Snapshot, ...]
    head: Head
    """Its list."""
    before: Head | None
    """The head of the rank's engine until then."""
    blobs: tuple[Blob, ...]
    """Those that were put for it."""
    written: tuple[Segment, ...]
    """The segments that were appended before."""
    waiting: tuple[Segment, ...]
    """Those of them that wait for the commit after it."""
    shrink: bool


class RankWriter(CommitWriter):
    """The writer of one rank: what makes a commit prepares it, and it is published when all ranks have done so."""

    def __init__(
        self, engine: Engine, loader: CommitLoader, tables: Sequence[Table], counters: Counters, retention: int | None,
        place: RankPlace,
    ) -> None:  # fmt: skip
        """``tables``: whole ones. Raises CorruptStoreError, and changes nothing then."""
        self._place = place
        self.prepared: Prepared | None = None
        """The commit that waits for the other ranks."""
        self.leased: Collection[int] = place.leased
        """The commits that other processes read, as rank 0 saw it, where this process cannot look itself."""
        self._replaced = list[Snapshot]()
        """Commits with other ranks or another sharding, until the first one of these is there."""
        self._abandoned: tuple[tuple[int, int], ...] = ()
        """The commits that rollbacks gave up before its first one: nobody asks what changed since one of them."""
        super().__init__(engine, loader, tables, counters, retention)
        if place.sharding.num_ranks > 1:
            self.sharding, self.folders = place.sharding, place.folders
        if place.anew and (before := loader.newest_record()) is not None:
            self.first_id, self._abandoned = before.id + 1, before.abandoned
            self.retention = retention or before.retention
        for one in self._replaced:
            assert one.commit is not None, "it is kept"
            self._next_id = one.commit.own.next_segment

    def _opened_at(self) -> tuple[Snapshot, ...]:
        head = self._engine.newest()
        is_new = head is None or before_commits(head)  # the engine of this rank has nothing yet
        kept = () if is_new and self._place.anew else super()._opened_at()
        if kept and self.rank:
            self._publish_list(_list_of(kept[-1]), head)
        if not self._place.anew:
            return kept
        self._replaced += kept
        self._holds.update(kept)
        return ()

    # -- preparing ---------------------------------------------------------------------------------------

    def _advance(
        self, commit: Commit, state: bytes | None = None, *, kept: Sequence[Snapshot] | None = None,
        appended: Sequence[Segment] = (), shrink: bool = False,
    ) -> Commit:  # fmt: skip
        """Prepare a commit; it has no blob of its own yet."""
        self._publisher.check_known()
        if self.prepared is not None:
            raise StoreError(
                f"commit {self.prepared.commit.id} of {self._label} waits for the other ranks: publish it before "
                "another one"
            )
        kept = self._kept(self.history.snapshots, commit) if kept is None else kept
        before, written = self._publisher.head, self.snapshot.appended
        # A commit that is rolled back to names the folders that ranks had then, and they may be elsewhere now.
        commit = replace(commit, folders=self.folders)
        if self.snapshot.commit is None:
            commit = replace(commit, abandoned=self._abandoned)
        commit, own, blobs = self._own_blobs(commit, state)
        if blobs:
            # what rank 0 has put is durable with the commit
            self._put(blobs, commit, partial(self._publish_list, own, before) if self.rank else lambda: None)
        self.prepared = Prepared(
            commit=commit, kept=tuple(kept), head=own, before=before, blobs=tuple(blob for blob, _ in blobs),
            written=written, waiting=tuple(appended), shrink=shrink,
        )  # fmt: skip
        return commit

    def _publish_list(self, head: Head, before: Head | None) -> None:
        """Have the engine of a rank above 0 stand at a list, which is durable then with all that was put."""
        try:
            if head != before:
                self._engine.publish(head, before)
        finally:
            with suppress(StoreError):
                self._publisher.look()

    def abandon(self) -> None:
        """Drop a commit that was prepared, and the segments that were appended for it; without one, nothing."""
        with self._lock:
            self._publisher.check_known()
            prepared, self.prepared = self.prepared, None
            if prepared is None:
                return
            if self.rank and prepared.before is not None:
                self._publish_list(prepared.before, self._publisher.head)
            self._engine.drop((blob.name, None) for blob in prepared.blobs)
            self.discard_uncommitted()

    def discard_uncommitted(self) -> None:
        """Drop the segments appended since the newest commit, and since the one that is prepared."""
        with self._lock:
            kept = () if self.prepared is None else self.prepared.written
            with self._snapshot_lock:
                self.snapshot = Snapshot(self.snapshot.commit, self._groups, kept)
            self._rewritten = Snapshot(None, self._groups)
            self._free()

    # -- committing --------------------------------------------------------------------------------------

    def publish_prepared(self, heads: Sequence[Head], forgot: int) -> None:
        """As rank 0, publish the commit that all ranks have prepared.

        ``heads`` has the list of each, and ``forgot`` is the newest commit with which one of them left out rows.
        """
        with self._lock:
            prepared = self.prepared
            assert prepared is not None, "this rank has prepared it"
            commit, blob = self._recorded(replace(prepared.commit, ranks=tuple(heads), forgot=forgot), prepared.kept)
            after = (*prepared.kept, Snapshot(commit, self._groups, prepared.waiting))
            try:
                self._put([blob], commit, partial(self._publish, after))
            finally:
                if self.snapshot.commit is commit:
                    self.prepared = None
            self._finish(prepared)

    @property
    def is_known(self) -> bool:
        """Whether this rank knows its newest commit: after a publish that failed nobody may."""
        return self._publisher.is_known

    def newest_blobs(self) -> list[tuple[Head, bytes]]:
        """Return, as rank 0, the blobs of the newest commit, those that it keeps, and those given up and still read."""
        snapshots = [*self._given_up, *(self._replaced or self.history.snapshots)]
        heads = [one.commit.head for one in snapshots if one.commit is not None and one.commit.head is not None]
        return [(head, read_whole(self._engine, head, head.name).tobytes()) for head in heads]

    def take(self, head: Head, record: CommitRecord) -> None:
        """Take the commit that rank 0 has published as the newest; ``leased`` says who reads which commit."""
        with self._lock:
            prepared = self.prepared
            if prepared is None or record.ranks[self.rank] != prepared.head:
                raise StoreError(f"{self._label} has not prepared commit {record.id}: close it and open it again")
            commit = Commit(**vars(record), own=prepared.commit.own, groups=prepared.commit.groups, head=head)
            kept = {one.id for one in record.kept}
            after = [one for one in prepared.kept if one.commit is not None and one.commit.id in kept]
            self._stand_at([*after, Snapshot(commit, self._groups, prepared.waiting)], prepared.before)
            self.prepared = None
            self._finish(prepared)

    def _finish(self, prepared: Prepared) -> None:
        """Free what the commit does not need that was prepared, and is the newest now."""
        self._counters.add(commits=1)
        with self._snapshot_lock:
            self._holds.subtract(self._replaced)
            self._holds = +self._holds
        self._given_up += self._replaced
        self._replaced.clear()
        with suppress(StoreError):  # the commit stands; what stayed may go later
            self._free(shrink=prepared.shrink)

    def _needing(self) -> list[Snapshot]:
        prepared = [] if self.prepared is None else [Snapshot(self.prepared.commit, self._groups)]
        return [*super()._needing(), *prepared]

    def leased_now(self) -> set[int]:
        """Return the commits that other processes read."""
        folder = self._loader.commits.lease_folder
        return {*self.leased} if folder is None else leased_commits(folder)

    def _leased_before(self, stored: Mapping[str, Stored]) -> list[Snapshot]:
        return super()._leased_before(self._loader.commits.list() if self.rank else stored)


def commit_together(writers: Sequence[RankWriter], steps: Iterable[Callable[[], object]]) -> None:
    """Make a commit of what one step of each rank prepares. After an error the store stands where it stood."""
    zero, *others = writers
    before = zero.snapshot.commit

    def tell_others() -> None:
        head, data = zero.newest_blobs()[-1]
        for one in others:
            one.take(head, CommitRecord.from_bytes(data, head.name))

    try:
        for step in steps:
            step()
        prepared = [one.prepared for one in writers if one.prepared is not None]
        zero.publish_prepared([one.head for one in prepared], max(one.commit.forgot for one in prepared))
    except BaseException:
        if zero.is_known and zero.snapshot.commit is before:
            for one in writers:
                with suppress(StoreError):
                    one.abandon()
        elif zero.is_known:
            tell_others()
        raise
    tell_others()


def commit_blobs(
    engine: Engine, newest: Head, record: CommitRecord | None
) -> tuple[list[tuple[Head, bytes]], set[int]]:
    """Return the blobs that other ranks need to open their parts, ``newest`` last, and which commits are read.

    Those are the newest commit, those that it keeps, and those that it gave up and that others read.
    """
    leased = set() if engine.lease_folder is None else leased_commits(engine.lease_folder)
    kept = () if record is None else record.kept
    heads = [*(one.head for one in kept), newest]
    found = [(head, read_whole(engine, head, head.name).tobytes()) for head in heads]
    known, stored = {head.name for head, _ in found}, engine.list() if leased else {}
    for name in sorted({f"commits/{id_}" for id_ in leased} & stored.keys() - known):
        data = np.empty(stored[name].size, np.uint8)
        with suppress(StoreError, BlockReadError):
            engine.read(ReadRequest(Blob(name, data.size), 0, data))
            found.insert(0, (head_of(name, data.tobytes()), data.tobytes()))
    return found, leased


def add_commits(copy: MemoryEngine, blobs: Sequence[tuple[Head, bytes]], kept: Sequence[Head] = ()) -> None:
    """Add the blobs of commits to a copy, which stands at the last of them, and drop all others but ``kept``.

    A second time, after an interrupt, does nothing more.
    """
    names = {head.name for head in kept} - {head.name for head, _ in blobs}
    copy.drop((name, None) for name in copy.list() if name not in names)
    copy.put(
        [Blob(head.name, head.size) for head, _ in blobs],
        ((i, 0, np.frombuffer(data, np.uint8)) for i, (_, data) in enumerate(blobs)),
    )
    copy.publish(blobs[-1][0], copy.newest())


def _list_of(snapshot: Snapshot) -> Head:
    commit = snapshot.commit
    assert commit is not None, "it is a commit"
    return commit.ranks[commit.own.rank]
