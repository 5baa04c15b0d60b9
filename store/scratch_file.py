"""A temporary file without a name: whatever ends the process, nothing of it is left."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiercache.store.errors import StoreError, StoreFullError
from tiercache.store.full_disk import check_room, room_for
from tiercache.store.punch_hole import punch_hole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.store.store import Store


class ScratchFile:
    """Bytes at any offset of a file, from one thread. ``what`` is the purpose of the file, for errors."""

    def __init__(self, folders: Path | Sequence[Path], what: str, *, num_bytes: int | None = None) -> None:
        """Make the file in the first of ``folders`` that takes it; ``num_bytes`` is its size, where that is known.

        Raises StoreFullError where there is less room, and StoreError where no file can be made.
        """
        self._what = what
        problem = StoreError(f"{what} has no folder for a temporary file: set TMPDIR")
        for folder in (folders,) if isinstance(folders, Path) else folders:
            self._folder = folder
            try:
                with room_for(num_bytes or 1, folder, what, at_least=num_bytes is None):
                    check_room(folder, num_bytes or 0)
                    self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - see close
            except StoreFullError as error:
                problem = error
            except OSError as error:
                needed = "a temporary file" if num_bytes is None else f"a temporary file of {num_bytes:,} bytes"
                problem = StoreError(f"{what} needs {needed} and {folder} takes none ({error}): set TMPDIR")
            else:
                return
        raise problem

    def close(self) -> None:
        """Give up the file and its bytes."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: NDArray[Any], offset: int) -> None:
        """Write an array. Raises StoreFullError."""
        view = np.ascontiguousarray(data).view(np.uint8).reshape(-1).data
        with room_for(len(view), self._folder, self._what, at_least=True):
            while len(view):
                count = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[count:], offset + count

    def read(self, out: NDArray[Any], offset: int) -> None:
        """Fill a contiguous array with what was written. Raises StoreError where the file ends before."""
        view = out.view(np.uint8).reshape(-1).data
        while len(view):
            count = os.preadv(self._file.fileno(), [view], offset)
            if not count:
                raise StoreError(f"a temporary file in {self._folder} ends at byte {offset:,}: try again")
            view, offset = view[count:], offset + count

    def free(self, offset: int, num_bytes: int) -> None:
        """Give the room of bytes that are not needed any more back, where the file system can."""
        with suppress(OSError):  # it comes back with the whole file
            punch_hole(self._file.fileno(), offset, num_bytes)

    def map(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return so many zeros, mapped: what is written there needs no memory. Raises StoreFullError."""
        with room_for(num_bytes, self._folder, self._what):
            os.posix_fallocate(self._file.fileno(), 0, num_bytes)  # a mapped file must not meet a full disk later
        return np.asarray(np.memmap(self._file, dtype=np.uint8, mode="r+", shape=(num_bytes,)))


def scratch_of(store: Store) -> Path:
    """Return the folder for temporary files: the store's own, or the system's where that cannot be written to."""
    return scratch_in(store.path)


def scratch_in(folder: Path | None) -> Path:
    """Return ``folder``, or the system's for temporary files where there is none that can be written to."""
    if folder is None or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return Path(tempfile.gettempdir())
    return folder


def with_system_folder(folder: Path | None) -> list[Path]:
    """Return ``folder``, where there is one, and the system's folder for temporary files after it."""
    system = Path(tempfile.gettempdir())
    return [system] if folder in {None, system} else [folder, system]
