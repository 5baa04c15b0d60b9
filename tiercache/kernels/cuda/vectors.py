"""Vectors on a CUDA device, of float32 or of a 16-bit dtype.

Kernels have an instantiation for each width, whose names differ by a suffix; the parts of one launch have one width.
"""

from typing import NamedTuple

import numpy as np

from tiercache.kernels.cuda.launch import Device, view
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
        """Return (vec, team): elements of one access, and lanes of one row.

        Four elements if rows, here and of float32 at other addresses, begin at multiples of 16 bytes, or 8 of 16 bits.
        """
        bits = 2 * self.address if self.suffix else self.address
        for address in addresses:
            bits |= address
        vec = 4 if self.dim % 4 == 0 and bits % 16 == 0 else 1
        return vec, min(32, 1 << (max(1, -(-self.dim // vec)) - 1).bit_length())


def rows_at(device: Device, vectors: Vectors, name: str = "vectors", *, written: bool = False) -> RowsAt:
    """Return the location of vectors. Raises ValueError like `launch.view` and `Vectors.check`."""
    seen = view(device, name, vectors.values, np.float32, np.uint16, ndim=2, written=written)
    vectors.check()
    if seen.address % 4:
        raise ValueError(f"{name} begin at address {seen.address:#x}: expected a multiple of 4.")
    suffix = "_narrow" if seen.dtype == np.uint16 else ""
    return RowsAt(seen.address, seen.shape[0], vectors.dim, vectors.is_half, suffix)
