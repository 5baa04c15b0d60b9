"""Segments: what one pass dumped, or a rewrite put in another order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.store.changed import CHANGED_BYTES, Changed
from tiercache.store.errors import CorruptStoreError
from tiercache.store.record import decode, encode, whole
from tiercache.store.stream import Stream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BASE_PASS = -1
"""The pass of a segment whose rows no pass dumped: a schedule begins with it."""


def base_pass(first_pass: int) -> int:
    """Return the pass of the segment with which a schedule is entered at ``first_pass``; ``BASE_PASS`` for 0."""
    return BASE_PASS - first_pass


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """The rows that one pass dumped: one stream for each group of the store; immutable."""

    id: int
    """Grows with every segment of a store: of two live rows of one key, that of the larger id is newer."""
    pass_index: int
    """The pass that dumped it; below 0 for a base, as ``base_pass`` says."""
    within: bool
    """Whether a commit inside the pass wrote it: then it holds the whole key set, with next use ``pass_index``. A base
    may stand for that too, where a schedule is entered inside its first pass."""
    streams: tuple[Stream, ...]
    """By group; a group that dumped nothing has an empty one."""
    checksums: tuple[NDArray[np.uint32], ...]
    """By group: CRC32C of each piece."""
    key_checksums: tuple[NDArray[np.uint32], ...]
    """By group: CRC32C of the keys of each block."""
    changed: tuple[Changed, ...] = ()
    """By group, where a rewrite wrote it: when its rows changed. Else all did with the first commit that named it."""

    @property
    def within_pass(self) -> int | None:
        """The pass whose whole key set it holds, for a cursor inside that pass; None where it is not ``within``."""
        if not self.within:
            return None
        return self.pass_index if self.pass_index >= 0 else BASE_PASS - self.pass_index

    @property
    def rows(self) -> int:
        """Rows of all groups."""
        return sum(stream.rows for stream in self.streams)

    @property
    def row_bytes(self) -> int:
        """Bytes of rows of all groups."""
        return sum(stream.rows * stream.row_bytes for stream in self.streams)

    @property
    def changed_bytes(self) -> int:
        """Bytes of the last changes that are stored beside them."""
        groups = zip(self.streams, self.changed, strict=False)
        return sum(CHANGED_BYTES * stream.rows for stream, changed in groups if changed.stored)

    def to_bytes(self) -> bytes:
        """Return its manifest record."""
        arrays = {}
        for group, (pieces, keys) in enumerate(zip(self.checksums, self.key_checksums, strict=True)):
            arrays[f"pieces/{group}"], arrays[f"keys/{group}"] = pieces, keys
        for group, changed in enumerate(self.changed):
            arrays[f"oldest/{group}"], arrays[f"newest/{group}"] = changed.oldest_B, changed.newest_B
            arrays[f"changed/{group}"] = changed.checksums_B
        streams = [stream.to_record() for stream in self.streams]
        values = {"id": self.id, "visit": self.pass_index, "within": self.within, "streams": streams}
        return encode("segment", values, arrays)

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Segment:
        """Read a manifest record. Raises CorruptStoreError that calls it ``name``."""
        values, arrays = decode("segment", data, name)
        try:
            checksums = tuple(arrays[f"pieces/{g}"] for g in range(len(values["streams"])))
            key_checksums = tuple(arrays[f"keys/{g}"] for g in range(len(values["streams"])))
            streams = tuple(
                Stream.from_record(record, most_pieces=pieces.size)
                for record, pieces in zip(values["streams"], checksums, strict=True)
            )
            changed: tuple[Changed, ...] = ()
            if "oldest/0" in arrays:
                changed = tuple(
                    Changed(
                        oldest_B=arrays[f"oldest/{g}"], newest_B=arrays[f"newest/{g}"],
                        checksums_B=arrays[f"changed/{g}"],
                    )
                    for g in range(len(streams))
                )  # fmt: skip
            first = values["visit"]  # of a base, as Python counts from the end
            pass_index = ~whole(~first, "visit") if isinstance(first, int) and first < 0 else whole(first, "visit")
            segment = cls(
                id=whole(values["id"], "id"), pass_index=pass_index, within=bool(values["within"]),
                streams=streams, checksums=checksums, key_checksums=key_checksums, changed=changed,
            )  # fmt: skip
            for stream, one in zip(streams, changed, strict=False):
                one.check(stream)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error}): restore the store from a copy") from error
        for stream, pieces, keys in zip(streams, checksums, key_checksums, strict=True):
            if (stream.num_pieces, stream.num_blocks) != (pieces.size, keys.size):
                raise CorruptStoreError(
                    f"{name} has {pieces.size} piece and {keys.size} key checksums for {stream.num_pieces} pieces "
                    f"in {stream.num_blocks} blocks: restore the store from a copy"
                )
        return segment
