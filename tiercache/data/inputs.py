"""The files that an extraction reads: found, named and told apart by their suffixes."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tiercache.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["InputFile", "find_inputs"]

_FORMATS: dict[str, tuple[Literal["parquet", "ipc", "csv"], str]] = {
    ".parquet": ("parquet", ""),
    ".pq": ("parquet", ""),
    ".arrow": ("ipc", ""),
    ".arrows": ("ipc", ""),
    ".ipc": ("ipc", ""),
    ".feather": ("ipc", ""),
    ".csv": ("csv", ","),
    ".tsv": ("csv", "\t"),
}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file of samples, as it was when the extraction began."""

    path: Path
    format: Literal["parquet", "ipc", "csv"]
    delimiter: str
    """Of text files."""
    compression: str | None
    """Of text files as a whole; other formats compress inside."""
    size: int
    """Bytes."""
    mtime_ns: int
    """Time of the last change."""

    def record(self) -> dict[str, Any]:
        """Return what tells the file from a changed one."""
        return {"name": self.path.name, "size": self.size, "mtime_ns": self.mtime_ns}

    def check_unchanged(self) -> None:
        """Raise SourceError where the file was changed since it was found."""
        stat = self.path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.mtime_ns):
            raise SourceError(f"{self.path} was changed while it was read: delete the dataset and start over")


def find_inputs(data: str | Path | Iterable[str | Path]) -> tuple[InputFile, ...]:
    """Return the files named by paths, patterns (``*``, ``?``, ``[...]``, ``**``) and folders.

    Named files keep their order; those of one pattern or folder are sorted by name. Raises SourceError where nothing
    matches, a file stands twice, is empty, or has an unknown suffix.
    """
    given = [data] if isinstance(data, str | Path) else list(data)
    paths: list[Path] = []
    for item in given:
        found = _expand(item)
        if not found:
            raise SourceError(f"no file matches {str(item)!r}: give files, folders or patterns such as 'day-*.parquet'")
        paths += found
    if not paths:
        raise SourceError("no files were given: give files, folders or patterns such as 'day-*.parquet'")
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise SourceError(f"{path} is given twice: name every file once")
        seen.add(path.resolve())
    return tuple(_describe(path) for path in paths)


def _expand(item: str | Path) -> list[Path]:
    path = Path(item)
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.is_file() and _kind(p) is not None)
    if path.exists():
        return [path]
    return [p for p in map(Path, sorted(glob.glob(str(item), recursive=True))) if p.is_file()]  # noqa: PTH207 - patterns may be absolute


def _kind(path: Path) -> tuple[Literal["parquet", "ipc", "csv"], str, str | None] | None:
    suffix, compression = path.suffix.lower(), None
    if suffix in _COMPRESSIONS:
        compression, suffix = _COMPRESSIONS[suffix], Path(path.stem).suffix.lower()
    if suffix not in _FORMATS or (compression is not None and _FORMATS[suffix][0] != "csv"):
        return None
    return (*_FORMATS[suffix], compression)


def _describe(path: Path) -> InputFile:
    kind = _kind(path)
    if kind is None:
        known = ", ".join(sorted(_FORMATS))
        raise SourceError(f"{path} has no known suffix: {known}, and .csv or .tsv followed by .gz or .zst")
    stat = path.stat()
    if stat.st_size == 0:
        raise SourceError(f"{path} is empty (0 bytes): leave it out or write it again")
    return InputFile(
        path=path,
        format=kind[0],
        delimiter=kind[1],
        compression=kind[2],
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
    )
