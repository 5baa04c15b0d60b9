"""A common commit: the commits of all parts of a sharded store that belong together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tiercache.store import Cursor
from tiercache.store.record import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CommonCommit", "checked_cursor", "in_words"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonCommit:
    """One atomic step of a sharded store."""

    id: int
    """Counts common commits; never used again. Parts count their own."""
    cursor: Cursor
    """Where all parts stand."""
    parts: tuple[int, ...]
    """By rank the commit of its part."""

    def to_record(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {"id": self.id, "cursor": list(self.cursor), "parts": list(self.parts)}

    @classmethod
    def from_record(cls, record: Any) -> Self:
        """Read what ``to_record`` returned. Raises TypeError or ValueError for anything else."""
        if not isinstance(record, dict) or record.keys() != {"id", "cursor", "parts"}:
            raise TypeError(f"a commit of it is {record!r:.80}")
        if not isinstance(record["parts"], list):
            raise TypeError(f"the parts of a commit of it are {record['parts']!r:.60}")
        return cls(
            id=whole(record["id"], "the id of a commit"),
            cursor=checked_cursor(record["cursor"]),
            parts=tuple(whole(id_, "the commit of a part") for id_ in record["parts"]),
        )


def checked_cursor(value: Any) -> Cursor:
    """Return a cursor of plain JSON values. Raises TypeError or ValueError for what is none."""
    if not isinstance(value, list):
        raise TypeError(f"its cursor is {value!r:.60}")
    pass_index, sample = value
    return Cursor(whole(pass_index, "the pass"), whole(sample, "the sample"))


def in_words(cursor: Sequence[int]) -> str:
    """Return where something stands, in the words of a message."""
    pass_index, sample = cursor
    return f"pass {pass_index}" + (f", sample {sample}" if sample else "")
