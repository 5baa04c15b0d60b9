"""Manifests: which records an engine has, each with its digest, in a chain.

A manifest names every record with its SHA-256, and has the digest of the manifest before. Whoever knows the digest of
the newest one (LMDB: ``HEAD``; Zarr: the object itself) knows that all records are those that were written, whatever
the pages of the engine say.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from tiercache.store.errors import CorruptStoreError
from tiercache.store.record import decode, encode, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Link(NamedTuple):
    """A record as its manifest names it."""

    number: int
    """Of the manifest with which it was written."""
    size: int
    digest: str
    """SHA-256, as hexadecimal digits."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The records of an engine after one of its commits."""

    number: int
    """Counts the commits of the engine; 0 before the first."""
    before: str = ""
    """The digest of the manifest before; of the first one nothing."""
    links: dict[str, Link] = field(default_factory=dict)
    """By name of each record."""
    writer: str = ""
    """What no other writer is called, where writers of one store may not know of each other."""

    def after(self, records: Mapping[str, bytes | None], number: int | None = None, *, writer: str = "") -> Manifest:
        """Return the manifest of the commit that sets ``records`` (None removes one) after this one.

        ``number`` is the next one where not said.
        """
        number = self.number + 1 if number is None else number
        new = {name: link(number, data) for name, data in records.items() if data is not None}
        kept = {name: known for name, known in self.links.items() if name not in records}
        return Manifest(number=number, before=self.digest if self.number else "", links=kept | new, writer=writer)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of its record, as hexadecimal digits."""
        return digest(self.to_bytes())

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each record, by name."""
        return {name: known.digest for name, known in self.links.items()}

    def to_bytes(self) -> bytes:
        """Return its record."""
        names = sorted(self.links)
        links = [[name, self.links[name].number, self.links[name].size, self.links[name].digest] for name in names]
        values = {"number": self.number, "before": self.before, "records": links}
        return encode("manifest", values | ({"writer": self.writer} if self.writer else {}), {})

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Manifest:
        """Read what ``to_bytes`` wrote. Raises CorruptStoreError that calls it ``name``."""
        values, _ = decode("manifest", data, name)
        try:
            links = {
                str(record): Link(whole(number, "a number"), whole(size, "a size"), checked_digest(sum_))
                for record, number, size, sum_ in values["records"]
            }
            before = values["before"]
            return cls(
                number=whole(values["number"], "the number"),
                before=checked_digest(before) if before else "",
                links=links,
                writer=str(values.get("writer", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error}): restore the store from a copy") from error

    def read(self, get: Callable[[str, Link], bytes | None], store: str) -> dict[str, bytes]:
        """Return all records by name, each from ``get(name, link)`` and checked. Raises CorruptStoreError."""
        found = {}
        for name, known in self.links.items():
            data = get(name, known)
            if data is None or len(data) != known.size or digest(data) != known.digest:
                seen = "is missing" if data is None else "is not what was written"
                raise CorruptStoreError(f"record {name!r} of {store} {seen}: restore the store from a copy")
            found[name] = data
        return found


def update(records: dict[str, bytes], changes: Mapping[str, bytes | None]) -> None:
    """Set and remove records (None) as a commit does."""
    for name, data in changes.items():
        records.pop(name, None)
        if data is not None:
            records[name] = bytes(data)


def link(number: int, data: bytes) -> Link:
    """Return how manifest ``number`` names a record that is written with it."""
    return Link(number, len(data), digest(data))


def digest(data: bytes) -> str:
    """Return the SHA-256 of bytes as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def checked_digest(value: object) -> str:
    """Return a digest. Raises ValueError for what is none."""
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"{str(value)[:70]!r} is no digest")
    return value
