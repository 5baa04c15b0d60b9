"""The errors of a store.

    StoreError
    ├── StoreMissingError      nothing at the path, and no tables to create a store with
    ├── NotAStoreError         the path holds something else
    ├── FormatVersionError     a store of an older or newer format
    ├── TableMismatchError     a store of other tables
    ├── StoreInUseError        another writer holds it (.pid)
    ├── CommitMissingError     a commit that is not kept, or no longer kept
    ├── KeyMissingError        keys without a row (.table, .keys)
    ├── CheckpointError        files that rows start from are missing, moved, changed, or lack a row
    ├── StoreFullError         the disk or the map is full (.needed_bytes)
    ├── StoreClosedError       used after close, or across a fork
    └── CorruptStoreError      a file differs from the written bytes
        ├── CorruptBlockError  a block is missing or damaged (.segment, .block, .tables)
        └── BlockReadError     an engine could not deliver a block (.seen); Store turns it into CorruptBlockError

Every message states the problem, the expected value, and the remedy. After any of them the store opens at its last
commit.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray


class StoreError(Exception):
    """Something is wrong with a store."""


class StoreMissingError(StoreError):
    """No store exists at the path."""


class NotAStoreError(StoreError):
    """The path holds something other than a store."""


class FormatVersionError(StoreError):
    """The store has a format version that this tiercache does not read."""


class TableMismatchError(StoreError):
    """The store has other tables than those given."""


class StoreInUseError(StoreError):
    """Another writer has the store open."""

    def __init__(self, message: str, *, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class CommitMissingError(StoreError):
    """The store does not keep the requested commit."""


class KeyMissingError(StoreError):
    """Keys of a table have no row."""

    def __init__(self, message: str, *, table: str, keys: NDArray[np.int64]) -> None:
        super().__init__(message)
        self.table, self.keys = table, keys


class CheckpointError(StoreError):
    """The files that rows of a table start from are missing, changed, or have no row for a key."""


class StoreFullError(StoreError):
    """The disk or the map is full: the message has ``needed_bytes``, the limit, and a remedy.

    ``kept_bytes`` of them are not written: they stay free for the records of a commit. ``at_least``: more will be
    needed, by an unknown amount.
    """

    def __init__(
        self,
        *,
        needed_bytes: int,
        limit: str,
        advice: str,
        what: str = "the next transaction of the store",
        kept_bytes: int = 0,
        at_least: bool = False,
    ) -> None:
        kept = f", {kept_bytes:,} of them kept free for records," if kept_bytes else ""
        least = "at least " if at_least else ""
        super().__init__(f"{what} needs {least}{needed_bytes:,} more bytes{kept} but {limit}: {advice}")
        self.needed_bytes, self.limit, self.advice = needed_bytes, limit, advice
        self.kept_bytes, self.at_least = kept_bytes, at_least

    def during(self, what: str, needed_bytes: int) -> StoreFullError:
        """Return the same error for a whole step that includes this transaction and writes ``needed_bytes``."""
        return StoreFullError(
            needed_bytes=max(self.needed_bytes, needed_bytes + self.kept_bytes),
            limit=self.limit,
            advice=self.advice,
            what=what,
            kept_bytes=self.kept_bytes,
            at_least=self.at_least,
        )


class StoreClosedError(StoreError):
    """The store is closed, or belongs to the process before a fork."""


class CorruptStoreError(StoreError):
    """The store's file differs from the written bytes."""


class CorruptBlockError(CorruptStoreError):
    """A block is missing, cut short, or has other bytes than were written."""

    def __init__(self, message: str, *, segment: int, block: int, tables: tuple[str, ...]) -> None:
        super().__init__(message)
        self.segment, self.block, self.tables = segment, block, tables


class BlockReadError(CorruptStoreError):
    """An engine lacks these bytes; ``seen`` completes "the block ..."."""

    def __init__(self, seen: str) -> None:
        super().__init__(f"the block {seen}")
        self.seen = seen


ADVICE = "restore the store from a copy"


def damaged(seen: str) -> CorruptStoreError:
    """Return the error of stored bytes that are not what was written."""
    return CorruptStoreError(f"{seen}: {ADVICE}")


@contextmanager
def parsing(name: str) -> Iterator[None]:
    """Raise CorruptStoreError in place of the errors of reading a record's values; ``name`` is its name in messages."""
    try:
        yield
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise damaged(f"{name} cannot be read ({error})") from error
