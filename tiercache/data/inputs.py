"""The input files of an extraction: finding them, and their formats by suffix."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from tiercache.data.array_rows import ArrayRows, read_split_spec
from tiercache.data.column_types import ColumnUse, kind_of
from tiercache.data.python_batches import PythonBatches
from tiercache.errors import SourceError
from tiercache.store.files import open_file

_INTEGER = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_BOOLS = {"true": True, "false": False}


def partition_values(file: InputFile, uses: Iterable[ColumnUse]) -> dict[str, Any]:
    """Return the columns in the folder names of a file, as Arrow scalars; uses: of columns that the file lacks.

    A column with a use as strings is a string; other keys are integers, exact up to 2^64. Columns used only in crosses
    and cuts are integers if they look like integers. Raises SourceError for a value that does not fit.
    """
    by_column: dict[str, dict[str, str]] = {}
    for use in uses:
        by_column.setdefault(use.column, {}).setdefault(use.use, use.who)
    return {
        name: pa.scalar(None, pa.null()) if text is None else _scalar(file, name, text, by_column[name])
        for name, text in partition_texts(file, by_column).items()
    }


def partition_texts(file: InputFile, names: Iterable[str]) -> dict[str, str | None]:
    """Return the columns in the folder names, as strings. Raises SourceError if two folders differ."""
    found: dict[str, str | None] = {}
    for name in names:
        texts = {text for column, text in file.partition if column == name}
        if len(texts) > 1:
            raise SourceError(f"{file.path} is in several folders {name!r} with different values: rename all but one")
        if texts:
            (found[name],) = texts
    return found


def check_repeated(file: InputFile, name: str, text: str | None, array: Any, row: int) -> None:
    """Raise SourceError if a column of the file has a different value than its folder; row: the first row's number.

    Integers and strings are compared; columns of other types are not.
    """
    kind = kind_of(array.type)
    if kind not in ("integer", "string"):
        return
    plain = array.dictionary_decode() if types.is_dictionary(array.type) else array
    try:
        if text is None:
            differs = plain.is_valid()
        elif kind == "integer":
            differs = pc.fill_null(pc.not_equal(plain, pa.scalar(_integer(text), plain.type)), True)
        else:
            expected = pa.scalar(text.encode(), pa.large_binary())
            differs = pc.fill_null(pc.not_equal(plain.cast(pa.large_binary()), expected), True)
    except (ValueError, OverflowError):  # not a number, not of the column's type, or not UTF-8
        differs = pa.repeat(True, len(plain))
    if differs.true_count:
        at = int(np.argmax(differs.to_numpy(zero_copy_only=False)))
        folder = "null" if text is None else repr(text)
        value = (plain if kind == "integer" else plain.cast(pa.large_binary()))[at].as_py()
        value = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
        raise SourceError(
            f"{file.path}, row {row + at}, column {name!r}: it is {value!r}, but its folder says {folder}: "
            "correct one of them, or rename the folder"
        )


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(text)
    return int(text)


def _scalar(file: InputFile, name: str, value: str, uses: dict[str, str]) -> Any:
    def refuse(use: str, what: str, change: str) -> SourceError:
        return SourceError(
            f"{file.path}, column {name!r}: its folder says {value!r}, but {uses[use]} needs {what}: {change}"
        )

    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise refuse(next(iter(uses)), "text in UTF-8", "rename the folder")
    if "string" in uses:
        return pa.scalar(value)
    number = int(value) if _INTEGER.fullmatch(value) and len(value) < 400 else None
    if number is not None and -(1 << 63) <= number < 1 << 64:
        return pa.scalar(number, pa.int64() if number < 1 << 63 else pa.uint64())
    if "integer" in uses:
        raise refuse("integer", "integers from -2^63 to 2^64 - 1", 'rename the folder, or set key = "string"')
    for use in uses.keys() & {"number", "own"}:
        if value.lower() in _BOOLS:
            return pa.scalar(_BOOLS[value.lower()])
        if not _NUMBER.fullmatch(value):
            raise refuse(use, "numbers", "rename the folder")
        return pa.scalar(float(value))
    if "part" in uses and number is not None:
        raise refuse("part", "integers below 2^64 or strings", "rename the folder")
    return pa.scalar(value)


FEATURE_SPEC = "feature_spec.yaml"
_FORMATS = {
    ".parquet": ("parquet", ""), ".pq": ("parquet", ""), ".arrow": ("ipc", ""), ".arrows": ("ipc", ""),
    ".ipc": ("ipc", ""), ".feather": ("ipc", ""), ".csv": ("csv", ","), ".tsv": ("csv", "\t"),
    ".npz": ("numpy", ""), ".npy": ("numpy", ""),
}  # fmt: skip
_NAMED_FORMATS = {"csv": ("csv", ","), "tsv": ("csv", "\t"), "criteo": ("criteo", "\t")}
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_NONE = object()
_ADVICE = "pass files, folders or patterns such as 'day-*.parquet'"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file of samples, or a folder of .npy columns, a split-binary data set or an iterable, as it was at first."""

    path: Path | str
    """A Path for a local file, a URL for others."""
    format: str
    """"parquet", "ipc", "csv", "criteo", "numpy", "split_binary" or "python"."""
    delimiter: str
    compression: str | None
    """The compression of a text file as a whole; other formats compress inside."""
    size: int
    mtime_ns: int
    """Modification time; 0 if there is none."""
    version: str = ""
    """The version of a remote file, or a digest of the first batch of an iterable."""
    partition: tuple[tuple[str, str | None], ...] = ()
    """Names and values of its folders ``name=value``, from the outermost: columns with one value."""
    split: str = ""
    """The part of a split-binary data set: "train", "test"."""
    batches: PythonBatches | None = field(default=None, compare=False, repr=False)
    """The batches of format "python"."""

    def record(self) -> dict[str, Any]:
        """Return the values that identify the file and its version."""
        name = self.path.name if isinstance(self.path, Path) else self.path
        more = {"version": self.version, "partition": [list(p) for p in self.partition], "split": self.split}
        record = {"name": name, "size": self.size, "mtime_ns": self.mtime_ns}
        return record | {key: value for key, value in more.items() if value}

    def check_unchanged(self) -> None:
        """Raise SourceError if the file was changed since it was found."""
        if self.batches is None and _stat(self) != (self.size, self.mtime_ns, self.version):
            raise SourceError(f"{self.path} was changed while it was read: delete the dataset and start over")


