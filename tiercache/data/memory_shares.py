"""How an extraction shares out its memory limit."""

from __future__ import annotations

from dataclasses import dataclass

from tiercache.errors import BudgetError
from tiercache.sizes import format_bytes

_SMALLEST_CHUNK = 256 << 10
_LARGEST_CHUNK = 128 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShares:
    """Bytes of host memory; beside them stands what Python, its libraries and compiled kernels take, about 250 MiB."""

    total: int
    chunk: int
    """Samples that are numbered at once. Reading ahead, joining, numbering and closing take nine times as much."""
    unit: int
    """The most that one batch multiple of samples may take."""
    use_threads: bool
    """Whether decoding may use several threads, which doubles what it holds."""
    keys: int
    """Tables of keys, and what closing a pass or writing a run of counts takes."""

    @classmethod
    def plan(cls, total: int, decoding: int) -> MemoryShares:
        """Share out ``total``: ``decoding`` of files, 3/8 of the rest for samples on their way.

        Raises BudgetError where what is left for keys would be nothing.
        """
        least = decoding + 32 * _SMALLEST_CHUNK
        if total < least:
            raise BudgetError(
                f"the memory limit is {format_bytes(total)}, but extraction of these files with this schema needs at "
                f"least {format_bytes(least)} for decoding and samples on their way: raise memory_limit"
            )
        use_threads = total >= 8 * decoding
        rest = total - decoding * (2 if use_threads else 1)
        return cls(
            total=total,
            chunk=max(_SMALLEST_CHUNK, min(_LARGEST_CHUNK, rest // 32)),
            unit=max(_SMALLEST_CHUNK, rest // 8),
            use_threads=use_threads,
            keys=rest - rest * 3 // 8,
        )
