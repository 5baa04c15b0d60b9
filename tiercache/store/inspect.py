"""Looking at a store from outside: what it holds, and whether all of it is what was written."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tiercache.store import store_errors
from tiercache.store.directory import FORMAT_VERSION, StoreDirectory
from tiercache.store.opening import store_path
from tiercache.store.shards.shard_manifest import Manifest
from tiercache.store.shards.sharded_store import Shards
from tiercache.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tiercache.store.commit import Commit


def info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the store at ``path`` holds at its newest commit, as plain values; reads no row.

    "rows" and "live_rows" count each key once, "row_bytes" their bytes; "stale_rows" are those in retained segments
    whose keys newer segments have too. "changed_bytes" are those of the last changes of moved rows, dead ones included.
    "space_amplification" is all bytes of files for each of "row_bytes".

    Of a sharded store rows and bytes are those of all shards, and "shards" has what is said of each. Raises what
    ``Store.open`` raises for reading; a writer may be at work meanwhile.
    """
    if (manifest := Manifest.read(store_path(path))) is not None and not manifest.is_plain:
        from tiercache.store.shards.shard_inspection import describe_shards

        return describe_shards(store_path(path), manifest)
    with Store.open(path, mode="r") as store:
        if isinstance(store, Shards):  # it was sharded meanwhile
            from tiercache.store.shards.shard_inspection import describe_shards

            return describe_shards(store_path(path), store.manifest)
        return describe(store, path)


def describe(store: Store, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what ``info`` does, of a store at ``path`` that is open, at the commit where it stands."""
    live = {table.name: 0 for table in store.tables}
    retained = {} if store.commit is None else {one.segment_id: one for one in store.commit.retained}
    segments, stale_bytes = [], 0
    for segment in store.segments:
        live_ranges, live_rows, ranges, stale_rows = 0, 0, 0, 0
        for group, layout in zip(store.groups, segment.layouts, strict=True):
            first = store.first_range(segment, group.index)
            ranges += layout.num_ranges
            live_ranges += layout.num_ranges - first
            for place, table in enumerate(group.tables):
                count = layout.rows_of_table(place, first)
                live_rows += count
                live[table.name] += count
            stale = retained[segment.id].stale_rows[group.index] if segment.id in retained else ()
            for table, count in zip(group.tables, stale, strict=False):
                live[table.name] -= count
            stale_rows += sum(stale)
            stale_bytes += sum(stale) * group.row_bytes
        segments.append(
            {
                "id": segment.id,
                "pass": segment.pass_index,
                "within": segment.within,
                "retained": segment.id in retained,
                "rows": segment.rows,
                "live_rows": live_rows - stale_rows,
                "stale_rows": stale_rows,
                "live_ranges": live_ranges,
                "dead_ranges": ranges - live_ranges,
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
    """Return the bytes that the file system keeps for all files below ``path``: those of holes do not count.

    A writer may delete some meanwhile.
    """
    found, folders = 0, [os.fspath(path)]
    while folders:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found += entry.stat().st_blocks * 512
    return found


def verify(path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Read every block of every commit that is kept, each block once, and check it, in a process of its own.

    Returns what was read, and under "problems" a sentence for each thing that is wrong: checksums, missing or cut
    blocks, keys that are not in hash order, keys with two live rows, stale rows that are not as many in each segment as
    the commit says, a stale row that changed after the newest of its key, a key that a commit has and one that came
    of it has not, and records that contradict each other. Of a store that keeps several commits each sentence names
    those that the damage touches: the others are whole. ``progress`` is called with bytes done and bytes in all.
    Whatever a damaged file does to the process that reads it (SIGBUS), it becomes a problem here. A row that was lost
    before the oldest commit that is kept is not missed: nothing says that it was there. Of a sharded store the problems
    of all shards are there, and whether these belong together.

    Raises what ``Store.open`` raises for reading where there is no store to speak of.
    """
    if (manifest := Manifest.read(store_path(path))) is not None and not manifest.is_plain:
        from tiercache.store.shards.shard_inspection import verify_shards

        return verify_shards(store_path(path), manifest, progress)
    directory = StoreDirectory(store_path(path))
    if not directory.find():
        raise directory.missing()
    command = [sys.executable, "-m", "tiercache.store.verification", str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    report: dict[str, Any] = {"path": str(path), "problems": []}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as child:
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
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        report["problems"].append(
            f"reading {path} ended with {name}, as it does where the file is cut short or damaged: "
            "restore the store from a copy"
        )
    elif child.returncode > 0:
        report["problems"].append(f"verification of {path} ended with status {child.returncode}: see its output")
    return report
