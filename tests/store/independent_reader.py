"""Reads stores of both engines from docs/format alone: nothing of tiercache, and nothing of Zarr."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

PART_BYTES = 1 << 30
Form = list[tuple[str, int, str]]
"""Name, numbers and dtype of each field of a row."""


def padded(width: int, dtype: str) -> int:
    """Return the numbers of a field in a row with those that fill its last 4 bytes."""
    return width + width % 2 if np.dtype(dtype).itemsize == 2 else width


def read_record(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return values and arrays of a record; its checksum is left to others."""
    assert data[:4] == b"TCR1"
    size = struct.unpack_from("<I", data, 4)[0]
    header, at, arrays = json.loads(data[8 : 8 + size]), 8 + size, {}
    for name, dtype, length in header["arrays"]:
        arrays[name] = np.frombuffer(data, dtype, length, at)
        at += arrays[name].nbytes
    assert at + 4 == len(data)
    return header["values"], arrays


def rows_of_ranges(layout: dict[str, Any], arrays: dict[str, np.ndarray], group: int) -> np.ndarray:
    """Return the rows of each table in each range."""
    return arrays[f"table_rows/{group}"].reshape(-1, layout["tables"])


def check_record(manifest: dict[str, Any], name: str, data: bytes) -> bytes:
    """Return a record that is what its manifest says."""
    _, _, size, digest = next(one for one in manifest["records"] if one[0] == name)
    assert (len(data), hashlib.sha256(data).hexdigest()) == (size, digest), name
    return data


