"""The map from keys to ranges of a segment: entries in the order of buckets (docs/format/store.md, "Key map")."""

import numpy as np

from tiercache.kernels.arrays import I8, U1, U4, Written
from tiercache.kernels.cpu.jit import serial


@serial
def _count(tops: U4, shift: int, counts: Written[U4]) -> None:
    for i in range(tops.size):
        counts[np.int64(tops[i]) >> shift] += np.uint32(1)


@serial
def _place(
    tops: U4, first_rows: I8, shift: int, print_bits: int, range_bits: int, entry_bytes: int,
    ends: Written[U4], entries: Written[U1],
) -> None:  # fmt: skip
    for r in range(first_rows.size - 1):
        for row in range(first_rows[r], first_rows[r + 1]):
            top = np.int64(tops[row])
            bucket = top >> shift
            fingerprint = (top >> (shift - print_bits)) & ((1 << print_bits) - 1)
            entry = (fingerprint << range_bits) | r
            at = np.int64(ends[bucket]) * entry_bytes
            ends[bucket] += np.uint32(1)
            for byte in range(entry_bytes):
                entries[at + byte] = (entry >> (8 * byte)) & 255


def bucket_counts(tops: U4, bucket_bits: int) -> U4:
    """Return how many of the hashes, given by their first 32 bits, are in each bucket: (2^bucket_bits,)."""
    counts = np.zeros(1 << bucket_bits, np.uint32)
    _count(tops, 32 - bucket_bits, counts)
    return counts


def placed_entries(
    tops: U4, first_rows: I8, counts: U4, *, bucket_bits: int, print_bits: int, range_bits: int, entry_bytes: int
) -> U1:
    """Return an entry for each row, bucket after bucket, in each in the order of rows: (rows * entry_bytes,).

    ``tops`` (rows,) are the first 32 bits of hashes, ``first_rows`` (R + 1,) the first row of each range and the
    number of rows, ``counts`` those of ``bucket_counts``.
    """
    starts = np.cumsum(counts, dtype=np.uint32) - counts
    entries = np.empty(tops.size * entry_bytes, np.uint8)
    _place(tops, first_rows, 32 - bucket_bits, print_bits, range_bits, entry_bytes, starts, entries)
    return entries
