"""A reader of stores of both engines, from docs/format alone: without tiercache code or Zarr."""

import hashlib
import json
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.store.independent_files import Files, files_of, rank_files
from tests.store.independent_format import (
    Arrays,
    Layout,
    Values,
    altered,
    check,
    field_bytes,
    key_hash,
    ranges_of,
    read_arrays,
    read_record,
)

NEVER = (1 << 63) - 1


class Row(NamedTuple):
    """A live row."""

    fields: tuple[bytes, ...]
    """The vector, then each optimizer state, without padding; bfloat16 as its bits."""
    changed: int
    """The commit that last changed it."""


class Contents(NamedTuple):
    """A store at one commit."""

    commit: Values
    tables: dict[str, dict[int, Row]]
    """By name of the table and key."""
    states: list[bytes]
    """Dense state by rank."""


def named(files: Files, kind: str, name: str, size: int, digest: str) -> tuple[Values, Arrays]:
    """Return a record, checked against its digest."""
    data = files.blob(name, size)
    assert hashlib.sha256(data).hexdigest() == digest, name
    return read_record(kind, data)


def read_commit(files: Files, id_: int | None = None) -> tuple[str, Values]:
    """Return the digest and the values of the newest commit, or of a kept one."""
    name, size, digest = files.head
    values, _ = named(files, "commit", name, size, digest)
    if id_ is None or id_ == values["id"]:
        return digest, values
    kept = {kept_id: rest for kept_id, *rest in values["kept"]}
    assert id_ in kept, f"commit {id_} is not kept"
    name, size, digest = kept[id_]
    return digest, named(files, "commit", name, size, digest)[0]


def read_store(path: Path, commit: int | None = None) -> Contents:
    """Return the whole content of a store at its newest commit, or at a kept one; every digest is checked.

    With several ranks rows have the columns of all slices.
    """
    files = files_of(path)
    _, values = read_commit(files, commit)
    steps = [*values["stored"], values["tables"]]
    found, states = [], []
    sharding = [*values["stored_sharding"], values["sharding"]][0] if "sharding" in values else None
    for rank, head in enumerate(values["ranks"]):
        of_rank = rank_files(path, values["folders"][rank], rank) if rank else files
        rows, state = read_rank(of_rank, head, tables_of_rank(steps[0], sharding, rank))
        found.append(rows)
        states.append(state)
    tables = found[0] if sharding is None else join_ranks(found, steps[0], sharding)
    for before, after in pairwise(steps):
        old = {table["name"]: table for table in before}
        tables = {
            table["name"]: {
                key: row._replace(fields=altered(key, row.fields, old[table["name"]], table))
                for key, row in (tables[table["name"]] if table["name"] in old else {}).items()
            }
            for table in after
        }
    return Contents(values, tables, states)


def read_rank(files: Files, head: list[Any], tables: list[Values]) -> tuple[dict[str, dict[int, Row]], bytes]:
    """Return the rows and the dense state of one list."""
    rows: dict[str, dict[int, Row]] = {table["name"]: {} for table in tables}
    counted = dict.fromkeys(rows, 0)
    listed, arrays = named(files, "rank", *head)
    for index, (id_, name, _, _, first, *meta) in enumerate(listed["segments"]):
        about, of_segment = read_meta(files, f"{name}/meta", *meta)
        assert about["id"] == id_
        for group, of_group in enumerate(about["layouts"]):
            layout = Layout.of(of_group, of_segment, group)
            first_range = check_list(arrays, index, listed["groups"], group, layout)
            for table, key, row, in_range in live_rows(files, name, of_segment, group, layout, first_range, first):
                rows[table][key] = row  # segments by id: a newer row replaces a stale one
                if (bits := about["maps"][group]) is not None:
                    assert in_range in ranges_of(key_hash(key, table), bits, of_segment, group)
                if id_ in listed["tombstones"]:
                    rows[table][key] = row._replace(fields=())
    names = names_in_order(tables)
    for table, live in zip(arrays["live_tables"].tolist(), arrays["live"].tolist(), strict=True):
        counted[names[table]] += live
    for at, stale in zip(arrays["stale_at"].tolist(), arrays["stale"].tolist(), strict=True):
        counted[names[arrays["live_tables"][at]]] -= stale
    assert counted == {name: len(of_table) for name, of_table in rows.items()}
    living = {name: {key: row for key, row in of_table.items() if row.fields} for name, of_table in rows.items()}
    return living, read_state(files, listed["state"], arrays["state"])


def tables_of_rank(tables: list[Values], sharding: Values | None, rank: int) -> list[Values]:
    """Return the tables of a rank: some are a slice of columns."""
    found: list[Values] = []
    for count, table in enumerate(tables):
        slices = [] if sharding is None else sharding["tables"][table["name"]].get("slices", [])
        for owner, first, last in slices:
            if owner == rank and last - first < table["dim"]:
                found.append({**table, "dim": last - first, "first_column": first, "whole_dim": table["dim"]})
        found += [table] if len(found) == count else []
    return found


