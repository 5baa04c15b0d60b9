"""Blobs of a Zarr store by the names of its objects, and what a writer holds of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from tiercache.store.engines.engine import PAGE_BYTES, Blob
from tiercache.store.engines.zarr_garbage import Hole
from tiercache.store.engines.zarr_layout import NODE, Arrays, Shape, arrays_in, arrays_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

FOLDERS = ("commits", "ranks", "segments", "states")
"""The folders of blobs: all other objects are the engine's own, or nobody's."""
_GROUP = 2
"""Folders of a segment's blob that goes with a group."""
TABLES = "tables"
"""The blob that is in none; of a writer with an epoch its name ends with that."""


class Held(NamedTuple):
    """A blob as a writer knows it."""

    size: int
    """Bytes; 0 of a leftover that cannot be read."""
    dropped: int
    names: tuple[str, ...]
    """Names of its objects, and of the folders of its arrays, which end with a slash."""
    arrays: Arrays | None


class Inventory(dict[str, Held]):
    """Blobs by name, and how many of them each folder of a segment has."""

    def __init__(self, blobs: Mapping[str, Held]) -> None:
        super().__init__()
        self.folders = Counter[str]()
        self.add(blobs)

    def add(self, blobs: Mapping[str, Held]) -> None:
        """Add blobs."""
        self.update(blobs)
        self.folders.update(folder for name in blobs for folder in _folders(name))

    def remove(self, blobs: Iterable[str]) -> list[str]:
        """Remove blobs, and return the objects and folders that nobody needs any more."""
        gone = {blob: held for blob in blobs if (held := self.pop(blob, None)) is not None}
        left = Counter(folder for name in gone for folder in _folders(name))
        self.folders.subtract(left)
        empty = [folder for folder in left if not self.folders[folder]]
        for folder in empty:
            del self.folders[folder]
        names = [name for held in gone.values() for name in held.names] + [f"{folder}/" for folder in empty]
        return [name for name in names if not any(f"{f}/" != name and name.startswith(f"{f}/") for f in empty)]

    def drop_front(self, name: str, upto: int, *, punch: bool) -> tuple[list[str], list[Hole]]:
        """Note that the front of a blob is dropped; return chunks that end there, and the pages of other files."""
        held, names, holes = self.get(name), list[str](), list[Hole]()
        if held is None or upto <= held.dropped:
            return names, holes
        self[name] = held._replace(dropped=min(upto, held.size))
        for array in held.arrays.arrays if held.arrays is not None else ():
            if held.arrays is None or array.suffix is None:
                continue  # a plain blob goes whole
            first, live = held.arrays.live(held.dropped), held.arrays.live(upto)
            dead = array.num_chunks if upto >= held.size else live // array.chunk_blocks
            names += [array.key(chunk) for chunk in range(first // array.chunk_blocks, dead)]
            size = live % array.chunk_blocks * array.block_rows * array.row_bytes // PAGE_BYTES * PAGE_BYTES
            if punch and dead < array.num_chunks and array.shards is None and size:
                holes.append(Hole(array.key(dead), size))
        return names, holes


def _folders(name: str) -> list[str]:
    """Return the folders of a segment's blob that go with their last blob."""
    parts = name.split("/")
    return ["/".join(parts[:n]) for n in range(2, len(parts))]


def held_of(blob: Blob, arrays: Arrays) -> Held:
    """Return a blob that was put whole."""
    names = [f"{array.folder}/" for array in arrays.arrays]
    if blob.of is None:
        (array,) = arrays.arrays
        names = [array.key(i) for i in range(max(1, array.num_chunks))]
    return Held(blob.size, 0, tuple(names), arrays)


def blobs_of(
    sizes: Mapping[str, int], known: Mapping[str, Held], read: Callable[[Sequence[str]], Sequence[bytes | None]]
) -> dict[str, Held]:
    """Return the blobs whose objects are there, leftovers of a crash among them.

    ``sizes`` are those of objects; empty folders end in a slash. ``known`` are blobs that were seen before; of each
    group of others ``read`` returns an object that describes one array, and so all.
    """
    keys: dict[str, list[str]] = defaultdict(list)
    bare: dict[str, list[str]] = defaultdict(list)
    for key in sizes:
        if key.count("/") != 1 or not key.endswith(NODE):
            (bare if _is_bare(key) else keys)[_blob_of(key, sizes)].append(key)
    # What describes a group or segment, or was left of it, is a blob only if there is no other.
    used = {folder for name in keys for folder in _folders(name)}
    found = {name: Held(0, 0, (), None) for name in bare if name not in keys and name.rpartition("/")[0] not in used}
    grouped = {name: name.rpartition("/")[0] for name in keys if len(_folders(name)) == _GROUP}
    nodes = {
        group: key
        for name, group in grouped.items()
        if name not in known or known[name].arrays is None
        for key in keys[name]
        if key.endswith(NODE)
    }
    shapes = dict(zip(nodes, map(Shape.of_node, read([*nodes.values()])), strict=True))
    for name, objects in keys.items():
        if name in grouped:
            arrays, shape = known[name].arrays if name in known else None, shapes.get(grouped[name])
            if arrays is None and shape is not None:
                arrays = arrays_in(name, shape)
            size, dropped = (0, 0) if arrays is None else arrays.stored(sizes)
            folders = sorted({"/".join(key.split("/")[:4]) + "/" for key in objects})
            found[name] = Held(size, dropped, tuple(folders), arrays)
        else:
            size = sum(sizes[key] for key in objects)
            found[name] = Held(size, 0, tuple(objects), arrays_of(Blob(name, size)))
    return found


def _blob_of(key: str, keys: Container[str]) -> str:
    """Return the blob that an object is of, or stands for if it has no other."""
    folder, segment, *rest = (*key.split("/"), "")
    if folder == "segments" and len(rest) > _GROUP:
        return f"segments/{segment}/{rest[0]}/{rest[1] if rest[1] in {'keys', 'changed'} else 'rows'}"
    if folder == "segments" and (key.endswith(NODE) or key[-1] == "/"):
        return f"segments/{segment}/meta"
    name, _, part = key.rpartition(".")
    is_part = part.isdecimal() and all(one in keys for one in (name, *(f"{name}.{i}" for i in range(1, int(part)))))
    return name if is_part else key


def _is_bare(key: str) -> bool:
    """Return whether an object describes a segment or group, or a folder of one is empty."""
    return (key.endswith(NODE) and key.count("/") < 4) or (key[-1] == "/" and key.count("/") < 4)


def is_tables(key: str) -> bool:
    """Return whether an object is a blob that is in no folder."""
    return key == TABLES or (key.startswith(f"{TABLES}-") and epoch_of(key) > 0)


def epoch_of(key: str) -> int:
    """Return the epoch of the writer of an object, as far as its name says so; 0 if it does not."""
    word = key.split("/")[1] if "/" in key else key
    epoch = word.partition("-")[2].partition(".")[0]
    return int(epoch) if epoch.isdecimal() else 0