def find_inputs(data: Any, format: str | None = None) -> tuple[InputFile, ...]:  # noqa: A002 - public API
    """Return the files named by paths, URLs, patterns (``*``, ``?``, ``[...]``, ``**``) and folders.

    Named files keep their order; files of one pattern or folder are sorted by name. A folder includes its subfolders;
    names that begin with "." or "_" are left out. An iterable of anything but paths is one file of batches. format: the
    format of every file, overriding its suffix (``SourceFormat.format``).

    Raises SourceError if nothing matches, or a file is repeated, empty, or of an unknown suffix.
    """
    is_structured = getattr(getattr(data, "dtype", None), "names", None) is not None
    if isinstance(data, str | Path | Mapping) or hasattr(data, "columns") or is_structured:  # one path, or one batch
        data = [data]
    try:
        stream = iter(data)
    except TypeError as error:
        scan = ", such as its to_batches()" if hasattr(data, "to_batches") else ""  # a dataset of pyarrow
        raise SourceError(f"data is {data!r}: {_ADVICE}, or an iterable of batches{scan}") from error
    first = next(stream, _NONE)
    if first is _NONE:
        raise SourceError(f"no files were given: {_ADVICE}, or an iterable of batches")
    if not isinstance(first, str | Path):
        batches = PythonBatches(data, first, stream)
        return (
            InputFile(
                path="the Python iterable", format="python", delimiter="", compression=None, size=0, mtime_ns=0,
                version=batches.digest, batches=batches,
            ),
        )  # fmt: skip
    paths: list[Path | str] = []
    for item in chain([first], stream):
        paths += _expand(item, format)
    seen: set[Path | str] = set()
    for path in paths:
        name = path.resolve() if isinstance(path, Path) else path
        if name in seen:
            raise SourceError(f"{path} is listed twice: list every file once")
        seen.add(name)
    return tuple(_describe(path, format) for path in paths)


def check_read(files: Sequence[InputFile], *, has_rows: bool) -> None:
    """Raise SourceError if files had no rows, or one changed while it was read."""
    if not has_rows:
        others = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise SourceError(f"no row was found in {files[0].path}{others}: pass files with data")
    for file in files:
        file.check_unchanged()


def open_binary(path: Path | str) -> Any:
    """Open a local file or a URL as a seekable Arrow file."""
    if isinstance(path, Path):
        return pa.OSFile(str(path))
    fs, name = file_system(path)
    return pa.PythonFile(fs.open(name, "rb"), mode="r")