class LmdbFiles:
    """Records and blocks of a store in LMDB."""

    def __init__(self, path: Path) -> None:
        with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin() as txn:
            items = {bytes(key).decode(): bytes(value) for key, value in txn.cursor()}
        head, manifest = (path / "HEAD").read_bytes(), items.pop("manifest")
        self.manifest, _ = read_record(manifest)
        slots = [struct.unpack_from("<8sQ32s", head, at) for at in (0, 4096)]
        _, number, digest = max(slots, key=lambda slot: slot[1])
        assert number == self.manifest["number"]
        assert digest == hashlib.sha256(manifest).digest()
        self.records = {}
        for name, _, size, _ in self.manifest["records"]:  # a record of more than 1 GiB has several values
            parts = [items[name], *(items[f"{name}\0{part}"] for part in range(1, -(-size // PART_BYTES)))]
            self.records[name] = check_record(self.manifest, name, b"".join(parts))
        self.blocks = (path / "blocks.bin").read_bytes()

    def rows(
        self, segment: int, group: int, layout: dict[str, Any], arrays: dict[str, np.ndarray], form: Form, block: int
    ) -> list[np.ndarray]:
        """Return the fields of the rows of a block."""
        counts = rows_of_ranges(layout, arrays, group).sum(axis=1)
        block_rows = layout["block_bytes"] // layout["row_bytes"]
        ends, row, last = np.cumsum(counts), block * block_rows, min((block + 1) * block_rows, sum(counts))
        fields: list[list[np.ndarray]] = [[] for _ in form]
        at = int(arrays[f"rows_at/{group}"][block])
        while row < last:  # page after page, each field after field
            count = min(row + layout["page_rows"], ends[np.searchsorted(ends, row, side="right")], last) - row
            for field, (_, width, dtype) in zip(fields, form, strict=True):
                numbers = padded(width, dtype)
                found = np.frombuffer(self.blocks, dtype, count * numbers, at)
                field.append(found.reshape(count, numbers)[:, :width])
                at += found.nbytes
            row += count
        return [np.concatenate(parts) for parts in fields]

    def numbers(
        self, name: str, dtype: str, _segment: int, group: int, arrays: dict[str, np.ndarray], block: int, rows: int
    ) -> np.ndarray:
        """Return the keys or the last changes of the rows of a block."""
        return np.frombuffer(self.blocks, dtype, rows, int(arrays[f"{name}_at/{group}"][block]))


class ZarrFiles:
    """Records and blocks of a store in Zarr arrays."""

    def __init__(self, path: Path) -> None:
        newest = max((f for f in (path / "manifests").iterdir() if f.name.isdecimal()), key=lambda f: int(f.name))
        self.path = path
        self.manifest, _ = read_record(newest.read_bytes())
        assert self.manifest["number"] == int(newest.name)
        self.records = {
            name: check_record(self.manifest, name, (path / f"records/{number}-{name.replace('/', '.')}").read_bytes())
            for name, number, _, _ in self.manifest["records"]
        }

    def rows(
        self, segment: int, group: int, layout: dict[str, Any], arrays: dict[str, np.ndarray], form: Form, block: int
    ) -> list[np.ndarray]:
        """Return the fields of the rows of a block."""
        total = int(rows_of_ranges(layout, arrays, group).sum())
        rows = layout["block_bytes"] // layout["row_bytes"]
        found = []
        for name, width, dtype in form:
            numbers = padded(width, dtype)
            count = min(rows, total - block * rows)
            data = self.bytes(segment, group, name, ".0", numbers * np.dtype(dtype).itemsize, rows, total, block, count)
            found.append(np.frombuffer(data, dtype).reshape(count, numbers)[:, :width])
        return found

    def numbers(
        self, name: str, dtype: str, segment: int, group: int, arrays: dict[str, np.ndarray], block: int, rows: int
    ) -> np.ndarray:
        """Return the keys or the last changes of the rows of a block."""
        layout = read_record(self.records[f"segment/{segment}"])[0]["layouts"][group]
        total = int(rows_of_ranges(layout, arrays, group).sum())
        block_rows = layout["block_bytes"] // layout["row_bytes"]
        data = self.bytes(segment, group, name, "", np.dtype(dtype).itemsize, block_rows, total, block, rows)
        return np.frombuffer(data, dtype)

    def bytes(
        self, segment: int, group: int, name: str, suffix: str, row_bytes: int, block_rows: int, total: int, block: int,
        count: int,
    ) -> bytes:  # fmt: skip
        """Return the bytes of rows of a block in one array: chunks have whole blocks of at most 64 MiB."""
        chunk_rows = min(max(1, (64 << 20) // (block_rows * row_bytes)) * block_rows, total)
        chunk, row = divmod(block * block_rows, chunk_rows)
        data = (self.path / f"segments/{segment}/{group}/{name}/c.{chunk}{suffix}").read_bytes()
        assert len(data) == chunk_rows * row_bytes
        return data[row * row_bytes : (row + count) * row_bytes]


def commit_digest(files: Any, commit: int) -> str:
    """Return the digest of a commit: of the names of its records, sorted, each with its SHA-256."""
    segments = [f"segment/{id_}" for id_, _ in read_record(files.records[f"commit/{commit}"])[0]["segments"]]
    lines = [
        f"{name} {hashlib.sha256(files.records[name]).hexdigest()}\n"
        for name in sorted(["tables", f"commit/{commit}", *segments])
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_manifest(path: Path) -> None:
    """Assert that each shard of a sharded store has the commits that its manifest names."""
    values = json.loads((path / "shards.json").read_text())
    assert values.pop("version") == 5
    for rank, name in enumerate(values["shards"]):
        files = files_of(path / name)
        for commit in values["commits"]:
            assert commit_digest(files, commit["shards"][rank]) == commit["digests"][rank], (rank, commit)


def files_of(path: Path) -> Any:
    """Return the records and blocks of a store."""
    marker = json.loads((path / "store.json").read_text())
    assert marker["version"] == 5
    return {"lmdb": LmdbFiles, "zarr": ZarrFiles}[marker["engine"]](path)


def last_change(
    files: Any, segment: int, group: int, arrays: dict[str, np.ndarray], block: int, at: int, rows: int, first: int
) -> int:
    """Return the commit that last changed a row of a block."""
    if f"oldest/{group}" not in arrays:
        return first
    if arrays[f"changed/{group}"].size:
        return int(files.numbers("changed", "<u4", segment, group, arrays, block, rows)[at])
    return int(arrays[f"oldest/{group}"][block])


def read_table(path: Path, groups: list[list[str]], form: Form, table: str) -> dict[int, tuple[list[bytes], int]]:
    """Return the fields and the last change of every live row of a table by key, at the newest commit.

    That commit was taken before a pass. ``groups`` has the names of the tables of each group, ``form`` the
    fields of the table's rows. Numbers of bfloat16 are given as their bits.
    """
    files = files_of(path)
    newest = max(int(name[7:]) for name in files.records if name.startswith("commit/"))
    spec = next(one for one in read_record(files.records["tables"])[0]["tables"] if one["name"] == table)
    form[0] = *form[0][:2], {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[spec["dtype"]]
    commit, _ = read_record(files.records[f"commit/{newest}"])
    group = next(i for i, names in enumerate(groups) if table in names)
    place, found = groups[group].index(table), dict[int, tuple[list[bytes], int]]()
    retained = {id_: groups_[group][0] for id_, *groups_ in commit.get("retained", [])}
    for segment, first in commit["segments"]:  # the newest last, so that its rows replace stale ones
        values, arrays = read_record(files.records[f"segment/{segment}"])
        layout, row = values["layouts"][group], 0
        counts, block_rows = rows_of_ranges(layout, arrays, group), layout["block_bytes"] // layout["row_bytes"]
        total = int(counts.sum())
        for index, (use, rows) in enumerate(zip(arrays[f"next_use/{group}"], counts.tolist(), strict=True)):
            low, row = row + sum(rows[:place]), row + sum(rows)
            live = index >= retained[segment] if segment in retained else use >= commit["cursor"][0]
            for at in range(low, low + rows[place]) if live else ():
                block, i = divmod(at, block_rows)
                count = min(block_rows, total - block * block_rows)
                keys = files.numbers("keys", "<i8", segment, group, arrays, block, count)
                fields = files.rows(segment, group, layout, arrays, form, block)
                changed = last_change(files, segment, group, arrays, block, i, count, first)
                found[int(keys[i])] = [field[i].tobytes() for field in fields], changed
    return found
