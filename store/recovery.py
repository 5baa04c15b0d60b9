"""What a store finds when it is opened: decided from what the engine holds, before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.store.blocks import KEYS, ROWS, block_name, corrupt_block
from tiercache.store.commit import Commit
from tiercache.store.dump import check_streams
from tiercache.store.errors import CorruptStoreError
from tiercache.store.life import Life
from tiercache.store.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.store.engine import Contents
    from tiercache.store.table import Group

COMMIT = "commit"
TABLES = "tables"


def segment_record(segment_id: int) -> str:
    """Return the name of a segment's record."""
    return f"segment/{segment_id}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The newest commit, and what is there without being named by it."""

    commit: Commit | None
    segments: tuple[Segment, ...]
    stale_records: tuple[str, ...]
    orphans: tuple[bytes, ...]


def recover(contents: Contents, groups: Sequence[Group], store: str) -> Recovery:
    """Read the manifest and check that every block it names is there, in its full length.

    Raises CorruptStoreError and CorruptBlockError, which call the store ``store``.
    """
    commit: Commit | None = None
    segments: list[Segment] = []
    named: set[bytes] = set()
    if COMMIT in contents.records:
        commit = Commit.from_bytes(contents.records[COMMIT], f"the commit record of {store}")
        segments = [_read_segment(contents, groups, store, commit, id_) for id_ in commit.segment_ids]
        for name, size in commit.state_blocks().items():
            named.add(name)
            if wrong := _wrong(contents, name, size):
                raise CorruptStoreError(
                    f"the dense state of commit {commit.id} of {store} {wrong}: restore the store from a copy"
                )
        try:
            life = Life.at(commit.cursor, segments)
        except ValueError as error:
            raise CorruptStoreError(f"commit {commit.id} of {store} makes no sense ({error}): restore it") from error
        for segment in segments:
            for group in groups:
                _check_blocks(contents, life, segment, group, store, named)
    records = {TABLES, COMMIT, *(segment_record(segment.id) for segment in segments)}
    return Recovery(
        commit=commit,
        segments=tuple(segments),
        stale_records=tuple(name for name in contents.records if name not in records),
        orphans=tuple(name for name in contents.blocks if name not in named),
    )


def _read_segment(contents: Contents, groups: Sequence[Group], store: str, commit: Commit, id_: int) -> Segment:
    name = f"the record of segment {id_} of {store}"
    if segment_record(id_) not in contents.records:
        raise CorruptStoreError(f"{name} is missing and commit {commit.id} names it: restore the store from a copy")
    segment = Segment.from_bytes(contents.records[segment_record(id_)], name)
    try:
        if segment.id != id_:
            raise ValueError(f"it is of segment {segment.id}")
        check_streams(segment.streams, groups)
    except ValueError as error:
        raise CorruptStoreError(f"{name} does not fit the tables ({error}): restore the store from a copy") from error
    return segment


def _check_blocks(
    contents: Contents, life: Life, segment: Segment, group: Group, store: str, named: set[bytes]
) -> None:
    stream = segment.streams[group.index]
    for block in range(life.first_block(segment, group.index), stream.num_blocks):
        row_bytes = int(stream.block_bytes_B[block])
        for kind, size in ((ROWS, row_bytes), (KEYS, row_bytes // stream.row_bytes * 8)):
            name = block_name(kind, segment.id, group.index, block)
            named.add(name)
            if wrong := _wrong(contents, name, size):
                raise corrupt_block(store, segment, group, block, wrong)


def _wrong(contents: Contents, name: bytes, size: int) -> str:
    """Return what is wrong with a block, in words; nothing where nothing is."""
    held = contents.blocks.get(name)
    if held is None:
        return "is missing"
    return "" if held == size else f"has {held:,} bytes of {size:,}"
