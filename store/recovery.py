"""What a store finds when it is opened: decided from what the engine holds, before anything is changed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.store.blocks import CHANGED, KEYS, ROWS, block_name, corrupt_block
from tiercache.store.changed import CHANGED_BYTES
from tiercache.store.commit import Commit
from tiercache.store.dump import check_streams
from tiercache.store.errors import CommitMissingError, CorruptStoreError
from tiercache.store.manifest import COMMIT, SEGMENT, TABLES, Manifest
from tiercache.store.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiercache.store.engine import Contents
    from tiercache.store.table import Group

_RECORD = re.compile(f"{TABLES}|({COMMIT}|{SEGMENT})(0|[1-9][0-9]{{0,18}})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The commits, and what is there without being named by one."""

    manifest: Manifest
    stale_records: tuple[str, ...]
    orphans: tuple[bytes, ...]


def recover(contents: Contents, groups: Sequence[Group], store: str, *, at: int | None = None) -> Recovery:
    """Read all commits, or only commit ``at``, and check that every block they name is there, in its full length.

    Raises CommitMissingError, CorruptStoreError and CorruptBlockError, which call the store ``store``.
    """
    if unknown := [name for name in contents.records if _RECORD.fullmatch(name) is None]:
        raise CorruptStoreError(f"{store} has a record named {unknown[0]!r}: restore it from a copy")
    ids = commit_ids(contents.records)
    if at is not None:
        if at not in ids:
            raise CommitMissingError(f"{store} has no commit {at}: {kept_commits(ids)}")
        ids = [at]
    commits = [_read_commit(contents, store, id_) for id_ in ids]
    segments: dict[int, Segment] = {}
    for commit in commits:
        for id_ in commit.segment_ids:
            if id_ not in segments:
                segments[id_] = _read_segment(contents, groups, store, commit, id_)
        for name, size in commit.state_blocks().items():
            if wrong := _wrong(contents, name, size):
                raise CorruptStoreError(
                    f"the dense state of commit {commit.id} of {store} {wrong}: restore the store from a copy"
                )
    try:
        for commit in commits:
            for settled in commit.settled:
                settled.check(segments[settled.segment_id], groups)
            for id_, first in commit.named.items():
                newest = max((int(one.newest_B.max(initial=0)) for one in segments[id_].changed), default=0)
                if newest > first:
                    raise ValueError(f"commit {newest} changed rows of segment {id_}, which commit {first} named")
        manifest = Manifest.of(commits, segments)
    except ValueError as error:
        raise CorruptStoreError(f"a commit of {store} makes no sense ({error}): restore it from a copy") from error
    for segment in manifest.segments.values():
        for group in groups:
            _check_blocks(contents, manifest, segment, group, store)
    named = set(manifest.blocks())
    records = {TABLES, *(f"{COMMIT}{id_}" for id_ in ids), *(f"{SEGMENT}{id_}" for id_ in manifest.segments)}
    return Recovery(
        manifest=manifest,
        stale_records=tuple(name for name in contents.records if name not in records),
        orphans=tuple(name for name in contents.blocks if name not in named),
    )


def commit_ids(records: Iterable[str]) -> list[int]:
    """Return the ids of the commits that ``records`` has, rising."""
    ids = (name.removeprefix(COMMIT) for name in records if name.startswith(COMMIT))
    return sorted(int(id_) for id_ in ids if re.fullmatch(r"0|[1-9][0-9]{0,18}", id_))


def kept_commits(ids: Sequence[int]) -> str:
    """Return which commits there are, in words that end a message."""
    return f"give one of {', '.join(map(str, ids))}" if ids else "it has none yet"


def _read_commit(contents: Contents, store: str, id_: int) -> Commit:
    name = f"the record of commit {id_} of {store}"
    commit = Commit.from_bytes(contents.records[f"{COMMIT}{id_}"], name)
    if commit.id != id_:
        raise CorruptStoreError(f"{name} is that of commit {commit.id}: restore the store from a copy")
    return commit


def _read_segment(contents: Contents, groups: Sequence[Group], store: str, commit: Commit, id_: int) -> Segment:
    name = f"the record of segment {id_} of {store}"
    if f"{SEGMENT}{id_}" not in contents.records:
        raise CorruptStoreError(f"{name} is missing and commit {commit.id} names it: restore the store from a copy")
    segment = Segment.from_bytes(contents.records[f"{SEGMENT}{id_}"], name)
    try:
        if segment.id != id_:
            raise ValueError(f"it is of segment {segment.id}")
        check_streams(segment.streams, groups)
    except ValueError as error:
        raise CorruptStoreError(f"{name} does not fit the store ({error}): restore the store from a copy") from error
    return segment


def _check_blocks(contents: Contents, manifest: Manifest, segment: Segment, group: Group, store: str) -> None:
    stream = segment.streams[group.index]
    kinds = {ROWS: stream.row_bytes, KEYS: 8}
    if segment.changed and segment.changed[group.index].stored:
        kinds[CHANGED] = CHANGED_BYTES
    for block in range(manifest.first_blocks[segment.id][group.index], stream.num_blocks):
        rows = int(stream.block_bytes_B[block]) // stream.row_bytes
        for kind, row_bytes in kinds.items():
            if wrong := _wrong(contents, block_name(kind, segment.id, group.index, block), rows * row_bytes):
                raise corrupt_block(store, segment, group, block, wrong)


def _wrong(contents: Contents, name: bytes, size: int) -> str:
    """Return what is wrong with a block, in words; nothing where nothing is."""
    held = contents.blocks.get(name)
    if held is None:
        return "is missing"
    return "" if held == size else f"has {held:,} bytes of {size:,}"
