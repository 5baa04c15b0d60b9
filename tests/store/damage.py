"""Damaged data: real bytes flipped, cut, lengthened and mixed up, and headers with wrong values."""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import google_crc32c
import numpy as np
from numpy.random import Generator

from tiercache.store.commit import head_of
from tiercache.store.engines.engine import Blob, Engine, Head, ReadRequest
from tiercache.store.records import describe, places_of

LIES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 255, 1 << 31, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1, 1 << 64, 1 << 200, 1 << 1100, -(1 << 63), 0.5, -0.0, 1e308, float("inf"), float("-inf"),
    float("nan"), "", "x", "../x", "/x", "a/b", ".", "\0", "\ud800", "ü" * 99, [], [[]], [[[]]], [0], [1 << 70, 2],
    [["a", "<u4", 1]], {}, {"": {}}, {"kind": "sgd"},
)  # fmt: skip
"""Replacements of any value in a header."""
DEEP = b"[" * 100_000
"""JSON nested deeper than parsers can handle."""


def damaged(data: bytes, generator: Generator) -> bytes:
    """Return ``data`` with one to four changes."""
    out = bytearray(data)
    for _ in range(int(generator.integers(1, 5))):
        at = int(generator.integers(0, len(out) + 1))
        match int(generator.integers(0, 6)):
            case 0 if out:
                out[at % len(out)] ^= 1 << int(generator.integers(0, 8))
            case 1:
                del out[at:]
            case 2:
                out[at:at] = generator.bytes(int(generator.integers(1, 40)))
            case 3:
                low = int(generator.integers(0, len(out) + 1))
                out[at:at] = out[low : low + int(generator.integers(1, 200))]
            case 4 if len(out) >= 8:
                word = int(generator.choice([0, 1, 2**31 - 1, 2**32 - 1]))
                struct.pack_into("<I", out, at % (len(out) - 3), word)
            case _:
                out[at : at + 8] = generator.bytes(8)
    return bytes(out)


def sealed(header: bytes, arrays: bytes = b"", header_bytes: int | None = None) -> bytes:
    """Return a record with a correct checksum and, by default, the correct length of its header."""
    body = b"TCR1" + struct.pack("<I", len(header) if header_bytes is None else header_bytes) + header + arrays
    return body + struct.pack("<I", google_crc32c.value(body))


def opened(record: bytes) -> tuple[Any, bytes]:
    """Return the header and the arrays of a record written by a store."""
    (size,) = struct.unpack("<I", record[4:8])
    return json.loads(record[8 : 8 + size]), record[8 + size : -4]


def lying(record: bytes, generator: Generator) -> bytes:
    """Return a record with a wrong value in its header and a correct checksum; sometimes also with other arrays."""
    end = front_of(record)
    header, arrays = opened(record[:end])
    for _ in range(int(generator.integers(1, 3))):
        lie(header, generator)
    if generator.random() < 0.2:
        arrays = damaged(arrays, generator)
    return sealed(json.dumps(header).encode(), arrays) + record[end:]


def resealed(record: bytes, generator: Generator) -> bytes:
    """Return a damaged record whose last four bytes are the correct checksum."""
    body = damaged(record[:-4], generator)
    return body + struct.pack("<I", google_crc32c.value(body))


def miscounting(record: bytes, generator: Generator) -> bytes:
    """Return a record with other numbers in its arrays, and a correct checksum."""
    end = front_of(record)
    header, arrays = opened(record[:end])
    numbers = [
        (np.dtype(dtype), at)
        for (_, dtype, length), start in zip(header["arrays"], _starts(header["arrays"]), strict=True)
        for at in range(start, start + length * np.dtype(dtype).itemsize, np.dtype(dtype).itemsize)
    ]
    data = bytearray(arrays)
    for _ in range(int(generator.integers(1, 3)) if numbers else 0):
        dtype, at = numbers[int(generator.integers(0, len(numbers)))]
        found, least, most = int(np.frombuffer(data, dtype, 1, at)[0]), np.iinfo(dtype).min, np.iinfo(dtype).max
        wrong = [0, 1, 2, 7, 1 << 20, -1, found + 1, found - 1, least, most]
        lie_ = int(generator.choice(np.array([max(least, min(most, n)) for n in wrong], object)))
        data[at : at + dtype.itemsize] = np.array([lie_], dtype).tobytes()
    return sealed(json.dumps(header).encode(), bytes(data)) + record[end:]


def _starts(described: Sequence[Any]) -> list[int]:
    return [0, *accumulate(length * np.dtype(dtype).itemsize for _, dtype, length in described)][:-1]


def lie(value: Any, generator: Generator) -> None:
    """Replace, remove or repeat something anywhere in a JSON value."""
    found = list(places(value))
    path = found[int(generator.integers(0, len(found)))]
    for key in path[:-1]:
        value = value[key]
    key = path[-1]
    match int(generator.integers(0, 8)):
        case 0:
            del value[key]
        case 1 if isinstance(value, list):
            value.insert(key, value[key])
        case 2 if isinstance(value[key], int) and not isinstance(value[key], bool):
            value[key] += int(generator.choice([-1, 1, 4096, -4096]))
        case _:
            value[key] = LIES[int(generator.integers(0, len(LIES)))]


