"""The process that ``verify`` starts: reads the whole store, and writes JSON lines to standard output."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store import key_invariants
from tiercache.store.bits import hash_keys
from tiercache.store.commit_reader import check_blobs
from tiercache.store.files import huge_pages
from tiercache.store.opening import newest_record, store_path
from tiercache.store.reading import Pages, read_ahead
from tiercache.store.scan import runs_of
from tiercache.store.store import Store
from tiercache.store.store_errors import ADVICE, CommitMissingError, CorruptStoreError, StoreError
from tiercache.store.table import Table, row_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiercache.store.layout import SegmentLayout
    from tiercache.store.segment import Segment
    from tiercache.store.snapshot import Snapshot

ROW_CHECK_THREADS = 4
"""Threads that read blocks of rows: one reads the disk while another checks."""
_MOST_PROBLEMS = 100
_ARRAY_STEP = 1 << 20


class Verification:
    """One pass over all kept commits of a store of one rank, or of one rank of several, reading each block once.

    Threads for rows and threads for keys run at the same time. Memory: about ``VERIFY_BYTES`` for any number of keys:
    hashes that exceed it wait in a temporary file.
    """

    def __init__(self, store: Store, stores: Sequence[Store] | None = None) -> None:
        """``stores``: the store at each commit that it keeps."""
        self.store = store
        self.problems: dict[str, dict[int, None]] = {}
        """Messages, with the commits that each problem affects."""
        self.counts = {"segments": 0, "blocks": 0, "pages": 0, "stored_rows": 0, "bytes": 0}
        self._stores, self.bytes_before = _at_commits(store) if stores is None else stores, 0
        self._commits = [one.commit.id for one in self._stores if one.commit is not None]
        self._local = threading.local()
        self._blocks: dict[tuple[int, int, int], tuple[Segment, list[int]]] = {}
        """By segment, group and block: the segment and the commits that need the block."""
        for one in self._stores:
            self._add_blocks(one)
        needed = ((segment.layouts[group], block) for (_, group, block), (segment, _) in self._blocks.items())
        self.total = sum(layout.bytes_of_block(block) for layout, block in needed)
        """Bytes of all blocks; with ``bytes_before`` for progress over several ranks."""

    def run(self, *, deep: bool = True) -> dict[str, Any]:
        """Check everything and return the report; not ``deep``: only descriptions of rows and dense state."""
        begun = time.perf_counter()
        snapshots = [one.snapshot for one in self._stores]
        self._check_descriptions(snapshots)
        if deep:
            self._check_contents(snapshots)
        for sentence, id_ in _contradictions(snapshots, self.store.label):
            self._report([sentence], [id_])
        return {
            **self.counts,
            "rows": sum(self.store.live_rows(table.name) for table in self.store.tables),
            "commit": self._commits[-1] if self._commits else None,
            "commits": self._commits,
            "deep": deep,
            "seconds": time.perf_counter() - begun,
            "problems": problem_sentences(self.problems, self._commits),
        }

    def _check_descriptions(self, snapshots: Sequence[Snapshot]) -> None:
        """Check that all blobs exist in full, and read the description of each segment."""
        stored = self.store.reader.stored()
        for snapshot in snapshots:
            self._report(_problem(partial(check_blobs, stored, [snapshot], self.store.label)), [snapshot.id])
        found: dict[str, tuple[Segment, list[int]]] = {}
        for snapshot in snapshots:
            for segment in snapshot.segments:
                found.setdefault(segment.name, (segment, []))[1].append(snapshot.id)
        self.counts["segments"] = len(found)
        for segment, commits in found.values():
            self._report(_problem(partial(_read_arrays, segment)), commits)

    def _check_contents(self, snapshots: Sequence[Snapshot]) -> None:
        with ThreadPoolExecutor(1) as key_thread, ThreadPoolExecutor(key_invariants.KEY_CHECK_THREADS) as readers:
            alike: dict[object, list[Snapshot]] = {}
            for snapshot in snapshots:  # commits before and after an alteration may have other groups
                alike.setdefault(row_layout(snapshot.groups), []).append(snapshot)
            keys = [
                key_thread.submit(key_invariants.KeyInvariantChecker(self.store.reader, of_kind, group, readers).run)
                for of_kind in alike.values()
                for group in of_kind[-1].groups
            ]
            self._check_rows()
            for found in keys:
                for sentence, commits in found.result().items():
                    self._report([sentence], commits)
        for one in self._stores:
            if one.commit is not None:
                self._report(_problem(one.state), [one.commit.id])

    def _add_blocks(self, store: Store) -> None:
        if store.commit is None:
            return
        for segment in store.segments:
            for group, layout in enumerate(segment.layouts):
                for block in range(store.snapshot.first_block(segment, group), layout.num_blocks):
                    _, commits = self._blocks.setdefault((segment.id, group, block), (segment, []))
                    commits.append(store.commit.id)

    def _check_rows(self) -> None:
        blocks = [(segment, group, block) for (_, group, block), (segment, _) in self._blocks.items()]
        with ThreadPoolExecutor(ROW_CHECK_THREADS) as readers:
            ahead = read_ahead(readers, self._read, blocks, most=2 * ROW_CHECK_THREADS)
            for (segment, group, block), problems in ahead:
                self._report(problems, self._blocks[segment.id, group, block][1])
                self._count(segment.layouts[group], block)

    def _read(self, segment: Segment, group: int, block: int) -> list[str]:
        """Read a block into this thread's page-aligned memory, bypassing the page cache."""
        layout = segment.layouts[group]
        size = layout.bytes_of_block(block)
        if getattr(self._local, "size", 0) < size:
            self._local.size, self._local.data = size, huge_pages(size)
        low, high = layout.pages_of_block(block)
        pages = Pages(segment, group, low, high, self._local.data[:size])
        return _problem(partial(self.store.reader.load, [pages], 1))

    def _count(self, layout: SegmentLayout, block: int) -> None:
        size = layout.bytes_of_block(block)
        first, last = layout.pages_of_block(block)
        self.counts["blocks"] += 1
        self.counts["pages"] += last - first
        self.counts["stored_rows"] += size // layout.row_bytes
        self.counts["bytes"] += size
        _say(kind="progress", done=self.bytes_before + self.counts["bytes"], total=self.total)

    def _report(self, sentences: Sequence[str], commits: Sequence[int]) -> None:
        for sentence in sentences:
            self.problems.setdefault(sentence, {}).update(dict.fromkeys(commits))


