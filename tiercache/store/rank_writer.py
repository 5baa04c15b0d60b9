"""The writers of a store's ranks, and the commits that they make together.

Why a kill of one rank or of all loses nothing. Let c be the newest commit.

1. Each rank *prepares* the next commit t: it puts its dense state and its list of segments. A rank above 0 publishes
   the list in its engine, so all blobs in it are durable. Nothing of c was touched: new blobs use free space.
2. When all ranks have prepared t, rank 0 publishes ``commits/t``, which names their lists. Now t exists. A kill before
   leaves c; each rank drops blobs that no commit names when it is opened again, and none is ever rolled back.
3. Only then do the ranks learn of t, and each frees blobs that no kept, leased or pinned commit needs. A kill before
   leaves blobs that the next opening drops.
4. Ranks that start over, with another number of ranks or another sharding, keep the blobs of c until t exists.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tiercache.store.commit import Commit, CommitRecord, before_commits
from tiercache.store.commit_reader import CommitLoader, read_blob
from tiercache.store.commit_writer import CommitWriter, head_of_commit
from tiercache.store.locks import leased_commits
from tiercache.store.snapshot import Snapshot
from tiercache.store.store_errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from tiercache.store.engines.engine import Blob, Counters, Engine, Head, Stored
    from tiercache.store.opening import RankPlace
    from tiercache.store.segment import Segment
    from tiercache.store.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """One rank's part of a commit that is not published yet."""

    commit: Commit
    """It has this rank's list, but not the other ranks'."""
    kept: tuple[Snapshot, ...]
    head: Head
    """The head of its list."""
    before: Head | None
    """The head of the rank's engine until then."""
    blobs: tuple[Blob, ...]
    """The blobs put for it."""
    written: tuple[Segment, ...]
    """The segments appended before it."""
    waiting: tuple[Segment, ...]
    """The segments of ``written`` that wait for the next commit."""
    shrink: bool


