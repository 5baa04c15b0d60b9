"""Bounds: whether other ranks ask for what this one has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tiercache.backends.base import Backend
    from tiercache.backends.jagged import Array
    from tiercache.dist.communicator import AnyCommunicator


class Bounds:
    """Looks at every number that came from another rank; its kernels would take no notice.

    Where the backend queues its work that is known later, and `check` says it: what is no row reads as zeros, or as a
    row of another table, until then, and is never stepped. Elsewhere nothing is read before.
    """

    def __init__(self, ranks: AnyCommunicator, backend: Backend) -> None:
        self._ranks, self._backend = ranks, backend
        self._unknown: list[tuple[Callable[[], tuple[int, int]], int, str]] = []

    def expect(self, values: Array, count: int, what: str) -> None:
        """Have all ``values`` be of [0, count): rows ``what``. Raises as `check` where that is known at once."""
        self._unknown.append((self._backend.bounds(values), count, what))
        if not self._backend.queues:
            self.check()

    def check(self) -> None:
        """Raise RankError where some were not."""
        unknown, self._unknown = self._unknown, []
        for told, count, what in unknown:
            low, high = told()
            if low < 0 or high >= count:
                raise RankError(
                    f"rank {self._ranks.rank} was asked for rows {low:,} to {high:,} {what}: start all ranks again "
                    "with one dataset and one sharding"
                )

    def forget(self) -> None:
        """Say nothing of what is not known yet."""
        self._unknown = []


def confined(values: torch.Tensor, count: int, backend: Backend) -> torch.Tensor:
    """Return ``values``, where the backend queues its work with those outside of [0, count) inside.

    There a wrong number as an index would end the device's work for this process.
    """
    return values.clamp(0, max(0, count - 1)) if backend.queues else values
