"""Recovery: the history that the records of a store describe, checked before anything changes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.commit import COMMIT, KEPT, SEGMENT, TABLES, Commit, History
from tiercache.store.records import decode, whole
from tiercache.store.segment import Segment, corrupt_block
from tiercache.store.segment_writer import check_layouts
from tiercache.store.store_errors import CommitMissingError, CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tiercache.store.commit import Snapshot
    from tiercache.store.engines.engine import Engine
    from tiercache.store.table import Group


_RECORD = re.compile(f"{TABLES}|{KEPT}|({COMMIT}|{SEGMENT})(0|[1-9][0-9]{{0,18}})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The commits that there are."""

    history: History
    """Those that are kept."""
    others: tuple[Snapshot, ...]
    """Those that are there only as other processes read them, or did."""
    names: frozenset[str]
    """Of all records."""


def recover(records: Mapping[str, bytes], groups: Sequence[Group], store: str, *, at: int | None = None) -> Recovery:
    """Read all commits, or only commit ``at``, with their segments.

    Raises CommitMissingError and CorruptStoreError, which call the store ``store``.
    """
    if unknown := [name for name in records if _RECORD.fullmatch(name) is None]:
        raise CorruptStoreError(f"{store} has a record named {unknown[0]!r}: restore it from a copy")
    ids = commit_ids(records)
    if at is not None:
        kept = sorted(kept_ids(records, store))
        if at not in kept:
            raise CommitMissingError(f"{store} has no commit {at}: {kept_commits(kept)}")
        ids = [at]
    commits = [_read_commit(records, store, id_) for id_ in ids]
    segments: dict[int, Segment] = {}
    for commit in commits:
        for id_ in commit.segment_ids:
            if id_ not in segments:
                segments[id_] = _read_segment(records, groups, store, commit, id_)
    try:
        for commit in commits:
            for retained in commit.retained:
                retained.check(segments[retained.segment_id], groups)
            for id_, first in commit.named.items():
                newest = max((int(one.newest_B.max(initial=0)) for one in segments[id_].changed), default=0)
                if newest > first:
                    raise ValueError(f"commit {newest} changed rows of segment {id_}, which commit {first} named")
        of_history = kept_ids(records, store) if at is None else {at}
        return Recovery(
            history=History.of([commit for commit in commits if commit.id in of_history], segments),
            others=History.of([commit for commit in commits if commit.id not in of_history], segments).snapshots,
            names=frozenset(records),
        )
    except ValueError as error:
        raise CorruptStoreError(f"a commit of {store} makes no sense ({error}): restore it from a copy") from error


def check_blocks(engine: Engine, snapshot: Snapshot, groups: Sequence[Group], store: str) -> None:
    """Check that the blocks that a commit needs are there, in their full length; reads none.

    Raises CorruptStoreError and CorruptBlockError, which call the store ``store``.
    """
    commit = snapshot.commit
    if commit is None:
        return
    for block in commit.state_blocks():
        if wrong := engine.problem(block):
            raise CorruptStoreError(
                f"the dense state of commit {commit.id} of {store} {wrong}: restore the store from a copy"
            )
    for segment in snapshot.committed:
        for group in groups:
            last = segment.layouts[group.index].num_blocks
            for block in segment.blocks(group, snapshot.first_blocks[segment.id][group.index], last):
                if wrong := engine.problem(block):
                    raise corrupt_block(store, segment, group, block.index, wrong)


def commit_ids(records: Iterable[str]) -> list[int]:
    """Return the ids of the commits that ``records`` has, rising."""
    ids = (name.removeprefix(COMMIT) for name in records if name.startswith(COMMIT))
    return sorted(int(id_) for id_ in ids if re.fullmatch(r"0|[1-9][0-9]{0,18}", id_))


def kept_commits(ids: Sequence[int]) -> str:
    """Return which commits there are, in words that end a message."""
    return f"give one of {', '.join(map(str, ids))}" if ids else "it has none yet"


def kept_ids(records: Mapping[str, bytes], store: str) -> set[int]:
    """Return the commits that are kept: the newest is, and none that is there only as somebody reads it.

    Raises CorruptStoreError.
    """
    ids = commit_ids(records)
    if not ids:
        return set()
    name = f"the record of the commits that {store} keeps"
    if KEPT not in records:
        raise CorruptStoreError(f"{name} is missing: restore the store from a copy")
    values, _ = decode("kept", records[KEPT], name)
    try:
        return {ids[-1], *(whole(id_, "a commit") for id_ in values["commits"])} & {*ids}
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"{name} cannot be read ({error}): restore the store from a copy") from error


def _read_commit(records: Mapping[str, bytes], store: str, id_: int) -> Commit:
    name = f"the record of commit {id_} of {store}"
    commit = Commit.from_bytes(records[f"{COMMIT}{id_}"], name)
    if commit.id != id_:
        raise CorruptStoreError(f"{name} is that of commit {commit.id}: restore the store from a copy")
    return commit


def _read_segment(
    records: Mapping[str, bytes], groups: Sequence[Group], store: str, commit: Commit, id_: int
) -> Segment:
    name = f"the record of segment {id_} of {store}"
    if f"{SEGMENT}{id_}" not in records:
        raise CorruptStoreError(f"{name} is missing and commit {commit.id} names it: restore the store from a copy")
    segment = Segment.from_bytes(records[f"{SEGMENT}{id_}"], name)
    try:
        if segment.id != id_:
            raise ValueError(f"it is of segment {segment.id}")
        check_layouts(segment.layouts, groups)
    except ValueError as error:
        raise CorruptStoreError(f"{name} does not fit the store ({error}): restore the store from a copy") from error
    return segment


_ADVICE = "restore the store from a copy"


def record_problems(commits: Iterable[Commit], segments: Iterable[Segment], label: str) -> Iterator[tuple[str, int]]:
    """Yield what is wrong in the records of the store ``label``, and a commit that it is in; reads nothing.

    All commits name the same first commit of a segment, and none is before that. What a pass dumped waits for a later
    one, or, of a commit inside the pass, for that: other rows would be dead before anything reads them.
    """
    firsts: dict[int, int] = {}
    by_id = {segment.id: segment for segment in segments}
    for commit in commits:
        for id_, first in commit.named.items():
            known = firsts.setdefault(id_, first)
            if not known == first <= commit.id:
                said = f"commit {commit.id} of {label} says that commit {first} was the first with segment {id_}"
                other = f"commit {known} was" if known != first else "that is newer"
                yield f"{said}, and {other}: {_ADVICE}", commit.id
            if (use := _over_at_once(by_id[id_])) is not None:
                said = (
                    f"segment {id_} of {label} was dumped by pass {by_id[id_].pass_index} and has rows that wait for "
                    f"{use}"
                )
                yield f"{said}: {_ADVICE}", commit.id


def _over_at_once(segment: Segment) -> int | None:
    """Return a next use that was over when the rows were dumped; None where there is none, and for a base."""
    soonest = segment.pass_index + (not segment.within)
    if segment.pass_index < 0:
        return None
    uses = (layout.next_use_R[np.diff(layout.first_row_R) > 0] for layout in segment.layouts)
    first = [int(counts[0]) for counts in uses if counts.size]
    return next((use for use in first if use < soonest), None)
