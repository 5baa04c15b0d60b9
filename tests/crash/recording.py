"""The disk contents of a run of the workload at each moment, and its syncs."""

import os
import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from tests.crash.child import Teller
from tests.crash.image import Camera, File, Image
from tests.crash.points import Point, unwatch, watch
from tests.crash.store_steps import go_on

_NO_CHANGE = {"Transaction.put", "Transaction.delete"}  # calls that only change memory
_META_PAGES = 2  # the first pages of LMDB's file: its two roots


class Moment(NamedTuple):
    """The state after a call, including data that a loss of power would remove."""

    call: str
    image: Image
    begun: int  # the newest commit that may be found; -1 if none was begun
    done: int  # the newest commit that must be found; -1 if none was done


@dataclass
class Recording:
    """The moments of a run, and its syncs."""

    moments: list[Moment] = field(default_factory=list)
    syncs: dict[int, list[int]] = field(default_factory=dict)
    """By number of a file or directory: the moments at which its content became durable."""

    def durable(self, number: int, moment: int) -> int:
        synced = self.syncs.get(number, [])
        i = bisect_right(synced, moment)
        return synced[i - 1] if i else 0

    def between(self, number: int, low: int, high: int) -> list[tuple[int, Any]]:
        """Return a file or directory at moment ``low`` and each change up to ``high``, with its moment.

        It is None before it exists and after it is deleted.
        """
        changes = self._changes.get(number, [])
        first = bisect_right(changes, low, key=itemgetter(0)) - 1
        begin = changes[first][1] if first >= 0 else None
        return [(low, begin), *changes[first + 1 : bisect_right(changes, high, key=itemgetter(0))]]

    @cached_property
    def directories(self) -> frozenset[int]:
        return frozenset(number for moment in self.moments for number in moment.image.directories)

    @cached_property
    def _changes(self) -> dict[int, list[tuple[int, Any]]]:
        """By number of a file or directory: the moments at which it changed, and its new content."""
        changes: dict[int, list[tuple[int, Any]]] = {}
        before: dict[int, Any] = {}
        for moment, (_, image, _, _) in enumerate(self.moments):
            now: dict[int, Any] = {**image.directories, **image.files}
            for number in before.keys() - now.keys():
                changes[number].append((moment, None))
            for number, value in now.items():
                if before.get(number) is not value:
                    changes.setdefault(number, []).append((moment, value))
            before = now
        return changes


def record(folder: Path, engine: str, teller: Teller) -> Recording:
    """Run the workload in a store in ``folder`` from start to end, and return the recording.

    Only the two sync calls are wrapped, because their argument identifies the synced file. LMDB's steps
    inside a commit are known from its source (mdb.c, ``mdb_txn_commit`` and ``mdb_env_write_meta``): it writes pages,
    syncs the file, then writes one root through a syncing handle. A test compares that with the system calls.
    """
    recorder = _Recorder(folder, teller)
    sync_file, sync_data = os.fsync, os.fdatasync
    vars(os).update(fsync=recorder.syncing(sync_file), fdatasync=recorder.syncing(sync_data))
    watch(recorder.reached)
    try:
        go_on(folder / "store.tc", engine, teller.note)
    finally:
        unwatch()
        vars(os).update(fsync=sync_file, fdatasync=sync_data)
    return recorder.recording


class _Recorder:
    """Lets one thread at a time touch the disk, so that writes and syncs have one order."""

    def __init__(self, folder: Path, teller: Teller) -> None:
        self._one = threading.RLock()
        self._camera, self._teller = Camera(folder), teller
        self.recording = Recording()
        self._add("the beginning", self._camera.take())
        for number in self._camera.image.directories:
            self._sync(number)

    def reached(self, _: int, point: Point) -> None:
        """Take an image after a call, which has had the disk for itself since it began."""
        if not point.after:
            self._one.acquire()
            return
        try:
            if point.call not in _NO_CHANGE:
                self._note(point)
        finally:
            self._one.release()

    def syncing(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        def sync(handle: int) -> None:
            with self._one:
                call(handle)
                self._add(call.__name__, self._camera.take())
                number = self._camera.number(handle)
                if number is not None:
                    self._sync(number)

        return sync

    def _note(self, point: Point) -> None:
        before, after = self._camera.image, self._camera.take()
        if point.commits_lmdb:
            self._commit(point.call, before, after)
        elif point.syncs_lmdb:
            self._add(point.call, after)
            for number in _environments(after):
                self._sync(number)
        else:
            self._add(point.call, after)

    def _commit(self, call: str, before: Image, after: Image) -> None:
        """Record a commit of LMDB as its steps: pages, a sync, a root, a sync."""
        for number in _environments(after):
            old, new = before.files.get(number), after.files[number]
            if old is None or old is new:
                continue
            pages = (*old.pages[:_META_PAGES], *new.pages[_META_PAGES:])
            self._add(f"{call} (pages)", Image(after.directories, {**after.files, number: File(new.size, pages)}))
            self._sync(number)
            self._add(f"{call} (root)", after)
            self._add(f"{call} (synced)", after)
            self._sync(number)

    def _add(self, call: str, image: Image) -> None:
        moments = self.recording.moments
        if moments and moments[-1].image == image and moments[-1][2:] == (self._teller.begun, self._teller.done):
            return
        moments.append(Moment(call, image, self._teller.begun, self._teller.done))

    def _sync(self, number: int) -> None:
        moments = self.recording.moments
        moments.append(moments[-1]._replace(call="sync"))
        self.recording.syncs.setdefault(number, []).append(len(moments) - 1)


def _environments(image: Image) -> list[int]:
    return [
        number
        for names in image.directories.values()
        for name, number in names.items()
        if name == "data.mdb" and number in image.files
    ]
