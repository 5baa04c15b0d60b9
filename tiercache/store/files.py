"""Files of the store: paths, room, whole files, syncing, direct I/O, memory for it, temporary files, notes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import resource
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np

from tiercache.store.store_errors import StoreError, StoreFullError, damaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/")
"""The start of a URL, also after ``Path`` made one slash of two."""


def local_path(path: str | os.PathLike[str], what: str, instead: str = "pass a local path") -> Path:
    """Return the path of ``what`` as an absolute path, ``~`` expanded; symbolic links stay in it.

    Raises ValueError for a URL, advising ``instead``, and for a relative path in a deleted folder, TypeError for bytes.
    """
    text = os.fspath(path)
    if is_url(text):
        raise ValueError(f"{text!r} is a URL, but {what} must be a local path: {instead}")
    try:
        return Path(os.path.expanduser(text)).absolute()  # noqa: PTH111 - leaves the name of an unknown user
    except FileNotFoundError:
        raise ValueError(f"{text!r} is relative, and the current folder was deleted: pass an absolute path") from None


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return True for a URL; a local folder of that name must begin with ``./``. Raises TypeError for bytes."""
    text: str | bytes = os.fspath(path)
    if isinstance(text, bytes):
        raise TypeError(f"the path {text!r} is bytes: pass a str or a Path, such as os.fsdecode(path)")
    return _URL.match(text) is not None


def reason(error: Exception) -> str:
    """Return an error's message without the path."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def unreadable(path: Path, error: OSError) -> StoreError:
    """Return the error for a file of the store that cannot be opened or read."""
    if isinstance(error, FileNotFoundError):
        return damaged(f"{path} is missing")
    if isinstance(error, PermissionError):
        return StoreError(f"{path} cannot be opened ({error}): grant this user read and write permission")
    return damaged(f"{path} cannot be read ({error})")


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk, a full quota or a file at its size limit."""
ROOM_FOR_RECORDS = 1 << 20
"""More than the records of a commit need: blocks leave it free."""


def check_room(path: Path, needed_bytes: int) -> None:
    """Raise OSError, one of FULL, if the file system of ``path``, which exists, has less free space than needed."""
    system = os.statvfs(path)
    if system.f_frsize * system.f_bavail < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_limit(file: Path, more_bytes: int) -> None:
    """Raise OSError, one of FULL, if this process may not let ``file`` grow by ``more_bytes``."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most != resource.RLIM_INFINITY and most < (file.stat().st_size if file.exists() else 0) + more_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def full_disk(
    path: Path, error: OSError, needed_bytes: int, *, kept_bytes: int = 0, at_least: bool = False
) -> StoreFullError:
    """Return the error of ``path``, which could not take ``needed_bytes`` because of ``error``, one of FULL.

    ``kept_bytes`` must also stay free. The message shows free < needed unless space was freed meanwhile or inodes ran
    out; then it says so.
    """
    if error.errno == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return StoreFullError(
            needed_bytes=needed_bytes, limit=f"files of this process may have {most:,} in all", advice="raise ulimit -f"
        )
    system = os.statvfs(path)
    free = system.f_frsize * system.f_bavail
    limit = f"the file system of {path} has {free:,} free"
    if error.errno == errno.EDQUOT:
        limit = f"the disk quota of {path} is used up"
    elif system.f_files and not system.f_favail:
        limit = f"the file system of {path} has no room for another file"
    elif free >= needed_bytes + kept_bytes:
        limit = f"the file system of {path} was full, but now has {free:,} free"
    return StoreFullError(
        needed_bytes=needed_bytes + kept_bytes,
        limit=limit,
        advice="free some space, or move the store to a larger one",
        kept_bytes=kept_bytes,
        at_least=at_least,
    )


@contextmanager
def writing(place: Path | str, needed_bytes: int = ROOM_FOR_RECORDS, *, kept_bytes: int = 0) -> Iterator[None]:
    """Raise StoreError in place of an OSError of ``place``, which was to take ``needed_bytes``, ``kept_bytes`` free.

    ``place`` is a path that exists, or the name of an object store in messages.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise StoreError(f"{place} cannot be written ({error}): fix that and open the store again") from error
        if isinstance(place, Path):
            raise full_disk(place, error, needed_bytes, kept_bytes=kept_bytes) from error
        limit = f"{place} is full ({error})"
        raise StoreFullError(needed_bytes=needed_bytes, limit=limit, advice="free some") from error


