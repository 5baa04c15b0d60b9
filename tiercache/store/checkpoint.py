"""Rows that start as rows of a released checkpoint: read from its files when they are first used.

Row k of a table starts as row k of the tensor. A store records sizes and headers of the files and the checksum of every
chunk that it read, in a file of its folder (docs/format/store.md, "Checkpoints"), so that it refuses other files.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from tiercache.store.bits import from_bits, nearest, row_beyond, xxh64
from tiercache.store.initializer import Checkpoint
from tiercache.store.records import decode, encode, page_checksums
from tiercache.store.store_errors import CheckpointError, damaged, parsing
from tiercache.store.tensor_file import CHUNK_BYTES, FileIdentity, Reads, Sums, TensorFile, find_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.files import Note, Notes
    from tiercache.store.table import Table
    from tiercache.store.tensor_file import Checksums

    Floats = NDArray[np.float32]
    _Place = tuple[str, Checkpoint]
    """A path, and the entry there."""

PREFIX = "checkpoint-"
_SAMPLED_CHUNKS = 64
_LAST_SHARED = -(1 << 63) + 1
"""The largest key of a row that keys share: the rows of rare keys and of null."""
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LOCK = threading.Lock()
_OPEN: WeakValueDictionary[_Place, CheckpointTensor] = WeakValueDictionary()
_RECORDS: dict[_Place, WeakSet[CheckpointRecord]] = {}
"""Records of open stores; every reader of a tensor compares and completes them."""
RECORD_BYTES = 25
"""Bytes per chunk of a record: 5 that stay, and copies while it is saved."""


class _Part:
    """Rows of a tensor in one file, with their scales if they are 8-bit numbers."""

    def __init__(self, values: TensorFile, scale: TensorFile | None, block: tuple[int, int] | None) -> None:
        if len(values.shape) != 2:
            raise CheckpointError(f"{values.label} has shape {list(values.shape)}: expected 2 dimensions")
        self.values, self.scale = values, scale
        self.num_rows, self.dim = values.shape
        if scale is not None:
            if scale.dtype not in _DTYPES or len(scale.shape) > 2:
                raise CheckpointError(f"{scale.label} has dtype {scale.dtype} and shape {list(scale.shape)}: no scales")
            shape = scale.shape if len(scale.shape) == 2 else (scale.shape[0], 1)
            if len(scale.shape) == 1 < scale.shape[0]:  # a vector has scales of rows; of columns it would fit too
                block = block or (1, self.dim)
            self._columns = shape[1]
            self._rows_of_scale, self._columns_of_scale = (
                _block(numbers, scales, size, scale)
                for numbers, scales, size in zip(values.shape, shape, block or (None, None), strict=True)
            )

    @property
    def files(self) -> list[TensorFile]:
        """Its tensors."""
        return [self.values] if self.scale is None else [self.values, self.scale]

    def vectors(
        self, rows: NDArray[np.int64], sums: Sequence[Sequence[Sums]], checksums: Checksums
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8], Floats | None, Reads]]:
        """Yield as `CheckpointTensor.vectors`; sums: for each of ``files``."""
        for index, raw, reads in self.values.rows(rows, sums[0], checksums):
            if self.scale is None:
                yield index, raw, None, reads
                continue
            scales, more = self._scales(self.scale, rows[index], sums[1], checksums)
            yield index, raw, eight_bit_values(self.values.dtype)[raw] * scales, reads.plus(more)

    def _scales(
        self, scale: TensorFile, rows: NDArray[np.int64], sums: Sequence[Sums], checksums: Checksums
    ) -> tuple[Floats, Reads]:
        """Return the scale of each number of rows."""
        unique, place = np.unique(rows // self._rows_of_scale, return_inverse=True)
        flat, is_table = unique, len(scale.shape) == 2
        if not is_table:
            flat = (unique[:, None] * self._columns + np.arange(self._columns)).ravel()
        found, reads = np.empty((unique.size, self._columns), np.float32), Reads()
        by_row = found if is_table else found.reshape(-1, 1)
        for index, raw, more in scale.rows(flat, sums, checksums):
            dtype = _DTYPES[scale.dtype]
            by_row[index] = raw.view(np.float32) if dtype == "float32" else from_bits(raw.view(np.uint16), dtype)
            reads = reads.plus(more)
        return np.repeat(found[place], self._columns_of_scale, axis=1)[:, : self.dim], reads


class CheckpointTensor:
    """A tensor (rows, columns), whole or cut by rows into several."""

    def __init__(self, start: Checkpoint) -> None:
        values = find_tensors(start.path, start.tensor)
        self.name = start.tensor
        self.label, dtype = values[0].label, values[0].dtype
        """The tensor, the first one of several, in the words of a message."""
        self.dtype = _DTYPES.get(dtype)
        """The dtype of its numbers; None: 8-bit floats with scales."""
        scales: Sequence[TensorFile | None] = [None] * len(values)
        if self.dtype is None:
            scales = self._scales(start, len(values))
        elif start.scale is not None or start.scale_block is not None:
            raise CheckpointError(f"{self.label} has dtype {dtype}, which takes no scale: leave it out")
        self.parts = [_Part(*pair, start.scale_block) for pair in zip(values, scales, strict=True)]
        self.dim = self.parts[0].dim
        for part in self.parts:
            if (part.dim, part.values.dtype) != (self.dim, dtype):
                raise CheckpointError(
                    f"{part.values.label} has {part.dim} columns of {part.values.dtype}, but {self.label} has "
                    f"{self.dim} of {dtype}: expected parts of one tensor"
                )
        self.starts = np.cumsum([0, *(part.num_rows for part in self.parts)])
        """The first row of each part, and after the last the number of rows."""
        self.num_rows = int(self.starts[-1])
        self.files = [file for part in self.parts for file in part.files]

    def _scales(self, start: Checkpoint, count: int) -> list[TensorFile]:
        try:
            found = find_tensors(start.path, start.scale or f"{start.tensor}_scale_inv")
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.label} has 8-bit numbers and needs the tensor of their scales: pass its name as scale ({error})"
            ) from error
        if len(found) != count:
            raise CheckpointError(f"{self.label} is one of {count} tensors, but there are {len(found)} of scales")
        return found

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        return self.parts[0].values.row_bytes

    @property
    def identities(self) -> list[FileIdentity]:
        """The identities of its files."""
        return [file.identity for file in self.files]

    def vectors(
        self, keys: NDArray[np.int64], records: Iterable[CheckpointRecord], checksums: Checksums
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8], Floats | None, Reads]]:
        """Yield the vectors of keys (n,) in the order of the files, each once.

        Yields indices (m,) into ``keys``, raw bytes (m, row bytes), their numbers (m, columns) if the bytes are 8-bit
        floats, and what was read.
        """
        records = [*records]
        sums_F = [[record.sums[f] for record in records] for f in range(len(self.files))]
        if len(self.parts) == 1:
            yield from self.parts[0].vectors(keys, sums_F, checksums)
            return
        order = np.argsort(keys, kind="stable")
        cuts, first = np.searchsorted(keys, self.starts, sorter=order).tolist(), 0
        for part, start, low, high in zip(self.parts, self.starts.tolist(), cuts, cuts[1:], strict=False):
            of_part, first = slice(first, first + len(part.files)), first + len(part.files)
            if low < high:
                rows = keys[order[low:high]] - start
                for index, raw, values, reads in part.vectors(rows, sums_F[of_part], checksums):
                    yield order[low:high][index], raw, values, reads

    def numbers(self, raw: NDArray[np.uint8], values: Floats | None) -> Floats:
        """Return the numbers (m, columns) of what ``vectors`` yields."""
        if values is not None:
            return values
        assert self.dtype is not None, "8-bit numbers have values"
        return raw.view(np.float32).copy() if self.dtype == "float32" else from_bits(raw.view(np.uint16), self.dtype)


class CheckpointRecord:
    """The identity of one table's checkpoint as a store first read it, with the checksums of its chunks.

    It is saved before every commit that follows a first read. It is of the files and not of a commit: it stays when a
    commit is rolled back or never comes.
    """

    def __init__(self, table: Table, notes: Notes | None) -> None:
        """notes: of the store or of a rank; None: nothing is saved. Raises StoreError, CorruptStoreError."""
        assert isinstance(table.initializer, Checkpoint), table
        self.start, self.name, self.sums = table.initializer, table.name, list[Sums]()
        of_tensor = xxh64(f"{self.start.tensor}\0{self.start.scale or ''}".encode())
        self.note, self._notes = f"{PREFIX}{table.table_id:016x}-{of_tensor:016x}", notes
        self.identities: list[FileIdentity] | None = None
        """The identities of the files; None before they are read."""
        self._tensor: CheckpointTensor | None = None
        self._saved: object = None
        """The version of the note as it was read or written last."""
        if notes is not None and (note := notes.read(self.note)) is not None:
            self._load(note, notes)
        with _LOCK:
            place = self.start.path, self.start
            if (tensor := _OPEN.get(place)) is not None and _RECORDS.get(place):
                self.know(tensor)
            _RECORDS.setdefault(place, WeakSet()).add(self)

    def know(self, tensor: CheckpointTensor) -> None:
        """Keep a tensor open, and note its identity. Raises CheckpointError if the record is of another one."""
        if self.identities is not None and self.identities != tensor.identities:
            for file, expected in zip(tensor.files, self.identities, strict=False):
                if file.identity != expected:
                    raise CheckpointError(
                        f"the checkpoint {file.path} is not the one that table {self.name!r} started from: it has "
                        f"{file.identity.size:,} bytes and header {file.identity.header[:12]}, expected "
                        f"{expected.size:,} and {expected.header[:12]}: restore the original file, or, if new rows "
                        f"should start from this one, delete {self.label}"
                    )
            raise CheckpointError(f"{tensor.label} has other parts than the one that table {self.name!r} started from")
        if self.identities is None:
            self.identities, self.sums = tensor.identities, [Sums.empty(file.num_chunks) for file in tensor.files]
            self.sums[0].changed = True
        elif [one.crc_C.size for one in self.sums] != [file.num_chunks for file in tensor.files]:
            raise damaged(f"{self.label} has checksums of other tensors")
        self._tensor = tensor

    def close(self) -> None:
        """Let other stores open other files at the same path."""
        self._tensor = None
        with _LOCK:
            _RECORDS[self.start.path, self.start].discard(self)

    def check(self, tensor: CheckpointTensor) -> None:
        """Compare a sample of the chunks that were read with the files of a tensor. Raises CheckpointError."""
        for file, sums in zip(tensor.files, self.sums, strict=True):
            file.sample(sums, _SAMPLED_CHUNKS)

    def check_all(self) -> int:
        """Read the whole tensor, compare known chunks, note the others; returns its bytes. Raises CheckpointError."""
        tensor, _ = _opened(self.start)
        for file, sums in zip(tensor.files, self.sums, strict=True):
            file.read_all(sums)
        return sum(file.size for file in tensor.files)

    def take(self, other: CheckpointRecord) -> None:
        """Add the chunks of another record of the tensor. Raises CheckpointError if they differ."""
        if other.identities is None:
            return
        if self.identities is None:
            self.identities, self.sums = other.identities, [Sums.empty(one.crc_C.size) for one in other.sums]
        if self.identities != other.identities or not all(map(Sums.take, self.sums, other.sums)):
            raise CheckpointError(
                f"two records of the checkpoint of table {self.name!r} differ, {self.label} and {other.label}: they "
                "were made of different files, so delete the wrong one"
            )

    def save(self) -> None:
        """Write it, durably, if a chunk was read for the first time. Raises StoreError, also of a full disk."""
        notes = self._notes
        if notes is None or not any(one.changed for one in self.sums):
            return
        assert self.identities is not None, "it has sums"
        if notes.version(self.note) not in {None, self._saved}:  # another process verified the tensor
            self.take(self._read(notes))
        for one in self.sums:
            one.changed = False
        arrays: dict[str, NDArray[Any]] = {}
        for number, one in enumerate(self.sums):
            known = one.known_C.copy()  # chunks that a reader adds meanwhile are of the next save
            bits = np.zeros(-(-known.size // 32) * 4, np.uint8)
            bits[: -(-known.size // 8)] = np.packbits(known)
            arrays |= {f"crc{number}": np.where(known, one.crc_C, np.uint32(0)), f"known{number}": bits.view("<u4")}
        values = {
            "table": self.name, "tensor": self.start.tensor, "chunk_bytes": CHUNK_BYTES,
            "files": [[*identity, one.crc_C.size] for identity, one in zip(self.identities, self.sums, strict=True)],
        }  # fmt: skip
        try:
            self._saved = notes.write(self.note, encode("checkpoint", values, arrays))
        except BaseException:
            self.sums[0].changed = True
            raise

    @property
    def label(self) -> str:
        """Its place in the words of a message."""
        return f"the record of table {self.name!r}" if self._notes is None else self._notes.label(self.note)

    def _read(self, notes: Notes) -> CheckpointRecord:
        """Return what was written last."""
        found = object.__new__(CheckpointRecord)
        found.name, found.note, found._notes, found.sums, found.identities = self.name, self.note, notes, [], None
        if (note := notes.read(self.note)) is not None:
            found._load(note, notes)
        return found

    def _load(self, note: Note, notes: Notes) -> None:
        self._saved, label = note.version, notes.label(self.note)
        values, arrays = decode("checkpoint", note.data, label)
        with parsing(label):
            if values["chunk_bytes"] != CHUNK_BYTES:
                raise ValueError(f"its chunks have {values['chunk_bytes']} bytes")
            self.identities = [FileIdentity(int(size), str(header)) for size, header, _ in values["files"]]
            for number, (_, _, chunks) in enumerate(values["files"]):
                known = np.unpackbits(arrays[f"known{number}"].view(np.uint8))[:chunks].astype(np.bool_)
                crc = arrays[f"crc{number}"].astype(np.uint32)
                if not crc.size == known.size == chunks:
                    raise ValueError(f"it has {crc.size} sums of {chunks} chunks")
                self.sums.append(Sums(crc, known))


def checkpoint_records(
    tables: Iterable[Table], notes: Notes | None, before: dict[str, CheckpointRecord]
) -> dict[str, CheckpointRecord]:
    """Return the record of each table that starts from a checkpoint; those of ``before`` if they are the same."""
    found = {}
    for table in tables:
        if isinstance(table.initializer, Checkpoint):
            one = before.get(table.name)
            start = table.initializer
            same = one is not None and (one.start.path, one.start) == (start.path, start)
            found[table.name] = one if one is not None and same else CheckpointRecord(table, notes)
    return found


def tensor_sizes(tables: Iterable[Table]) -> dict[str, tuple[int, int, int]]:
    """Return, for each table that starts from a checkpoint, the rows of its tensor, bytes of a row, and bytes of its
    record.

    Raises CheckpointError unless its files are there, and fit the table.
    """
    found = {}
    for table in tables:
        if isinstance(table.initializer, Checkpoint):
            tensor = checkpoint_tensor(table)
            chunks = sum(file.num_chunks for file in tensor.files)
            found[table.name] = tensor.num_rows, tensor.row_bytes, RECORD_BYTES * chunks
    return found


def checkpoint_tensor(table: Table) -> CheckpointTensor:
    """Return the tensor that the rows of a table start as. Raises CheckpointError."""
    return _opened_for(table)[0]


def _opened_for(table: Table) -> tuple[CheckpointTensor, list[CheckpointRecord]]:
    assert isinstance(table.initializer, Checkpoint), table
    tensor, records = _opened(table.initializer)
    dim = table.dim if table.whole_dim is None else table.whole_dim
    if tensor.dim != dim:
        raise CheckpointError(
            f"{tensor.label} has {tensor.dim} columns, but table {table.name!r} has dim {dim}: use the dim of "
            "the tensor for the table"
        )
    return tensor, records


def checkpoint_vectors(
    table: Table,
    keys: NDArray[np.int64],
    put: Callable[[NDArray[np.int64], NDArray[np.uint8], Floats | None], None],
    checksums: Checksums = page_checksums,
) -> Reads:
    """Call ``put(index (m,), raw (m, bytes), vectors (m, dim))`` until each of ``keys`` (n,) was among the indices.

    ``raw``: the bytes of vectors of the table's dtype, and ``vectors`` None, if the tensor has that dtype; else
    ``vectors`` are float32, not rounded. Raises CheckpointError, also for keys that the tensor has no row for.
    """
    (tensor, records), columns = _opened_for(table), slice(table.first_column, table.first_column + table.dim)
    outside = (keys < 0) | (keys >= tensor.num_rows)
    if (keys <= _LAST_SHARED).any():
        raise CheckpointError(
            f"table {table.name!r} has a row that rare keys or nulls share, but {tensor.label} has none: omit "
            'min_count and null = "embed"'
        )
    if outside.any():
        raise CheckpointError(
            f"table {table.name!r} has key {int(keys[np.argmax(outside)])}, but {tensor.label} has "
            f"{tensor.num_rows:,} rows: expected keys from 0 to {tensor.num_rows - 1:,}"
        )
    reads = Reads()
    same = tensor.dtype == table.dtype
    for index, raw, values, more in tensor.vectors(keys, records, checksums):
        if same:
            item = raw.shape[1] // tensor.dim
            put(index, raw[:, columns.start * item : columns.stop * item], None)
        else:
            vectors = np.ascontiguousarray(tensor.numbers(raw, values)[:, columns])
            if (bad := row_beyond(vectors, table.dtype)) is not None:
                raise CheckpointError(
                    f"row {int(keys[index[bad]])} of {tensor.label} has a number that is infinite in {table.dtype}: "
                    f"choose another dtype for table {table.name!r}"
                )
            put(index, raw, vectors)
        reads = reads.plus(more)
    return reads


def initial_checkpoint_vectors(table: Table, keys: NDArray[np.int64]) -> Floats:
    """Return the first vectors (n, dim) of keys (n,), rounded to the nearest of the table's dtype."""
    out = np.empty((keys.size, table.dim), np.float32)

    def put(index: NDArray[np.int64], raw: NDArray[np.uint8], vectors: Floats | None) -> None:
        if vectors is None:
            raw = np.ascontiguousarray(raw)
            out[index] = raw.view(np.float32) if table.dtype == "float32" else from_bits(raw.view("<u2"), table.dtype)
        else:
            out[index] = nearest(vectors, table.dtype)

    checkpoint_vectors(table, np.ascontiguousarray(keys, np.int64), put)
    return out


