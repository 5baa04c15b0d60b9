"""Records, layouts, maps and hashes, from docs/format alone: without tiercache code."""

import json
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

PAGE_BYTES = 4096
KEY_PAGE_ROWS = 1024
META_CHUNK_BYTES = 16 << 10
"""Chunk size of an array after the head of a segment's metadata, with one checksum each."""
DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
ALL = (1 << 64) - 1
PRIMES = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip
"""Constants of XXH64."""

Values = dict[str, Any]
Arrays = dict[str, np.ndarray]


class Layout(NamedTuple):
    """The layout of the rows of a group in a segment."""

    rows: int
    block_rows: int
    page_rows: int
    row_bytes: int
    counts: np.ndarray
    """Rows by range and table, (ranges, tables)."""
    next_use: np.ndarray
    tables: list[str]
    fields: list[tuple[str, int, str]]
    """Name, numbers and dtype of each field of a row."""

    @classmethod
    def of(cls, values: Values, arrays: Arrays, group: int) -> "Layout":
        """Return the layout of a group, from the record of a segment."""
        tables = values["tables"]
        counts = arrays[f"table_rows/{group}"].astype(np.int64).reshape(-1, len(tables))
        fields = [(name, width, DTYPES[dtype]) for name, dtype, width in values["fields"]]
        block_rows = values["block_bytes"] // values["row_bytes"]
        layout = cls(
            int(counts.sum()), block_rows, values["page_rows"], values["row_bytes"], counts,
            arrays[f"next_use/{group}"], tables, fields,
        )  # fmt: skip
        assert layout.row_bytes == sum(field_bytes(width, dtype) for _, width, dtype in fields)
        return layout

    def block(self, index: int) -> tuple[int, int]:
        """Return the first row of a block, and the one after its last."""
        return index * self.block_rows, min((index + 1) * self.block_rows, self.rows)

    def pages(self) -> list[int]:
        """Return the first row of each page, and the number of rows."""
        return cuts(self.counts.sum(axis=1).tolist(), self.page_rows, self.block_rows)

    def key_pages(self) -> list[int]:
        """Return the first row of each key page, and the number of rows."""
        return cuts([self.rows], KEY_PAGE_ROWS, self.block_rows)