@contextmanager
def room_for(needed_bytes: int, path: Path, what: str, *, at_least: bool = False) -> Iterator[None]:
    """Raise StoreFullError, which says that ``what`` needed ``needed_bytes``, instead of an OSError for a full disk.

    ``path`` or its parent must exist. ``at_least``: ``what`` needs more bytes later.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        existing = path if path.exists() else path.parent
        raise full_disk(existing, error, needed_bytes, at_least=at_least).during(what, needed_bytes) from error


_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_CANNOT = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})


def punch_hole(handle: int, offset: int, num_bytes: int) -> bool:
    """Free the disk space of bytes, which become zeros; False if the file system has no holes. Raises OSError."""
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while fallocate(handle, _PUNCH_HOLE | _KEEP_SIZE, offset, num_bytes):
        code = ctypes.get_errno()
        if code in _CANNOT:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


HUGE_BYTES = 2 << 20


def huge_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Return whole pages with at least ``num_bytes`` zeros, in huge pages if possible, allocated on first touch."""
    size = max(mmap.PAGESIZE, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    if size < HUGE_BYTES // 8 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, size), np.uint8)
    size = -(-size // HUGE_BYTES) * HUGE_BYTES
    memory = mmap.mmap(-1, size + HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(memory, np.uint8)
    return everything[-everything.ctypes.data % HUGE_BYTES :][:size]


def replace_file(path: Path, data: bytes, *, suffix: str = ".tmp", mode: int = 0o666) -> None:
    """Replace ``path`` by ``data`` in one step, durably. A crash may leave the name + ``suffix``."""
    temporary = path.with_name(path.name + suffix)
    temporary.unlink(missing_ok=True)  # opening a FIFO would wait forever
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    publish(temporary, path)


def publish(temporary: Path, path: Path) -> None:
    """Give a file, whose content is on disk already, its final name; the name is on disk on return."""
    temporary.replace(path)
    sync(path.parent)


def sync(path: str | Path, *, data_only: bool = False) -> None:
    """Return when a file's content (``data_only``: not its times) or a folder's names are on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        (os.fdatasync if data_only else os.fsync)(handle)
    finally:
        os.close(handle)


PAGE_BYTES = 4096
"""Page size of memory and files: direct reads and writes begin and end at multiples of it."""
DIRECT_BYTES = 64 << 10
"""Shorter ranges are read through the page cache, which may have them already."""
_STEP_BYTES = 256 << 10
"""A file is written through the page cache in steps: long ones cost the kernel ten times the processor."""


def paged(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def write_at(handle: int, direct: int | None, buffer: NDArray[np.uint8], at: int, size: int) -> None:
    """Write bytes from byte ``at`` of a file on: whole pages directly, the rest through the page cache.

    They are in ``buffer``, from ``huge_pages``, at the same offset in its pages as in the file's: from byte ``at %
    PAGE_BYTES`` on. ``direct`` is the file, opened past the page cache. Raises OSError.
    """
    lead = at % PAGE_BYTES
    base, low, high = at - lead, paged(lead), (lead + size) // PAGE_BYTES * PAGE_BYTES
    if direct is None or high - low < DIRECT_BYTES:
        low = high = lead
    else:
        done = low
        try:
            while done < high:
                pages = os.pwrite(direct, buffer[done:high].data, base + done) // PAGE_BYTES
                if not pages:  # not even one page fits: the cached write raises the reason
                    high = done
                done += pages * PAGE_BYTES
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            high = done
    write_cached(handle, buffer[lead:low].data, base + lead)
    write_cached(handle, buffer[high : lead + size].data, base + high)


def write_cached(handle: int, data: memoryview, offset: int) -> None:
    """Write bytes from byte ``offset`` of a file on, through the page cache. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done : done + _STEP_BYTES], offset + done)


def write_whole(path: str, data: bytes | memoryview) -> None:
    """Make a file of bytes, through the page cache. It is not synced. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        write_cached(handle, memoryview(data), 0)
    finally:
        os.close(handle)


def read_whole(path: str, last: int | None = None) -> bytes:
    """Return the bytes of a file, or its ``last`` ones. Raises OSError, also if it is not a regular file."""
    handle = open_file(path)
    try:
        size = os.fstat(handle).st_size
        return read_at(handle, size if last is None else last, 0 if last is None else max(0, size - last))
    finally:
        os.close(handle)


def read_at(handle: int, size: int, offset: int) -> bytes:
    """Return the bytes of an open file from ``offset`` on, fewer at its end; one read of Linux is less than 2 GiB."""
    parts = []
    while size and (part := os.pread(handle, size, offset)):
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)


def read_direct(handle: int, pages: Sequence[memoryview], offset: int) -> int:
    """Read whole pages past the page cache; returns their bytes, 0 if the file system cannot. Raises OSError."""
    try:
        return os.preadv(handle, pages, offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0


def read_cached(handle: int, out: memoryview, offset: int, done: int = 0) -> int:
    """Fill ``out`` from byte ``done`` on with a file's bytes; returns those read before its end. Raises OSError."""
    while done < len(out) and (count := os.preadv(handle, [out[done:]], offset + done)):
        done += count
    return done


READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO in place of the file would block


def open_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file and nothing else. Raises OSError."""
    handle = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        file_bytes(handle)
    except BaseException:
        os.close(handle)
        raise
    return handle


def open_direct(path: str | os.PathLike[str], flags: int) -> int | None:
    """Open a file past the page cache; None if the system or the file system cannot. Raises OSError."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def file_bytes(handle: int) -> int:
    """Return the bytes of an open file. Raises OSError if it is not a regular file."""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return status.st_size


class ScratchFile:
    """Bytes at any offset of a file, from one thread. ``what`` is the purpose of the file, for errors."""

    def __init__(self, folders: Path | Sequence[Path], what: str, *, num_bytes: int | None = None) -> None:
        """Make the file in the first of ``folders`` that has room; ``num_bytes`` is its size, if known.

        Raises StoreFullError if there is less room, and StoreError if no file can be made.
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
                problem = StoreError(f"{what} needs {needed}, but {folder} cannot hold it ({error}): set TMPDIR")
            else:
                return
        raise problem

    def close(self) -> None:
        """Free the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: NDArray[Any], offset: int) -> None:
        """Write an array. Raises StoreFullError."""
        view = np.ascontiguousarray(data).view(np.uint8).reshape(-1).data
        with room_for(len(view), self._folder, self._what, at_least=True):
            write_cached(self._file.fileno(), view, offset)

    def read(self, out: NDArray[Any], offset: int) -> None:
        """Fill a contiguous array with written bytes. Raises StoreError if the file ends early."""
        view = out.view(np.uint8).reshape(-1).data
        if (done := read_cached(self._file.fileno(), view, offset)) < len(view):
            raise StoreError(f"a temporary file in {self._folder} ends at byte {offset + done:,}: try again")

    def free(self, offset: int, num_bytes: int) -> None:
        """Free the disk space of bytes that are no longer needed, if the file system can."""
        with suppress(OSError):  # close() frees it otherwise
            punch_hole(self._file.fileno(), offset, num_bytes)

    def extend(self, num_bytes: int) -> None:
        """Extend the file to ``num_bytes`` of zeros, which take space when written. Raises StoreFullError."""
        with room_for(num_bytes, self._folder, self._what, at_least=True):
            os.ftruncate(self._file.fileno(), num_bytes)

    def map(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return ``num_bytes`` mapped zeros: writes to them go to the file, not memory. Raises StoreFullError."""
        with room_for(num_bytes, self._folder, self._what):
            os.posix_fallocate(self._file.fileno(), 0, num_bytes)  # a mapped file must not meet a full disk later
        return np.asarray(np.memmap(self._file, dtype=np.uint8, mode="r+", shape=(num_bytes,)))


def scratch_in(folder: Path | None) -> Path:
    """Return ``folder``, or the system's temporary folder if that is None or not writable."""
    if folder is None or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return Path(tempfile.gettempdir())
    return folder


def with_system_folder(folder: Path | None) -> list[Path]:
    """Return ``folder``, if any, followed by the system's temporary folder."""
    system = Path(tempfile.gettempdir())
    return [system] if folder in {None, system} else [folder, system]


class Note(NamedTuple):
    """The contents of a note as last written."""

    data: bytes
    version: object
    """Another one after another write."""


class Notes(Protocol):
    """The notes of a store, by name: small records that belong to no commit. Each is replaced whole."""

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
