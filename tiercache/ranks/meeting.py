"""This process among the ranks, as what writes parts needs it: torch is not known here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["Meeting"]


class Meeting(Protocol):
    """This process among the ranks, as far as parts need it; every call is made by all ranks in one order."""

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def agree(self, what: str, error: BaseException | None = None) -> None:
        """Raise on every rank where any brings an error: its own on that rank, on the others one that tells of it."""

    def patiently(self, what: str) -> AbstractContextManager[None]:
        """Run the body, without a meeting inside, then ``agree`` on how it ended, however long some ranks take."""

    def values(self, mine: Any) -> list[Any]:
        """Return the JSON value that each rank brings, in the order of ranks."""