def problem_sentences(problems: dict[str, dict[int, None]], kept: Sequence[int]) -> list[str]:
    """Return the problems as messages; if several commits are kept, each names the affected ones."""
    if len(kept) < 2:
        return list(problems)[:_MOST_PROBLEMS]
    words = []
    for sentence, commits in problems.items():
        *most, last = map(str, sorted(commits))
        words.append((f"in commits {', '.join(most)} and {last}, " if most else f"in commit {last}, ") + sentence)
    return words[:_MOST_PROBLEMS]


def verify_store(store: Store, *, deep: bool = True) -> tuple[dict[str, Any], dict[str, dict[int, None]]]:
    """Verify an open store; return the report, and the problems with the commits that they affect."""
    stores = _at_commits(store)
    if not store.ranks:
        verification = Verification(store, stores)
        return verification.run(deep=deep), verification.problems
    parts = [Verification(rank, [one.ranks[i] for one in stores]) for i, rank in enumerate(store.ranks)]
    total, before, problems, reports = sum(one.total for one in parts), 0, dict[str, dict[int, None]](), []
    for rank, one in enumerate(parts):
        size, one.total, one.bytes_before = one.total, total, before
        reports.append(one.run(deep=deep))
        before += size
        problems |= {f"rank {rank}: {sentence}": commits for sentence, commits in one.problems.items()}
    if not problems:
        for at in stores:
            assert at.commit is not None, "it has several ranks"
            for sentence in _strays(at):
                problems.setdefault(sentence, {})[at.commit.id] = None
    report = {name: reports[0][name] for name in ("commit", "commits", "deep")} | {"ranks": len(parts)}
    report |= {name: sum(one[name] for one in reports) for name in (*parts[0].counts, "seconds")}
    report["rows"] = sum(store.live_rows(table.name) for table in store.tables)
    return report | {"shards": reports, "problems": problem_sentences(problems, reports[0]["commits"])}, problems


def _at_commits(store: Store) -> list[Store]:
    """Return a store at each kept commit, each with a lease."""
    if len(store.commits) < 2:
        return [store]
    stores = []
    for commit in store.commits:
        with suppress(CommitMissingError):  # a writer has dropped it
            stores.append(store.at(commit.id))
    return stores


def _strays(store: Store) -> Iterator[str]:
    """Yield a message for each table and rank with rows of other ranks, or with rows that differ between slices."""
    sharding = None if store.commit is None else store.commit.sharding
    assert sharding is not None, "it has several ranks"
    for table in store.tables:
        slices = sharding.tables[table.name].slices
        rows = [rank.live_rows(table.name) for rank in store.ranks]
        for i, rank in enumerate(store.ranks):
            if not _within(rank, table, *(sharding.owned_hashes(table.name, i) or (0, 0))):
                yield (
                    f"rank {i} of {store.label} has rows of table {table.name!r} that the sharding gives to other "
                    f"ranks: {ADVICE}"
                )
        if len({rows[one.rank] for one in slices}) > 1:
            counts = ", ".join(f"{rows[one.rank]:,}" for one in slices)
            yield f"the slices of table {table.name!r} of {store.label} have {counts} rows: {ADVICE}"


