"""Which objects are there, and which of them are deleted because nothing needs them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tiercache.store.reader_mark import commits_read
from tiercache.store.zarr_arrays import NODE
from tiercache.store.zarr_objects import LEFTOVER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from tiercache.store.zarr_manifest import Manifest
    from tiercache.store.zarr_writer import ChunkWriter

    Sizes = Mapping[str, int | None]


class Sweep:
    """The objects of a store as its writer knows them. For one thread at a time.

    What the newest manifest does not name is garbage; it is deleted unless a manifest that a reader has open names it.
    """

    def __init__(self, writer: ChunkWriter, readers: Path | None) -> None:
        """``readers`` is where readers leave their marks; None where they leave none."""
        self._writer, self._readers = writer, readers
        self._present: dict[str, int | None] = {}
        self._garbage: dict[str, int | None] = {}
        self._held: dict[int, Manifest | None] = {}
        self._going: tuple[Future[None], list[str]] | None = None
        self._folders: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether an object of this name is there, or may be."""
        return key in self._present

    @property
    def chunk_bytes(self) -> int:
        """Bytes of all objects that hold blocks."""
        return sum(size or 0 for key, size in self._present.items() if is_chunk(key))

    def add(self, objects: Sizes) -> None:
        """Note objects that were written."""
        self._present |= objects

    def hold(self, number: int, manifest: Manifest | None) -> None:
        """Keep what an older manifest names for as long as a reader has it open; of one that is damaged, everything."""
        self._held[number] = manifest

    def give(self, objects: Sizes | Iterable[tuple[str, int | None]]) -> None:
        """Note objects that the newest manifest does not name."""
        self._garbage.update(objects)
        self._present.update(objects)

    def garbage(self) -> set[str]:
        """Return the names of all objects that are to be deleted."""
        return set(self._garbage)

    def run(self) -> None:
        """Delete garbage on another thread; where that fails it raises nothing, and the next run tries again."""
        self.wait()
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
        inside = [key for key in self._present if _stream(key) in folders or _segment(key) in folders]
        with contextlib.suppress(RuntimeError):  # the system has no thread for it
            self._going = self._writer.delete(dead, sorted(folders)), list(dict.fromkeys([*dead, *inside]))

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
                    self._present.pop(key, None)
                    self._garbage.pop(key, None)

    def _bare_folders(self, dead: list[str]) -> set[str]:
        """Return the folders of streams that ``dead`` leaves without a chunk, and of segments without a stream."""
        gone = set(dead)
        folders = {folder for key in dead if key.startswith("segments/") for folder in (_stream(key), _segment(key))}
        for key in self._present:
            if is_chunk(key) and key not in gone:
                folders -= {_stream(key), _segment(key)}
        return folders - {""}


def is_chunk(key: str) -> bool:
    """Whether an object holds bytes of blocks."""
    if key.endswith(LEFTOVER):
        return False
    return key.startswith("blocks/") or (key.startswith("segments/") and not key.endswith(NODE))


def _stream(key: str) -> str:
    """Return the folder of the stream whose arrays an object belongs to."""
    parts = key.split("/", 3)
    return "/".join(parts[:3]) if parts[0] == "segments" and len(parts) == 4 else ""


def _segment(key: str) -> str:
    parts: list[Any] = key.split("/", 2)
    return "/".join(parts[:2]) if parts[0] == "segments" and len(parts) == 3 else ""
