"""Deletion of rows: a tombstone segment hides them, and the next rewrite frees their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.alter import check_between_passes, checked_commit
from tiercache.store.bits import hash_keys
from tiercache.store.layout import NEVER, Range
from tiercache.store.lookup import check_keys, locate
from tiercache.store.row_codec import blocks_of
from tiercache.store.scan import scan_segments
from tiercache.store.segment import BASE_PASS, base_layout
from tiercache.store.table import tombstone_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tiercache.store.commit import Commit
    from tiercache.store.snapshot import Snapshot
    from tiercache.store.store import Store

    Int64s = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Forgotten:
    """The result of ``forget``."""

    commit: Commit
    """The newest commit."""
    rows: int
    """Rows that were forgotten."""
    unknown: int
    """Keys that had no row."""
    waiting_bytes: int
    """Bytes of rows that the next rewrite frees, those of earlier commands too."""
    listed_by: tuple[str, ...]
    """The older commits that still list some of the rows, and why they are kept."""


def forget(
    store: Store,
    table_name: str,
    keys: Int64s | None = None,
    *,
    unused_since: int | None = None,
    now: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> Forgotten:
    """Delete the rows of ``keys`` (n,) of a table, or those that no commit after ``unused_since`` wrote.

    Their keys go into a tombstone segment, in one atomic, durable commit that keeps dense state and position. The
    commit has no schedule: a training reorganizes the store first. A key that is trained later starts from its first
    row. Older commits that are kept list the rows still; the next rewrite frees their bytes. ``now`` rewrites the store
    as ``compact`` does, in a second commit, and gives up all commits that only the retention keeps: the rows are gone
    unless ``listed_by`` names a pin or a reader. Keys take 24 bytes each in memory; ``unused_since`` reads all rows.

    Raises ValueError, CommitMissingError, StoreFullError and CorruptStoreError.
    """
    commit = checked_commit(store)
    check_between_passes(store, "rows are forgotten")
    if (keys is None) == (unused_since is None):
        raise ValueError("give either keys or unused_since")
    if unused_since is not None and unused_since >= commit.id:
        raise ValueError(
            f"no row of {store.label} changed after commit {unused_since}, as the newest is {commit.id}: give an older "
            "commit"
        )
    if unused_since is not None:
        keys = np.concatenate([_unused(part, table_name, unused_since) for part in store.parts])
    keys = np.unique(check_keys(np.asarray(keys)))
    found = [_with_rows(part, part.snapshot, table_name, keys) for part in store.parts]
    rows = np.unique(np.concatenate(found)).size
    if rows:
        of_part = dict(zip(store.parts, found, strict=True))
        store.commit_on_all(lambda part: _append(part, table_name, of_part[part]))
    if now:
        writers = [part.commit_writer for part in store.parts]
        for writer in writers:
            writer.keeps_pins_only = True
        try:
            store.compact(progress=progress)
        finally:
            for writer in writers:
                writer.keeps_pins_only = False
    assert store.commit is not None, "it was checked"
    return Forgotten(
        commit=store.commit, rows=rows, unknown=keys.size - rows,
        waiting_bytes=store.waiting_bytes,
        listed_by=tuple(dict.fromkeys(one for part in store.parts for one in _listed_by(part, table_name, keys))),
    )  # fmt: skip


def _with_rows(store: Store, snapshot: Snapshot, table_name: str, keys: Int64s) -> Int64s:
    """Return the keys that have a row, in hash order."""
    stored = snapshot.find(table_name, store.label)
    ids, _ = locate(store.reader, snapshot, {table_name: keys}, after=-1)[table_name]
    found = keys[ids >= 0]
    return found[np.argsort(hash_keys(found, stored.table.table_id))]


def _unused(store: Store, table_name: str, since: int) -> Int64s:
    """Return the keys of the rows that did not change after a commit. Raises as ``changed_rows`` does."""
    store.changed_rows(table_name, since=since)
    parts = [np.empty(0, np.int64)]
    with store.pinned() as snapshot:
        for keys, fields in scan_segments(
            store.reader, snapshot, snapshot.committed, table_name, as_words=True, changed=True
        ):
            parts.append(keys[fields[-1][:, 0].view(np.uint32) <= since])
    return np.concatenate(parts)


def _append(store: Store, table_name: str, keys: Int64s) -> None:
    """Make a commit that forgets keys, which are in hash order."""
    groups, writer = tombstone_groups(store.snapshot.groups), store.commit_writer
    layouts = []
    for group in groups:
        rows = tuple(keys.size * (table.name == table_name) for table in group.tables)
        layouts.append(base_layout(group, [Range(next_use=NEVER, table_rows=rows)] if any(rows) else []))
    blocks = (
        block
        for group, layout in zip(groups, layouts, strict=True)
        if layout.rows
        for block in blocks_of(group, layout, [(keys, np.zeros((keys.size, 1), np.float32))])
    )
    before = store.commit
    try:
        if keys.size:
            with store._opened.uses.using():
                writer.append(
                    BASE_PASS, layouts, blocks, store.reader.compute, within=False, stable=False, tombstone=True
                )
        store.overlay()
    except BaseException:
        if not store.closed and store.commit is before:
            store.discard_uncommitted()
        raise


def _listed_by(store: Store, table_name: str, keys: Int64s) -> list[str]:
    """Return which older commits have a row of one of the keys, and why they are there."""
    found, writer = [], store.commit_writer
    kept = [*writer.history.snapshots[:-1]]
    for snapshot in [*kept, *writer.given_up]:
        commit = snapshot.commit
        if commit is None or table_name not in {table.name for table in commit.tables}:
            continue
        if _with_rows(store, snapshot, table_name, keys).size:
            pins = [f"pin {name!r}" for name, id_ in writer.history.commits[-1].pins.items() if id_ == commit.id]
            why = ", ".join(pins) or ("retention" if snapshot in kept else "a reader")
            found.append(f"commit {commit.id} ({why})")
    return found
