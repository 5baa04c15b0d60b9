"""The record of a head: the value of LMDB's key "head", and the objects below ``heads`` of the Zarr engine."""

from __future__ import annotations

from typing import NamedTuple

from tiercache.store.engines.engine import Head
from tiercache.store.records import checked_digest, decode, encode, whole
from tiercache.store.store_errors import CorruptStoreError


class HeadRecord(NamedTuple):
    """A head as it is stored."""

    number: int
    """Counts heads, from 1; 0 where there is none."""
    head: Head | None
    """None after a writer took over an object store in which nothing was published."""
    before: str = ""
    """The digest of the one before; of the first one what the engine says."""
    blobs: int = 0
    """In LMDB's map."""
    checksums: int = 0
    """The sum of those of the entries of LMDB's map."""
    writer: str = ""
    """A name that no other writer has, on object stores."""

    def to_bytes(self) -> bytes:
        """Return the record."""
        head = {} if self.head is None else self.head._asdict()
        others = {"blobs": self.blobs, "checksums": self.checksums, "writer": self.writer}
        values = {"number": self.number, "before": self.before} | head
        return encode("head", values | {name: value for name, value in others.items() if value}, {})

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> HeadRecord:
        """Read what ``to_bytes`` wrote. Raises CorruptStoreError that calls it ``name``."""
        values, head = decode("head", data, name)[0], None
        try:
            number, blobs, checksums = (whole(values.get(key, 0), key) for key in ("number", "blobs", "checksums"))
            if "name" in values:
                head = Head(str(values["name"]), whole(values["size"], "size"), checked_digest(values["digest"]))
            before = checked_digest(values["before"]) if values["before"] else ""
            return cls(number, head, before, blobs, checksums, str(values.get("writer", "")))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error}): restore the store from a copy") from error