def _opened(start: Checkpoint) -> tuple[CheckpointTensor, list[CheckpointRecord]]:
    """Return a tensor, open while an open store has a table that starts from it, and the records to compare with."""
    place = start.path, start
    with _LOCK:
        records, tensor = [*_RECORDS.get(place, ())], _OPEN.get(place)
        if tensor is None or not records:
            tensor = CheckpointTensor(start)
            for record in records:
                record.know(tensor)
            _OPEN[place] = tensor
    for file in {file.path: file for file in tensor.files}.values():
        file.check_unchanged()
    return tensor, records


def moved_with(tables: Sequence[Table], stored: Iterable[Table]) -> tuple[Table, ...]:
    """Return tables with the checkpoint paths of the same tables in ``stored``: files may have moved."""
    paths = {one.name: one.initializer for one in stored if isinstance(one.initializer, Checkpoint)}
    return tuple(
        replace(one, initializer=paths[one.name]) if paths.get(one.name) == one.initializer else one for one in tables
    )


@cache
def eight_bit_values(dtype: str) -> Floats:
    """Return the 256 numbers of an 8-bit float: E4M3 (without infinities) or E5M2 (Micikevicius et al., 2022)."""
    if dtype == "F8_E5M2":  # the upper byte of a float16
        return (np.arange(256, dtype=np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[codes & 127 == 127] = np.nan
    return np.where(codes >> 7, -values, values).astype(np.float32)


def _block(numbers: int, scales: int, size: int | None, scale: TensorFile) -> int:
    """Return how many numbers share a scale: ``size``, or the only one of a power of two and equal parts that fits."""
    if size is not None:
        found = {size}
    elif scales == 1:
        found = {numbers}
    else:
        found = {1 << bit for bit in range(numbers.bit_length())}
        found |= {numbers // scales} if numbers % scales == 0 else set()
    found = {one for one in found if -(-numbers // one) == scales}
    if len(found) == 1:
        return found.pop()
    seen = f"blocks of {' or '.join(map(str, sorted(found)))} fit" if found else "no block fits"
    raise CheckpointError(
        f"{scale.label} has {scales} scales for {numbers} numbers, and {seen}: pass scale_block = [rows, columns]"
    )
