"""Files of folders, compared byte by byte, and flips of their bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def flip(path: Path, at: int, mask: int = 1) -> int:
    """Flip bits of a byte of a file in place, and return the original byte."""
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ mask]))
    return byte


@contextmanager
def flipped(path: Path, at: int, mask: int = 1) -> Iterator[None]:
    """Flip bits of a byte of a file; afterward restore it, whatever was written, unless something went wrong."""
    byte = flip(path, at, mask)
    yield
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        file.write(bytes([byte]))
