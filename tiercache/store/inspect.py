"""The content of a store, and a check that it is what was written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store import store_errors
from tiercache.store.bits import hash_keys
from tiercache.store.directory import FORMAT_VERSION, StoreDirectory
from tiercache.store.opening import store_path
from tiercache.store.runs import runs_of
from tiercache.store.shards.open_shards import open_shards
from tiercache.store.shards.shard_manifest import ShardManifest
from tiercache.store.shards.sharded_store import ShardedStore
from tiercache.store.store import Store
from tiercache.store.store_errors import CommitMissingError, StoreError
from tiercache.store.table import find_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tiercache.store.commit import Commit
    from tiercache.store.table import Table


def info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the store at ``path`` holds at its newest commit, as plain values; reads no row.

    "rows" and "live_rows" count each key once, "row_bytes" their bytes; "stale_rows" are those in retained segments
    whose keys newer segments have too. "waiting_bytes" are those of rows that no table has any more, stale ones among
    them: the next rewrite frees them. "changed_bytes" are those of the last changes of moved rows, dead ones included.
    "space_amplification" is all bytes of files for each of "row_bytes".

    Of a sharded store rows and bytes are those of all shards, and "shards" has what is said of each. Raises what
    ``Store.open`` raises for reading; a writer may be at work meanwhile.
    """
    if (manifest := ShardManifest.read(store_path(path))) is not None and not manifest.is_plain:
        return describe_shards(store_path(path), manifest)
    with Store.open(path, mode="r") as store:
        if isinstance(store, ShardedStore):  # it was sharded meanwhile
            return describe_shards(store_path(path), store.manifest)
        return describe(store, path)


