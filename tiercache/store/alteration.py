"""Schema changes and deletion of rows: each is one commit that moves no row, and the next rewrite does the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.bits import hash_keys
from tiercache.store.bulk_load import discarding
from tiercache.store.checkpoint import moved_with, tensor_sizes
from tiercache.store.commit import Commit, between_passes
from tiercache.store.lookup import check_keys, locate
from tiercache.store.records import integer
from tiercache.store.row_codec import blocks_of
from tiercache.store.scan import scan_segments
from tiercache.store.segment import BASE_PASS, base_layouts
from tiercache.store.sharding import ShardingPlan, TableSharding, groups_of_rank
from tiercache.store.table import Table, group_tables, row_layout, tombstone_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store.snapshot import Snapshot
    from tiercache.store.store import Store

    Int64s = NDArray[np.int64]


def alter(store: Store, tables: Iterable[Table]) -> Commit:
    """Make a commit with different tables, and return it; the newest one if it already has these tables.

    Tables may be added or dropped, dims may grow; optimizers, their settings, initializers and seeds may change. Rows
    keep their layout: they are read as rows of the new tables, and the next rewrite stores them as such. The vector is
    kept; new columns are taken from the key's first row; the state of a different kind of optimizer starts over. Dense
    state and position are kept. Unless only settings change, the commit has no schedule: training reorganizes the store
    first.

    One atomic, durable step. Raises ValueError for tables that the rows cannot be converted to, CheckpointError for
    files that do not match, and StoreFullError.
    """
    commit = checked_commit(store)
    requested = altered_tables(commit.tables, tables, store.label)
    before = [table.to_record() for table in commit.tables]
    if [table.to_record() for table in requested] == before:
        return commit
    tensor_sizes(table for table in requested if table.to_record() not in before)  # or raises
    changes: dict[str, Any] = {"tables": requested, "settings": altered_settings(commit, requested)}
    sharding = None if commit.sharding is None else altered_sharding(commit.sharding, commit.tables, requested)
    groups = {part: groups_of_rank(requested, sharding, part.snapshot.rank) for part in store.parts}
    moves = commit.stored or any(row_layout(new) != row_layout(part.snapshot.groups) for part, new in groups.items())
    if moves:
        between_passes(commit, store.label, "tables, dims or optimizers change")
        changes |= {
            "stored": tuple(moved_with(tables, requested) for tables in (*commit.stored, commit.tables)),
            "since": commit.id + 1,
            "origin": "",
            "schedule_digest": "",
            "overlaid": commit.overlaid or commit.schedule_digest,
        }
        if commit.sharding is not None:
            changes |= {"sharding": sharding, "stored_sharding": (*commit.stored_sharding, commit.sharding)}

    def amend(part: Store) -> None:
        own = {} if moves else {"groups": groups[part]}
        part.commit_writer.amend(**changes, **own)

    return store.commit_on_all(amend)


def altered_sharding(sharding: ShardingPlan, before: Sequence[Table], tables: Sequence[Table]) -> ShardingPlan:
    """Return the sharding: rows stay, a new table is ``row_wise``, and the last slice gets the new columns."""
    old_names, found = {table.name for table in before}, dict[str, TableSharding]()
    for table in tables:
        one = sharding.tables[table.name] if table.name in old_names else TableSharding("row_wise")
        last = [replace(part, last=table.dim) for part in one.slices[-1:]]
        found[table.name] = replace(one, slices=(*one.slices[:-1], *last))
    return replace(sharding, tables=found)


def checked_commit(store: Store) -> Commit:
    """Return the newest commit of a store that is open for writing, with nothing appended. Raises ValueError."""
    _ = store.any_writer  # or raises
    store.check_whole()
    if store.commit is None:
        raise ValueError(f"{store.label} has no commit yet: create a new store, or train and commit first")
    if any(part.snapshot.appended for part in store.parts):
        raise ValueError(f"{store.label} has rows that no commit names: call discard_uncommitted() first")
    return store.commit


def altered_tables(before: Sequence[Table], requested: Iterable[Table], label: str) -> tuple[Table, ...]:
    """Return the requested tables in the order of table ids. Raises ValueError if ``before`` cannot become them."""
    stored, found = {table.name: table for table in before}, []
    for table in sorted(requested, key=lambda table: table.table_id):
        old = stored.get(table.name)
        compression = None if old is None else old.compression
        wrong = None
        if table.compression not in {None, compression}:
            wrong = f"compression {compression!r}, but {table.compression!r} was given: omit it"
        elif old is not None and table.dtype != old.dtype:
            wrong = f"dtype {old.dtype!r}, but {table.dtype!r} was given: use {old.dtype!r}, or import into a new store"
        elif old is not None and table.dim < old.dim:
            wrong = f"dim {old.dim}, but {table.dim} was given: a dim can only grow"
        if wrong:
            raise ValueError(f"table {table.name!r} of {label} has {wrong}")
        found.append(Table.from_record({**table.to_record(), **({"compression": compression} if compression else {})}))
    group_tables(found)
    dropped = sorted(stored.keys() - {table.name for table in found})
    added = sorted({table.name for table in found} - stored.keys())
    if dropped and added:
        raise ValueError(
            f"{label} has a table {dropped[0]!r} that was not given, and lacks the table {added[0]!r}: a table cannot "
            "be renamed; to drop one and add another, alter the store twice"
        )
    return tuple(found)


def altered_settings(commit: Commit, tables: Sequence[Table]) -> dict[str, Any]:
    """Return the settings for other tables: changed values win. Raises ValueError for several rates in a group."""
    settings: dict[str, Any] = {**commit.settings}
    before = {table.name: table for table in commit.tables}
    own: dict[str, dict[str, Any]] = {}
    for table in tables:
        old, now = before.get(table.name), table.optimizer.settings()
        if old is None or type(old.optimizer) is not type(table.optimizer):
            own[table.name] = {"step": 0} if settings.get("steps") else {}
            continue
        changed = {name for name, value in old.optimizer.settings().items() if value != now[name]}
        kept = settings.get("tables", {}).get(table.name, {})
        own[table.name] = {name: value for name, value in kept.items() if name not in changed}
    settings.pop("tables", None)
    if own := {name: values for name, values in own.items() if values}:
        settings["tables"] = own
    if "learning_rates" in settings:
        rates = {}
        for table in tables:
            old, rate = before.get(table.name), table.optimizer.learning_rate
            stays = old is not None and type(old.optimizer) is type(table.optimizer)
            stays = stays and old is not None and old.optimizer.learning_rate == rate
            rates[table.name] = settings["learning_rates"].get(table.name, rate) if stays else rate
        settings["learning_rates"] = rates
        _check_rates(rates, tables)
    return settings


def _check_rates(rates: Mapping[str, float], tables: Sequence[Table]) -> None:
    for group in group_tables(tables):
        found = {rates[table.name]: table.name for table in group.tables}
        if len(found) > 1:
            (one, first), (other, second), *_ = found.items()
            raise ValueError(
                f"tables {first!r} and {second!r} would share a group, and so a learning rate, but training left them "
                f"at {one} and {other}: set a new learning_rate for both"
            )


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
    """Bytes of rows that the next rewrite frees, including those of earlier commands."""
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
    commit has no schedule: training reorganizes the store first. A key that is trained later starts from its first row.
    Older commits that are kept still list the rows; the next rewrite frees their bytes. ``now`` rewrites the store as
    ``compact`` does, in a second commit, and drops all commits that only the retention keeps: the rows are gone unless
    ``listed_by`` names a pin or a reader. Keys take 24 bytes each in memory; ``unused_since`` reads all rows.

    Raises ValueError, CommitMissingError, StoreFullError and CorruptStoreError.
    """
    commit = checked_commit(store)
    between_passes(commit, store.label, "rows are forgotten")
    if (keys is None) == (unused_since is None):
        raise ValueError("pass either keys or unused_since (--keys or --unused-since)")
    unused_since = None if unused_since is None else integer(unused_since, "unused_since")
    if unused_since is not None and unused_since >= commit.id:
        raise ValueError(
            f"no row of {store.label} changed after commit {unused_since}, because the newest is {commit.id}: pass an "
            "older commit"
        )
    if unused_since is not None:
        keys = np.concatenate([_unused(part, table_name, unused_since) for part in store.parts])
    keys = np.unique(check_keys(keys))
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
    ids, _ = locate(store.reader, snapshot, table_name, keys, after=-1)
    found = keys[ids >= 0]
    return found[np.argsort(hash_keys(found, stored.table.table_id))]


def _unused(store: Store, table_name: str, since: int) -> Int64s:
    """Return the keys of the rows that did not change after a commit. Raises as ``changed_rows`` does."""
    store.changed_rows(table_name, since=since)
    parts = [np.empty(0, np.int64)]
    with store.pinned() as snapshot:
        of_segments = store.reader, snapshot, snapshot.committed
        for keys, fields in scan_segments(*of_segments, table_name, as_words=True, changed=True):
            parts.append(keys[fields[-1][:, 0].view(np.uint32) <= since])
    return np.concatenate(parts)


def _append(store: Store, table_name: str, keys: Int64s) -> None:
    """Make a commit that forgets keys, which are in hash order."""
    groups, writer = tombstone_groups(store.snapshot.groups), store.commit_writer
    layouts = base_layouts(groups, lambda table: keys.size * (table.name == table_name))
    no_rows = keys, np.zeros((keys.size, 1), np.float32)
    blocks = blocks_of(groups, layouts, lambda _, layout: [no_rows] if layout.rows else [])
    with discarding(store):
        if keys.size:
            writer.append(BASE_PASS, layouts, blocks, store.reader.compute, within=False, stable=False, tombstone=True)
        store.overlay()


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
