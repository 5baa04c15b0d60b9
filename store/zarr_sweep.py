"""Which objects are there, and which of them are deleted because nothing needs them."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from tiercache.store.direct_file import PAGE_BYTES, paged
from tiercache.store.reader_mark import commits_read
from tiercache.store.zarr_arrays import NODE
from tiercache.store.zarr_objects import LEFTOVER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from tiercache.store.spare_files import SpareFiles
    from tiercache.store.zarr_manifest import Manifest
    from tiercache.store.zarr_writer import ChunkWriter

    Sizes = Mapping[str, int | None]


class Sweep:
    """The objects of a store as its writer knows them. For one thread at a time.

    What the newest manifest does not name is garbage; it is deleted unless a manifest that a reader has open names it.
    """

    def __init__(self, writer: ChunkWriter, readers: Path | None, spares: SpareFiles | None) -> None:
        """``readers`` is where readers leave their marks; None where they leave none, and then there are no spares."""
        self._writer, self._readers, self._spares = writer, readers, spares
        self._present: dict[str, int | None] = {}
        self._inside: dict[str, set[str]] = {}
        """By folder of a stream or a segment: the objects in it."""
        self._chunks: Counter[str] = Counter()
        """How many of these hold bytes of blocks."""
        self._garbage: dict[str, int] = {}
        """By name: the commit that frees it."""
        self._held: dict[int, Manifest | None] = {}
        self._going: tuple[Future[None], list[str]] | None = None
        self._folders: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether an object of this name is there, or may be."""
        return key in self._present

    @property
    def chunk_bytes(self) -> int:
        """Bytes of all objects that hold blocks, once nothing is being deleted."""
        self.wait()
        present = [*self._present.items()]  # at once: the writer adds to it
        return sum(size or 0 for key, size in present if is_chunk(key))

    def add(self, objects: Sizes) -> None:
        """Note objects that were written."""
        for key in objects.keys() - self._present.keys():
            for folder in _folders(key):
                self._inside.setdefault(folder, set()).add(key)
                self._chunks[folder] += is_chunk(key)
        self._present |= objects

    def hold(self, number: int, manifest: Manifest | None) -> None:
        """Keep what an older manifest names for as long as a reader has it open; of one that is damaged, everything."""
        self._held[number] = manifest

    def give(self, objects: Sizes | Iterable[tuple[str, int | None]], freed: int) -> None:
        """Note objects that the newest manifest does not name, and that no read needs from commit ``freed`` on."""
        sizes = dict(objects)
        self._garbage |= dict.fromkeys(sizes, freed)
        self.add(sizes)

    def is_garbage(self, key: str) -> bool:
        """Whether objects of this name are deleted, now or when no reader holds them: nothing may be written to it."""
        return key in self._garbage

    def garbage(self) -> set[str]:
        """Return the names of all objects that are to be deleted."""
        return set(self._garbage)

    def run(self, *, shrink: bool = False) -> None:
        """Delete garbage on another thread, but for what becomes a spare; with ``shrink`` nothing does, and none stays.

        Where that fails it raises nothing, and the next run tries again.
        """
        self.wait()
        if self._spares is not None:
            self._spares.turn()
            if shrink:
                self._spares.shrink()
        read = set() if self._readers is None else commits_read(self._readers)
        if read is None or not self._garbage:
            return
        self._held = {number: held for number, held in self._held.items() if number in read}
        manifests = [manifest for manifest in self._held.values() if manifest is not None]
        if len(manifests) < len(self._held):
            return
        held = {key for manifest in manifests for key in manifest.named()}
        dead = [key for key in self._garbage if key not in held]
        folders = self._folders = self._bare_folders(dead)
        inside = [key for folder in folders for key in self._inside[folder]]
        spares = [] if shrink else self._choose(dead)
        with contextlib.suppress(RuntimeError):  # the system has no thread for it
            job = self._writer.delete(dead, sorted(folders), spares)
            self._going = job, list(dict.fromkeys([*dead, *inside]))

    def leave(self, folder: str) -> None:
        """Return when ``folder``, into which something is to be written, is not being deleted."""
        if self._going is not None and any(folder.startswith(gone) for gone in self._folders):
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being deleted."""
        if self._going is not None:
            (job, keys), self._going = self._going, None
            if job.exception() is None:
                for key in keys:
                    self._drop(key)

    def _choose(self, dead: list[str]) -> list[tuple[str, int]]:
        """Return which dead objects are to be spares, each with the commit that freed it: small ones save the most."""
        if self._spares is None:
            return []
        chosen, room = [], self._spares.most
        sizes = {key: self._present[key] or 0 for key in dead if is_chunk(key)}
        for key in sorted(sizes, key=sizes.__getitem__):
            if PAGE_BYTES <= sizes[key] <= room:
                chosen.append((key, self._garbage[key]))
                room -= paged(sizes[key])
        return chosen

    def _bare_folders(self, dead: list[str]) -> set[str]:
        """Return the folders of streams that ``dead`` leaves without a chunk, and of segments without a stream."""
        dying: Counter[str] = Counter()
        for key in dead:
            chunk = is_chunk(key)
            for folder in _folders(key):
                dying[folder] += chunk
        return {folder for folder, count in dying.items() if count == self._chunks[folder]}

    def _drop(self, key: str) -> None:
        self._garbage.pop(key, None)
        if key in self._present:
            del self._present[key]
            for folder in _folders(key):
                self._chunks[folder] -= is_chunk(key)
                self._inside[folder].remove(key)
                if not self._inside[folder]:
                    del self._inside[folder], self._chunks[folder]


def is_chunk(key: str) -> bool:
    """Whether an object holds bytes of blocks."""
    if key.endswith(LEFTOVER):
        return False
    return key.startswith("blocks/") or (key.startswith("segments/") and not key.endswith(NODE))


def _folders(key: str) -> list[str]:
    """Return the folders of the segment, and of the stream, that an object belongs to."""
    match key.split("/", 3):
        case ["segments", segment, _]:
            return [f"segments/{segment}"]
        case ["segments", segment, group, _]:
            return [f"segments/{segment}", f"segments/{segment}/{group}"]
    return []
