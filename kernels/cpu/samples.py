"""Gathering samples from a mapped sub-dataset, and turning numbers into local ids.

A mapped file is seen as 32-bit words. Its samples lie in batches of `1 << shift` samples (the last may be shorter);
`starts` says for each batch where a column begins, in words (of offsets: in 64-bit words).
All kernels are serial and run without the GIL, so that any thread may call them.
Legend: n samples asked for, C batches, W words of a sample, S features with one id, E ids.
"""

import numpy as np
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect, same_length
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
def _gather_rows(words, starts, shift, samples, out):  # type: ignore[no-untyped-def]
    mask, width = (1 << shift) - 1, out.shape[1]
    for i in range(samples.size):
        at = starts[samples[i] >> shift] + (samples[i] & mask) * width
        for w in range(width):
            out[i, w] = words[at + w]


@serial
def _gather_columns(words, starts, shift, samples, width, columns, out):  # type: ignore[no-untyped-def]
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
def _gather_offsets(longs, starts, counts, shift, samples, begins, offsets):  # type: ignore[no-untyped-def]
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
def _gather_lists(words, starts, shift, samples, begins, offsets, out):  # type: ignore[no-untyped-def]
    for i in range(samples.size):
        at = starts[samples[i] >> shift] + begins[i]
        for e in range(offsets[i + 1] - offsets[i]):
            out[offsets[i] + e] = words[at + e]


@serial
def _permute(ids, positions):  # type: ignore[no-untyped-def]
    for e in range(ids.size):
        ids[e] = positions[ids[e]]


@serial
def _permute_columns(ids, positions, bases):  # type: ignore[no-untyped-def]
    for n in range(ids.shape[0]):
        for s in range(ids.shape[1]):
            ids[n, s] = positions[bases[s] + ids[n, s]]


def gather_rows(
    words: NDArray[np.int32],  # (file,)
    starts: NDArray[np.int64],  # (C,)
    shift: int,
    samples: NDArray[np.int64],  # (n,) each within the file
    out: NDArray[np.int32],  # (n, W)
) -> None:
    """Copy the W words of each sample, which lie side by side in the file."""
    _gather_rows(
        expect("words", words, np.int32),
        expect("starts", starts, np.int64),
        shift,
        expect("samples", samples, np.int64),
        expect("out", out, np.int32, 2, written=True),
    )


def gather_columns(
    words: NDArray[np.int32],  # (file,)
    starts: NDArray[np.int64],  # (C,)
    shift: int,
    samples: NDArray[np.int64],  # (n,) each within the file
    width: int,  # words of a sample
    columns: NDArray[np.int64],  # (S,) word of a sample that each row of out is made of
    out: NDArray[np.int32],  # (S, n)
) -> None:
    """Copy S of the words of each sample and transpose them: out is feature-major."""
    _gather_columns(
        expect("words", words, np.int32),
        expect("starts", starts, np.int64),
        shift,
        expect("samples", samples, np.int64),
        width,
        expect("columns", columns, np.int64),
        expect("out", out, np.int32, 2, written=True),
    )


def gather_offsets(
    longs: NDArray[np.int64],  # (file,) the file as 64-bit words
    starts: NDArray[np.int64],  # (C,) where the offsets of each batch begin
    counts: NDArray[np.int64],  # (C,) values of each batch
    shift: int,
    samples: NDArray[np.int64],  # (n,)
    begins: NDArray[np.int64],  # (n,) written: where each list begins in its batch's values
    offsets: NDArray[np.int64],  # (n + 1,) written: offsets of the gathered lists
) -> int:
    """Read where lists begin and lay them out one after another.

    Return the first of the n whose list does not lie within its batch's values, -1 where all do.
    """
    same_length(starts=starts, counts=counts)
    bad = _gather_offsets(
        expect("longs", longs, np.int64),
        expect("starts", starts, np.int64),
        expect("counts", counts, np.int64),
        shift,
        expect("samples", samples, np.int64),
        expect("begins", begins, np.int64, written=True),
        expect("offsets", offsets, np.int64, written=True),
    )
    return int(bad)


def gather_lists(
    words: NDArray[np.int32],  # (file,)
    starts: NDArray[np.int64],  # (C,) where the values of each batch begin
    shift: int,
    samples: NDArray[np.int64],  # (n,)
    begins: NDArray[np.int64],  # (n,)
    offsets: NDArray[np.int64],  # (n + 1,)
    out: NDArray[np.int32],  # (offsets[n],)
) -> None:
    """Copy the lists that `gather_offsets` laid out."""
    same_length(samples=samples, begins=begins)
    _gather_lists(
        expect("words", words, np.int32),
        expect("starts", starts, np.int64),
        shift,
        expect("samples", samples, np.int64),
        expect("begins", begins, np.int64),
        expect("offsets", offsets, np.int64),
        expect("out", out, np.int32, written=True),
    )


def permute(ids: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
    """Replace each of the E ids by `positions[id]`, in place."""
    _permute(expect("ids", ids, np.int32, written=True), expect("positions", positions, np.int32))


def permute_columns(
    ids: NDArray[np.int32],  # (n, S) changed in place
    positions: NDArray[np.int32],  # positions of all tables, one table after another
    bases: NDArray[np.int64],  # (S,) where the table of each column begins in positions
) -> None:
    """Replace each id of column s by `positions[bases[s] + id]`, in place."""
    _permute_columns(
        expect("ids", ids, np.int32, 2, written=True),
        expect("positions", positions, np.int32),
        expect("bases", bases, np.int64),
    )
