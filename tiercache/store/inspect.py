"""The contents of a store, the check of all its blocks, and the difference between two stores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store import store_errors
from tiercache.store.external_sort import SortedCursor, hashed, merged
from tiercache.store.opening import FORMAT_VERSION, StoreDirectory, store_path
from tiercache.store.store import Store
from tiercache.store.store_errors import CommitMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tiercache.store.commit import Commit
    from tiercache.store.table import Table


def info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of the store at ``path`` at its newest commit, as plain values; reads no row.

    "rows" and "live_rows" count each key once, "row_bytes" their bytes; "stale_rows" are those in retained segments
    whose keys newer segments have too. "waiting_bytes" are the bytes of rows of dropped tables and of stale rows, which
    the next rewrite frees. "changed_bytes" are the last changes of moved rows, including dead rows.
    "space_amplification" is all bytes of files for each of "row_bytes".

    In a store of several ranks, rows and bytes are totals, and "shards" has the numbers of each rank. Raises what
    ``Store.open`` raises for reading; a writer may be active.
    """
    with Store.open(store_path(path), mode="r") as store:
        return _describe_ranks(store, path) if store.ranks else describe(store, path)


def describe(store: Store, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the result of ``info`` for an open store at ``path``, at its current commit."""
    live, snapshot = {table.name: store.live_rows(table.name) for table in store.tables}, store.snapshot
    all_tables = [(group, table) for group in snapshot.groups for table in group.tables]
    stale_bytes = sum(snapshot.stale_rows(store.segments, *one) * one[0].row_bytes for one in all_tables)
    segments = []
    for segment in store.segments:
        dead_ranges = sum(snapshot.first_range(segment, group) for group in range(len(segment.layouts)))
        live_ranges = sum(layout.num_ranges for layout in segment.layouts) - dead_ranges
        stale_rows = sum(snapshot.stale_rows([segment], *one) for one in all_tables)
        living_rows = sum(snapshot.living_rows([segment], *one) for one in all_tables)
        segments.append(
            {
                "id": segment.id,
                "pass": segment.pass_index,
                "within": segment.within,
                "retained": segment.id in snapshot.retained,
                "rows": segment.rows,
                "tombstone": segment.tombstone,
                "live_rows": living_rows,
                "stale_rows": stale_rows,
                "live_ranges": live_ranges,
                "dead_ranges": dead_ranges,
                "row_bytes": segment.row_bytes,
                "changed_bytes": segment.changed_bytes,
            }
        )
    tables = [
        {**table.to_record(), "group": group.index, "row_bytes": table.row_bytes, "rows": live[table.name]}
        for group in store.groups
        for table in group.tables
    ]
    commit, row_bytes = store.commit, sum(table["rows"] * table["row_bytes"] for table in tables)
    file_bytes = file_bytes_of(path)
    return {
        "path": str(path),
        "format_version": FORMAT_VERSION,
        "file_bytes": file_bytes,
        "rows": sum(live.values()),
        "row_bytes": row_bytes,
        "stale_rows": sum(segment["stale_rows"] for segment in segments),
        "stale_bytes": stale_bytes,
        "waiting_bytes": snapshot.waiting_bytes,
        "changed_bytes": sum(segment["changed_bytes"] for segment in segments),
        "space_amplification": file_bytes / row_bytes if row_bytes else None,
        "live_ranges": sum(segment["live_ranges"] for segment in segments),
        "dead_ranges": sum(segment["dead_ranges"] for segment in segments),
        "commit": None
        if commit is None
        else {
            "id": commit.id,
            "pass": commit.cursor.pass_index,
            "sample": commit.cursor.sample,
            "schedule_digest": commit.schedule_digest,
            "state_bytes": commit.state_bytes,
            "settings": commit.settings,
            "environment": commit.environment,
        },
        "retention": None if commit is None else commit.retention,
        "pins": {} if commit is None else commit.pins,
        "commits": describe_commits(store.commits),
        "tables": tables,
        "segments": segments,
    }


def describe_commits(commits: Iterable[Commit]) -> list[dict[str, int]]:
    """Return ids, cursors and numbers of segments, as plain values."""
    return [
        {"id": c.id, "pass": c.cursor.pass_index, "sample": c.cursor.sample, "segments": len(c.segment_ids)}
        for c in commits
    ]


def file_bytes_of(path: str | os.PathLike[str]) -> int:
    """Return the bytes that the file system allocates to all files below ``path``, without holes."""
    found, folders = 0, [os.fspath(path)]
    while folders:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with suppress(OSError):  # it was deleted, or is a link to nothing
                    found += entry.stat().st_blocks * 512
    return found


def verify(
    path: str | os.PathLike[str], *, deep: bool = True, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Read every block of every kept commit, each block once, and check it, in a separate process.

    Returns the counts of its reads, and under "problems" a message for each defect: checksums, missing or cut
    blocks, keys that are not in hash order, keys with two live rows, a wrong number of stale rows in a segment, a stale
    row that changed after the newest row of its key, a key that a commit has and a later one derived from it lacks, and
    records that contradict each other. In a store that keeps several commits, each message names the damaged ones: the
    others are whole. ``progress`` is called with bytes done and bytes in all. Whatever a damaged file does to the
    process that reads it (SIGBUS), it becomes a problem here. A row that was lost before the oldest kept commit is not
    noticed. In a store of several ranks, "shards" has the counts of each, and rows on the wrong rank are problems.

    Not ``deep``: only metadata is read, in seconds; no row, key or dense state.

    Raises what ``Store.open`` raises for reading if no store is found.
    """
    directory = StoreDirectory(store_path(path))
    if not directory.find():
        raise directory.missing()
    command = [sys.executable, "-m", "tiercache.store.verification", str(path), "--deep" if deep else "--no-deep"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    report: dict[str, Any] = {"path": str(path), "problems": []}
    # in a session of its own, Ctrl-C ends this process, which ends the other
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True
    ) as child, ExitStack() as on_error:  # fmt: skip
        on_error.callback(child.kill)
        assert child.stdout is not None
        for line in child.stdout:
            message = json.loads(line)
            match message["kind"]:
                case "progress":
                    if progress is not None:
                        progress(message["done"], message["total"])
                case "report":
                    report |= message["report"]
                case "error":
                    raise getattr(store_errors, message["type"], store_errors.StoreError)(message["text"])
        on_error.pop_all()
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        report["problems"].append(
            f"reading {path} ended with {name}, as happens if the file is truncated or damaged: {store_errors.ADVICE}"
        )
    elif child.returncode > 0:
        report["problems"].append(f"verification of {path} ended with status {child.returncode}: see its output")
    return report


def _describe_ranks(store: Store, path: str | os.PathLike[str]) -> dict[str, Any]:
    commit = store.commit
    assert commit is not None, "it has a commit"
    assert commit.sharding is not None, "it has several ranks"
    shards, by_commit = [describe(rank, rank.path or path) for rank in store.ranks], []
    for one in store.commits:
        with suppress(CommitMissingError), store.at(one.id) as at:  # a writer may have dropped it
            by_commit.append(describe_commits(rank.commit for rank in at.ranks if rank.commit is not None))
    for rank, shard in enumerate(shards):
        shard["commits"] = [commits[rank] for commits in by_commit]
    inside = sum(one["file_bytes"] for one, folder in zip(shards[1:], commit.folders[1:], strict=True)
                 if not folder.startswith("/"))  # fmt: skip
    shards[0]["file_bytes"] -= inside  # the folder of rank 0 is the store's folder
    tables = []
    for table in store.tables:
        sharding = commit.sharding.tables[table.name]
        rows = store.live_rows(table.name)
        of_table = {"sharding": sharding.described(), "rows": rows, "row_bytes": table.row_bytes}
        tables.append(table.to_record() | of_table)
    return {
        "path": str(path),
        "format_version": FORMAT_VERSION,
        "ranks": len(shards),
        "retention": commit.retention,
        "pins": commit.pins,
        "cursor": {"pass": commit.cursor.pass_index, "sample": commit.cursor.sample},
        "commits": [{**ranks[0], "segments": sum(one["segments"] for one in ranks)} for ranks in by_commit],
        "rows": sum(table["rows"] for table in tables),
        "row_bytes": sum(shard["row_bytes"] for shard in shards),
        "waiting_bytes": store.waiting_bytes,
        "file_bytes": sum(shard["file_bytes"] for shard in shards),
        "tables": tables,
        "folders": [str(rank.path) for rank in store.ranks],
        "shards": shards,
    }


_EXAMPLES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Counts of differing rows in one table; vectors and optimizer state are compared bit for bit."""

    table: str
    only_first: int
    """Rows whose keys the second does not have."""
    only_second: int
    different: int
    same: int
    examples: tuple[int, ...]
    """The first few keys, in hash order, whose rows are not the same."""


def differences(first: Store, second: Store, *, progress: Callable[[int, int], None] | None = None) -> list[Difference]:
    """Compare all rows of two stores of the same tables, table by table, in about 512 MiB of memory.

    ``progress(done, total)`` is called with rows of both.

    Raises ValueError for stores of different tables, or without a commit, and CorruptStoreError.
    """
    if first.tables != second.tables:
        names = sorted({table.name for table in {*first.tables} ^ {*second.tables}})
        raise ValueError(
            f"{first.label} and {second.label} have different tables (see {', '.join(names)}): "
            "compare stores of the same tables"
        )
    total = sum(store.live_rows(table.name) for store in (first, second) for table in first.tables)
    found, done = [], 0
    for table in first.tables:
        one, other = (_cursor(store, table) for store in (first, second))
        counts, examples = np.zeros(4, np.int64), list[int]()
        for (hashes, keys, rows), (second_hashes, second_keys, second_rows) in merged(one, other):
            _, first_at, second_at = np.intersect1d(hashes, second_hashes, assume_unique=True, return_indices=True)
            unequal = first_at[np.any(rows[first_at].view(np.uint32) != second_rows[second_at].view(np.uint32), axis=1)]
            left, right = np.delete(keys, first_at), np.delete(second_keys, second_at)
            counts += left.size, right.size, unequal.size, first_at.size - unequal.size
            done += 2 * first_at.size + left.size + right.size
            if progress is not None:
                progress(done, total)
            examples += np.concatenate([keys[unequal], left, right]).tolist()[: _EXAMPLES - len(examples)]
        of_table = zip(("only_first", "only_second", "different", "same"), counts.tolist(), strict=True)
        found.append(Difference(table=table.name, examples=tuple(examples), **dict(of_table)))
    return found


def _cursor(store: Store, table: Table) -> SortedCursor:
    rows = ((keys, np.concatenate(fields, axis=1)) for keys, fields in store.scan(table.name))
    width = sum(field.width for field in table.fields)
    return SortedCursor(hashed(table, rows), np.int64, (np.float32, (width,)))
