"""Where a store stands: its commits, what was appended since, and the steps from one commit to the next."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiercache.store.blocks import segment_names
from tiercache.store.commit import STATE_CHUNK_BYTES, Commit, state_chunks
from tiercache.store.dump import Dump, check_streams, new_segment
from tiercache.store.errors import CommitMissingError, StoreError, StoreFullError
from tiercache.store.life import Life
from tiercache.store.manifest import COMMIT, Manifest
from tiercache.store.recovery import Recovery, kept_commits, recover
from tiercache.store.segment import base_pass
from tiercache.store.standing import Standing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from tiercache.store.blocks import Checksums
    from tiercache.store.commit import Cursor
    from tiercache.store.counters import Counters
    from tiercache.store.dump import Block, MovedBlock
    from tiercache.store.engine import Engine
    from tiercache.store.opening import Opened
    from tiercache.store.rewrite import Rewrite
    from tiercache.store.segment import Segment
    from tiercache.store.store import Store
    from tiercache.store.stream import Stream
    from tiercache.store.table import Group

TRANSACTION_BYTES = 64 << 20


class History:
    """The commits that an engine keeps, and the segments appended since; ``Store`` says what its methods promise."""

    @classmethod
    def of(
        cls,
        opened: Opened,
        groups: Sequence[Group],
        label: str,
        counters: Counters,
        mode: str,
        at: int | None,
        retention: int,
    ) -> Self:
        """Take up the commits, or only commit ``at``, and, in mode "a", delete what they do not name."""
        if opened.of is not None and at is not None:
            found = opened.of.only(at)
        else:
            found = recover(opened.contents, groups, label, at=at)
        if mode == "a" and (found.stale_records or found.orphans):
            opened.engine.commit(dict.fromkeys(found.stale_records), found.orphans)
            counters.add(transactions=1, blocks_freed=len(found.orphans))
        return cls(opened.engine, groups, label, counters, found, retention, opened.of)

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[Group],
        label: str,
        counters: Counters,
        found: Recovery,
        retention: int,
        of: History | None,
    ) -> None:
        """Stand at the newest commit of ``found``; ``retention`` 0 means as many commits as before.

        ``of`` is the history of the same engine that may give that commit up.
        """
        self._of = of
        self._engine, self._groups, self._label, self._counters = engine, groups, label, counters
        self._lock = threading.RLock()
        self._stepping = threading.RLock()
        """Held from before an engine frees what a commit does not need until that commit is the newest."""
        self.standing: Standing
        """The newest commit, and its segments with those appended since."""
        self._orphans: set[bytes] = set()
        self._settle(found.manifest)
        self._next_id = 0 if self.commit is None else self.commit.next_segment
        self.retention = retention or (1 if self.commit is None else self.commit.retention)
        """How many of the newest commits are kept."""
        self.named: frozenset[int] | None = None
        """The commits that are kept in place of those, beside the newest; None: those."""

    @property
    def commit(self) -> Commit | None:
        """The newest."""
        return self.standing.commit

    @property
    def commits(self) -> tuple[Commit, ...]:
        """All that are kept, the oldest first."""
        return self._manifest.commits

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Those of the newest commit and those appended since, by id."""
        return self.standing.segments

    def append(
        self,
        pass_index: int,
        streams: Sequence[Stream],
        blocks: Iterable[Block] | Iterable[MovedBlock],
        checksums: Checksums,
        *,
        within: bool,
        stable: bool,
        transaction_bytes: int,
        moved: Sequence[bool] = (),
    ) -> Segment:
        """Write a segment that no commit names yet; see ``new_segment`` for ``moved``."""
        check_streams(streams, self._groups)
        with self._lock:
            segment = new_segment(self._next_id, pass_index, streams, within=within, moved=moved)
            dump = Dump(segment, self._groups, blocks, transaction_bytes, checksums, stable=stable)
            self._next_id += 1
            try:
                dump.write(self._engine)
            except BaseException as error:
                self._orphans |= dump.names()
                if isinstance(error, StoreFullError):
                    what = f"the dump of pass {pass_index} to" if pass_index >= 0 else "a new segment with the rows of"
                    raise error.during(f"{what} {self._label}", dump.bytes_left) from error
                raise
            finally:
                self._counters.add(transactions=dump.transactions)
            self._counters.add(
                rows_written=dump.rows,
                row_bytes_written=dump.row_bytes,
                key_bytes_written=8 * dump.rows,
                changed_bytes_written=dump.changed_bytes,
            )
            self.standing = Standing(self.commit, (*self.segments, segment))
        return segment

    def publish(
        self,
        cursor: Cursor,
        *,
        state: bytes,
        schedule_digest: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, Any],
        transaction_bytes: int,
    ) -> Commit:
        """Make a commit of the rows live at ``cursor``."""
        with self._lock:
            self._check_cursor(cursor)
            before = self.commit
            settled = () if before is None else before.settled
            life = Life.at(cursor, self.segments, settled)
            ids = tuple(segment.id for segment in self.segments if life.keeps(segment))
            named = {} if before is None else before.named
            id_ = 0 if before is None else before.id + 1
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
                settled=settled,
            )
            self._advance(self.commits, commit, chunks, transaction_bytes)
        return commit

    def rollback(self, to: Commit, state: NDArray[np.uint8]) -> Commit:
        """Make a commit like ``to``, which is kept and has the dense ``state``; those between go, unless named."""
        with self._lock:
            newest = self.commits[-1]
            self.forget()
            chunks, checksums = state_chunks(state)
            commit = replace(
                to,
                id=newest.id + 1,
                next_segment=self._next_id,
                retention=self.retention,
                abandoned=(*to.abandoned, *([(to.id + 1, newest.id)] if to.id < newest.id else [])),
                state_chunk_bytes=STATE_CHUNK_BYTES,
                state_checksums=checksums,
            )
            before = [c for c in self.commits if c.id <= to.id or c.id in (self.named or ())]
            self._advance(before, commit, chunks, TRANSACTION_BYTES)
        return commit

    def rewrite(
        self, rewrite: Rewrite, checksums: Checksums, state: NDArray[np.uint8], schedule_digest: str, start: Cursor
    ) -> Commit:
        """Make a commit at ``start`` of a schedule, with one segment in place of all that do not settle."""
        with self._lock:
            before, streams = self.commits[-1], rewrite.read()
            ids = [one.segment_id for one in rewrite.settled]
            chunks, state_checksums = state_chunks(state)
            try:
                segment = self.append(
                    base_pass(start.pass_index),
                    streams,
                    rewrite.blocks(streams),
                    checksums,
                    within=start.sample > 0,
                    stable=False,
                    transaction_bytes=TRANSACTION_BYTES,
                    moved=rewrite.moved(),
                )
                new = [segment.id] if segment.rows or segment.within else []
                commit = replace(
                    before,
                    id=before.id + 1,
                    cursor=start,
                    schedule_digest=schedule_digest,
                    segment_ids=(*ids, *new),
                    first_commits=(*(before.named[id_] for id_ in ids), *([before.id + 1] * len(new))),
                    next_segment=self._next_id,
                    retention=self.retention,
                    state_chunk_bytes=STATE_CHUNK_BYTES,
                    state_checksums=state_checksums,
                    settled=rewrite.settled,
                )
                self._advance(self.commits, commit, chunks, TRANSACTION_BYTES)
            except BaseException:
                if self.commits[-1] is before:
                    self.forget()
                raise
            with suppress(StoreError):  # the commit stands; what stayed may go another time
                self._engine.commit({}, (), shrink=True)
                self._counters.add(transactions=1)
        return commit

    def find(self, id_: int) -> Commit:
        """Return a commit that is kept. Raises CommitMissingError."""
        for commit in self.commits:
            if commit.id == id_:
                return commit
        raise CommitMissingError(
            f"{self._label} has no commit {id_}: {kept_commits([commit.id for commit in self.commits])}"
        )

    def only(self, id_: int) -> Recovery:
        """Return what there is of a commit that is kept. Raises CommitMissingError."""
        with self._stepping:
            manifest = Manifest.of([self.find(id_)], self._manifest.segments)
        return Recovery(manifest=manifest, stale_records=(), orphans=())

    def stands_at(self, standing: Standing) -> bool:
        """Return whether ``standing`` is where the store stands, and every block of it is there; waits for a step.

        Raises CommitMissingError where its commit is that of another history, which does not keep it any more.
        """
        if self._of is not None and standing.commit is not None and not self._of.keeps(standing.commit):
            raise CommitMissingError(
                f"{self._label} does not keep commit {standing.commit.id} any more: read a newer one"
            )
        with self._stepping:
            return self.standing is standing

    def held(self) -> AbstractContextManager[object]:
        """Hold off what frees blocks, commits first of all, from other threads."""
        return (self if self._of is None else self._of)._stepping

    def keeps(self, commit: Commit) -> bool:
        """Return whether ``commit`` is kept, and every block of it is there; waits for a step."""
        with self._stepping:
            return any(kept.id == commit.id for kept in self.commits)

    def forget(self) -> None:
        """Drop the segments appended since the newest commit."""
        with self._lock:
            named = set() if self.commit is None else set(self.commit.segment_ids)
            for segment in self.segments:
                if segment.id not in named:
                    for group, stream in enumerate(segment.streams):
                        self._orphans.update(segment_names(segment, group, 0, stream.num_blocks))
            with self._stepping:
                self.standing = Standing(self.commit, tuple(s for s in self.segments if s.id in named))
                if self._orphans:
                    try:
                        self._engine.commit({}, self._orphans)
                    except StoreError:
                        return  # nothing names them: the next commit or the next opening deletes them
                    self._counters.add(transactions=1, blocks_freed=len(self._orphans))
                    self._orphans = set()

    def _advance(
        self, before: Sequence[Commit], commit: Commit, state: Sequence[NDArray[np.uint8]], transaction_bytes: int
    ) -> None:
        """Write the blocks of a commit's state, then the commit itself, after those ``before`` that are kept."""
        segments = {**self._manifest.segments, **{segment.id: segment for segment in self.segments}}
        after = Manifest.of(self._kept([*before, commit]), segments)
        records = self._manifest.records_before(after)
        parts = list(zip(commit.state_blocks(), state, strict=True))
        # A commit that failed had blocks of the same names.
        orphans = self._orphans - commit.state_blocks().keys()
        dead = [*orphans, *self._manifest.dead_before(after, self.segments)]
        step = max(1, transaction_bytes // STATE_CHUNK_BYTES)
        with self._stepping:
            try:
                for i in range(0, len(parts), step):
                    self._engine.write((name, chunk, None) for name, chunk in parts[i : i + step])
                    self._counters.add(transactions=1)
                self._engine.commit(records, dead)
            except BaseException as error:
                if self._stands(commit):
                    self._settle(after)  # interrupted when all was done
                    raise
                self._orphans.update(commit.state_blocks())
                if isinstance(error, StoreFullError):
                    needed = max(error.needed_bytes, commit.state_bytes)
                    raise error.during(f"commit {commit.id} of {self._label}", needed) from error
                raise
            self._counters.add(
                transactions=1, commits=1, blocks_freed=len(dead), state_bytes_written=commit.state_bytes
            )
            self._settle(after)

    def release(self) -> None:
        """Drop the commits that are kept no more, and what was appended since the newest; see ``release`` below."""
        with self._lock:
            self.forget()
            after = Manifest.of(self._kept(self.commits), self._manifest.segments)
            if len(after.commits) < len(self.commits):
                dead = list(self._manifest.dead_before(after, ()))
                with self._stepping:
                    self._engine.commit(self._manifest.records_before(after), dead)
                    self._counters.add(transactions=1, blocks_freed=len(dead))
                    self._settle(after)

    def _kept(self, commits: Sequence[Commit]) -> Sequence[Commit]:
        """Return which of ``commits``, the oldest first, are kept now."""
        if self.named is None:
            return commits[-self.retention :]
        return [*(commit for commit in commits[:-1] if commit.id in self.named), *commits[-1:]]

    def _settle(self, manifest: Manifest) -> None:
        """Stand at the newest commit of ``manifest``."""
        self._manifest, self._orphans = manifest, set()
        newest = manifest.newest
        self.standing = Standing(newest, () if newest is None else manifest.named(newest))

    def _stands(self, commit: Commit) -> bool:
        """Whether the engine has the record of a commit, although it raised."""
        try:
            return self._engine.contents().records.get(f"{COMMIT}{commit.id}") == commit.to_bytes()
        except StoreError:
            return False  # what is there cannot be known: opening the store again finds it out

    def _check_cursor(self, cursor: Cursor) -> None:
        before = None if self.commit is None else self.commit.cursor
        if min(cursor) < 0 or (before is not None and cursor < before):
            raise ValueError(f"{self._label} stands at {before} and cannot go back to {cursor}")
        newest = -1 if self.commit is None else max(self.commit.segment_ids, default=-1)
        settled = frozenset[int]() if self.commit is None else self.commit.settled_ids
        for segment in self.segments:
            if segment.id not in settled and segment.pass_index > cursor.pass_index - (not segment.within):
                raise ValueError(f"a commit at {cursor} cannot name a dump of pass {segment.pass_index}")
        if cursor.sample and cursor != before and not any(
            s.within_pass == cursor.pass_index and s.id > newest for s in self.segments
        ):  # fmt: skip
            raise ValueError(f"a commit at {cursor} needs the rows of its pass: append them with within=True first")


def keep(store: Store, commits: Iterable[int]) -> None:
    """Have commits of ``store``, rollbacks too, keep these and the newest, whatever its retention, until it is closed.

    For what makes several stores one: its own record names these commits.
    """
    store._history.named = frozenset(commits)


def release(store: Store) -> None:
    """Drop the commits of ``store`` that ``keep`` does not name, but the newest, in one atomic, durable step.

    Raises StoreError, after which the newest commit and those that are named are there.
    """
    store._history.release()


def manifest_of(store: Store) -> Manifest:
    """Return the commits that ``store`` keeps, and what they need."""
    return store._history._manifest
