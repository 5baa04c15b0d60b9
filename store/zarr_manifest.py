"""What a commit of ``ZarrEngine`` names: the one object that makes it whole."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.store.blocks import CHANGED, KEYS, ROWS
from tiercache.store.errors import CorruptStoreError, StoreError
from tiercache.store.record import decode, encode
from tiercache.store.table import COMPRESSIONS
from tiercache.store.zarr_arrays import Arrays

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

_NAME = struct.Struct(">cqII")
"""The form of ``block_name``, with owners as the signed integers of a column."""
_COLUMNS = 7
MOST_BLOCKS = 1 << 22
"""The most that a manifest names, which takes half a gigabyte to read: a lie must not take more."""


class RecordObject(NamedTuple):
    """Where a record stands, and what its bytes must be."""

    key: str
    size: int
    checksum: int


class BlockObjects(NamedTuple):
    """Where a block stands: in chunks of ``arrays``, or in an object of its own."""

    size: int
    version: int
    """Counts blocks of one name that were on the disk together: the names of their objects differ by it."""
    arrays: Arrays | None
    lengths: tuple[int, ...] = ()
    """Bytes of its objects where they are compressed."""

    def chunks(self, name: bytes) -> Iterator[tuple[str, int]]:
        """Yield name and bytes of every object of the block called ``name``."""
        if self.arrays is None:
            yield f"blocks/{name.hex()}" + (f"~{self.version}" if self.version else ""), self.size
        else:
            _, _, _, index = _NAME.unpack(name)
            chunks = self.arrays.chunks(index, name[:1])
            for i, (key, size) in enumerate(chunks):
                yield key, self.lengths[i] if self.lengths else size

    def room(self, name: bytes) -> int:
        """Return the bytes that its objects take, a last chunk's zeros too; compressed ones mostly take fewer."""
        if self.arrays is not None and self.arrays.compression is not None:
            return self.size
        return sum(size for _, size in self.chunks(name))

    def with_lengths(self, name: bytes, sizes: Mapping[str, int | None]) -> BlockObjects:
        """Return the same with the bytes of its objects, which ``sizes`` has, where these are compressed."""
        if self.arrays is None or self.arrays.compression is None:
            return self
        return self._replace(lengths=tuple(sizes[key] or 0 for key, _ in self.chunks(name)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All records and blocks of a commit."""

    number: int
    """Counts the commits of an engine; the newest whole manifest is the commit."""
    records: dict[str, RecordObject] = field(default_factory=dict)
    blocks: dict[bytes, BlockObjects] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name of its object."""
        return f"manifests/{self.number}"

    def named(self) -> dict[str, int | None]:
        """Return name and bytes (None: any) of every object that it names, itself too."""
        named: dict[str, int | None] = {self.key: None}
        named |= {record.key: record.size for record in self.records.values()}
        for name, block in self.blocks.items():
            named |= dict(block.chunks(name))
        for arrays in _arrays(self.blocks):
            named |= dict.fromkeys(arrays.node_keys())
        return named

    def damaged(self, listed: Mapping[str, int | None]) -> dict[bytes, int | None]:
        """Return the blocks with objects missing (None) or of another length (bytes that are there).

        ``listed`` has the objects that are there, with their bytes where these are known.
        """
        wrong: dict[bytes, int | None] = {}
        for name, block in self.blocks.items():
            lacking = 0
            for key, size in block.chunks(name):
                if key not in listed:
                    wrong[name] = None
                    break
                seen = listed[key]
                lacking += 0 if seen is None else size - seen
            else:
                if lacking:
                    wrong[name] = max(0, block.size - lacking)
        return wrong

    def to_bytes(self) -> bytes:
        """Return its object: a record (see docs/format.md). Raises StoreError for more blocks than could be read."""
        if len(self.blocks) > MOST_BLOCKS:
            raise StoreError(
                f"a commit names {len(self.blocks):,} blocks and may name {MOST_BLOCKS:,}: dump larger blocks"
            )
        arrays = list(_arrays(self.blocks))
        values = {
            "number": self.number,
            "records": {name: list(record) for name, record in self.records.items()},
            "arrays": [_array_values(a) for a in arrays],
            "blocks": [[n.hex(), b.size, b.version] for n, b in sorted(self.blocks.items()) if not _regular(n, b)],
        }
        runs = list(_runs(self.blocks, arrays))
        columns = {"runs": np.array(runs, np.int64).reshape(-1)}
        lengths = [size for name, block in sorted(self.blocks.items()) for size in block.lengths]
        if any(a.compression for a in arrays):
            columns["lengths"] = np.array(lengths, np.int64)
        return encode("manifest", values, columns)

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Manifest:
        """Read what ``to_bytes`` wrote. Raises CorruptStoreError that calls it ``name``."""
        values, found = decode("manifest", data, name)
        try:
            arrays = [
                Arrays(
                    folder=_folder(folder),
                    rows=_positive(rows),
                    chunk_rows=_positive(chunk_rows),
                    fields=_fields(fields),
                    **_compressed(chunk_rows, *how),
                )
                for folder, rows, chunk_rows, fields, *how in values["arrays"]
            ]
            records = {
                str(name): RecordObject(_record(key), _whole(size), _whole(checksum))
                for name, (key, size, checksum) in values["records"].items()
            }
            blocks = {
                bytes.fromhex(name): BlockObjects(_whole(size), _whole(version), None)
                for name, size, version in values["blocks"]
            }
            lengths = found["lengths"].tolist() if "lengths" in found else []
            blocks |= _expand(found["runs"].reshape(-1, _COLUMNS), arrays, lengths)
            return cls(number=_whole(values["number"]), records=records, blocks=blocks)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, struct.error, OverflowError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error}): restore the store from a copy") from error


