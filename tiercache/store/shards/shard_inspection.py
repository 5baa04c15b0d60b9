"""What a sharded store holds, and whether all shards are whole and belong together."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.bits import hash_keys
from tiercache.store.inspect import describe, describe_commits, verify
from tiercache.store.runs import runs_of
from tiercache.store.scan import live_rows
from tiercache.store.shards.open_shards import open_shards
from tiercache.store.shards.shard_manifest import Manifest
from tiercache.store.store_errors import CommitMissingError, StoreError
from tiercache.store.table import find_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiercache.store.commit import Commit
    from tiercache.store.shards.sharded_store import Shards
    from tiercache.store.store import Store
    from tiercache.store.table import Table

_TRIES = 8
"""How often verification begins anew, each time because the store was sharded anew."""


def describe_shards(path: Path, manifest: Manifest) -> dict[str, Any]:
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


def _described(store: Shards, rank: int) -> dict[str, Any]:
    """Return what ``info`` says of a shard, as far as it is the whole store's: nothing of a commit of its own."""
    shard = store.shards[rank]
    own: list[Commit] = []
    for commit in store.named:
        with suppress(CommitMissingError), store.at(commit.id) as at:  # given up since it was opened
            own += [one for one in [at.shards[rank].commit] if one is not None]
    kept = describe_commits(own)
    return describe(shard, shard.path or store.path) | {"retention": store.retention, "commits": kept}


def verify_shards(path: Path, manifest: Manifest, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
    """Verify every shard of the store at ``path``, and that the shards belong together; a training may go on meanwhile.

    Returns, beside sums, "shards", which has what ``verify`` returns for each, and under "problems" a sentence for each
    thing that is wrong: with a shard, or one that is missing or lacks a commit of the manifest, and at any commit that
    is kept with rows that are another rank's, or with slices of a table that have different rows. ``progress`` is
    called with bytes done and bytes in all, as far as they are known: shards are read one after the other. Where
    another number of ranks makes its own shards meanwhile, those are verified.
    """
    for _ in range(_TRIES):
        report = _verify_shards(path, manifest, progress)
        if not report["problems"]:
            break
        now = Manifest.read(path)
        if now is None or now.is_plain:
            return verify(path, progress=progress)
        if now.generation == manifest.generation:
            break
        manifest = now
    return report


def _verify_shards(path: Path, manifest: Manifest, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
    report: dict[str, Any] = {"path": str(path), "ranks": manifest.num_ranks, "problems": [], "shards": []}
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
            shard = verify(manifest.folder(path, rank), progress=tell)
        except StoreError as error:
            shard = {"problems": [str(error)]}
        before += last[1]
        report["shards"].append(shard)
        problems += [f"shard {rank}: {problem}" for problem in shard["problems"]]
    for name in ("segments", "blocks", "pages", "rows", "bytes"):
        report[name] = sum(shard.get(name, 0) for shard in report["shards"])
    if manifest.newest is not None and not problems:
        try:
            with open_shards(path, Manifest.read(path) or manifest) as store:
                report["commits"] = [commit.id for commit in store.named]
                store.check_shards()
                for commit in store.named:
                    with suppress(CommitMissingError), store.at(commit.id) as at:  # given up since it was opened
                        problems += [one for one in _strays(at) if one not in problems]
        except StoreError as error:
            problems.append(str(error))
    return report


def _strays(store: Shards) -> Iterator[str]:
    """Yield a sentence for each table of each shard that has rows of other ranks, or other rows than its slices."""
    for table in store.tables:
        slices = store.sharding.tables[table.name].slices
        rows = [live_rows(shard, table.name) for shard in store.shards]
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
    group, mine = find_table(shard.groups, table.name, shard.label)
    snapshot = shard.snapshot
    for run in runs_of(shard, snapshot, snapshot.committed, group, mine):
        layout = run.segment.layouts[group.index]
        for row in (run.low, run.high - 1):
            block = row // layout.block_rows
            key = shard.read_keys(run.segment, group.index, block)[row - layout.rows_of_block(block)[0]]
            if not low <= int(hash_keys(np.array([key]), table.table_id)[0]) < high:
                return False
    return True