def places(value: Any, path: Sequence[Any] = ()) -> Iterator[list[Any]]:
    """Yield the keys that lead to each value inside a JSON value."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, part in items:
        yield [*path, key]
        yield from places(part, [*path, key])


def assert_sentence(error: Exception) -> None:
    """Assert that a message is one line with a remedy after a colon."""
    assert "\n" not in str(error)
    assert ": " in str(error)


def generator_of(seed: int) -> Generator:
    return np.random.default_rng([seed, 20])


# -- records of an engine that are replaced, with the digests of everything that names them updated ---------------


def records_of(engine: Engine) -> dict[str, bytes]:
    """Return the records of an engine by name: commits, rank lists, metadata of segments, and tables."""
    kinds = "commits/", "ranks/", "tables"
    names = {name: one for name, one in engine.list().items() if name.startswith(kinds) or name.endswith("/meta")}
    found = {}
    for name, stored in names.items():
        out = np.empty(stored.size, np.uint8)
        engine.read(ReadRequest(Blob(name, stored.size), 0, out))
        found[name] = out.tobytes()
    return found


def front_of(blob: bytes) -> int:
    """Return the number of bytes of the record at the front of a blob."""
    size = int(struct.unpack("<I", blob[4:8])[0])
    header: dict[str, Any] = json.loads(blob[8 : 8 + size])
    arrays: int = sum(int(length) * np.dtype(dtype).itemsize for _, dtype, length in header["arrays"])
    return 12 + size + arrays


def mismapped(meta: bytes, generator: Generator) -> bytes:
    """Return metadata of a segment with other numbers in the arrays that are read in place, and correct checksums."""
    end = front_of(meta)
    header, small = opened(meta[:end])
    places_ = places_of(header["values"]["arrays"])
    arrays = {
        name: np.frombuffer(meta, place.dtype, place.size, end + place.begin).copy() for name, place in places_.items()
    }
    full = [name for name, array in arrays.items() if array.size]
    for _ in range(int(generator.integers(1, 3)) if full else 0):
        array = arrays[full[int(generator.integers(0, len(full)))]]
        at, most = int(generator.integers(0, array.size)), np.iinfo(array.dtype).max
        array[at] = int(
            generator.choice(np.array([0, 1, 2, 200, most, most - 1, most // 2, int(array[at]) ^ 1], object))
        )
    _, parts, chunks = describe(arrays)
    small = small[: len(small) - chunks.nbytes] + chunks.tobytes()
    return sealed(json.dumps(header).encode(), small) + b"".join(part.tobytes() for part in parts)


def signed(
    records: Mapping[str, bytes], head: Head | None, name: str, data: bytes
) -> tuple[dict[str, bytes], Head | None]:
    """Return the records that a writer of ``data`` would have written: all that change, and the head.

    Sizes and digests are correct from that record up to the head, so only its content can be refused.
    """
    changed, waiting = {name: data}, [name]
    while waiting:
        one = waiting.pop(0)
        old, new = records[one], changed[one]
        if one.endswith("/meta"):  # its list contains the digest of its front
            old, new = old[: front_of(old)], new[: _front_or_all(new)]
        old_head, new_head = head_of(one, old), head_of(one, new)
        if head == old_head:
            head = new_head
        for other, record in records.items():
            if other == one or old_head.digest.encode() not in record:
                continue
            header, arrays = opened(changed.get(other, record))
            _sign(header["values"], old_head, new_head, len(changed[one]))
            changed[other] = sealed(json.dumps(header).encode(), arrays)
            waiting.append(other)
    return changed, head


def _front_or_all(blob: bytes) -> int:
    """Return the number of bytes of the record at the front of a blob; all bytes if it cannot be determined."""
    try:
        return min(len(blob), front_of(blob))
    except (ValueError, KeyError, TypeError, struct.error, MemoryError, OverflowError):
        return len(blob)


def plant(engine: Engine, name: str, data: bytes) -> None:
    """Replace a record, update the digests that name it, and publish."""
    before = engine.newest()
    assert before is not None
    changed, head = signed(records_of(engine), before, name, data)
    engine.drop([(one, None) for one in changed])
    for one, record in changed.items():
        engine.put([Blob(one, len(record))], [(0, 0, np.frombuffer(record, np.uint8))])
    assert head is not None
    engine.publish(head, before)


def _sign(value: Any, old: Head, new: Head, num_bytes: int) -> None:
    """Replace the size and digest of a blob everywhere in a header; ``num_bytes``: including the bytes after it."""
    for path in [*places(value)]:
        *way, key = path
        part = value
        for step in way:
            part = part[step]
        if part[key] == old.digest:
            part[key] = new.digest
            if isinstance(part, list) and key:
                part[key - 1] = new.size
                if new.name.endswith("/meta"):
                    part[key - 2] = num_bytes