def _within(rank: Store, table: Table, low: int, high: int) -> bool:
    """Return True if all rows of a table have hashes in [low, high); reads the first and the last key of each run."""
    snapshot = rank.snapshot
    stored = snapshot.find(table.name, rank.label)
    if (group := stored.group) is None:
        return True
    for run in runs_of(rank.reader, snapshot, snapshot.committed, group, stored.table):
        for row in (run.low, run.high - 1):
            key = rank.reader.keys_between(run.segment, group.index, row, row + 1)
            if not low <= int(hash_keys(key, table.table_id)[0]) < high:
                return False
    return True


def _together(path: str, *, deep: bool) -> dict[str, Any]:
    """Return the report of a store, again if its ranks changed, which deletes the folders of the old ones."""
    while True:
        with Store.open(path, mode="r") as store:
            try:
                report, _ = verify_store(store, deep=deep)
            except StoreError:
                if not _was_divided(store):
                    raise
                continue
            if not report["problems"] or not _was_divided(store):
                return report


def _was_divided(store: Store) -> bool:
    with suppress(StoreError):
        newest = store._opened.loader(store.counters).newest_record()
        return store.commit is not None and newest is not None and newest.folders != store.commit.folders
    return False


def _each_alone(path: str, error: CorruptStoreError, *, deep: bool) -> dict[str, Any]:
    """Return the report of a store whose commits do not open together: each is opened separately."""
    try:
        record = newest_record(store_path(path))
        assert record is not None, "a store without a commit has no older one that is damaged"
    except CorruptStoreError:
        return {"problems": [str(error)]}
    kept = [*(one.id for one in record.kept), record.id]
    problems: dict[str, dict[int, None]] = {}
    for id_ in kept:
        found: dict[str, dict[int, None]] = {}
        try:
            with Store.open(path, mode="r", commit=id_) as store:
                _, found = verify_store(store, deep=deep)
        except CommitMissingError:
            continue  # a writer committed meanwhile
        except CorruptStoreError as wrong:
            found = {str(wrong): {}}
        for sentence in found:
            problems.setdefault(sentence, {})[id_] = None
    return {"commits": kept, "problems": problem_sentences(problems, kept) or [str(error)]}


def _contradictions(snapshots: Sequence[Snapshot], label: str) -> Iterator[tuple[str, int]]:
    """Yield the commits' claims that contradict their segments' descriptions, each with a commit.

    All commits name the same first commit of a segment, and none is before that. Rows that a pass dumped wait for a
    later pass or, if dumped inside a pass, for that one: others would be dead before anything reads them.
    """
    firsts: dict[int, int] = {}
    for snapshot in snapshots:
        if snapshot.commit is None:
            continue
        id_ = snapshot.commit.id
        for segment, first in zip(snapshot.committed, snapshot.commit.own.first_commits, strict=True):
            what, named = f"segment {segment.id} of {label}", firsts.setdefault(segment.id, first)
            if not named == first <= id_:
                other = f"commit {named} was" if named != first else "that is newer"
                yield f"commit {id_} says that commit {first} was the first with {what}, but {other}: {ADVICE}", id_
            newest = max((int(one.newest_B[:].max(initial=0)) for one in segment.changed), default=0)
            if newest > first:
                yield f"commit {newest} changed rows of {what}, which commit {first} named first: {ADVICE}", id_
            if (use := _over_at_once(segment)) is not None:
                passed = f"was dumped by pass {segment.pass_index} and has rows that wait for {use}"
                yield f"{what} {passed}: {ADVICE}", id_


def _over_at_once(segment: Segment) -> int | None:
    """Return a next use that was over when the rows were dumped; None if all are valid, and for a base."""
    soonest = segment.pass_index + (not segment.within)
    if segment.pass_index < 0:
        return None
    uses = (layout.next_use_R[np.diff(layout.first_row_R) > 0] for layout in segment.layouts)
    first = [int(counts[0]) for counts in uses if counts.size]
    return next((use for use in first if use < soonest), None)


def _problem(call: Callable[[], object]) -> list[str]:
    """Return the corruption that ``call`` reports, as a message, if any."""
    try:
        call()
    except CorruptStoreError as error:
        return [str(error)]
    return []


def _read_arrays(segment: Segment) -> None:
    """Read a segment's whole description, each chunk checked."""
    for array in chain.from_iterable((*one.arrays().values(), *(one.changed or ())) for one in segment.meta):
        for low in range(0, array.size, _ARRAY_STEP):
            array[low : low + _ARRAY_STEP]


def _say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(path: str, deep: bool) -> None:
    """Verify the store at ``path``."""
    try:
        try:
            report = _together(path, deep=deep)
        except CorruptStoreError as error:
            report = _each_alone(path, error, deep=deep)
        _say(kind="report", report=report)
    except StoreError as error:
        _say(kind="error", type=type(error).__name__, text=str(error))
    except BrokenPipeError:  # the process that asked has ended
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] != ["--no-deep"])