def describe(store: Store, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what ``info`` does, of a store at ``path`` that is open, at the commit where it stands."""
    live, snapshot = {table.name: store.live_rows(table.name) for table in store.tables}, store.snapshot
    segments, stale_bytes = [], 0
    for segment in store.segments:
        live_ranges, live_rows, ranges, stale_rows = 0, 0, 0, 0
        for group, layout in zip(snapshot.groups, segment.layouts, strict=True):
            first = snapshot.first_range(segment, group.index)
            ranges += layout.num_ranges
            live_ranges += layout.num_ranges - first
            for place, table in enumerate(group.tables):
                live_rows += layout.rows_of_table(place, first) * (not segment.tombstone)
                stale = snapshot.stale_rows([segment], group, table)
                stale_rows += stale
                stale_bytes += stale * group.row_bytes
        segments.append(
            {
                "id": segment.id,
                "pass": segment.pass_index,
                "within": segment.within,
                "retained": segment.id in snapshot.retained,
                "rows": segment.rows,
                "tombstone": segment.tombstone,
                "live_rows": max(0, live_rows - stale_rows),
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
    """Return the bytes that the file system keeps for all files below ``path``: those of holes do not count.

    A writer may delete some meanwhile.
    """
    found, folders = 0, [os.fspath(path)]
    while folders:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with suppress(FileNotFoundError):
                    found += entry.stat().st_blocks * 512
    return found


def verify(
    path: str | os.PathLike[str], *, deep: bool = True, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Read every block of every commit that is kept, each block once, and check it, in a process of its own.

    Returns what was read, and under "problems" a sentence for each thing that is wrong: checksums, missing or cut
    blocks, keys that are not in hash order, keys with two live rows, stale rows that are not as many in each segment as
    the commit says, a stale row that changed after the newest of its key, a key that a commit has and one that came
    of it has not, and records that contradict each other. Of a store that keeps several commits each sentence names
    those that the damage touches: the others are whole. ``progress`` is called with bytes done and bytes in all.
    Whatever a damaged file does to the process that reads it (SIGBUS), it becomes a problem here. A row that was lost
    before the oldest commit that is kept is not missed: nothing says that it was there. Of a sharded store the problems
    of all shards are there, and whether these belong together.

    Not ``deep``: only what says which rows there are and where, in seconds; no row, key or dense state is read.

    Raises what ``Store.open`` raises for reading where there is no store to speak of.
    """
    if (manifest := ShardManifest.read(store_path(path))) is not None and not manifest.is_plain:
        return verify_shards(store_path(path), manifest, progress, deep=deep)
    return _verify_plain(path, progress, deep=deep)


def _verify_plain(
    path: str | os.PathLike[str], progress: Callable[[int, int], None] | None, *, deep: bool
) -> dict[str, Any]:
    directory = StoreDirectory(store_path(path))
    if not directory.find():
        raise directory.missing()
    command = [sys.executable, "-m", "tiercache.store.verification", str(path), "--deep" if deep else "--no-deep"]
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


_TRIES = 8
"""How often verification begins anew, each time because the store was sharded anew."""


def describe_shards(path: Path, manifest: ShardManifest) -> dict[str, Any]:
    """Return what the sharded store at ``path`` holds at the commit of its manifest, as plain values; reads no row.

    Rows and bytes are those of all shards; "shards" has what ``info`` says of each, but as "commits" those that belong
    to the store's, and its "retention". Of a store without a commit there are no rows. Raises what ``Store.open`` does.
    """
    shards: list[dict[str, Any]] = []
    commits: list[dict[str, Any]] = []
    if manifest.newest is not None:
        with open_shards(path, manifest) as store:  # nobody takes its commits away meanwhile
            manifest = store.manifest
            commits = [
                {"id": one.id, "pass": one.cursor.pass_index, "sample": one.cursor.sample, "shards": list(one.shards)}
                for one in store.named
            ]
            shards = [_described(store, rank) for rank in range(manifest.num_ranks)]
    tables = []
    for table in manifest.tables:
        sharding = manifest.sharding.tables[table.name]
        counting = shards[sharding.slices[0].rank : sharding.slices[0].rank + 1] if sharding.slices else shards
        rows = sum(one["rows"] for shard in counting for one in shard["tables"] if one["name"] == table.name)
        tables.append(
            {**table.to_record(), "sharding": sharding.described(), "rows": rows, "row_bytes": table.row_bytes}
        )
    cursor = manifest.cursor
    return {
        "path": str(path),
        "ranks": manifest.num_ranks,
        "generation": manifest.generation,
        "engine": manifest.engine,
        "retention": manifest.retention,
        "pins": {},
        "cursor": None if cursor is None else {"pass": cursor.pass_index, "sample": cursor.sample},
        "commits": commits,
        "rows": sum(table["rows"] for table in tables),
        "row_bytes": sum(shard["row_bytes"] for shard in shards),
        "file_bytes": sum(shard["file_bytes"] for shard in shards),
        "tables": tables,
        "folders": [str(manifest.folder(path, rank)) for rank in range(manifest.num_ranks)],
        "obsolete": list(manifest.obsolete),
        "shards": shards,
    }


def _described(store: ShardedStore, rank: int) -> dict[str, Any]:
    """Return what ``info`` says of a shard, as far as it is the whole store's: nothing of a commit of its own."""
    shard = store.shards[rank]
    own: list[Commit] = []
    for commit in store.named:
        with suppress(CommitMissingError), store.at(commit.id) as at:  # given up since it was opened
            own += [one for one in [at.shards[rank].commit] if one is not None]
    kept = describe_commits(own)
    return describe(shard, shard.path or store.path) | {"retention": store.retention, "commits": kept}


def verify_shards(
    path: Path, manifest: ShardManifest, progress: Callable[[int, int], None] | None, *, deep: bool = True
) -> dict[str, Any]:
    """Verify every shard of the store at ``path``, and that the shards belong together; a training may go on meanwhile.

    Returns, beside sums, "shards", which has what ``verify`` returns for each, and under "problems" a sentence for each
    thing that is wrong: with a shard, or one that is missing or lacks a commit of the manifest, and at any commit that
    is kept with rows that are another rank's, or with slices of a table that have different rows. ``progress`` is
    called with bytes done and bytes in all, as far as they are known: shards are read one after the other. Where
    another number of ranks makes its own shards meanwhile, those are verified.
    """
    for _ in range(_TRIES):
        report = _verify_shards(path, manifest, progress, deep=deep)
        if not report["problems"]:
            break
        now = ShardManifest.read(path)
        if now is None or now.is_plain:
            return verify(path, deep=deep, progress=progress)
        if now.generation == manifest.generation:
            break
        manifest = now
    return report


def _verify_shards(
    path: Path, manifest: ShardManifest, progress: Callable[[int, int], None] | None, *, deep: bool
) -> dict[str, Any]:
    report: dict[str, Any] = {
        "path": str(path),
        "ranks": manifest.num_ranks,
        "deep": deep,
        "problems": [],
        "shards": [],
    }
    problems: list[str] = report["problems"]
    report["commits"] = [commit.id for commit in manifest.commits]
    before = 0
    for rank in range(manifest.num_ranks if manifest.newest is not None else 0):
        last = (0, 0)

        def tell(done: int, total: int, before: int = before) -> None:
            nonlocal last
            last = done, total
            if progress is not None:
                progress(before + done, before + total)

        try:
            shard = _verify_plain(manifest.folder(path, rank), tell, deep=deep)
        except StoreError as error:
            shard = {"problems": [str(error)]}
        before += last[1]
        report["shards"].append(shard)
        problems += [f"shard {rank}: {problem}" for problem in shard["problems"]]
    for name in ("segments", "blocks", "pages", "rows", "bytes"):
        report[name] = sum(shard.get(name, 0) for shard in report["shards"])
    if manifest.newest is not None and not problems:
        try:
            with open_shards(path, ShardManifest.read(path) or manifest) as store:
                report["commits"] = [commit.id for commit in store.named]
                store.check_shards()
                for commit in store.named:
                    with suppress(CommitMissingError), store.at(commit.id) as at:  # given up since it was opened
                        problems += [one for one in _strays(at) if one not in problems]
        except StoreError as error:
            problems.append(str(error))
    return report


def _strays(store: ShardedStore) -> Iterator[str]:
    """Yield a sentence for each table of each shard that has rows of other ranks, or other rows than its slices."""
    for table in store.tables:
        slices = store.sharding.tables[table.name].slices
        rows = [shard.live_rows(table.name) for shard in store.shards]
        for rank, shard in enumerate(store.shards):
            if not _within(shard, table, *(store.sharding.owned_hashes(table.name, rank) or (0, 0))):
                yield (
                    f"shard {rank} of {store.label} has rows of table {table.name!r} that the sharding gives to other "
                    "ranks: restore all shards from copies of one moment"
                )
        if len({rows[one.rank] for one in slices}) > 1:
            yield (
                f"the slices of table {table.name!r} of {store.label} have "
                f"{', '.join(f'{rows[one.rank]:,}' for one in slices)} rows: restore all shards from copies of one "
                "moment"
            )


def _within(shard: Store, table: Table, low: int, high: int) -> bool:
    """Return whether all rows of a table have hashes in [low, high); reads the first and the last key of each run."""
    group, own_table = find_table(shard.groups, table.name, shard.label)
    snapshot = shard.snapshot
    for run in runs_of(shard.reader, snapshot, snapshot.committed, group, own_table):
        layout = run.segment.layouts[group.index]
        for row in (run.low, run.high - 1):
            block = row // layout.block_rows
            key = shard.reader.keys(run.segment, group.index, block)[row - layout.rows_of_block(block)[0]]
            if not low <= int(hash_keys(np.array([key]), table.table_id)[0]) < high:
                return False
    return True