class RankWriter(CommitWriter):
    """The writer of one rank: each step prepares a commit, published when all ranks have prepared theirs."""

    def __init__(
        self, engine: Engine, loader: CommitLoader, tables: Sequence[Table], counters: Counters, retention: int | None,
        place: RankPlace,
    ) -> None:  # fmt: skip
        """``tables``: whole ones. Raises CorruptStoreError, and changes nothing then."""
        self._place = place
        self.prepared: Prepared | None = None
        """The commit that waits for the other ranks."""
        self.leased: Collection[int] = place.leased
        """The commits leased by other processes, as seen by rank 0, if this process cannot check."""
        self._replaced = list[Snapshot]()
        """Commits with other ranks or another sharding, until the first one of these ranks exists."""
        self._abandoned: tuple[tuple[int, int], ...] = ()
        """Commits dropped by rollbacks before the first one of these ranks: no changes since them are requested."""
        self._origin = ""
        """The ``origin`` of the first commit of these ranks, which has the rows of the commit before."""
        super().__init__(engine, loader, tables, counters, retention)
        if place.sharding.num_ranks > 1:
            self.sharding, self.folders = place.sharding, place.folders
        if place.anew and (before := loader.newest_record()) is not None:
            newest = loader.commits.newest()
            self._origin = before.origin or ("" if newest is None else newest.digest)
            self.first_id, self._abandoned = before.id + 1, before.abandoned
            self.retention = retention or before.retention
        for one in self._replaced:
            assert one.commit is not None, "it is kept"
            self._next_id = one.commit.own.next_segment

    def _opened_at(self) -> tuple[Snapshot, ...]:
        head = self._engine.newest()
        is_new = head is None or before_commits(head)  # this rank's engine is empty
        kept = () if is_new and self._place.anew else super()._opened_at()
        if kept and self.rank:
            assert kept[-1].commit is not None, "it is a commit"
            self._publish_list(kept[-1].commit.ranks[self.rank], head)
        if not self._place.anew:
            return kept
        self._replaced += kept
        self._holds.update(kept)
        return ()

    def _advance(
        self, commit: Commit, state: bytes | None = None, *, kept: Sequence[Snapshot] | None = None,
        appended: Sequence[Segment] = (), shrink: bool = False,
    ) -> Commit:  # fmt: skip
        """Prepare a commit; its blob is not written yet."""
        self._check_known()
        if self.prepared is not None:
            raise StoreError(
                f"commit {self.prepared.commit.id} of {self._label} waits for the other ranks: publish it before "
                "another one"
            )
        kept = self._kept(self.history.snapshots, commit) if kept is None else kept
        before, written = self._head, self.snapshot.appended
        # A rolled-back-to commit names the ranks' old folders, which may have moved since.
        commit = replace(commit, folders=self.folders)
        if self.snapshot.commit is None:
            commit = replace(commit, abandoned=self._abandoned, origin=self._origin)
        commit, own, blobs = self._own_blobs(commit, state)
        if blobs:
            # rank 0's blobs become durable with the commit
            self._put(blobs, commit, partial(self._publish_list, own, before) if self.rank else lambda: None)
        self.prepared = Prepared(
            commit=commit, kept=tuple(kept), head=own, before=before, blobs=tuple(blob for blob, _ in blobs),
            written=written, waiting=tuple(appended), shrink=shrink,
        )  # fmt: skip
        return commit

    def _publish_list(self, head: Head, before: Head | None) -> None:
        """Make a list the head of a rank's engine (above 0); it and all blobs before it are durable on return."""
        try:
            if head != before:
                self._engine.publish(head, before)
        finally:
            with suppress(StoreError):
                self._head = self._engine.newest()

    def abandon(self) -> None:
        """Drop a prepared commit and the segments appended for it, if any."""
        with self._lock:
            self._check_known()
            prepared, self.prepared = self.prepared, None
            if prepared is None:
                return
            if self.rank and prepared.before is not None:
                self._publish_list(prepared.before, self._head)
            self._engine.drop((blob.name, None) for blob in prepared.blobs)
            self.discard_uncommitted()

    def discard_uncommitted(self) -> None:
        """Drop the segments appended since the newest commit and since the prepared one."""
        with self._lock:
            kept = () if self.prepared is None else self.prepared.written
            with self._snapshot_lock:
                self.snapshot = Snapshot(self.snapshot.commit, self._groups, kept)
            self._rewritten = Snapshot(None, self._groups)
            self._free()

    def publish_prepared(self, heads: Sequence[Head], forgot: int) -> None:
        """On rank 0, publish the prepared commit, with the list of each rank and the newest ``forgot`` of them."""
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

    def newest_blob(self) -> tuple[Head, bytes]:
        """Return, on rank 0, the blob of the newest commit."""
        head = head_of_commit([*self._replaced, *self.history.snapshots][-1])
        return head, read_blob(self._engine, head, head.name)

    def take(self, head: Head, record: CommitRecord) -> None:
        """Make the commit that rank 0 has published the newest; ``leased`` are the commits in use."""
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
        """Free blobs that the prepared commit, now the newest, does not need."""
        self._counters.add(commits=1)
        with self._snapshot_lock:
            self._holds.subtract(self._replaced)
            self._holds = +self._holds
        self._given_up += self._replaced
        self._replaced.clear()
        with suppress(StoreError):  # the commit is durable; the rest is freed later
            self._free(shrink=prepared.shrink)

    def _needing(self) -> list[Snapshot]:
        prepared = [] if self.prepared is None else [Snapshot(self.prepared.commit, self._groups)]
        return [*super()._needing(), *prepared]

    def leased_now(self) -> set[int]:
        """Return the commits that other processes lease."""
        folder = self._loader.commits.lease_folder
        return {*self.leased} if folder is None else leased_commits(folder)

    def _leased_before(self, stored: Mapping[str, Stored]) -> list[Snapshot]:
        return super()._leased_before(self._loader.commits.list() if self.rank else stored)


def commit_together(writers: Sequence[RankWriter], steps: Iterable[Callable[[], object]]) -> None:
    """Make a commit from one prepared step per rank. After an error the store is unchanged."""
    zero, *others = writers
    before = zero.snapshot.commit

    def tell_others() -> None:
        head, data = zero.newest_blob()
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
