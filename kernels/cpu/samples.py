"""Gathering samples from a mapped sub-dataset, and turning numbers into local ids.

A mapped file is seen as 32-bit words. Its samples lie in batches of `1 << shift` samples (the last may be shorter);
`starts` says for each batch where a column begins, in words (of offsets: in 64-bit words).
All kernels are serial and run without the GIL, so that any thread may call them.
Legend: n samples asked for, C batches, W words of a sample, S features with one id, E ids.
"""

import numpy as np

from tiercache.kernels.arrays import I4, I8, Matrix, Written
from tiercache.kernels.cpu.jit import serial

__all__ = [
    "gather_columns",
    "gather_lists",
    "gather_offsets",
    "gather_rows",
    "permute",
    "permute_columns",
]


@serial
def gather_rows(
    words: I4,  # (file,)
    starts: I8,  # (C,)
    shift: int,
    samples: I8,  # (n,) each within the file
    out: Written[Matrix[I4]],  # (n, W)
) -> None:
    """Copy the W words of each sample, which lie side by side in the file."""
    mask, width = (1 << shift) - 1, out.shape[1]
    for i in range(samples.size):
        at = starts[samples[i] >> shift] + (samples[i] & mask) * width
        for w in range(width):
            out[i, w] = words[at + w]


@serial
def gather_columns(
    words: I4,  # (file,)
    starts: I8,  # (C,)
    shift: int,
    samples: I8,  # (n,) each within the file
    width: int,  # words of a sample
    columns: I8,  # (S,) word of a sample that each row of out is made of
    out: Written[Matrix[I4]],  # (S, n)
) -> None:
    """Copy S of the words of each sample and transpose them: out is feature-major."""
    # Tiles of 16 samples: the lines that a tile reads stay in the first cache while each column writes one line.
    mask, tile = (1 << shift) - 1, 16
    at = np.empty(tile, np.int64)
    for first in range(0, samples.size, tile):
        count = min(tile, samples.size - first)
        for i in range(count):
            at[i] = starts[samples[first + i] >> shift] + (samples[first + i] & mask) * width
        for s in range(columns.size):
            column = columns[s]
            for i in range(count):
                out[s, first + i] = words[at[i] + column]


@serial
def gather_offsets(
    longs: I8,  # (file,) the file as 64-bit words
    starts: I8,  # (C,) where the offsets of each batch begin
    counts: I8,  # (C,) values of each batch
    shift: int,
    samples: I8,  # (n,)
    begins: Written[I8],  # (n,) where each list begins in its batch's values
    offsets: Written[I8],  # (n + 1,) offsets of the gathered lists
) -> int:
    """Read where lists begin and lay them out one after another.

    Return the first of the n whose list does not lie within its batch's values, -1 where all do.
    """
    mask = (1 << shift) - 1
    offsets[0] = 0
    for i in range(samples.size):
        batch = samples[i] >> shift
        at = starts[batch] + (samples[i] & mask)
        begin, end = longs[at], longs[at + 1]
        if not 0 <= begin <= end <= counts[batch]:
            return i
        begins[i] = begin
        offsets[i + 1] = offsets[i] + end - begin
    return -1


@serial
def gather_lists(
    words: I4,  # (file,)
    starts: I8,  # (C,) where the values of each batch begin
    shift: int,
    samples: I8,  # (n,)
    begins: I8,  # (n,)
    offsets: I8,  # (n + 1,)
    out: Written[I4],  # (offsets[n],)
) -> None:
    """Copy the lists that `gather_offsets` laid out."""
    for i in range(samples.size):
        at = starts[samples[i] >> shift] + begins[i]
        for e in range(offsets[i + 1] - offsets[i]):
            out[offsets[i] + e] = words[at + e]


@serial
def permute(ids: Written[I4], positions: I4) -> None:
    """Replace each of the E ids by `positions[id]`, in place."""
    for e in range(ids.size):
        ids[e] = positions[ids[e]]


@serial
def permute_columns(
    ids: Written[Matrix[I4]],  # (n, S) changed in place
    positions: I4,  # positions of all tables, one table after another
    bases: I8,  # (S,) where the table of each column begins in positions
) -> None:
    """Replace each id of column s by `positions[bases[s] + id]`, in place."""
    for n in range(ids.shape[0]):
        for s in range(ids.shape[1]):
            ids[n, s] = positions[bases[s] + ids[n, s]]
