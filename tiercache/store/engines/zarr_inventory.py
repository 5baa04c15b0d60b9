"""Blobs of a Zarr store by the names of its objects, and what a writer holds of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from tiercache.store.engines.engine import PAGE_BYTES, Blob
from tiercache.store.engines.zarr_garbage import Hole
from tiercache.store.engines.zarr_layout import NODE, Arrays, arrays_of, arrays_of_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

FOLDERS = ("commits", "ranks", "segments", "states")
"""The folders of blobs: all other objects are the engine's own, or nobody's."""
TABLES = "tables"
"""The blob that is in none."""


class Held(NamedTuple):
    """A blob as a writer knows it."""

    size: int
    """Bytes; 0 of a leftover that cannot be read."""
    dropped: int
    names: tuple[str, ...]
    """Of its objects, and with a slash at the end of the folders of its arrays."""
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
    sizes: Mapping[str, int], arrays: Mapping[str, Arrays], read: Callable[[Sequence[str]], Sequence[bytes | None]]
) -> dict[str, Held]:
    """Return the blobs whose objects are there, leftovers of a crash among them.

    ``sizes`` are those of objects; empty folders end in a slash. ``arrays`` are those of blobs whose geometry is known;
    for others ``read`` returns the objects that describe them.
    """
    plain, by_array, bare = _sorted(sizes)
    found: dict[str, Held] = {}
    for name, objects in plain.items():
        size = sum(sizes[key] for key in objects)
        found[name] = Held(size, 0, tuple(objects), arrays_of(Blob(name, size)))
    nodes = [f"{f}/{NODE}" for name, some in by_array.items() for f in some if name not in arrays]
    described = dict(zip(nodes, read(nodes), strict=True))
    for name, folders in by_array.items():
        of_blob = arrays.get(name) or arrays_of_nodes({f: described.get(f"{f}/{NODE}") for f in sorted(folders)})
        size, dropped = (0, 0) if of_blob is None else of_blob.stored(sizes)
        found[name] = Held(size, dropped, tuple(f"{folder}/" for folder in sorted(folders)), of_blob)
    used = {folder for name in found for folder in _folders(name)}
    return found | {name: Held(0, 0, (), None) for folder, name in bare.items() if folder not in used}


def _sorted(keys: Iterable[str]) -> tuple[dict[str, list[str]], dict[str, set[str]], dict[str, str]]:
    """Return the objects of plain blobs, the folders of arrays, and folders of segments and groups, each by name.

    The last ones are by folder: the name of a blob that stands for them where they have no other.
    """
    objects: set[str] = set()
    by_array: dict[str, set[str]] = defaultdict(set)
    bare: dict[str, str] = {}
    for key in keys:
        parts = key.rstrip("/").split("/")
        is_object = key[-1] != "/" and parts[-1] != NODE
        if parts[0] != "segments" or (len(parts) == 3 and is_object):
            if is_object:
                objects.add(key)
        elif len(parts) > 3 and (len(parts) > 4 or parts[3] != NODE):
            kind = parts[3] if parts[3] in {"keys", "changed"} else "rows"
            by_array["/".join((*parts[:3], kind))].add("/".join(parts[:4]))
        if parts[0] == "segments" and len(parts) > 1 and parts[1] != NODE:
            bare["/".join(parts[:2])] = f"segments/{parts[1]}/meta"
            if len(parts) > 2 and not (len(parts) == 3 and key[-1] != "/"):
                bare["/".join(parts[:3])] = f"{'/'.join(parts[:3])}/rows"
    plain: dict[str, list[str]] = {}
    for key in objects:
        parent, part = _parent(key, objects)
        if parent:
            continue
        plain[key] = [key]
        while (part := f"{key}.{len(plain[key])}") in objects:
            plain[key].append(part)
    return plain, by_array, bare


def _parent(key: str, objects: set[str]) -> tuple[str, str]:
    """Return the blob that an object is a later part of, and the number of the part; "" for a blob's first object."""
    name, _, part = key.rpartition(".")
    whole = part.isdecimal() and name in objects and all(f"{name}.{n}" in objects for n in range(1, int(part)))
    return (name, part) if whole else ("", "")


def epoch_of(key: str) -> int:
    """Return the epoch of the writer of an object, as far as its name says so; 0 if it does not."""
    word = key.split("/")[1] if "/" in key else key
    epoch = word.partition("-")[2].partition(".")[0]
    return int(epoch) if epoch.isdecimal() else 0
