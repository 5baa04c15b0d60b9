"""Looking at a sharded store from outside: what it holds, and whether all parts are whole and belong together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.ranks.record import RECORD, Record
from tiercache.ranks.sharded_folder import check_there
from tiercache.ranks.sharded_store import ShardedStore, sharding_of
from tiercache.ranks.sharding_plan import HASHES, hash_bounds
from tiercache.store import StoreError, hash_keys, verify
from tiercache.store.inspect import describe, describe_commits
from tiercache.store.run import runs_of
from tiercache.store.scan import live_rows
from tiercache.store.table import find_table

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from tiercache.ranks.common_commit import CommonCommit
    from tiercache.store import Store, Table

__all__ = ["is_sharded", "sharded_info", "verify_sharded"]


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a sharded store's record at ``path``, whatever is in it."""
    return (Path(path) / RECORD).is_file()


def sharded_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the sharded store at ``path`` holds at the commit of its record, as plain values; reads no row.

    Rows and bytes are those of all parts; "parts" has what ``info`` says of each, but as "commits" those that belong to
    the store's, and its "retention". Raises what ``ShardedStore.open`` raises, but for a store without a commit: that
    has no rows.
    """
    place = Path(path)
    check_there(place)
    record = Record.read(place)
    assert record is not None
    parts: list[dict[str, Any]] = []
    commits: Sequence[CommonCommit] = ()
    sharding = sharding_of(record, place)
    if record.cursor is not None:
        with ShardedStore.open(place) as store:  # nobody takes its commits away meanwhile
            record, sharding = store.record, store.sharding
            commits = store.commits
            parts = [_described(store, rank) for rank in range(record.num_ranks)]
    rows = [{table["name"]: table["rows"] for table in part["tables"]} for part in parts]
    tables = []
    for table in record.tables:
        slices = sharding.tables[table.name].slices
        found = [rows[slices[0].rank]] if slices and rows else rows
        table_sharding = sharding.to_record()["tables"][table.name]
        tables.append(
            {**table.to_record(), "sharding": table_sharding, "rows": sum(one[table.name] for one in found)}
            | {"row_bytes": table.row_bytes}
        )
    return {
        "path": str(path),
        "ranks": record.num_ranks,
        "generation": record.generation,
        "engine": record.engine,
        "retention": record.retention,
        "cursor": None if record.cursor is None else {"pass": record.cursor.pass_index, "sample": record.cursor.sample},
        "commits": [
            {
                "id": commit.id,
                "pass": commit.cursor.pass_index,
                "sample": commit.cursor.sample,
                "parts": list(commit.parts),
            }
            for commit in commits
        ],
        "rows": sum(table["rows"] for table in tables),
        "row_bytes": sum(part["row_bytes"] for part in parts),
        "file_bytes": sum(part["file_bytes"] for part in parts),
        "tables": tables,
        "folders": [str(record.folder(place, rank)) for rank in range(record.num_ranks)],
        "obsolete": list(record.obsolete),
        "parts": parts,
    }


def _described(store: ShardedStore, rank: int) -> dict[str, Any]:
    """Return what ``info`` says of a part, as far as it is the sharded store's: nothing of a commit of its own."""
    part = store.parts[rank]
    own = [store.at(commit.id).parts[rank].commit for commit in store.commits]
    kept = describe_commits(commit for commit in own if commit is not None)
    return describe(part, part.path or store.path) | {"retention": store.record.retention, "commits": kept}


def verify_sharded(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Verify every part of the sharded store at ``path``, and that the parts belong together.

    Returns, beside sums, "parts", which has what ``verify`` returns for each, and under "problems" a sentence for each
    thing that is wrong: with a part, or a part that is missing or lacks a commit of the record, and at any commit that
    is kept with rows that are another rank's, or with slices of a table that have different rows. ``progress`` is
    called with bytes done and bytes in all, as far as they are known: parts are read one after the other.

    Raises what ``ShardedStore.open`` raises where the record cannot be read.
    """
    place = Path(path)
    check_there(place)
    record = Record.read(place)
    assert record is not None
    sharding_of(record, place)
    report: dict[str, Any] = {"path": str(path), "ranks": record.num_ranks, "problems": [], "parts": []}
    problems: list[str] = report["problems"]
    report["commits"] = [commit.id for commit in record.commits]
    before = 0
    for rank in range(record.num_ranks if record.cursor is not None else 0):
        last = (0, 0)

        def tell(done: int, total: int, before: int = before) -> None:
            nonlocal last
            last = done, total
            if progress is not None:
                progress(before + done, before + total)

        try:
            part = verify(record.folder(place, rank), progress=tell)
        except StoreError as error:
            part = {"problems": [str(error)]}
        before += last[1]
        report["parts"].append(part)
        problems += [f"part {rank}: {problem}" for problem in part["problems"]]
    for name in ("segments", "blocks", "pages", "rows", "bytes"):
        report[name] = sum(part.get(name, 0) for part in report["parts"])
    if record.cursor is not None and not problems:
        try:
            with ShardedStore.open(place) as store:
                report["commits"] = [commit.id for commit in store.commits]
                store.check_parts()
                for commit in store.commits:
                    problems += [one for one in _strays(store.at(commit.id)) if one not in problems]
        except StoreError as error:
            problems.append(str(error))
    return report


def _strays(store: ShardedStore) -> Iterator[str]:
    """Yield a sentence for each table of each part that has rows of other ranks, or other rows than its slices."""
    bounds = hash_bounds(len(store.parts))
    for table in store.tables:
        table_sharding = store.sharding.tables[table.name]
        rows = [live_rows(part, table.name) for part in store.parts]
        for rank, part in enumerate(store.parts):
            mine = (bounds[rank], bounds[rank + 1])
            if table_sharding.slices and table_sharding.slice_of(rank) is None:
                mine = (0, 0)
            elif table_sharding.slices:
                mine = (0, HASHES)
            if not _within(part, table, *mine):
                yield (
                    f"part {rank} of {store.label} has rows of table {table.name!r} that the sharding gives to other "
                    "ranks: restore all parts from copies of one moment"
                )
        if len({rows[one.rank] for one in table_sharding.slices}) > 1:
            yield (
                f"the slices of table {table.name!r} of {store.label} have "
                f"{', '.join(f'{rows[one.rank]:,}' for one in table_sharding.slices)} rows: restore all parts from "
                "copies of one moment"
            )


def _within(part: Store, table: Table, low: int, high: int) -> bool:
    """Return whether all rows of a table have hashes in [low, high); reads the first and the last key of each run."""
    group, mine = find_table(part.groups, table.name, part.label)
    snapshot = part.snapshot
    for run in runs_of(part, snapshot, snapshot.committed, group, mine):
        layout = run.segment.layouts[group.index]
        for row in (run.low, run.high - 1):
            block = row // layout.block_rows
            key = part.read_keys(run.segment, group.index, block)[row - layout.rows_of_block(block)[0]]
            if not low <= int(hash_keys(np.array([key]), table.table_id)[0]) < high:
                return False
    return True
