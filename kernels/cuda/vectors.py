"""Vectors on a CUDA device, of float32 or of a 16-bit dtype: `vectors`, by the words that rows are kept in.

Kernels have an instantiation for each width, whose names differ by a suffix; the parts of one launch have one width.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tiercache.kernels.cuda.launch import Device, Part, view

__all__ = ["RowsAt", "Vectors", "by_width", "rows_at"]

_DTYPES = ("float32", "bfloat16", "float16")


class Vectors(NamedTuple):
    """The vectors of a group's rows, one in each slot."""

    words: Any
    """(S, W): the 4-byte words of a row, as an array of float32; rows of an odd dim end with 16 zero bits."""
    dim: int
    dtype: str
    """float32, bfloat16 or float16."""


class RowsAt(NamedTuple):
    """Where vectors lie."""

    address: int
    num_slots: int
    dim: int
    suffix: str
    """Of the kernels that take them."""
    is_half: int

    @property
    def wide(self) -> tuple[int, ...]:
        """Their address, if they are float32: then they are taken as all other rows are."""
        return () if self.suffix else (self.address,)

    @property
    def narrow(self) -> int | None:
        """Their address, if they have 16 bits."""
        return self.address if self.suffix else None


def rows_at(device: Device, vectors: Any, name: str = "vectors", *, written: bool = False) -> RowsAt:
    """Return where Vectors, or an array (S, D) of float32, lie.

    Raises ValueError as `view` does, and where words and dim do not fit.
    """
    if not isinstance(vectors, Vectors):
        seen = view(device, name, vectors, np.float32, ndim=2, written=written)
        return RowsAt(seen.address, seen.shape[0], seen.shape[1], "", 0)
    seen = view(device, name, vectors.words, np.float32, ndim=2, written=written)
    if vectors.dtype not in _DTYPES:
        raise ValueError(f"{name} are of dtype {vectors.dtype}: rows are kept in {', '.join(_DTYPES)}.")
    is_wide = vectors.dtype == "float32"
    words = vectors.dim if is_wide else (vectors.dim + 1) // 2
    if seen.shape[1] != words:
        raise ValueError(f"{name} of {vectors.dtype} and dim {vectors.dim} have {seen.shape[1]} words, not {words}.")
    return RowsAt(
        seen.address, seen.shape[0], vectors.dim, "" if is_wide else "_narrow", int(vectors.dtype == "float16")
    )


def by_width(parts: Sequence[tuple[RowsAt, Part, int]]) -> Iterator[tuple[str, list[Part], list[int]]]:
    """Give the suffix, the parts and their tasks of each launch that is needed, from (vectors, part, tasks)."""
    for suffix in ("", "_narrow"):
        some = [(part, tasks) for vectors, part, tasks in parts if vectors.suffix == suffix]
        if some:
            yield suffix, [part for part, _ in some], [tasks for _, tasks in some]