def manifest_numbers(keys: Iterable[str]) -> list[int]:
    """Return the numbers of the manifests among the names of objects."""
    return [int(key[10:]) for key in keys if key.startswith("manifests/") and key[10:].isdecimal()]


def record_numbers(keys: Iterable[str]) -> list[int]:
    """Return the numbers of the commits that wrote records, whether they ended or not, among the names of objects."""
    found = (key[8:].partition(".")[0] for key in keys if key.startswith("records/"))
    return [int(number) for number in found if number.isdecimal()]


def _regular(name: bytes, block: BlockObjects) -> bool:
    """Whether the name is one of ``block_name``, so that neighbors are written as runs."""
    return block.arrays is not None or (len(name) == _NAME.size and name[1] < 128)


def _arrays(blocks: Mapping[bytes, BlockObjects]) -> dict[Arrays, None]:
    """Return all arrays that blocks stand in, each once; most blocks share the object with others, which is faster."""
    return dict.fromkeys({id(b.arrays): b.arrays for b in blocks.values() if b.arrays is not None}.values())


def _runs(blocks: dict[bytes, BlockObjects], arrays: list[Arrays]) -> Iterator[tuple[int, ...]]:
    """Yield (kind, owner, group, first block, blocks, bytes of each, arrays or -1 - version) of neighbors alike."""
    rows, place = [], {a: i for i, a in enumerate(arrays)}
    known: dict[int, int] = {}
    for name, block in sorted(blocks.items()):
        if _regular(name, block):
            kind, owner, group, index = _NAME.unpack(name)
            if block.arrays is None:
                where = -1 - block.version
            elif (where := known.get(id(block.arrays), -1)) < 0:
                where = known[id(block.arrays)] = place[block.arrays]
            rows.append((kind[0], owner, group, index, block.size, where))
    for _, same in groupby(enumerate(rows), lambda pair: (*pair[1][:3], pair[1][3] - pair[0], *pair[1][4:])):
        run = [row for _, row in same]
        kind, owner, group, first, size, where = run[0]
        yield kind, owner, group, first, len(run), size, where


def _expand(runs: NDArray[Any], arrays: list[Arrays], lengths: list[int]) -> dict[bytes, BlockObjects]:
    if int(runs[:, 4].clip(0, MOST_BLOCKS + 1).sum()) > MOST_BLOCKS:
        raise ValueError(f"it names more than {MOST_BLOCKS:,} blocks")
    blocks, at = {}, 0
    for kind, owner, group, first, count, size, where in runs.tolist():
        block = BlockObjects(_whole(size), 0, arrays[where]) if where >= 0 else BlockObjects(size, -1 - where, None)
        if where >= 0 and bytes([kind]) not in {ROWS, KEYS, CHANGED}:
            raise ValueError(f"blocks of kind {kind} stand in arrays")
        objects = 0
        if block.arrays is not None and block.arrays.compression:
            objects = len(block.arrays.row_bytes(bytes([kind])))
        for index in range(first, first + count):
            if objects:
                block = block._replace(lengths=tuple(_whole(length) for length in lengths[at : at + objects]))
                at += objects
            blocks[_NAME.pack(bytes([kind]), owner, group, index)] = block
    if at != len(lengths):
        raise ValueError(f"it has the lengths of {len(lengths)} objects that are compressed, and names {at}")
    return blocks


def _array_values(arrays: Arrays) -> list[Any]:
    """Return the JSON values of arrays; those without compression do not speak of it."""
    values: list[Any] = [arrays.folder, arrays.rows, arrays.chunk_rows, [list(f) for f in arrays.fields]]
    return values if arrays.compression is None else [*values, arrays.compression, arrays.inner_rows]


def _compressed(chunk_rows: int, compression: Any = None, inner_rows: Any = 0) -> dict[str, Any]:
    """Return what arrays have beside the rest where they are compressed."""
    if compression is None:
        return {}
    if compression not in COMPRESSIONS or not _whole(inner_rows) or chunk_rows % inner_rows:
        raise ValueError(f"{compression!r} of {inner_rows!r} rows is no compression of chunks of {chunk_rows}")
    return {"compression": str(compression), "inner_rows": _whole(inner_rows)}


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no size or number")
    return value


def _positive(value: Any) -> int:
    if not _whole(value):
        raise ValueError("arrays have at least one row and one field, and fields at least a byte")
    return _whole(value)


def _folder(value: Any) -> str:
    """Return the folder of a stream's arrays, which cannot leave that of the segments."""
    match str(value).split("/"):
        case ["segments", segment, group] if segment.replace("~", "", 1).isdecimal() and group.isdecimal():
            return str(value)
    raise ValueError(f"{value!r} is no folder of arrays")


def _fields(values: Any) -> tuple[tuple[str, int], ...]:
    """Return names and bytes of fields; rows without any would leave chunks that nothing names."""
    _positive(len(values))
    for name, _ in values:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{name!r} is no field")
    return tuple((name, _positive(size)) for name, size in values)


def _record(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("records/") or not value[8:].replace(".", "", 1).isdecimal():
        raise ValueError(f"{value!r} is no object of a record")
    return value
