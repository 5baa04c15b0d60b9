"""Kinds and checksums of blocks."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np

from tiercache.store.errors import CorruptBlockError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from tiercache.store.engine import FieldSource, ReadSource
    from tiercache.store.segment import Segment
    from tiercache.store.table import Group

    Part = tuple[NDArray[np.uint8], NDArray[np.int64]]
    """Bytes, and bounds (R + 1, rising) of runs of them."""
    Checksums = Callable[[Sequence[Part]], NDArray[np.uint32]]
    """What computes the checksums of pages: ``page_checksums``, or what does the same faster."""
    Read = tuple[NDArray[np.int64], NDArray[np.uint32]]
    """Bytes read of each part, or -errno, and the checksums of all runs."""
    Reads = Callable[[Sequence[ReadSource], Sequence[Part]], Read]
    """What fills each part from its source at once."""
    FieldReads = Callable[[Sequence[FieldSource], Sequence[Part]], Read]
    """The same for rows whose fields stand apart; the runs of a part are its pages."""

ROWS, KEYS, CHANGED, STATE = b"r", b"k", b"c", b"s"
"""A segment's rows, their keys and last changes, and a commit's dense state."""


def checksum(data: NDArray[Any]) -> int:
    """Return the CRC32C of contiguous bytes."""
    view = data.view()
    view.flags.writeable = False  # google_crc32c takes read-only buffers, and only those without a copy
    return int(google_crc32c.value(view))


def page_checksums(parts: Sequence[Part]) -> NDArray[np.uint32]:
    """Return the CRC32C of each run of bytes between neighboring bounds, part after part."""
    sums = []
    for data, bounds in parts:
        view = data.view()
        view.flags.writeable = False
        sums += [google_crc32c.value(view[a:b]) for a, b in pairwise(bounds.tolist())]
    return np.array(sums, np.uint32)


def corrupt_block(
    store: str, segment: Segment, group: Group, block: int, seen: str, expected: int | None = None
) -> CorruptBlockError:
    """Return the error of a block that is not what was written; where known, with the checksum ``expected``."""
    tables = tuple(table.name for table in group.tables)
    named = ", ".join(repr(name) for name in tables[:3]) + (f" and {len(tables) - 3} more" if tables[3:] else "")
    wanted = "" if expected is None else f" where {expected:08x} was written"
    return CorruptBlockError(
        f"block {block} of segment {segment.id} (pass {segment.pass_index}; tables {named}) of {store} {seen}{wanted}: "
        "restore the store from a copy, or train again from the start",
        segment=segment.id,
        block=block,
        tables=tables,
    )
