"""The content of a folder at a moment: directories, files and their pages, each identified by its inode."""

import contextlib
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PAGE_BYTES, SECTOR_BYTES = 4096, 512
_ZEROS = bytes(PAGE_BYTES)
ROOT = 0  # the inode number of the folder itself in an image
_CLOCK_NANOSECONDS = 50_000_000  # more than the resolution of file times


@dataclass(frozen=True, slots=True)
class File:
    """The content of a file. Unchanged pages are the same objects as in the previous image."""

    size: int
    pages: tuple[bytes, ...]  # pages of PAGE_BYTES each; the last one is padded with zeros

    def page(self, index: int) -> bytes:
        return self.pages[index] if index < len(self.pages) else _ZEROS


@dataclass(frozen=True, slots=True)
class Image:
    """Directories and files by numbers that are unique within a recording."""

    directories: dict[int, dict[str, int]] = field(default_factory=dict)  # names and the numbers of their files
    files: dict[int, File] = field(default_factory=dict)


class Camera:
    """Takes consecutive images of a folder; reused inode numbers are distinguished.

    A file is read again unless its length and times show that it was not written since. Writes through a map are not
    detected: in a store only LMDB's reader table has any, which no crash needs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers: dict[int, int] = {}  # numbers by inode
        self._next = ROOT + 1
        self._retained: dict[int, tuple[int, ...]] = {}
        """By number of a file: its length and times, if it was read long enough after them."""
        self.image = Image()  # the last image

    def take(self) -> Image:
        directories: dict[int, dict[str, int]] = {}
        files: dict[int, File] = {}
        numbers: dict[int, int] = {}
        waiting = [(ROOT, os.fspath(self._folder))]
        while waiting:
            directory, path = waiting.pop()
            names = directories[directory] = {}
            with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
                for entry in entries:
                    inode = entry.inode()
                    number = numbers.get(inode) or self._numbers.get(inode) or self._fresh()
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((number, entry.path))
                    elif number not in files:
                        with contextlib.suppress(FileNotFoundError):
                            files[number] = self._read(entry, number)
                        if number not in files:
                            continue
                    names[entry.name] = numbers[inode] = number
            before = self.image.directories.get(directory)
            if before == names:
                directories[directory] = before  # the same object, because a recording holds many images
        self._retained = {number: seen for number, seen in self._retained.items() if number in files}
        self._numbers, self.image = numbers, Image(directories, files)
        return self.image

    def number(self, handle: int) -> int | None:
        """Return the number of an open file or directory in the last image; None if it is not in it."""
        status = os.fstat(handle)
        if status.st_ino == self._folder.stat().st_ino:
            return ROOT
        return self._numbers.get(status.st_ino)

    def _read(self, entry: os.DirEntry[str], number: int) -> File:
        status, before = entry.stat(follow_symlinks=False), self.image.files.get(number)
        seen = status.st_size, status.st_mtime_ns, status.st_ctime_ns
        if before is not None and self._retained.get(number) == seen:
            return before
        if max(seen[1:]) < time.time_ns() - _CLOCK_NANOSECONDS:
            self._retained[number] = seen
        else:
            self._retained.pop(number, None)
        return _read(entry.path, before)

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1


def put(folder: Path, directories: Mapping[int, Mapping[str, int]], files: Mapping[int, bytes]) -> None:
    """Create ``folder``, which must not exist, with the directories and files below number ROOT."""
    waiting = [(ROOT, folder)]
    while waiting:
        directory, path = waiting.pop()
        path.mkdir()
        for name, number in directories[directory].items():
            if number in directories:
                waiting.append((number, path / name))
            else:
                (path / name).write_bytes(files[number])


def tear(folder: Path, before: Image, after: Image, generator: random.Random) -> None:
    """Revert some changes in ``folder``, as if the write had ended: in file order, but the roots of LMDB last."""
    changed: list[tuple[bool, str, int, File]] = []
    for path, number in _paths(folder, after):
        new, old = after.files[number], before.files.get(number, File(0, ()))
        if new is old:
            continue
        for index, page in enumerate(new.pages):
            for at in range(0, PAGE_BYTES, SECTOR_BYTES):
                if page[at : at + SECTOR_BYTES] != old.page(index)[at : at + SECTOR_BYTES]:
                    root = path.endswith("data.mdb") and index < 2
                    changed.append((root, path, index * PAGE_BYTES + at, old))
    changed.sort(key=lambda change: change[:3])
    arrived = generator.randrange(len(changed)) if changed else 0
    ends: dict[str, int] = {}
    for _, path, at, _ in changed[:arrived]:
        ends[path] = max(ends.get(path, 0), at + SECTOR_BYTES)
    for _, path, at, old in changed[arrived:]:
        try:
            handle = os.open(path, os.O_WRONLY)
        except FileNotFoundError:  # another thread has just deleted it
            continue
        start = at % PAGE_BYTES
        os.pwrite(handle, old.page(at // PAGE_BYTES)[start : start + SECTOR_BYTES], at)
        os.ftruncate(handle, min(os.fstat(handle).st_size, max(old.size, ends.get(path, 0))))
        os.close(handle)


def _paths(folder: Path, image: Image) -> list[tuple[str, int]]:
    found, waiting = [], [(ROOT, os.fspath(folder))]
    while waiting:
        directory, path = waiting.pop()
        for name, number in image.directories[directory].items():
            if number in image.directories:
                waiting.append((number, f"{path}/{name}"))
            else:
                found.append((f"{path}/{name}", number))
    return found


def _read(path: str, before: File | None) -> File:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123  many times for each recording
        data = file.readall()
    pages = []
    for index, at in enumerate(range(0, len(data), PAGE_BYTES)):
        page = data[at : at + PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
        if before is not None and index < len(before.pages) and before.pages[index] == page:
            page = before.pages[index]
        pages.append(page)
    if (
        before is not None
        and before.size == len(data)
        and all(a is b for a, b in zip(pages, before.pages, strict=True))
    ):
        return before
    return File(len(data), tuple(pages))
