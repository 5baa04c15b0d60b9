"""Heads: numbered objects that each name a store's newest commit; the largest number is the store.

On a local disk a lock keeps writers apart. On an object store each head is put by a conditional put: a writer takes
over by publishing a head, and the previous writer finds its next number taken.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from tiercache.store.engines.engine import HeadRecord
from tiercache.store.engines.zarr_objects import PROBES
from tiercache.store.files import writing
from tiercache.store.records import digest
from tiercache.store.store_errors import CorruptStoreError, StoreError, StoreInUseError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiercache.store.engines.engine import Head
    from tiercache.store.engines.zarr_objects import Objects

HEADS = "heads"
"""The folder of the objects."""
_LOOKS = 100
"""Tries to read the newest head while a writer replaces it."""
_EMPTY_LOOKS = 3
"""A listing may miss both the new head and the deleted one."""


class Heads:
    """Reads and publishes heads, and tracks whether this process may still write."""

    def __init__(self, objects: Objects) -> None:
        """Read the newest head. Raises CorruptStoreError."""
        self._objects, self._label = objects, objects.label
        self.epoch = 0
        """On an object store, the number of the head with which this writer took over."""
        self.dirty: set[str] = set()
        """Objects that must be durable before the next head."""
        self._name = secrets.token_hex(8) if objects.root is None else ""
        self._next = 0
        self.fenced = self._unknown = self._unsynced = False
        """True if another writer took over; if a head was put and the store did not confirm it; if a sync failed, after
        which a later success does not prove that nothing was lost."""
        self._own = self._newest()
        if not self._own.number and objects.names("commits"):
            raise CorruptStoreError(f"the head of {self._label} is missing: restore the store from a copy")

    @property
    def writes(self) -> bool:
        """True if this process took over as the writer."""
        return self._next > 0

    def newest(self) -> Head | None:
        """Read the newest head. Raises CorruptStoreError, and StoreError if its durability is unknown."""
        if self._unknown and not self.epoch:
            raise self._lost()
        found = self._newest()
        if not self.writes:  # a writer may have withdrawn a head that it saw
            if found.number < self._own.number:
                raise CorruptStoreError(
                    f"{self._label} is at head {found.number}, but was at {self._own.number} before: "
                    "restore the store from a copy"
                )
            self._own = found
        return found.head

    def take_over(self) -> bool:
        """Become the writer; return True if the store is new. Raises StoreError."""
        before, self._next = self._own, self._own.number + 1
        if self._objects.root is None:
            with writing(self._objects.place):
                problem = self._objects.overwrites()
            if problem:
                raise StoreError(
                    f"{self._label} cannot be written: {problem}, so one writer could destroy another's commits: "
                    "use zarr.storage.ObjectStore on a server with conditional puts, or write to a local "
                    "disk and copy that"
                )
            self._create(self._after(before.head))
            self.epoch = self._own.number
        elif before.number:
            self._sync([_key(before.number)])
        with contextlib.suppress(OSError):  # else the next writer deletes them
            names = self._objects.names(HEADS)
            old = [f"{HEADS}/{one}" for one in names if not one.isdecimal() or int(one) < self._own.number]
            self._objects.delete(old + [f"{PROBES}/{one}" for one in self._objects.names(PROBES)])
        return not before.number

    def publish(self, head: Head, before: Head | None) -> None:
        """Sync pending objects, then write the head with the next number, and delete the previous one."""
        if self._own.head != before:
            raise StoreError(f"{self._label} is at {self._own.head}, not at {before}: close it and open it again")
        old, fresh, begun = self._own, self._after(head), False
        try:
            self._sync(self.dirty)
            if self.epoch:
                self._create(fresh)
            else:
                self._check_newest()
                begun = True
                with writing(self._objects.place):
                    self._objects.publish(_key(fresh.number), fresh.to_bytes())
                self._sync([_key(fresh.number)])
                self._own = fresh
        finally:
            # An interrupt may leave the head durable, or not written at all.
            if self._own is fresh:
                self.dirty, self._unknown = set(), False
                with contextlib.suppress(OSError):
                    self._objects.delete([_key(old.number)])
            elif begun:
                self._withdraw(fresh)

    def check_writer(self) -> None:
        """Raise StoreError, or StoreInUseError, if this process may not write."""
        if self.fenced:
            raise StoreInUseError(f"another writer has opened {self._label}: close this one")
        if self._unknown:
            raise self._lost()
        if not self.writes:
            raise ValueError(f"{self._label} is open for reading: open it with mode='a' to write")
        self._objects.check()
        self._check_newest()

    # -- inside ------------------------------------------------------------------------------------------

    def _after(self, head: Head | None) -> HeadRecord:
        number = self._next
        self._next += self._objects.root is not None  # on a local disk only success takes a number
        before = digest(self._own.to_bytes()) if self._own.number else ""
        return HeadRecord(number, head, before, writer=self._name)

    def _create(self, head: HeadRecord) -> None:
        """Publish a head whose number no other writer has taken; a fenced writer fails."""
        self._unknown = True
        with writing(self._objects.place):
            # The number that was taken may be free again if the other writer has deleted that head: then a greater one
            # exists.
            if self._objects.create(_key(head.number), head.to_bytes()):
                if self._number() == head.number:
                    self._own, self._next, self._unknown = head, head.number + 1, False
                    return
                with contextlib.suppress(OSError):
                    self._objects.delete([_key(head.number)])
        self.fenced = True
        raise StoreInUseError(
            f"another writer has opened {self._label}: earlier commits of both are kept; let one train at a time"
        )

    def _withdraw(self, head: HeadRecord) -> None:
        """Undo a head that is not durable; if that fails, only an opening can tell whether it exists."""
        self._unknown = True
        with contextlib.suppress(OSError):
            self._objects.withdraw(_key(head.number))
            self._unknown = False

    def _lost(self) -> StoreError:
        return StoreError(f"{self._label} did not confirm its newest commit: open it again")

    def _sync(self, keys: Iterable[str]) -> None:
        if self._unsynced:
            raise StoreError(f"{self._label} could not be synced: fix that and open the store again")
        self._unsynced = True
        with writing(self._objects.place):
            self._objects.sync(keys)
        self._unsynced = False

    def _check_newest(self) -> None:
        """Raise StoreError if the newest head on a local disk is not the last one written or read."""
        if self._objects.root is None:
            return
        found = self._newest()
        if found != self._own:
            raise StoreError(
                f"the newest head of {self._label} is {found.number}, but this process wrote {self._own.number}: "
                "another process has written to the store, or an older copy replaced it. Nothing more is written: "
                "close it, and open it again"
            )

    def _newest(self) -> HeadRecord:
        """Return the newest head; number 0 if there is none."""
        empty = 0
        try:
            for _ in range(_LOOKS):
                number = self._number()
                if number and (data := self._objects.get(_key(number))) is not None:
                    found = HeadRecord.from_bytes(data, f"head {number} of {self._label}")
                    if found.number != number:
                        raise CorruptStoreError(
                            f"head {number} of {self._label} cannot be read (its number is {found.number}): "
                            "restore the store from a copy"
                        )
                    return found
                empty += not number
                if empty == _EMPTY_LOOKS:
                    return HeadRecord(0, None)
        except OSError as error:
            raise self._objects.unreadable(f"the head of {self._label}", error) from error
        raise CorruptStoreError(f"the head of {self._label} is missing: restore the store from a copy")

    def _number(self) -> int:
        return max((int(name) for name in self._objects.names(HEADS) if name.isdecimal()), default=0)


def _key(number: int) -> str:
    """Return the name of a head's object."""
    return f"{HEADS}/{number}"