def cuts(runs: Iterable[int], most: int, block_rows: int) -> list[int]:
    """Cut runs of rows every ``most`` rows and at the ends of blocks; return the cuts, from 0 to all rows."""
    found, row = [0], 0
    for count in runs:
        end = row + count
        while row < end:
            row = min(row + most, end, (row // block_rows + 1) * block_rows)
            found.append(row)
    return found


def field_bytes(width: int, dtype: str) -> int:
    """Return the bytes of a field in a row: whole words of 4 bytes."""
    return -(-width * np.dtype(dtype).itemsize // 4) * 4


def paged(size: int) -> int:
    """Return bytes rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def read_record(kind: str, data: bytes) -> tuple[Values, Arrays]:
    """Return values and arrays of a record of ``kind``."""
    assert data[:4] == b"TCR1"
    assert struct.unpack("<I", data[-4:])[0] == google_crc32c.value(data[:-4])
    size = struct.unpack_from("<I", data, 4)[0]
    header, at, arrays = json.loads(data[8 : 8 + size]), 8 + size, {}
    assert header["kind"] == kind
    for name, dtype, length in header["arrays"]:
        arrays[name] = np.frombuffer(data, dtype, length, at)
        at += arrays[name].nbytes
    assert at + 4 == len(data)
    return header["values"], arrays


def check(sums: np.ndarray, index: int, data: bytes) -> None:
    """Assert that bytes have a checksum."""
    assert int(sums[index]) == google_crc32c.value(data), index


def read_arrays(described: list[tuple[str, str, int]], sums: np.ndarray, data: bytes) -> Arrays:
    """Return the arrays after the head of a segment's metadata."""
    arrays, at, chunk = {}, 0, 0
    for name, dtype, size in described:
        end = at + size * np.dtype(dtype).itemsize
        arrays[name] = np.frombuffer(data[at:end], dtype)
        for begin in range(at, end, META_CHUNK_BYTES):
            check(sums, chunk, data[begin : min(begin + META_CHUNK_BYTES, end)])
            chunk += 1
        at = -(-end // 8) * 8
    assert (at, chunk) == (len(data), len(sums))
    return arrays


def ranges_of(hash_: int, about: list[int], arrays: Arrays, group: int) -> list[int]:
    """Return the ranges that may have a key, by the key map of a group."""
    bucket_bits, range_bits, entry_bytes = about
    print_bits = min(8 * entry_bytes - range_bits, 32 - bucket_bits)
    low = hash_ & 0xFFFFFFFF
    bucket = low >> (32 - bucket_bits)
    fingerprint = low >> (32 - bucket_bits - print_bits) & ((1 << print_bits) - 1)
    counts = arrays[f"map_counts/{group}"]
    start = int(arrays[f"map_starts/{group}"][bucket // 64]) + int(counts[bucket // 64 * 64 : bucket].sum())
    found = []
    for i in range(start, start + int(counts[bucket])):
        entry = int.from_bytes(arrays[f"map/{group}"][i * entry_bytes : (i + 1) * entry_bytes].tobytes(), "little")
        if entry >> range_bits == fingerprint:
            found.append(entry & ((1 << range_bits) - 1))
    return found


def key_hash(key: int, table: str) -> int:
    """Return the hash of a key of a table."""
    x = (key ^ xxh64(table.encode())) & ALL
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & ALL
    x = (x ^ x >> 27) * 0x94D049BB133111EB & ALL
    return x ^ x >> 31


def altered(key: int, fields: tuple[bytes, ...], before: Values, after: Values) -> tuple[bytes, ...]:
    """Return the fields of a row, without padding, after one alteration of its table."""
    new = initial_vector(key, after) if after["dim"] > before["dim"] else fields[0]
    vector = fields[0] + new[len(fields[0]) :]
    kind, widths = state_of(after)
    start = struct.pack("<f", after["optimizer"].get("initial_accumulator", 0.0))
    states = fields[1:] if kind == state_of(before)[0] else [b""] * len(widths)
    return vector, *(state + start * (width - len(state) // 4) for state, width in zip(states, widths, strict=True))


def state_of(table: Values) -> tuple[str, list[int]]:
    """Return the kind of a table's state, and the numbers per row of each state."""
    dim, optimizer = table["dim"], table["optimizer"]
    kind = "momentum" if optimizer.get("momentum") else optimizer["kind"]
    return kind, {
        "sgd": [], "momentum": [dim], "adagrad": [dim], "rowwise_adagrad": [1], "adam": [dim, dim],
        "rowwise_adam": [dim, 1], "rowwise_rmsprop": [1],
    }[kind]  # fmt: skip


def initial_vector(key: int, table: Values) -> bytes:
    """Return the initial vector of a key of a float32 table: zeros, a constant or uniform numbers."""
    start, dim = table["initializer"], table["dim"]
    if start["kind"] != "uniform":
        return np.full(dim, start.get("value", 0.0), np.float32).tobytes()
    words = [word for block in range(-(-dim // 4)) for word in philox(key & ALL, block, table)]
    low, high = np.float32(start["low"]), np.float32(start["high"])
    unit = np.array([word >> 8 for word in words[:dim]], np.float32) * np.float32(2.0**-24)
    return (low + unit * (high - low)).tobytes()


def philox(key: int, block: int, table: Values) -> list[int]:
    """Return four random words of Philox4x32-10."""
    x = table["seed"] ^ xxh64(table["name"].encode())
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & ALL
    x = (x ^ x >> 27) * 0x94D049BB133111EB & ALL
    x ^= x >> 31
    half = 0xFFFFFFFF
    a, b, c, d, k, m = key & half, key >> 32, block, 0, x & half, x >> 32
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = q >> 32 ^ b ^ k, q & half, p >> 32 ^ d ^ m, p & half
        k, m = k + 0x9E3779B9 & half, m + 0xBB67AE85 & half
    return [a, b, c, d]


def xxh64(data: bytes) -> int:
    """Return XXH64 with seed 0 of at most 31 bytes."""
    assert len(data) < 32
    one, two, three, four, five = PRIMES
    found, at = five + len(data), 0
    for at in range(0, len(data) - 7, 8):
        word = rotated(int.from_bytes(data[at : at + 8], "little") * two, 31) * one
        found = rotated(found ^ word & ALL, 27) * one + four
    at = len(data) // 8 * 8
    if len(data) - at >= 4:
        found = rotated(found ^ int.from_bytes(data[at : at + 4], "little") * one & ALL, 23) * two + three
        at += 4
    for byte in data[at:]:
        found = rotated(found ^ byte * five & ALL, 11) * one
    found &= ALL
    found = (found ^ found >> 33) * two & ALL
    found = (found ^ found >> 29) * three & ALL
    return found ^ found >> 32


def rotated(number: int, bits: int) -> int:
    """Return 64 bits rotated to the left."""
    number &= ALL
    return (number << bits | number >> (64 - bits)) & ALL
