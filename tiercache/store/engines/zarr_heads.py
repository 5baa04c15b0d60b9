"""Heads: numbered objects that each name a store's newest blob; the largest number is the store."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tiercache.store.engines.engine import Head
from tiercache.store.records import checked_digest, decode, digest, encode, whole
from tiercache.store.store_errors import CorruptStoreError

if TYPE_CHECKING:
    from tiercache.store.engines.zarr_objects import Objects

HEADS = "heads"
"""The folder of the objects."""
_LOOKS = 100
"""How often the newest head is looked for while a writer replaces it."""
_EMPTY_LOOKS = 3


@dataclass(frozen=True, kw_only=True)
class NumberedHead:
    """A head as it is stored."""

    number: int
    head: Head | None
    """None from a writer's takeover of a store in which nothing was published."""
    before: str = ""
    """The SHA-256 of the object of the head before it; of the first one nothing."""
    writer: str = ""
    """A name that no other writer has, on object stores."""

    @property
    def key(self) -> str:
        """The name of its object."""
        return f"{HEADS}/{self.number}"

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of its object."""
        return digest(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return its record."""
        values = {"number": self.number, "before": self.before}
        values |= {} if self.head is None else {"name": self.head.name, "size": self.head.size}
        values |= {} if self.head is None else {"digest": self.head.digest}
        return encode("head", values | ({"writer": self.writer} if self.writer else {}), {})

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> NumberedHead:
        """Read the record of ``to_bytes``. Raises CorruptStoreError that calls it ``name``."""
        values, _ = decode("head", data, name)
        try:
            head = None
            if "name" in values:
                head = Head(str(values["name"]), whole(values["size"], "the size"), checked_digest(values["digest"]))
            before = values["before"]
            return cls(
                number=whole(values["number"], "the number"),
                head=head,
                before=checked_digest(before) if before else "",
                writer=str(values.get("writer", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error}): restore the store from a copy") from error


NOTHING = NumberedHead(number=0, head=None)
"""The head of a store to which nobody has written."""


class Heads:
    """Finds heads. All raise CorruptStoreError."""

    def __init__(self, objects: Objects, label: str) -> None:
        self._objects, self._label = objects, label

    def newest(self) -> NumberedHead:
        """Return the newest head; NOTHING if there is none."""
        empty = 0
        for _ in range(_LOOKS):
            number = self.newest_number()
            if not number:
                empty += 1  # a listing may miss a head that comes and the one that goes
                if empty == _EMPTY_LOOKS:
                    return NOTHING
                continue
            data = self._get(f"{HEADS}/{number}")
            if data is not None:
                found = NumberedHead.from_bytes(data, f"head {number} of {self._label}")
                if found.number != number:
                    raise CorruptStoreError(
                        f"head {number} of {self._label} says that it is {found.number}: restore the store from a copy"
                    )
                return found
        raise CorruptStoreError(f"the head of {self._label} is missing: restore the store from a copy")

    def newest_number(self) -> int:
        """Return the largest number of a head; 0 if there is none."""
        try:
            names = self._objects.names(HEADS)
        except OSError as error:
            raise CorruptStoreError(
                f"the heads of {self._label} cannot be listed ({error}): fix that, or restore the store from a copy"
            ) from error
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _get(self, key: str) -> bytes | None:
        try:
            return self._objects.get(key)
        except OSError as error:
            raise CorruptStoreError(
                f"object {key} of {self._label} cannot be read ({error}): fix that, or restore the store from a copy"
            ) from error
