"""Notes: small records next to the blobs of a store. Each is replaced whole, and belongs to no commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from tiercache.store.files import read_whole, replace_file, writing

if TYPE_CHECKING:
    from pathlib import Path


class Note(NamedTuple):
    """The contents as last written."""

    data: bytes
    version: object
    """Another one after another write."""


class Notes(Protocol):
    """The notes of a store, by name."""

    def label(self, name: str) -> str:
        """Return a note's place in the words of a message."""

    def read(self, name: str) -> Note | None:
        """Return a note; None if there is none. Raises StoreError."""

    def version(self, name: str) -> object:
        """Return the version of a note; None if there is none. Raises StoreError."""

    def write(self, name: str, data: bytes) -> object:
        """Replace a note, durably; returns its version. Raises StoreError, also of a full disk."""


class FolderNotes:
    """Notes as files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def label(self, name: str) -> str:
        """Return the path of a note."""
        return str(self._folder / name)

    def read(self, name: str) -> Note | None:
        """Return a note; None if there is none."""
        version = self.version(name)
        return None if version is None else Note(read_whole(self.label(name)), version)

    def version(self, name: str) -> object:
        """Return the inode and the time of the file."""
        try:
            status = (self._folder / name).stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def write(self, name: str, data: bytes) -> object:
        """Replace a note; returns its version."""
        with writing(self._folder, len(data)):
            replace_file(self._folder / name, data)
            return self.version(name)