def file_system(path: Path | str) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and the absolute name of the file in it."""
    import fsspec

    try:
        fs, name = fsspec.core.url_to_fs(str(path))
    except (ImportError, ValueError) as error:
        raise SourceError(f"{path} cannot be opened: {error} (fsspec opens URLs)") from error
    return fs, str(name)


def _expand(item: Path | str, format_name: str | None) -> list[Path | str]:
    if not str(item) or "\0" in str(item):
        raise SourceError(f"{str(item)!r} is not a file name: {_ADVICE}")
    fs, name = file_system(item)
    is_local = "file" in fs.protocol
    try:
        if not fs.isdir(name):
            names = [name] if fs.exists(name) or "#" in name else [one for one in fs.glob(name) if fs.isfile(one)]
        elif fs.exists(f"{name}/{FEATURE_SPEC}"):
            names = [f"{name}/{FEATURE_SPEC}"]
        else:
            files = [
                one for one in (_walk(name) if is_local else fs.find(name)) if not _is_hidden(one.removeprefix(name))
            ]
            names = [one for one in files if format_name or _kind(PurePosixPath(one), None) is not None]
            if is_local and names and all(one.endswith(".npy") for one in names) and not _is_structured(names[0]):
                names = [name]
    except OSError as error:
        raise SourceError(f"{error.filename or item} cannot be read ({error.strerror or error})") from error
    if not names:
        seen = f"no file matches {str(item)!r}"
        if fs.isdir(name):
            seen = f"the folder {item} has no files of a known suffix ({_known()})"
        raise SourceError(f"{seen}: {_ADVICE}")
    return [Path(one) if is_local else fs.unstrip_protocol(one) for one in sorted(names)]


def _walk(folder: str) -> Iterator[str]:
    """Yield the files in a folder and its subfolders, following links. Raises OSError for an unreadable folder."""

    def refuse(error: OSError) -> None:
        raise error

    for place, _, names in os.walk(folder, onerror=refuse, followlinks=True):
        yield from (f"{place}/{name}" for name in names)


def _known() -> str:
    return f"{', '.join(sorted(_FORMATS))}, {FEATURE_SPEC}, and .csv or .tsv followed by .gz or .zst"


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _is_structured(name: str) -> bool:
    with os.fdopen(open_file(name), "rb") as file:
        return ArrayRows.of_npy(file, name).dtype.names is not None


def _kind(path: Path | PurePosixPath, format_name: str | None) -> tuple[str, str, str | None] | None:
    suffix, compression = path.suffix.lower(), None
    if suffix in _COMPRESSIONS:
        compression, suffix = _COMPRESSIONS[suffix], Path(path.stem).suffix.lower()
    format_ = _NAMED_FORMATS.get(format_name, (format_name, "")) if format_name else _FORMATS.get(suffix)
    if format_ is None or (compression is not None and format_[0] not in {"csv", "criteo"}):
        return None
    return (*format_, compression)


def formats_of(inputs: Sequence[InputFile], format_name: str | None) -> tuple[str, ...]:
    """Return the format of each file if ``format_name`` is that of every file, None: by suffix."""
    found = []
    for file in inputs:
        has_own = file.batches is not None or file.split or (isinstance(file.path, Path) and file.path.is_dir())
        kind = None if has_own else _kind(PurePosixPath(file.path), format_name)
        format_, delimiter, _ = kind or (file.format, file.delimiter, None)
        found.append("tsv" if (format_, delimiter) == _NAMED_FORMATS["tsv"] else format_)
    return tuple(found)


def _describe(path: Path | str, format_name: str | None) -> InputFile:
    pure, split = PurePosixPath(path), ""
    if isinstance(path, Path):
        name, _, part = path.name.partition("#")
        if name == FEATURE_SPEC or format_name == "split_binary":
            path, split = path.with_name(name), part or "train"
    is_folder = isinstance(path, Path) and path.is_dir()
    kind = ("split_binary", "", None) if split else ("numpy", "", None) if is_folder else _kind(pure, format_name)
    if kind is None:
        raise SourceError(
            f"{path} has no known suffix: {_known()}; or pass --format, or set [source] format in the schema"
        )
    file = InputFile(
        path=path, format=kind[0], delimiter=kind[1], compression=kind[2], size=0, mtime_ns=0,
        partition=_partition(pure), split=split,
    )  # fmt: skip
    size, mtime_ns, version = _stat(file)
    if size == 0:
        raise SourceError(f"{path} is empty (0 bytes): omit it or write it again")
    return replace(file, size=size, mtime_ns=mtime_ns, version=version)


def _stat(file: InputFile) -> tuple[int, int, str]:
    """Return bytes, time of change and version of a file as it is now."""
    path = file.path
    if not isinstance(path, Path):
        fs, name = file_system(path)
        info = fs.info(name)
        version = info.get("ETag") or info.get("mtime") or info.get("LastModified") or info.get("created") or ""
        return int(info["size"]), 0, str(version)
    paths = [path]
    if file.split:
        paths = [path.parent / str(chunk["files"][0]) for chunk in read_split_spec(path, file.split)[1]]
    elif path.is_dir():
        paths = sorted(path.glob("*.npy"))
    try:
        stats = [one.stat() for one in paths]
    except OSError as error:
        raise SourceError(f"{error.filename} cannot be read: {error.strerror}") from error
    for one, stat in zip(paths, stats, strict=True):
        if not S_ISREG(stat.st_mode):
            raise SourceError(f"{one} is not a regular file: write its contents to a file first")
    return sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats), ""


def _partition(path: PurePosixPath) -> tuple[tuple[str, str | None], ...]:
    """Return the columns in the folders ``name=value`` of a path; bytes that are not UTF-8 become surrogates."""
    found = []
    for part in path.parts[:-1]:
        name, equals, value = part.partition("=")
        if name and equals:
            text = None if value in ("", _HIVE_NULL) else unquote(value, errors="surrogateescape")
            found.append((unquote(name, errors="surrogateescape"), text))
    return tuple(found)
