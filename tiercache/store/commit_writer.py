"""The one write path: segments, commits, and what is free after each of them."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.commit import (
    COMMIT,
    KEPT,
    SEGMENT,
    STATE_CHUNK_BYTES,
    TABLES,
    Commit,
    History,
    Liveness,
    Needed,
    Snapshot,
    state_chunks,
)
from tiercache.store.locks import leased_commits
from tiercache.store.records import encode
from tiercache.store.recovery import kept_commits
from tiercache.store.segment import base_pass
from tiercache.store.segment_writer import SegmentWriter, check_layouts
from tiercache.store.store_errors import CommitMissingError, StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store.commit import Cursor
    from tiercache.store.engines.engine import Counters, Engine
    from tiercache.store.layout import Checksums, SegmentLayout
    from tiercache.store.recovery import Recovery
    from tiercache.store.rewrite import Rewrite
    from tiercache.store.row_codec import MovedBlock, RowBlock
    from tiercache.store.segment import RetainedSegment, Segment
    from tiercache.store.table import Group


class CommitWriter:
    """The commits of a store that is open for writing, and what was appended since; ``Store`` says what it promises.

    One rule of freeing: a block is free when no commit that is kept, none that another process has a lease of, and no
    snapshot that somebody in this process holds needs it.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[Group],
        label: str,
        counters: Counters,
        found: Recovery,
        retention: int | None,
    ) -> None:
        """Stand at the newest commit of ``found``, free what nothing needs; ``retention`` None: as many as before."""
        self._engine, self._groups, self._label, self._counters = engine, groups, label, counters
        self._lock = threading.RLock()
        """Held from the begin of a step to its end."""
        self._snapshot_lock = threading.Lock()
        """Held for a moment, where ``snapshot`` and the pins change."""
        self.history = found.history
        self.snapshot = found.history.newest
        """The newest commit, and its segments with those appended since."""
        self._pins: Counter[Snapshot] = Counter()
        self._names = set(found.names)
        """Of all records that the engine has."""
        leased = self._leased()
        self._given_up = [s for s in found.others if s.commit is not None and s.commit.id in leased]
        """Commits that are not kept, and that were leased when that was looked at last."""
        self._allocated = Needed.of([*self.history.snapshots, *self._given_up])
        engine.retain(self._allocated.blocks(groups))
        self._next_id = 0 if self.snapshot.commit is None else self.snapshot.commit.next_segment
        self.retention = retention or (1 if self.snapshot.commit is None else self.snapshot.commit.retention)
        """How many of the newest commits are kept."""
        self.first_id = 0
        """The id of the first commit of a store without one."""
        self.named: frozenset[int] | None = None
        """The commits that are kept in place of those, beside the newest; None: those."""

    @property
    def digests(self) -> Mapping[str, str]:
        """The SHA-256 of each record of the commits that are kept, by name."""
        return self._engine.digests()

    @contextmanager
    def pinned(self, commit: int | None = None) -> Iterator[Snapshot]:
        """Keep what the newest snapshot, or that of a commit that is kept, needs until this ends; from any thread.

        Raises CommitMissingError.
        """
        with self._snapshot_lock:
            snapshot = self.snapshot if commit is None else find(self.history, commit, self._label)
            self._pins[snapshot] += 1
        try:
            yield snapshot
        finally:
            with self._snapshot_lock:
                self._pins[snapshot] -= 1
                self._pins = +self._pins  # of those that somebody holds

    # -- segments ----------------------------------------------------------------------------------------

    def append(
        self,
        pass_index: int,
        layouts: Sequence[SegmentLayout],
        blocks: Iterable[RowBlock] | Iterable[MovedBlock],
        checksums: Checksums,
        *,
        within: bool,
        stable: bool,
        moved: Sequence[bool] = (),
    ) -> Segment:
        """Write a segment that no commit names yet; see `SegmentWriter` for ``moved``."""
        check_layouts(layouts, self._groups)
        with self._lock:
            self._free()
            writer = SegmentWriter(
                self._next_id, pass_index, layouts, self._groups, blocks, checksums,
                within=within, stable=stable, moved=moved,
            )  # fmt: skip
            segment = writer.segment
            self._next_id += 1
            try:
                writer.write(self._engine)
            except StoreFullError as error:
                what = f"the dump of pass {pass_index} to" if pass_index >= 0 else "a new segment with the rows of"
                raise self._full_error(error, f"{what} {self._label}", writer.num_bytes) from error
            self._counters.add(transactions=1, **writer.written)
            self._allocate(Needed({segment.id: segment}, {segment.id: (0,) * len(layouts)}, {}))
            appended = Snapshot(self.snapshot.commit, (*self.snapshot.segments, segment))
            with self._snapshot_lock:
                self.snapshot = appended
        return segment

    def discard_uncommitted(self) -> None:
        """Drop the segments appended since the newest commit."""
        with self._lock:
            newest = self.history.newest
            with self._snapshot_lock:
                self.snapshot = newest
            self._free()

    # -- commits -----------------------------------------------------------------------------------------

    def publish(
        self,
        cursor: Cursor,
        *,
        state: bytes,
        schedule_digest: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, Any],
    ) -> Commit:
        """Make a commit of the rows live at ``cursor``."""
        with self._lock:
            self._check_cursor(cursor)
            before = self.snapshot.commit
            retained = () if before is None else before.retained
            liveness = Liveness.at(cursor, self.snapshot.segments, retained)
            ids = tuple(segment.id for segment in self.snapshot.segments if liveness.keeps(segment))
            named = {} if before is None else before.named
            id_ = self.first_id if before is None else before.id + 1
            chunks, checksums = state_chunks(np.frombuffer(state, dtype=np.uint8))
            commit = Commit(
                id=id_,
                cursor=cursor,
                schedule_digest=schedule_digest,
                settings=dict(settings),
                environment=dict(environment),
                segment_ids=ids,
                first_commits=tuple(named.get(segment_id, id_) for segment_id in ids),
                next_segment=self._next_id,
                retention=self.retention,
                abandoned=() if before is None else before.abandoned,
                state_bytes=len(state),
                state_chunk_bytes=STATE_CHUNK_BYTES,
                state_checksums=checksums,
                state_places=np.empty(0, np.int64),
                retained=retained,
            )
            return self._advance(self.history.snapshots, commit, self.snapshot.segments, chunks)

    def rollback(self, to: int, state: NDArray[np.uint8]) -> Commit:
        """Make a commit like ``to``, which is kept and has the dense ``state``; those between go, unless named."""
        with self._lock:
            self.discard_uncommitted()
            snapshot, newest = find(self.history, to, self._label), self.history.newest.commit
            assert snapshot.commit is not None, "it is kept"
            assert newest is not None, "it is kept"
            chunks, checksums = state_chunks(state)
            removed = [(to + 1, newest.id)] if to < newest.id else []
            commit = replace(
                snapshot.commit,
                id=newest.id + 1,
                next_segment=self._next_id,
                retention=self.retention,
                abandoned=(*snapshot.commit.abandoned, *removed),
                state_chunk_bytes=STATE_CHUNK_BYTES,
                state_checksums=checksums,
            )
            before = [s for s in self.history.snapshots if _id(s) <= to or _id(s) in (self.named or ())]
            return self._advance(before, commit, snapshot.segments, chunks)

    def rewrite(
        self, rewrite: Rewrite, checksums: Checksums, state: NDArray[np.uint8], schedule_digest: str, start: Cursor
    ) -> Commit:
        """Make a commit at ``start`` of a schedule, with one segment in place of all that are not retained."""
        with self._lock:
            before, layouts = self.history.newest.commit, rewrite.read()
            assert before is not None, "an empty store has nothing to put in another order"
            chunks, state_checksums = state_chunks(state)
            interrupts = not schedule_digest and start == before.cursor
            try:
                segment = self.append(
                    base_pass(start.pass_index),
                    layouts,
                    rewrite.blocks(layouts),
                    checksums,
                    within=start.sample > 0,
                    stable=False,
                    moved=rewrite.moved(),
                )
                new = [segment.id] if segment.rows or segment.within else []
                commit = self._retaining(
                    before, rewrite.retained, new, state_checksums,
                    cursor=start, schedule_digest=schedule_digest,
                    overlaid=before.overlaid or before.schedule_digest if interrupts else "",
                )  # fmt: skip
                commit = self._advance(self.history.snapshots, commit, self.snapshot.segments, chunks)
            except BaseException:
                if self.snapshot.commit is before:
                    self.discard_uncommitted()
                raise
            with suppress(StoreError):  # the commit stands; what stayed may go another time
                self._engine.shrink()
        return commit

    def overlay(
        self, retained: tuple[RetainedSegment, ...], state: NDArray[np.uint8], settings: Mapping[str, Any]
    ) -> Commit:
        """Make a commit at the same cursor, of the retained segments and of what was appended since the newest."""
        with self._lock:
            before = self.history.newest.commit
            assert before is not None, "an empty store has nothing to lay rows over"
            new = [segment.id for segment in self.snapshot.segments if segment.id not in before.named and segment.rows]
            chunks, checksums = state_chunks(state)
            commit = self._retaining(
                before, retained, new, checksums,
                settings={**settings, **before.settings},
                schedule_digest="", overlaid=before.overlaid or before.schedule_digest,
            )  # fmt: skip
            return self._advance(self.history.snapshots, commit, self.snapshot.segments, chunks)

    def keep(self, commits: Iterable[int]) -> None:
        """Have commits, rollbacks too, keep these and the newest, whatever the retention, until the store is closed.

        For what makes several stores one: its own record names these commits.
        """
        self.named = frozenset(commits)

    def release(self) -> None:
        """Drop the commits that are kept no more, and what was appended since the newest, in one atomic, durable step.

        Raises StoreError, after which the newest commit and those that are kept are there.
        """
        with self._lock:
            self.discard_uncommitted()
            *before, newest = self.history.snapshots or [self.history.newest]
            kept = [*self._kept(before), newest]
            if len(kept) < len(self.history.snapshots):
                self._commit(History(tuple(kept)))

    # -- inside ------------------------------------------------------------------------------------------

    def _retaining(
        self,
        before: Commit,
        retained: tuple[RetainedSegment, ...],
        new: Sequence[int],
        state_checksums: NDArray[np.uint32],
        **changes: Any,
    ) -> Commit:
        """Return the commit after ``before`` that has its retained segments and new ones."""
        ids, id_ = [one.segment_id for one in retained], before.id + 1
        return replace(
            before,
            id=id_,
            segment_ids=(*ids, *new),
            first_commits=(*(before.named[one] for one in ids), *([id_] * len(new))),
            next_segment=self._next_id,
            retention=self.retention,
            state_chunk_bytes=STATE_CHUNK_BYTES,
            state_checksums=state_checksums,
            retained=retained,
            **changes,
        )

    def _advance(
        self,
        before: Sequence[Snapshot],
        commit: Commit,
        segments: Sequence[Segment],
        state: Sequence[NDArray[np.uint8]],
    ) -> Commit:
        """Write a commit of some of ``segments``, and its state, after those ``before`` that are kept."""
        commit = replace(commit, state_places=np.full(len(state), -1))
        try:
            places = self._engine.write(zip(commit.state_blocks(), state, strict=True))
            commit = replace(commit, state_places=np.array(places, np.int64))
            try:
                named = [segment for segment in segments if segment.id in commit.segment_ids]
                self._commit(History((*self._kept(before), Snapshot(commit, named))))
            except BaseException:
                if self.snapshot.commit is not commit:
                    with suppress(StoreError):
                        self._engine.free(commit.state_blocks())
                raise
        except StoreFullError as error:
            needed = max(error.needed_bytes, commit.state_bytes)
            raise self._full_error(error, f"commit {commit.id} of {self._label}", needed) from error
        self._counters.add(commits=1, state_bytes_written=commit.state_bytes)
        return commit

    def _commit(self, after: History) -> None:
        """Set the records of ``after`` in place of those of the commits before, and free what that gives up."""
        kept = {_id(snapshot) for snapshot in after.snapshots}
        given_up = [*self._given_up, *(s for s in self.history.snapshots if _id(s) not in kept)]
        leased = self._leased() if given_up else set()
        needed_records = _records_of([*after.snapshots, *(s for s in given_up if _id(s) in leased)])
        records = {name: one.to_bytes() for name, one in needed_records.items() if name not in self._names}
        records[KEPT] = encode("kept", {"commits": sorted(kept)}, {})
        removed = self._names - needed_records.keys() - {TABLES, KEPT}
        done = False
        try:
            self._engine.commit({**records, **dict.fromkeys(removed)})
            done = True
        finally:
            # An error or an interrupt may come when all of it is durable, or when nothing is.
            if done or self._is_durable(records, removed):
                self._names = {TABLES, KEPT, *needed_records}
                self.history, self._given_up = after, given_up
                newest = after.newest
                if newest.commit is not None:
                    self._allocate(Needed({}, {}, {newest.commit.id: newest.commit}))
                with self._snapshot_lock:
                    self.snapshot = newest
                self._counters.add(transactions=1)
        self._keep_leased()
        self._free()

    def _keep_leased(self) -> None:
        """Set the records again of commits that were leased after the last look, before they were given up durably.

        Nobody leases them from now on. Where there is no room, they last as long as this writer.
        """
        leased = self._leased() if self._given_up else set()
        needed_records = _records_of([snapshot for snapshot in self._given_up if _id(snapshot) in leased])
        records = {name: one.to_bytes() for name, one in needed_records.items() if name not in self._names}
        if records:
            with suppress(StoreError):
                self._engine.commit(records)
            if self._is_durable(records, ()):
                self._names |= records.keys()

    def _is_durable(self, records: Mapping[str, bytes], removed: Collection[str]) -> bool:
        """Whether the engine has set ``records`` and removed those that are ``removed``, although it raised."""
        try:
            stored = self._engine.records()
        except StoreError:
            return False  # what is there cannot be known: opening the store again finds it out
        return all(stored.get(name) == data for name, data in records.items()) and stored.keys().isdisjoint(removed)

    def _allocate(self, more: Needed) -> None:
        """Note what the engine keeps from now on."""
        before = self._allocated
        self._allocated = Needed(
            {**before.segments, **more.segments},
            {**more.first_blocks, **before.first_blocks},
            {**before.states, **more.states},
        )

    def _leased(self) -> set[int]:
        """Return the commits that other processes read."""
        folder = self._engine.lease_folder
        return set() if folder is None else leased_commits(folder)

    def _free(self) -> None:
        """Free what nothing needs any more. A reader may have leased a commit until it was given up, durably."""
        leased = self._leased() if self._given_up else set()
        self._given_up = [snapshot for snapshot in self._given_up if _id(snapshot) in leased]
        with self._snapshot_lock:
            pinned = [*self._pins]
        needed = Needed.of([*self.history.snapshots, *self._given_up, *pinned, self.snapshot])
        blocks = list(self._allocated.blocks(self._groups, but=needed))
        if blocks:
            self._allocated = needed
            self._engine.free(blocks)
            self._counters.add(blocks_freed=len(blocks))

    def _full_error(self, error: StoreFullError, what: str, needed_bytes: int) -> StoreFullError:
        """Return the error of a whole step, which says what readers hold."""
        mine = Needed.of([*self.history.snapshots, self.snapshot])
        with self._snapshot_lock:
            pinned = [*self._pins]
        read = Needed.of([*self._given_up, *pinned]).num_bytes(self._groups, but=mine)
        if read:
            error.advice += f"; readers of older commits hold {read:,} bytes: close them"
        return error.during(what, needed_bytes)

    def _kept(self, before: Sequence[Snapshot]) -> Sequence[Snapshot]:
        """Return which snapshots, the oldest first, are kept beside the one that follows them."""
        if self.named is None:
            return before[max(0, len(before) + 1 - self.retention) :]
        return [snapshot for snapshot in before if _id(snapshot) in self.named]

    def _check_cursor(self, cursor: Cursor) -> None:
        before = None if self.snapshot.commit is None else self.snapshot.commit.cursor
        if min(cursor) < 0 or (before is not None and cursor < before):
            raise ValueError(f"{self._label} stands at {before} and cannot go back to {cursor}")
        newest = -1 if self.snapshot.commit is None else max(self.snapshot.commit.segment_ids, default=-1)
        retained = frozenset[int]() if self.snapshot.commit is None else self.snapshot.commit.retained_ids
        for segment in self.snapshot.segments:
            if segment.id not in retained and segment.pass_index > cursor.pass_index - (not segment.within):
                raise ValueError(f"a commit at {cursor} cannot name a dump of pass {segment.pass_index}")
        if cursor.sample and cursor != before and not any(
            s.within_pass == cursor.pass_index and s.id > newest for s in self.snapshot.segments
        ):  # fmt: skip
            raise ValueError(f"a commit at {cursor} needs the rows of its pass: append them with within=True first")


def find(history: History, commit: int, label: str) -> Snapshot:
    """Return a commit that is kept. Raises CommitMissingError."""
    for snapshot in history.snapshots:
        if _id(snapshot) == commit:
            return snapshot
    raise CommitMissingError(f"{label} has no commit {commit}: {kept_commits([_id(s) for s in history.snapshots])}")


def _records_of(snapshots: Iterable[Snapshot]) -> dict[str, Commit | Segment]:
    """Return what has the records of commits, by their names."""
    needed_records: dict[str, Commit | Segment] = {}
    for snapshot in snapshots:
        if snapshot.commit is not None:
            needed_records[f"{COMMIT}{_id(snapshot)}"] = snapshot.commit
        needed_records |= {f"{SEGMENT}{segment.id}": segment for segment in snapshot.committed}
    return needed_records


def _id(snapshot: Snapshot) -> int:
    return -1 if snapshot.commit is None else snapshot.commit.id
