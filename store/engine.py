"""The seam between the store's logic and what keeps its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.stream import Stream
    from tiercache.store.table import Group

    Block = tuple[bytes, NDArray[Any], "Form | None"]
    """Name, contiguous bytes, form."""


class Form(NamedTuple):
    """What the bytes of a block are, for an engine that keeps the fields of rows apart: others ignore it.

    A block with a form has a name of ``block_name`` (rows or keys of a segment) and is the whole block of the stream
    that its name says. Of rows, whole pieces are read.
    """

    group: Group
    """Whose rows: fields and tables."""
    stream: Stream
    """Which rows stand in which block and piece."""


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

    def write(self, blocks: Iterable[Block], *, stable: bool = False) -> None:
        """Keep blocks, all of them or none. They last from the next ``commit`` on: a crash before it loses them.

        Asks for one after another and takes what it needs of each before it asks for the next, or, of ``stable``
        blocks, which do not change, before it returns. A block of the same name is replaced, and is
        there again after a crash. Raises StoreFullError.
        """

    def read(self, name: bytes, offset: int, out: NDArray[np.uint8], form: Form | None = None) -> None:
        """Fill ``out`` with the bytes of a block, which was written with ``form``, from ``offset`` on.

        Raises BlockReadError.
        """

    def commit(self, records: Mapping[str, bytes | None], dead: Iterable[bytes], *, shrink: bool = False) -> None:
        """Set records (None removes one) and delete blocks (some may be gone already), all or nothing, durably.

        All blocks written before and not deleted are durable then, too. The room of deleted blocks is for those to
        come; with ``shrink`` it goes back to where it came from, as far as nobody sees the blocks any more.

        Raises StoreFullError.
        """

    def contents(self) -> Contents:
        """List everything, without reading blocks."""

    def close(self) -> None:
        """Give up every resource; a second time does nothing."""


class Wanted(NamedTuple):
    """Bytes of a block that are to be read."""

    name: bytes
    offset: int
    out: NDArray[np.uint8]
    form: Form


class Source(NamedTuple):
    """Where bytes of a block lie."""

    handle: int
    """Of an open file."""
    in_pages: bool
    """Whether whole pages must be read; then bytes are wanted where they lie in their page as in that of the file."""
    offset: int
    """Of the file."""


class FieldFile(NamedTuple):
    """Where one field of rows lies."""

    path: str
    file_bytes: int
    """Of the whole file: one of another size is not what was written."""
    begin: int
    """Byte of the file where the field of the first row wanted begins; the other rows' follow."""
    row_bytes: int
    """Of the field in a row."""


class FieldSource(NamedTuple):
    """Where rows of a block lie whose fields stand apart."""

    in_pages: bool
    """Whether whole pages are read, past the page cache."""
    files: Sequence[FieldFile]
    """In the order of a row."""


@runtime_checkable
class LocatingEngine(Protocol):
    """An engine that keeps blocks in files as they are, or as their fields are, so that many can be read at once."""

    fields_apart: bool
    """Whether sources are those of fields."""

    def locate(self, wanted: Sequence[Wanted]) -> AbstractContextManager[Sequence[Source | FieldSource | None]]:
        """Say where wanted bytes lie; nothing is written over them, and no file is closed, within the context.

        None: ``read`` says why not, or reads what is not kept so. Raises StoreClosedError.
        """


@runtime_checkable
class OvertakenEngine(Protocol):
    """An engine whose readers may be unseen by the writer: on a file system that is mounted read-only for them."""

    def overtaken(self) -> bool:
        """Tell whether what this reader reads may be gone: the writer does not see it and made a newer commit."""
