"""The one write path: segments, commits, and freeing after each of them."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.commit import Commit, CommitRecord, Kept, RankList, State, before_commits, check_readable, head_of
from tiercache.store.commit_reader import CommitLoader, check_blobs, kept_commits
from tiercache.store.engines.engine import Blob, Counters, Engine, Head, Stored
from tiercache.store.locks import leased_commits
from tiercache.store.segment import Compute, Live, Segment, base_pass
from tiercache.store.segment_writer import SegmentWriter, check_layouts
from tiercache.store.snapshot import History, Needed, Snapshot
from tiercache.store.store_errors import CommitMissingError, CorruptStoreError, StoreError, StoreFullError
from tiercache.store.table import Table, tombstone_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store.commit import Cursor
    from tiercache.store.layout import SegmentLayout
    from tiercache.store.rewrite import Rewrite
    from tiercache.store.row_codec import MovedBlock, RowBlock
    from tiercache.store.sharding import ShardingPlan

    Put = tuple[Blob, NDArray[np.uint8]]
    """A blob, and its bytes."""


class CommitWriter:
    """The commits of a store that is open for writing, and segments appended since; see ``Store`` for its promises.

    One rule of freeing: bytes are free if no kept commit, no commit leased by another process and no snapshot held in
    this process needs them.
    """

    sharding: ShardingPlan | None = None
    """The sharding of its commits; None for one rank."""
    folders: tuple[str, ...] = ()
    before_commit: Callable[[], None] = staticmethod(lambda: None)
    """Called before the blobs of a commit are written."""

    def __init__(
        self, engine: Engine, loader: CommitLoader, tables: Sequence[Table], counters: Counters, retention: int | None
    ) -> None:
        """Open at the newest commit, free unneeded blobs; raises CorruptStoreError first if a needed one is missing."""
        self._engine, self._loader, self._tables, self._counters = engine, loader, tuple(tables), counters
        self._groups, self._label, self.rank = loader.groups, loader.label, loader.rank
        self._lock = threading.RLock()
        """Held for the length of a step."""
        self._snapshot_lock = threading.Lock()
        """Held briefly, while ``snapshot`` or the pins change."""
        self._holds: Counter[Snapshot] = Counter()
        self._head = engine.newest()
        self.is_known = True
        """False if a head may or may not be durable: nothing is written or dropped after that."""
        self.history = History(self._opened_at())
        """The commits that are kept."""
        kept = self.history.snapshots or (Snapshot(None, self._groups),)
        newest = self.snapshot = kept[-1]
        """The newest commit, and its segments with those appended since."""
        stored = engine.list()
        check_blobs(stored, [*self.history.snapshots, *self._holds], self._label)
        self._rewritten = Snapshot(None, self._groups)
        """The segments of a rewrite, until its commit names them in place of the old ones."""
        self._given_up = self._leased_before(stored)
        """Commits that are not kept, and that were leased at the last check."""
        self._next_id = 0 if newest.commit is None else newest.commit.own.next_segment
        self.retention = retention or (1 if newest.commit is None else newest.commit.retention)
        """The number of newest commits to keep."""
        self.first_id = 0
        """The id of the first commit of a store without one."""
        self.keeps_pins_only = False
        """True if the retention does not count: commits keep the newest and those that are pinned."""
        self._allocated = Needed.of([*self.history.snapshots, *self._given_up, *self._holds])
        needed = {need.name: need.first_byte for need in self._allocated.blobs()}
        if self._head is not None:
            needed.setdefault(self._head.name, 0)
        first_bytes = {name: needed.get(name) for name in stored}
        engine.drop((name, at) for name, at in first_bytes.items() if at is None or at > stored[name].dropped)

    def _opened_at(self) -> tuple[Snapshot, ...]:
        """Return the commits that are kept, the oldest first."""
        newest = self._loader.newest()
        return () if newest.commit is None else (*map(self._loader.kept, newest.commit.kept), newest)

    @property
    def given_up(self) -> list[Snapshot]:
        """Commits that are not kept, and that others read."""
        return [*self._given_up, *(one for one in self._holds if one not in self.history.snapshots)]

    @contextmanager
    def pinned(self, commit: int | None = None) -> Iterator[Snapshot]:
        """Keep the blobs of the newest snapshot, or of a kept commit, until this ends. Raises CommitMissingError."""
        with self._snapshot_lock:
            snapshot = self.snapshot if commit is None else self.find(commit)
            self._holds[snapshot] += 1
        try:
            yield snapshot
        finally:
            with self._snapshot_lock:
                self._holds[snapshot] -= 1
                self._holds = +self._holds  # of those that somebody holds

    def find(self, commit: int) -> Snapshot:
        """Return a commit that is kept. Raises CommitMissingError."""
        for snapshot in self.history.snapshots:
            if snapshot.id == commit:
                return snapshot
        ids = [snapshot.id for snapshot in self.history.snapshots]
        raise CommitMissingError(f"{self._label} has no commit {commit}: {kept_commits(ids)}")

    def append(
        self,
        pass_index: int,
        layouts: Sequence[SegmentLayout],
        blocks: Iterable[RowBlock] | Iterable[MovedBlock],
        compute: Compute,
        *,
        within: bool,
        stable: bool,
        moved: Sequence[bool] = (),
        rewritten: bool = False,
        tombstone: bool = False,
    ) -> Segment:
        """Write a segment that no commit names yet. ``rewritten``: it replaces others, in the current groups."""
        now = self.snapshot
        groups = now.next_groups if rewritten else tombstone_groups(now.groups) if tombstone else now.groups
        check_layouts(layouts, groups)
        with self._lock:
            self._free()
            segment = Segment(
                id_=self._next_id, name=self._name("segments", f"{self.rank}.{self._next_id}"), pass_index=pass_index,
                within=within, groups=groups, tombstone=tombstone,
            )  # fmt: skip
            writer = SegmentWriter(segment, layouts, blocks, compute, stable=stable, moved=moved)
            self._next_id += 1
            try:
                head = writer.write(self._engine)
            except StoreFullError as error:
                what = f"the dump of pass {pass_index} to" if pass_index >= 0 else "a new segment with the rows of"
                raise self._full_error(error, f"{what} {self._label}", writer.num_bytes) from error
            self._loader.read_in_place(segment, head)
            self._counters.add(**writer.written)
            commit, before = (None, self._rewritten) if rewritten else (self.snapshot.commit, self.snapshot)
            appended = Snapshot(commit, groups, (*before.appended, segment))
            self._allocated = Needed.of([appended], also=self._allocated)
            with self._snapshot_lock:
                if rewritten:
                    self._rewritten = appended
                else:
                    self.snapshot = appended
        return segment

    def discard_uncommitted(self) -> None:
        """Drop the segments appended since the newest commit."""
        with self._lock:
            with self._snapshot_lock:
                self.snapshot = Snapshot(self.snapshot.commit, self._groups)
            self._rewritten = Snapshot(None, self._groups)
            self._free()

    def publish(
        self, cursor: Cursor, *, state: bytes, schedule_digest: str, settings: Mapping[str, Any],
        environment: Mapping[str, Any],
    ) -> Commit:  # fmt: skip
        """Make a commit of the rows live at ``cursor``."""
        with self._lock:
            self.snapshot.check_cursor(cursor, self._label)
            before = self.snapshot.commit
            id_ = self.first_id if before is None else before.id + 1
            segments, live = self.snapshot.live_at(cursor)
            named = {} if before is None else before.named
            same: dict[str, Any] = {"tables": self._tables, "sharding": self.sharding, "since": id_}
            if before is not None:
                same = {name: getattr(before, name) for name in _SAME}
            commit = Commit(
                id=id_,
                cursor=cursor,
                schedule_digest=schedule_digest,
                settings=dict(settings),
                environment=dict(environment),
                groups=self.snapshot.groups,
                retention=self.retention,
                own=self._listed(segments, [named.get(segment.id, id_) for segment in segments], live, _NO_STATE),
                folders=self.folders,
                **same,
            )
            return self._advance(commit, state)

    def rollback(self, to: int) -> Commit:
        """Make a commit like ``to``, which is kept; later ones are dropped, unless something else keeps them."""
        with self._lock:
            self.discard_uncommitted()
            target, newest = self.find(to).commit, self.snapshot.commit
            assert target is not None, "it is kept"
            assert newest is not None, "it is kept"
            removed = [(to + 1, newest.id)] if to < newest.id else []
            commit = replace(
                target,
                id=newest.id + 1,
                own=replace(target.own, next_segment=self._next_id),
                ranks=(),
                origin=target.rows_digest,
                retention=self.retention,
                abandoned=(*target.abandoned, *removed),
                pins=newest.pins,
            )
            pinned = {*newest.pins.values()}
            before = [one for one in self.history.snapshots if one.id <= to or one.id in pinned]
            return self._advance(commit, kept=self._kept(before, commit))

    def rewrite(self, rewrite: Rewrite, compute: Compute, schedule_digest: str, start: Cursor) -> Commit:
        """Make a commit at ``start`` of a schedule, with new segments in place of all that are not retained."""
        with self._lock:
            before = self.snapshot.commit
            new: list[Segment] = []
            assert before is not None, "an empty store has nothing to put in another order"
            interrupts = not schedule_digest and start == before.cursor
            try:
                for one in rewrite.segments():
                    segment = self.append(
                        base_pass(start.pass_index), one.layouts, one.blocks, compute,
                        within=start.sample > 0, stable=False, moved=one.moved, rewritten=True,
                    )  # fmt: skip
                    new += [segment] if segment.rows or segment.within else []
                commit = self._retaining(
                    before, rewrite.retained, new,
                    cursor=start, schedule_digest=schedule_digest, stored=(), stored_sharding=(),
                    groups=self.snapshot.next_groups,
                    overlaid=before.overlaid or before.schedule_digest if interrupts else "",
                    forgot=before.id + 1 if before.stored or self.snapshot.has_tombstones else before.forgot,
                )  # fmt: skip
                return self._advance(commit, shrink=True)
            except BaseException:
                if self.snapshot.commit is before:
                    self.discard_uncommitted()
                raise
            finally:
                self._rewritten = Snapshot(None, self._groups)

    def overlay(self, retained: Mapping[int, NDArray[np.int64]], settings: Mapping[str, Any]) -> Commit:
        """Make a commit at the same cursor, of the retained segments and those appended since the newest."""
        with self._lock:
            before = self.snapshot.commit
            assert before is not None, "an empty store has nothing to lay rows over"
            commit = self._retaining(
                before, retained, [segment for segment in self.snapshot.appended if segment.rows],
                settings={**settings, **before.settings},
                schedule_digest="", overlaid=before.overlaid or before.schedule_digest, origin="",
            )  # fmt: skip
            return self._advance(commit)

    def pin(self, name: str, commit: int | None) -> Commit:
        """Make a commit like the newest that pins ``commit`` by name, or unpins the name if None."""
        with self._lock:
            before = self.snapshot.commit
            if before is None:
                raise ValueError(f"{self._label} has no commit yet: publish one first")
            pins = {**before.pins}
            if commit is not None:
                self.find(commit)
                pins[name] = commit
            elif pins.pop(name, None) is None:
                names = ", ".join(map(repr, pins)) or "none"
                raise ValueError(f"{self._label} has no pinned commit {name!r}: it has {names}")
            *older, newest = self.history.snapshots
            changed = self._like(before, pins=pins)
            kept = self._kept(older, changed) + ([newest] if before.id in pins.values() else [])
            return self._advance(changed, kept=kept, appended=self.snapshot.appended)

    def amend(self, **changes: Any) -> Commit:
        """Make a commit that lists the same rows as the newest, with other values."""
        with self._lock:
            assert self.snapshot.commit is not None, "an empty store has nothing to amend"
            commit = self._like(self.snapshot.commit, **changes)
            return self._advance(commit)

    def _name(self, folder: str, word: str) -> str:
        """Return a unique name for a blob of this writer: no other writer uses it."""
        return f"{folder}/{word}-{self._engine.epoch}" if self._engine.epoch else f"{folder}/{word}"

    def _listed(self, segments: Sequence[Segment], firsts: Sequence[int], live: Live, state: State) -> RankList:
        return RankList(
            rank=self.rank, next_segment=self._next_id, segments=tuple(segments), first_commits=tuple(firsts),
            live=live, state=state,
        )  # fmt: skip

    def _like(self, before: Commit, **changes: Any) -> Commit:
        """Return the commit after ``before`` that lists the same rows."""
        changes = {"origin": before.rows_digest, **changes}
        if self._next_id != before.own.next_segment:
            changes |= {"own": replace(before.own, next_segment=self._next_id), "ranks": ()}
        return replace(before, id=before.id + 1, retention=self.retention, **changes)

    def _retaining(
        self, before: Commit, retained: Mapping[int, NDArray[np.int64]], new: Sequence[Segment], **changes: Any
    ) -> Commit:
        """Return the commit after ``before`` that has its retained segments and new ones, and begins a schedule."""
        id_, changes = before.id + 1, {"origin": before.rows_digest, **changes}
        rows = {segment.id: row for row, segment in enumerate(before.own.segments)}
        kept, groups = [rows[one] for one in retained], changes.get("groups", before.groups)
        live = before.own.live.taken(kept) if kept else Live.zeros(0, groups)
        for row, stale_T in enumerate(retained.values()):
            live.stale_ST[row] = stale_T
        own = self._listed(
            [*(before.own.segments[row] for row in kept), *new],
            [*(before.own.first_commits[row] for row in kept), *([id_] * len(new))],
            live.joined(Live.of(new, groups)),
            before.own.state,
        )
        return replace(before, id=id_, since=id_, own=own, ranks=(), retention=self.retention, **changes)

    def _advance(
        self, commit: Commit, state: bytes | None = None, *, kept: Sequence[Snapshot] | None = None,
        appended: Sequence[Segment] = (), shrink: bool = False,
    ) -> Commit:  # fmt: skip
        """Publish a commit with ``state``, or the previous state. ``kept``: the older ones to keep; None: by retention.

        ``appended``: segments that wait for the next one.
        """
        kept = self._kept(self.history.snapshots, commit) if kept is None else kept
        self._check_known()
        commit, own, blobs = self._own_blobs(commit, state)
        commit, of_commit = self._recorded(replace(commit, ranks=(own,)), kept)
        after = (*kept, Snapshot(commit, self._groups, appended))
        self._put([*blobs, of_commit], commit, partial(self._publish, after))
        self._counters.add(commits=1)
        with suppress(StoreError):  # the commit is durable; the rest is freed later
            self._free(shrink=shrink)
        return commit

    def _own_blobs(self, commit: Commit, state: bytes | None) -> tuple[Commit, Head, list[Put]]:
        """Return a commit with its ``state``, or the previous state, its list, and the blobs still to be put."""
        blobs: list[Put] = []
        if state is not None:
            data = np.frombuffer(state, np.uint8)
            name = self._name("states", f"{self.rank}.{commit.id}")
            commit = replace(commit, own=replace(commit.own, state=State.of(name, data)))
            blobs.append((commit.own.state.blob, data))
        if commit.ranks:
            return commit, commit.ranks[self.rank], blobs
        rank_bytes = commit.own.to_bytes()
        check_readable(commit.id, partial(RankList.from_bytes, rank_bytes, commit.groups, Segment))
        own = head_of(self._name("ranks", f"{self.rank}.{commit.id}"), rank_bytes)
        return commit, own, [*blobs, (Blob(own.name, own.size), np.frombuffer(rank_bytes, np.uint8))]

    def _recorded(self, commit: Commit, kept: Sequence[Snapshot]) -> tuple[Commit, Put]:
        """Return a commit that keeps older ones, and its own blob."""
        parent = "" if self._head is None else self._head.digest
        commit = replace(commit, parent=parent, kept=tuple(Kept(one.id, head_of_commit(one)) for one in kept))
        commit_bytes = commit.to_bytes()
        check_readable(commit.id, partial(CommitRecord.from_bytes, commit_bytes))
        head = head_of(self._name("commits", str(commit.id)), commit_bytes)
        return replace(commit, head=head), (Blob(head.name, head.size), np.frombuffer(commit_bytes, np.uint8))

    def _put(self, blobs: Sequence[Put], commit: Commit, publish: Callable[[], None]) -> None:
        """Put blobs, then ``publish``; if that fails they are dropped, unless ``commit`` is the newest now."""
        self.before_commit()
        try:
            self._engine.put([blob for blob, _ in blobs], ((i, 0, data) for i, (_, data) in enumerate(blobs)))
            try:
                publish()
            except BaseException:
                if self.snapshot.commit is not commit and self.is_known:
                    with suppress(StoreError):
                        self._engine.drop((blob.name, None) for blob, _ in blobs)
                raise
        except StoreFullError as error:
            needed = max(error.needed_bytes, sum(blob.size for blob, _ in blobs))
            raise self._full_error(error, f"commit {commit.id} of {self._label}", needed) from error
        state_bytes = sum(blob.size for blob, _ in blobs if blob.name == commit.own.state.name)
        meta_bytes = sum(blob.size for blob, _ in blobs) - state_bytes
        self._counters.add(state_bytes_written=state_bytes, meta_bytes_written=meta_bytes)

    def _publish(self, after: Sequence[Snapshot]) -> None:
        """Make the newest commit of ``after`` the engine's head, and the newest here if that is durable."""
        head, before, done = head_of_commit(after[-1]), self._head, False
        try:
            self._engine.publish(head, before)
            done = True
        finally:
            # An error or an interrupt may leave all of it durable, or nothing.
            if done or self._is_durable(head, before):
                self._head = head
                self._stand_at(after, before)

    def _is_durable(self, head: Head, before: Head | None) -> bool:
        """Return True if the engine is at ``head`` although it raised, False if it is still at ``before``."""
        try:
            found = self._engine.newest()
        except StoreError:
            found = None
        self.is_known = found is not None and found in (head, before)
        return found == head and self.is_known

    def _check_known(self) -> None:
        """Raise StoreError if the engine's head is unknown: only opening the store again resolves that."""
        if not self.is_known:
            what = f"a commit of {self._label} failed and may or may not exist"
            raise StoreError(f"{what}: close the store and open it again")

    def _stand_at(self, after: Sequence[Snapshot], before: Head | None) -> None:
        """Make the last of ``after``, which is durable, the newest commit, and drop commits that are not among them."""
        kept, newest = {snapshot.id for snapshot in after}, after[-1]
        self._given_up += [one for one in self.history.snapshots if one.id not in kept]
        self._allocated = Needed.of([newest], also=self._allocated)
        if before is not None and before_commits(before):
            self._allocated.whole[before.name] = before.size  # the first commit says it now
        committed = Snapshot(newest.commit, self._groups) if newest.appended else newest
        self.history = History((*after[:-1], committed))
        with self._snapshot_lock:
            self.snapshot = newest

    def _leased_before(self, stored: Mapping[str, Stored]) -> list[Snapshot]:
        """Return commits that a previous writer dropped but other processes still read.

        One that cannot be read was half dropped: its reader retries and finds that it is not kept.
        """
        kept, found = {snapshot.id for snapshot in self.history.snapshots}, list[Snapshot]()
        for name in sorted({f"commits/{id_}" for id_ in self.leased_now() - kept} & stored.keys()):
            with suppress(CorruptStoreError):
                found.append(self._loader.given_up(Blob(name, stored[name].size)))
        return found

    def leased_now(self) -> set[int]:
        """Return the commits that other processes lease."""
        folder = self._engine.lease_folder
        return set() if folder is None else leased_commits(folder)

    def _free(self, *, shrink: bool = False) -> None:
        """Free unneeded blobs. A reader may have leased a commit until it was durably dropped."""
        self._check_known()
        leased = self.leased_now() if self._given_up else set()
        self._given_up = [snapshot for snapshot in self._given_up if snapshot.id in leased]
        needed = Needed.of(self._needing())
        drops = list(self._allocated.given_up(needed))
        if drops or shrink:
            self._allocated = needed
            self._engine.drop(drops, shrink=shrink)

    def _needing(self) -> list[Snapshot]:
        """Return the snapshots whose bytes are not free."""
        with self._snapshot_lock:
            snapshots = [*self._holds]
        return [*self.history.snapshots, *self._given_up, *snapshots, self.snapshot, self._rewritten]

    def _full_error(self, error: StoreFullError, what: str, needed_bytes: int) -> StoreFullError:
        """Return the error of a whole step, including the bytes that readers hold."""
        with self._snapshot_lock:
            snapshots = [*self._holds]
        own = Needed.of([*self.history.snapshots, self.snapshot, self._rewritten])
        if read := Needed.of([*self._given_up, *snapshots]).num_bytes(but=own):
            error.advice += f"; readers of older commits hold {read:,} bytes: close them"
        return error.during(what, needed_bytes)

    def _kept(self, before: Sequence[Snapshot], commit: Commit) -> list[Snapshot]:
        """Return the older snapshots to keep with the commit that follows them, the oldest first."""
        newest = () if self.keeps_pins_only else before[max(0, len(before) + 1 - self.retention) :]
        ids = {*(one.id for one in newest), *commit.pins.values()}
        return [snapshot for snapshot in before if snapshot.id in ids]


_SAME = ("tables", "stored", "stored_sharding", "sharding", "forgot", "since", "abandoned", "pins")
"""Fields that the next commit inherits."""
_NO_STATE = State.of("", np.empty(0, np.uint8))
"""A placeholder, replaced before the commit is written."""


def head_of_commit(snapshot: Snapshot) -> Head:
    """Return the head that names the commit of a snapshot."""
    assert snapshot.commit is not None, "it is kept"
    assert snapshot.commit.head is not None, "it is written"
    return snapshot.commit.head
