"""Blobs of a Zarr store by the names of its objects, and objects that no commit needs anymore."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from tiercache.store.engines.zarr_layout import NODE, Arrays, Shape, arrays_in
from tiercache.store.files import PAGE_BYTES
from tiercache.store.records import decode, encode
from tiercache.store.store_errors import CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from tiercache.store.engines.zarr_objects import Objects

Hole = tuple[str, int]
"""A file name, and the number of bytes at its front that may be freed."""
FOLDERS = ("commits", "ranks", "segments", "states")
"""The folders of blobs: all other objects belong to the engine, or are ignored."""
_GROUP = 2
"""Number of folders in the path of a segment's blob with a group."""
TABLES = "tables"
"""The blob outside of folders; with an epoch, its name ends with that."""
FREE = "free"
"""The folder of the objects that list garbage, one per writer."""


class Held(NamedTuple):
    """A writer's record of a blob."""

    size: int
    """Bytes; 0 for a leftover that cannot be read."""
    dropped: int
    names: tuple[str, ...]
    """Names of its objects, and of the folders of its arrays, which end with a slash."""
    arrays: Arrays | None
    """None for a blob without arrays, or if their description is missing."""


class Inventory(dict[str, Held]):
    """Blobs by name, and the number of blobs in each folder of a segment."""

    def __init__(self, blobs: Mapping[str, Held]) -> None:
        super().__init__()
        self.folders = Counter[str]()
        self.add(blobs)

    def add(self, blobs: Mapping[str, Held]) -> None:
        """Add blobs."""
        self.update(blobs)
        self.folders.update(folder for name in blobs for folder in _folders_of(name))

    def remove(self, blobs: Iterable[str]) -> list[str]:
        """Remove blobs, and return the objects and folders that may be deleted."""
        removed = {blob: held for blob in blobs if (held := self.pop(blob, None)) is not None}
        counts = Counter(folder for name in removed for folder in _folders_of(name))
        self.folders.subtract(counts)
        empty = [folder for folder in counts if not self.folders[folder]]
        for folder in empty:
            del self.folders[folder]
        names = [name for held in removed.values() for name in held.names] + empty
        return [name for name in names if not any(folder != name and name.startswith(folder) for folder in empty)]

    def drop_front(self, name: str, upto: int) -> tuple[list[str], list[Hole]]:
        """Drop the front of a blob with arrays; return chunks that end there, and the pages of other files."""
        blob, names, holes = self.get(name), list[str](), list[Hole]()
        if blob is None or blob.arrays is None or upto <= blob.dropped:
            return names, holes
        self[name] = blob._replace(dropped=min(upto, blob.size))
        first, live = blob.arrays.live(blob.dropped), blob.arrays.live(upto)
        for array in blob.arrays.arrays:
            dead = array.num_chunks if upto >= blob.size else live // array.chunk_blocks
            names += [array.key(chunk) for chunk in range(first // array.chunk_blocks, dead)]
            size = live % array.chunk_blocks * array.block_rows * array.row_bytes // PAGE_BYTES * PAGE_BYTES
            if dead < array.num_chunks and array.shards is None and size:
                holes.append((array.key(dead), size))
        return names, holes


def blobs_of(
    sizes: Mapping[str, int], known: Mapping[str, Held], read: Callable[[Sequence[str]], Sequence[bytes | None]]
) -> dict[str, Held]:
    """Return the blobs with existing objects, including leftovers of a crash.

    ``sizes`` are the objects' sizes; names of empty folders end in a slash. ``known`` are blobs that were seen before;
    for each other group ``read`` returns an object that describes one array, and so all.
    """
    keys, bare = defaultdict[str, list[str]](list), set[str]()
    for key in sizes:
        describes = key.endswith(NODE)
        if describes and key.count("/") == 1:
            continue  # the folder of all segments
        if (describes or key[-1] == "/") and key.count("/") < 4:
            bare.add(_blob_of(key, sizes))
        else:
            keys[_blob_of(key, sizes)].append(key)
    # A leftover description of a group or segment is a blob only if no other object is left.
    used = {folder for name in keys for folder in _folders_of(name)}
    found = {name: Held(0, 0, (), None) for name in bare - keys.keys() if _folder_of(name) not in used}
    grouped = {name for name in keys if len(_folders_of(name)) == _GROUP}
    nodes = {
        _folder_of(name): key
        for name in grouped
        if name not in known or known[name].arrays is None
        for key in keys[name]
        if key.endswith(NODE)
    }
    shapes = dict(zip(nodes, map(Shape.of_node, read([*nodes.values()])), strict=True))
    for name, objects in keys.items():
        if name in grouped:
            arrays, shape = known[name].arrays if name in known else None, shapes.get(_folder_of(name))
            if arrays is None and shape is not None:
                arrays = arrays_in(name, shape)
            size, dropped = (0, 0) if arrays is None else arrays.stored(sizes)
            folders = sorted({"/".join(key.split("/")[:4]) + "/" for key in objects})
            found[name] = Held(size, dropped, tuple(folders), arrays)
        else:
            found[name] = Held(sum(sizes[key] for key in objects), 0, tuple(objects), None)
    return found


def _blob_of(key: str, keys: Container[str]) -> str:
    """Return the blob of an object, or the blob that it represents alone."""
    folder, segment, *rest = (*key.split("/"), "")
    if folder == "segments" and len(rest) > _GROUP:
        return f"segments/{segment}/{rest[0]}/{rest[1] if rest[1] in {'keys', 'changed'} else 'rows'}"
    if folder == "segments" and (key.endswith(NODE) or key[-1] == "/"):
        return f"segments/{segment}/meta"
    name, _, part = key.rpartition(".")
    is_part = part.isdecimal() and all(one in keys for one in (name, *(f"{name}.{i}" for i in range(1, int(part)))))
    return name if is_part else key


def _folders_of(key: str, first: int = 2) -> list[str]:
    """Return the folders of an object, each with a slash; for a blob, its segment's and its group's."""
    parts = key.split("/")
    return ["/".join(parts[:n]) + "/" for n in range(first, len(parts))]


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0] + "/"


def is_tables(key: str) -> bool:
    """Return True for a blob outside of folders."""
    return key == TABLES or (key.startswith(f"{TABLES}-") and epoch_of(key) > 0)


def epoch_of(key: str) -> int:
    """Return the epoch of an object's writer from its name; 0 if it has none."""
    word = key.split("/")[1] if "/" in key else key
    epoch = word.partition("-")[2].partition(".")[0]
    return int(epoch) if epoch.isdecimal() else 0


class Garbage:
    """Objects, and folders (ending in a slash), to delete on a thread; on an object store after a delay for readers.

    For one thread at a time, except ``in`` and ``wait``.
    """

    def __init__(self, objects: Objects, keep_for: float) -> None:
        """On an object store, delete after ``keep_for`` seconds, by the clock of the machine that noted a name."""
        self._objects, self._keep_for = objects, keep_for
        self._since: dict[str, float] = {}
        """On an object store, the seconds since 1970 when a name was noted."""
        self._before: dict[str, float] = {}
        """Times noted by earlier writers; they do not decide what is garbage."""
        self._epoch = 0
        self._listed: set[str] | None = None
        """The names in the list of this writer; None if it has none."""
        self._deleting: Future[None] | None = None

    def __contains__(self, key: str) -> bool:
        """Return True if an object is garbage, by itself or with its folder."""
        return bool(self._since) and any(name in self._since for name in (key, *_folders_of(key, 1)))

    def join(self, epoch: int) -> None:
        """Read the times of garbage from the lists of earlier writers; an unreadable one costs only time."""
        self._epoch, now = epoch, time.time()
        with contextlib.suppress(OSError):
            keys = [f"{FREE}/{name}" for name in self._objects.names(FREE)]
            for key, data in zip(keys, self._objects.get_all(keys), strict=True):
                with contextlib.suppress(CorruptStoreError, KeyError, TypeError, ValueError, OverflowError):
                    listed = decode(FREE, data or b"", key)[0]["since"]
                    times = {str(name): float(since) for since, names in listed for name in names}
                    for name, since in times.items():  # a fast clock's times count as now
                        self._before[name] = min(since, now, self._before.get(name, now))

    def delete(self, names: Iterable[str], holes: Sequence[Hole] = ()) -> None:
        """Delete names and punch holes; names that cannot be deleted are left to the next opening."""
        self.wait()
        due = list(names)
        if self._epoch:
            now = time.time()
            for name in due:
                times = [self._before[one] for one in (name, *_folders_of(name, 1)) if one in self._before]
                self._since.setdefault(name, min(times, default=now))
            due, holes = [name for name, since in self._since.items() if since + self._keep_for <= now], ()
            for name in due:
                del self._since[name]

        def run() -> None:
            with contextlib.suppress(OSError):
                for hole in holes:
                    self._objects.punch(*hole)
                self._objects.delete(due)

        if due or holes:
            self._deleting = self._objects.threads.submit(run)

    def give_back(self, names: Iterable[str]) -> None:
        """Delete names at once that are about to be put again. Raises OSError."""
        self.wait()
        own = {*names}
        around = own | {folder for name in own for folder in _folders_of(name.rstrip("/"), 1)}
        inside = tuple(name for name in own if name[-1] == "/")
        found = [one for one in self._since if one in around or one.startswith(inside)]
        self._objects.delete(found)
        for name in found:
            del self._since[name]

    def wait(self) -> None:
        """Return when no deletion is in progress."""
        if (deleting := self._deleting) is not None:
            deleting.exception()

    def list(self, *, again: bool = True) -> None:
        """On an object store, replace the lists of undeleted names; not ``again``: unless this writer has one."""
        if not self._epoch or (not again and self._listed is not None):
            return
        by_time = defaultdict[float, list[str]](list)
        for name, since in self._since.items():
            by_time[since].append(name)
        since_all = sorted([since, sorted(names)] for since, names in by_time.items())
        with contextlib.suppress(OSError):
            if since_all and self._since.keys() != self._listed:
                self._objects.put(f"{FREE}/{self._epoch}", encode(FREE, {"since": since_all}, {}))
            last = self._epoch - bool(since_all)
            lists = [name for name in self._objects.names(FREE) if name.isdecimal() and int(name) <= last]
            self._objects.delete([f"{FREE}/{name}" for name in lists])
            self._listed = {*self._since}
