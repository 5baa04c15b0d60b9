"""A small map from keys to the ranges of a segment: it rules the segment out, or lists the ranges that may have a key.

A segment in the order of next uses may have a key in any of its ranges. The map has 2 or 3 bytes for each key: in the
bucket that the last 32 bits of the key's hash choose, a fingerprint of the next bits and the number of the range. (The
first bits are the same for all keys of a rank that has a range of hashes.) It is read in place: a lookup reads one
chunk of each of its three arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.records import PagedArray, PagedArrays, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from tiercache.store.layout import SegmentLayout

    Hashes = NDArray[np.uint64]
    Int64s = NDArray[np.int64]
    Numbers = NDArray[Any] | PagedArray
    Entries = Callable[[NDArray[np.uint32], Int64s, int, int, int, int], tuple[NDArray[np.uint32], NDArray[np.uint8]]]
    """``map_entries`` or its equivalent."""

MOST_ROWS = 1 << 26
"""Largest layout with a map. While one is built, each row takes 4 bytes of memory, 3 for its entry, and a sort."""
BUILD_BYTES = 10
"""Memory per row while a segment with a map is written."""
_BUCKET_KEYS = 4
"""Minimum average number of keys in a bucket; the maximum is twice that."""
_LEAST_PRINT_BITS = 8
_LOW = np.uint64(0xFFFFFFFF)
_FEW = 4
"""Hashes."""
_RUN = 64
"""Buckets with one start."""
_PARTS = 16
"""Sorted one after another, each in a sixteenth of the memory."""
_PART_ROWS = 1 << 16
"""Minimum size of a part: smaller ones only take longer."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyMap:
    """The map of one layout. Shapes: B buckets, N rows."""

    bucket_bits: int
    """The first of the last 32 bits of a hash: its first bits are the same for all keys of a rank."""
    range_bits: int
    """Bits of the range number."""
    print_bits: int
    """Bits of a fingerprint, right after the bucket's bits of a hash."""
    entry_bytes: int
    starts: Numbers
    """(B / 64 rounded up,) uint32: the number of entries before each 64 buckets."""
    counts: Numbers
    """(B,) uint8: entries of each bucket."""
    entries: Numbers
    """(N * entry_bytes,) uint8, little-endian: the range in the last bits, and the fingerprint before it."""

    def find(self, hashes: Hashes) -> tuple[Int64s, Int64s]:
        """Return (m,), (m,): indices into ``hashes``, and a range that may have each."""
        if hashes.size <= _FEW:
            which_few, ranges_few = self.find_few(hashes.tolist())
            return np.array(which_few, np.int64), np.array(ranges_few, np.int64)
        which: list[Int64s] = []
        ranges: list[Int64s] = []
        lows = (hashes & _LOW).astype(np.int64)
        buckets = lows >> (32 - self.bucket_bits)
        prints = (lows >> (32 - self.bucket_bits - self.print_bits)) & ((1 << self.print_bits) - 1)
        runs, order = buckets // _RUN, np.argsort(buckets, kind="stable")
        cuts = np.nonzero(np.diff(runs[order]))[0] + 1
        for part in np.split(order, cuts) if hashes.size else ():
            run = int(runs[part[0]])
            counts = self.counts[run * _RUN : (run + 1) * _RUN].astype(np.int64)
            ends = np.cumsum(counts)
            start = int(self.starts[run])
            entries = self._entries(start, start + int(ends[-1]))
            local = buckets[part] - run * _RUN
            sizes, firsts = counts[local], (ends - counts)[local]
            query = np.repeat(part, sizes)
            places = np.arange(query.size) - np.repeat(np.cumsum(sizes) - sizes, sizes) + np.repeat(firsts, sizes)
            hit = np.nonzero(entries[places] >> self.range_bits == prints[query])[0]
            which.append(query[hit])
            ranges.append(entries[places[hit]] & ((1 << self.range_bits) - 1))
        empty = np.empty(0, np.int64)
        return np.concatenate([empty, *which]), np.concatenate([empty, *ranges])

    def find_few(self, hashes: Iterable[int]) -> tuple[list[int], list[int]]:
        """Do the same as ``find`` without arrays, which take longer for a few hashes."""
        which: list[int] = []
        ranges: list[int] = []
        size, bucket_shift = self.entry_bytes, 32 - self.bucket_bits
        shift, bits = bucket_shift - self.print_bits, (1 << self.print_bits) - 1
        for number, one in enumerate(hashes):
            low = one & 0xFFFFFFFF
            bucket, fingerprint = low >> bucket_shift, (low >> shift) & bits
            run = bucket // _RUN
            counts = self.counts[run * _RUN : bucket + 1].tobytes()
            if not counts[-1]:
                continue
            first = int.from_bytes(self.starts[run : run + 1].tobytes(), "little") + sum(counts) - counts[-1]
            entries = self.entries[first * size : (first + counts[-1]) * size].tobytes()
            for at in range(0, len(entries), size):
                entry = int.from_bytes(entries[at : at + size], "little")
                if entry >> self.range_bits == fingerprint:
                    which.append(number)
                    ranges.append(entry & ((1 << self.range_bits) - 1))
        return which, ranges

    def _entries(self, low: int, high: int) -> Int64s:
        data = np.asarray(self.entries[low * self.entry_bytes : high * self.entry_bytes]).reshape(-1, self.entry_bytes)
        found = np.zeros(data.shape[0], np.int64)
        for byte in range(self.entry_bytes):
            found |= data[:, byte].astype(np.int64) << (8 * byte)
        return found

    def arrays(self) -> dict[str, Numbers]:
        """Return its arrays, by name."""
        return {"map_starts": self.starts, "map_counts": self.counts, "map": self.entries}

    def to_record(self) -> list[int]:
        """Return the other fields as plain JSON values."""
        return [self.bucket_bits, self.range_bits, self.entry_bytes]

    @staticmethod
    def most_bytes(layout: SegmentLayout) -> int:
        """Return the maximum bytes of the map of a layout."""
        if not needs_map(layout):
            return 0
        bucket_bits, _, entry_bytes = _sizes(layout)
        buckets = 1 << bucket_bits
        return layout.rows * entry_bytes + buckets + 4 * -(-buckets // _RUN)

    @classmethod
    def of(cls, layout: SegmentLayout, lows: NDArray[np.uint32], entries_of: Entries) -> KeyMap | None:
        """Return the map of a layout, given ``lows`` of its rows; None if a bucket has more than 255 keys."""
        bucket_bits, range_bits, entry_bytes = _sizes(layout)
        print_bits = _print_bits(bucket_bits, range_bits, entry_bytes)
        counts, entries = entries_of(lows, layout.first_row_R, bucket_bits, print_bits, range_bits, entry_bytes)
        if int(counts.max()) > 255:
            return None
        before = np.cumsum(counts, dtype=np.int64) - counts
        return cls(
            bucket_bits=bucket_bits, range_bits=range_bits, entry_bytes=entry_bytes, print_bits=print_bits,
            starts=before[::_RUN].astype(np.uint32), counts=counts.astype(np.uint8), entries=entries,
        )  # fmt: skip

    @classmethod
    def from_record(cls, record: Any, arrays: PagedArrays, group: int, layout: SegmentLayout) -> KeyMap:
        """Build what ``to_record`` wrote. Raises ValueError, TypeError and KeyError for anything else."""
        bucket_bits, range_bits, entry_bytes = (whole(value, "bits of a map") for value in record)
        found = cls(
            bucket_bits=bucket_bits, range_bits=range_bits, entry_bytes=entry_bytes,
            print_bits=_print_bits(bucket_bits, range_bits, entry_bytes),
            starts=arrays.array(f"map_starts/{group}"), counts=arrays.array(f"map_counts/{group}"),
            entries=arrays.array(f"map/{group}"),
        )  # fmt: skip
        sizes = found.starts.size, found.counts.size, found.entries.size
        expected = -(-(1 << min(bucket_bits, 40)) // _RUN), 1 << min(bucket_bits, 40), layout.rows * entry_bytes
        if sizes != expected or found.print_bits < 1:
            raise ValueError(f"a map of keys has arrays of {sizes}, but {expected} were written")
        return found


def map_entries(
    lows: NDArray[np.uint32], first_row_R: Int64s, bucket_bits: int, print_bits: int, range_bits: int, entry_bytes: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Return (B,) counts and (N * entry_bytes,) entries of buckets; ``lows`` (N,): the last 32 bits of hashes."""
    counts = np.zeros(1 << bucket_bits, np.uint32)
    data = np.empty((lows.size, entry_bytes), np.uint8)
    done = 0
    for part in _parts(lows, bucket_bits):
        low = lows[part].astype(np.int64)
        buckets = low >> (32 - bucket_bits)
        first = int(buckets.min())
        buckets -= first
        found = np.bincount(buckets)
        counts[first : first + found.size] = found
        prints = (low >> (32 - bucket_bits - print_bits)) & ((1 << print_bits) - 1)
        of_range = np.diff(np.searchsorted(part, first_row_R))
        entries = (prints << range_bits) | np.repeat(np.arange(of_range.size), of_range)
        order = np.argsort(buckets.astype(np.uint16), kind="stable")  # NumPy sorts 16 bits by their digits
        if int(buckets.max()) >> 16:
            order = order[np.argsort((buckets >> 16)[order].astype(np.uint16), kind="stable")]
        entries = entries[order]
        for byte in range(entry_bytes):
            data[done : done + part.size, byte] = (entries >> (8 * byte)) & 255
        done += part.size
    return counts, data.reshape(-1)


def _parts(lows: NDArray[np.uint32], bucket_bits: int) -> Iterator[Int64s]:
    """Yield the rows of a run of buckets, in order, then of the next run."""
    parts = min(_PARTS, -(-lows.size // _PART_ROWS))
    if parts == 1:
        yield np.arange(lows.size)
        return
    shift = 32 - bucket_bits
    first, last = (int(low) >> shift for low in (lows.min(), lows.max()))
    bounds = [(first + (last + 1 - first) * part // parts) << shift for part in range(parts + 1)]
    for low, high in pairwise(bounds):
        rows = np.nonzero((lows >= low) & (lows <= high - 1))[0]
        if rows.size:
            yield rows


def needs_map(layout: SegmentLayout) -> bool:
    """Return False for a layout of one range, which needs no map, and for one that is too large."""
    return layout.rows <= MOST_ROWS and int(np.count_nonzero(np.diff(layout.first_row_R))) > 1


def _sizes(layout: SegmentLayout) -> tuple[int, int, int]:
    """Return the bits of a bucket's number and of a range's, and the bytes of an entry."""
    range_bits = max(1, (layout.num_ranges - 1).bit_length())
    return max(0, (layout.rows // _BUCKET_KEYS).bit_length() - 1), range_bits, -(-(range_bits + _LEAST_PRINT_BITS) // 8)


def _print_bits(bucket_bits: int, range_bits: int, entry_bytes: int) -> int:
    """Return the bits of a fingerprint: the room in an entry, up to the bits that the bucket leaves of 32."""
    return min(8 * entry_bytes - range_bits, 32 - bucket_bits)
