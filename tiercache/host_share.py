"""How an extraction shares out its host budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.errors import BudgetError
from tiercache.sample_layout import BATCH_SAMPLES
from tiercache.sizes import format_bytes

if TYPE_CHECKING:
    from tiercache.sample_layout import SampleLayout

__all__ = ["HostShare"]

_SMALLEST_CHUNK = 256 << 10
_LARGEST_CHUNK = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class HostShare:
    """Bytes of host memory; beside them stands what Python and its libraries take (about 250 MiB)."""

    total: int
    chunk: int
    """Samples that are numbered at once. Reading, joining and numbering them takes about five times as much."""
    unit: int
    """The most that one aligned unit of samples may take."""
    keys: int
    """Tables of keys, and what closing a pass or writing a run of counts takes."""

    @classmethod
    def plan(cls, total: int, layout: SampleLayout) -> HostShare:
        """Share out ``total``: one record batch, 3/8 for samples on their way, the rest for keys.

        Raises BudgetError where a record batch alone takes too much.
        """
        record_batch = 4 * BATCH_SAMPLES * sum(column.width or 1 for column in layout.columns)
        least = 4 * record_batch + 16 * _SMALLEST_CHUNK
        if total < least:
            raise BudgetError(
                f"the host budget is {format_bytes(total)}, but extraction with this schema needs at least "
                f"{format_bytes(least)}, four record batches of {BATCH_SAMPLES:,} samples: raise host_budget"
            )
        return cls(
            total=total,
            chunk=max(_SMALLEST_CHUNK, min(_LARGEST_CHUNK, total // 32)),
            unit=max(_SMALLEST_CHUNK, total // 8),
            keys=total - total * 3 // 8 - record_batch,
        )
