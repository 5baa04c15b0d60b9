"""Reads stores of both engines from docs/format.md alone: nothing of tiercache, and nothing of Zarr."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path


Form = list[tuple[int, str]]
"""Numbers of each field in a row, and their dtype."""


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


class LmdbFiles:
    """Records and rows of a store in LMDB."""

    def __init__(self, path: Path) -> None:
        with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin() as txn:
            items = {bytes(key): bytes(value) for key, value in txn.cursor()}
        self.records = {key[1:].decode(): value for key, value in items.items() if key[:1] == b"r"}
        self.places = {key[1:]: struct.unpack("<QQ", value) for key, value in items.items() if key[:1] == b"b"}
        self.blocks = (path / "blocks.bin").read_bytes()

    def rows(self, segment: int, group: int, stream: dict[str, Any], form: Form, block: int) -> list[np.ndarray]:
        """Return the keys and the fields of the rows of a block."""
        offset, size = self.places[struct.pack(">cQII", b"r", segment, group, block)]
        data = self.blocks[offset : offset + size]
        counts = [sum(rows) for _, *rows in stream["ranges"]]
        block_rows = stream["block_bytes"] // stream["row_bytes"]
        ends, row, last = np.cumsum(counts), block * block_rows, min((block + 1) * block_rows, sum(counts))
        fields: list[list[np.ndarray]] = [[] for _ in form]
        at = 0
        while row < last:  # piece after piece, each field after field
            count = min(row + stream["piece_rows"], ends[np.searchsorted(ends, row, side="right")], last) - row
            for field, (width, dtype) in zip(fields, form, strict=True):
                numbers = padded(width, dtype)
                field.append(np.frombuffer(data, dtype, count * numbers, at).reshape(count, numbers)[:, :width])
                at += np.dtype(dtype).itemsize * count * numbers
            row += count
        return [self.keys(segment, group, block), *map(np.concatenate, fields)]

    def keys(self, segment: int, group: int, block: int) -> np.ndarray:
        """Return the keys of the rows of a block."""
        offset, size = self.places[struct.pack(">cQII", b"k", segment, group, block)]
        return np.frombuffer(self.blocks[offset : offset + size], "<i8")

    def changed(self, segment: int, group: int, block: int) -> np.ndarray:
        """Return the last change of each row of a block."""
        offset, size = self.places[struct.pack(">cQII", b"c", segment, group, block)]
        return np.frombuffer(self.blocks[offset : offset + size], "<u4")


class ZarrFiles:
    """Records and rows of a store in Zarr arrays."""

    def __init__(self, path: Path) -> None:
        newest = max((f for f in (path / "manifests").iterdir() if f.name.isdecimal()), key=lambda f: int(f.name))
        self.path = path
        self.manifest, arrays = read_record(newest.read_bytes())
        self.records = {name: (path / key).read_bytes() for name, (key, _, _) in self.manifest["records"].items()}
        self.runs = arrays["runs"].reshape(-1, 7)

    def rows(self, segment: int, group: int, stream: dict[str, Any], form: Form, block: int) -> list[np.ndarray]:
        """Return the keys and the fields of the rows of a block."""
        (folder, _, _, fields), size = self.stood(b"r", segment, group, block)
        rows = size // stream["row_bytes"]
        found = [self.keys(segment, group, block)]
        for (name, _), (width, dtype) in zip(fields, form, strict=True):
            chunk = np.frombuffer((self.path / folder / f"{name}/c.{block}.0").read_bytes(), dtype)
            found.append(chunk.reshape(-1, padded(width, dtype))[:rows, :width])
        return found

    def keys(self, segment: int, group: int, block: int) -> np.ndarray:
        """Return the keys of the rows of a block."""
        (folder, *_), size = self.stood(b"k", segment, group, block)
        return np.frombuffer((self.path / folder / f"keys/c.{block}").read_bytes()[:size], "<i8")

    def changed(self, segment: int, group: int, block: int) -> np.ndarray:
        """Return the last change of each row of a block."""
        (folder, *_), size = self.stood(b"c", segment, group, block)
        return np.frombuffer((self.path / folder / f"changed/c.{block}").read_bytes()[:size], "<u4")

    def stood(self, kind: bytes, segment: int, group: int, block: int) -> tuple[list[Any], int]:
        """Return what the manifest says of the arrays that hold a block, and its bytes."""
        for of_kind, owner, of, first, count, size, place in self.runs.tolist():
            if (of_kind, owner, of) == (kind[0], segment, group) and first <= block < first + count:
                return self.manifest["arrays"][place], size
        raise KeyError(block)


def last_change(
    files: Any, segment: int, group: int, arrays: dict[str, np.ndarray], row: tuple[int, int], first: int
) -> int:
    """Return the commit that last changed a row of a block."""
    block, at = row
    if f"oldest/{group}" not in arrays:
        return first
    if arrays[f"changed/{group}"].size:
        return int(files.changed(segment, group, block)[at])
    return int(arrays[f"oldest/{group}"][block])


def read_table(
    path: Path, groups: list[list[str]], widths: list[int], table: str
) -> dict[int, tuple[list[bytes], int]]:
    """Return the fields and the last change of every live row of a table by key, at the newest commit.

    That commit was taken before a pass. ``groups`` has the names of the tables of each group, ``widths`` the numbers in
    each field of the table's rows. Numbers of bfloat16 are given as their bits.
    """
    engine = json.loads((path / "store.json").read_text())["engine"]
    files: Any = {"lmdb": LmdbFiles, "zarr": ZarrFiles}[engine](path)
    newest = max(int(name[7:]) for name in files.records if name.startswith("commit/"))
    spec = next(one for one in read_record(files.records["tables"])[0]["tables"] if one["name"] == table)
    form = [(width, "<f4") for width in widths]
    form[0] = widths[0], {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[spec["dtype"]]
    commit, _ = read_record(files.records[f"commit/{newest}"])
    group = next(i for i, names in enumerate(groups) if table in names)
    place, found = groups[group].index(table), dict[int, tuple[list[bytes], int]]()
    settled = {id_: groups_[group][0] for id_, *groups_ in commit.get("settled", [])}
    for segment, first in commit["segments"]:  # the newest last, so that its rows replace stale ones
        values, arrays = read_record(files.records[f"segment/{segment}"])
        stream, row = values["streams"][group], 0
        for index, (use, *rows) in enumerate(stream["ranges"]):
            low, row = row + sum(rows[:place]), row + sum(rows)
            live = index >= settled[segment] if segment in settled else use >= commit["cursor"][0]
            for at in range(low, low + rows[place]) if live else ():
                block, i = divmod(at, stream["block_bytes"] // stream["row_bytes"])
                keys, *fields = files.rows(segment, group, stream, form, block)
                changed = last_change(files, segment, group, arrays, (block, i), first)
                found[int(keys[i])] = [field[i].tobytes() for field in fields], changed
    return found
