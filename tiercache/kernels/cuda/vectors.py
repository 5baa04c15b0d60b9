"""Vectors on a CUDA device, of float32 or of a 16-bit dtype.

Kernels have an instantiation for each width, whose names differ by a suffix; the parts of one launch have one width.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tiercache.kernels.cuda.launch import Device, Part, access, view
from tiercache.kernels.step import Vectors


class RowsAt(NamedTuple):
    """The address and layout of vectors."""

    address: int
    num_slots: int
    dim: int
    is_half: int
    suffix: str
    """The suffix of kernels for them."""

    def access(self, *addresses: int) -> tuple[int, int]:
        """Return `launch.access` for these rows, with others of float32 at some addresses."""
        if self.suffix:
            return access(self.dim, *addresses, narrow=self.address)
        return access(self.dim, self.address, *addresses)


def rows_at(device: Device, vectors: Vectors, name: str = "vectors", *, written: bool = False) -> RowsAt:
    """Return where vectors lie. Raises ValueError as `launch.view` and `Vectors.check` do."""
    seen = view(device, name, vectors.values, np.float32, np.uint16, ndim=2, written=written)
    vectors.check()
    if seen.address % 4:
        raise ValueError(f"{name} begin at address {seen.address:#x}: rows begin at multiples of 4.")
    suffix = "_narrow" if seen.dtype == np.uint16 else ""
    return RowsAt(seen.address, seen.shape[0], vectors.dim, vectors.is_half, suffix)


def by_width(parts: Sequence[tuple[RowsAt, Part, int]]) -> Iterator[tuple[str, list[Part], list[int]]]:
    """Yield the suffix, the parts and their tasks of each launch, from (vectors, part, tasks)."""
    for suffix in ("", "_narrow"):
        chosen = [(part, tasks) for vectors, part, tasks in parts if vectors.suffix == suffix]
        if chosen:
            yield suffix, [part for part, _ in chosen], [tasks for _, tasks in chosen]
