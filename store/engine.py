"""The seam between the store's logic and what keeps its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Contents:
    """All that an engine holds."""

    records: dict[str, bytes]
    """Small records by name."""
    blocks: dict[bytes, int]
    """Bytes of each block by name."""


class Engine(Protocol):
    """Keeps blocks and small records; knows nothing of segments.

    ``write`` and ``commit`` come from one thread at a time and, where they raise, have changed nothing; ``read``
    may come from other threads meanwhile. ``MemoryEngine`` is the executable definition.
    """

    def write(self, blocks: Iterable[tuple[bytes, NDArray[Any]]], *, stable: bool = False) -> None:
        """Keep blocks, all of them or none. They last from the next ``commit`` on: a crash before it loses them.

        Asks for one after another and takes what it needs of each before it asks for the next, or, of ``stable``
        blocks, which do not change, before it returns. A block of the same name is replaced. Raises StoreFullError.
        """

    def read(self, name: bytes, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` with the bytes of a block from ``offset`` on. Raises BlockReadError."""

    def commit(self, records: Mapping[str, bytes | None], dead: Iterable[bytes]) -> None:
        """Set records (None removes one) and delete blocks (some may be gone already), all or nothing, durably.

        All blocks written before and not deleted are durable then, too.

        Raises StoreFullError.
        """

    def contents(self) -> Contents:
        """List everything, without reading blocks."""

    def close(self) -> None:
        """Give up every resource; a second time does nothing."""
