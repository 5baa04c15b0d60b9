"""Rows whose fields stand apart, checked where they lie: nobody wants them, so they are not brought together."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np

from tiercache.store.direct_file import RangeReader
from tiercache.store.errors import BlockReadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.store.blocks import Part, Read
    from tiercache.store.engine import FieldFile, FieldSource


class FieldCheck:
    """What ``Store.read_with`` takes to read rows only for their checksums; from any thread.

    The arrays that it is given to fill stay as they are: a store that reads so can tell what is whole, and no more.
    """

    def __init__(self) -> None:
        self._reader = RangeReader()

    def __call__(self, sources: Sequence[FieldSource], parts: Sequence[Part]) -> Read:
        """Return the bytes read for each part (N,), 0 where a file is not whole, and the CRC32C of each page (R,)."""
        done, sums = [], []
        for source, (out, bounds) in zip(sources, parts, strict=True):
            try:
                sums += self._sums(source.files, bounds)
                done.append(out.size)
            except BlockReadError:
                sums += [0] * (bounds.size - 1)
                done.append(0)
        return np.array(done, np.int64), np.array(sums, np.uint32)

    def _sums(self, files: Sequence[FieldFile], bounds: NDArray[np.int64]) -> list[int]:
        """Return the checksums of pages, of which all of the first field come first, then all of the next."""
        rows = (bounds // sum(file.row_bytes for file in files)).tolist()
        ranges = [(file.path, file.begin, file.begin + rows[-1] * file.row_bytes, file.file_bytes) for file in files]
        fields = self._reader.read(ranges)
        for field in fields:
            field.flags.writeable = False  # google_crc32c takes read-only buffers, and only those without a copy
        sums = []
        for low, high in pairwise(rows):
            found = 0
            for field, file in zip(fields, files, strict=True):
                found = google_crc32c.extend(found, field[low * file.row_bytes : high * file.row_bytes])
            sums.append(found)
        return sums