def join_ranks(
    found: list[dict[str, dict[int, Row]]], tables: list[Values], sharding: Values
) -> dict[str, dict[int, Row]]:
    """Return the rows of all ranks; assert that each rank has the rows that the sharding assigns to it."""
    joined: dict[str, dict[int, Row]] = {}
    for table in tables:
        rows = joined[table["name"]] = {}
        of_table = sharding["tables"][table["name"]]
        for rank, _, _ in of_table.get("slices", []):
            for key, row in found[rank][table["name"]].items():
                rows[key] = side_by_side(rows[key], row, table) if key in rows else row
        for rank, of_rank in enumerate(found):
            own = of_rank[table["name"]]
            if "slices" in of_table:
                assert own.keys() == (rows.keys() if rank in [owner for owner, _, _ in of_table["slices"]] else set())
                continue
            low, high = (which * 2**64 // len(found) for which in (rank, rank + 1))
            assert all(low <= key_hash(key, table["name"]) < high for key in own)
            rows |= own
    return joined


def side_by_side(left: Row, right: Row, table: Values) -> Row:
    """Return a row with the columns of all slices; a row-wise optimizer's one number is the same in all of them."""
    pairs = zip(left.fields, right.fields, strict=True)
    alone = table["optimizer"]["kind"].startswith("rowwise_")
    assert not alone or left.fields[-1] == right.fields[-1]
    fields = [a if alone and index == len(left.fields) - 1 else a + b for index, (a, b) in enumerate(pairs)]
    assert left.changed == right.changed
    return Row(tuple(fields), left.changed)


def read_meta(files: Files, name: str, size: int, head_bytes: int, digest: str) -> tuple[Values, Arrays]:
    """Return the metadata of a segment: the values of its head, and the arrays in the head and after it."""
    data = files.blob(name, size)
    assert hashlib.sha256(data[:head_bytes]).hexdigest() == digest, name
    values, arrays = read_record("segment", data[:head_bytes])
    return values, arrays | read_arrays(values["arrays"], arrays["chunks"], data[head_bytes:])


def names_in_order(tables: list[Values]) -> list[str]:
    """Return the names of tables, given by unsigned id, group by group."""
    groups: dict[str, list[str]] = {}
    for table in tables:
        alone = "whole_dim" in table and table["optimizer"]["kind"].startswith("rowwise_")
        like = [table.get(name) for name in ("dim", "dtype", "optimizer", "compression")]
        groups.setdefault(json.dumps([*like, alone and table["name"]]), []).append(table["name"])
    return [name for names in groups.values() for name in names]


def read_state(files: Files, state: list[Any], sums: np.ndarray) -> bytes:
    """Return the dense state of a rank."""
    name, size, chunk = state
    data = files.blob(name, size)
    for index in range(-(-size // chunk)):
        check(sums, index, data[index * chunk : (index + 1) * chunk])
    return data


def check_list(arrays: Arrays, index: int, groups: int, group: int, layout: Layout) -> int:
    """Return the first live range of a group, and assert that its listing matches its segment."""
    names = ("first_ranges", "next_uses", "rows", "block_rows", "row_bytes")
    first, use, rows, block_rows, row_bytes = (int(arrays[name][index * groups + group]) for name in names)
    assert use == (layout.next_use[first] if first < len(layout.next_use) else NEVER)
    assert (rows, block_rows, row_bytes) == (layout.rows, layout.block_rows, layout.row_bytes)
    return first


def live_rows(
    files: Files, segment: str, arrays: Arrays, group: int, layout: Layout, first_range: int, first_commit: int
) -> Iterable[tuple[str, int, Row, int]]:
    """Yield (table, key, row, range) of the live ranges of a group; each of their pages is checked."""
    first_row = int(layout.counts[:first_range].sum())
    of_table = np.repeat(np.tile(np.arange(len(layout.tables)), len(layout.counts)), layout.counts.reshape(-1))
    of_range = np.repeat(np.arange(len(layout.counts)), layout.counts.sum(axis=1))
    pages, key_pages = layout.pages(), layout.key_pages()
    for block in range(first_row // layout.block_rows, -(-layout.rows // layout.block_rows)):
        low, high = layout.block(block)
        data, keys = files.rows(segment, group, layout, block), files.numbers(segment, group, layout, block, "keys")
        changed = last_changes(files, segment, arrays, group, layout, block, first_commit)
        for index, (a, b) in enumerate(pairwise(key_pages)):
            if low <= a < high:
                check(arrays[f"key_pages/{group}"], index, keys[8 * (a - low) : 8 * (b - low)])
                first_key = struct.unpack_from("<q", keys, 8 * (a - low))[0]
                assert arrays[f"first_hashes/{group}"][index] == key_hash(first_key, layout.tables[of_table[a]])
        for index, (a, b) in enumerate(pairwise(pages)):
            if not (low <= a < high and b > first_row):
                continue
            page = data[(a - low) * layout.row_bytes : (b - low) * layout.row_bytes]
            check(arrays[f"pages/{group}"], index, page)
            for row in range(a, b):
                fields, at = [], 0
                for _, width, dtype in layout.fields:
                    size = field_bytes(width, dtype)
                    begin = at + (row - a) * size
                    fields.append(page[begin : begin + width * np.dtype(dtype).itemsize])
                    at += (b - a) * size
                key = struct.unpack_from("<q", keys, 8 * (row - low))[0]
                yield layout.tables[of_table[row]], key, Row(tuple(fields), int(changed[row - low])), int(of_range[row])


def last_changes(
    files: Files, segment: str, arrays: Arrays, group: int, layout: Layout, block: int, first_commit: int
) -> np.ndarray:
    """Return the commit that last changed each row of a block."""
    low, high = layout.block(block)
    if f"oldest/{group}" not in arrays:
        return np.full(high - low, first_commit)
    oldest, newest = (int(arrays[f"{name}/{group}"][block]) for name in ("oldest", "newest"))
    if not arrays[f"changed/{group}"].size:
        return np.full(high - low, oldest)
    data = files.numbers(segment, group, layout, block, "changed")
    check(arrays[f"changed/{group}"], block, data)
    found = np.frombuffer(data, "<u4")
    assert (found.min(), found.max()) == (oldest, newest)
    return found
