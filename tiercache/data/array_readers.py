"""Columns that are arrays of bytes: NumPy's files, and NVIDIA's split-binary data sets."""

from __future__ import annotations

import io
import zipfile
from abc import abstractmethod
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tiercache.data.arrow_arrays import CONVERSION_ERRORS, arrow_array
from tiercache.data.inputs import open_binary
from tiercache.data.readers import FileReader, Piece, batch_rows
from tiercache.errors import SourceError
from tiercache.store.direct_file import read_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.data.column_types import ColumnUse
    from tiercache.data.inputs import InputFile
    from tiercache.schema import Schema

_MOST_HEADER = 100_000
"""Bytes of a .npy header of version 3.0 with its letters escaped; NumPy's own limit is 10,000 letters."""


class ArrayRows:
    """Rows of one dtype and shape, one after another in a file that is open at the first."""

    def __init__(self, file: Any, where: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._file, self._where, self.dtype, self._width, self._left = file, where, dtype, shape[1:], shape[0]
        self.count, self.row_bytes = shape[0], dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))

    @classmethod
    def of_npy(cls, file: Any, where: str) -> ArrayRows:
        """Read the header of a .npy file."""
        try:
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
            elif version == (2, 0):
                shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file)
            elif version == (3, 0):
                header = _escaped_header(file)
                shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(header, max_header_size=_MOST_HEADER)
            else:
                raise ValueError(f"format version {version[0]}.{version[1]}; versions 1.0 to 3.0 are known")
        except (OSError, MemoryError):
            raise
        except Exception as error:  # NumPy's parser of headers raises what Python's does, SyntaxError for one
            raise SourceError(f"{where} is no .npy file that can be read ({error}): save it with numpy.save") from error
        if dtype.hasobject or not shape or len(shape) > 2 or (is_fortran and len(shape) > 1):
            raise SourceError(
                f"{where} holds {dtype} of shape {shape} in {'Fortran' if is_fortran else 'C'} order: it must be an "
                "array of numbers or strings in C order, with one or two dimensions"
            )
        return cls(file, where, dtype, shape)

    def skip(self, rows: int) -> None:
        """Go on behind the next rows."""
        self._file.seek(rows * self.row_bytes, 1)
        self._left -= rows

    def read(self, rows: int) -> NDArray[Any]:
        """Return the next rows, fewer at the end."""
        rows = min(rows, self._left)
        data = self._file.read(rows * self.row_bytes)
        if len(data) != rows * self.row_bytes:
            raise SourceError(f"{self._where} is cut short: its header promises {self.count:,} rows")
        self._left -= rows
        return np.frombuffer(data, self.dtype).reshape(rows, *self._width)


class _ArrayReader(FileReader):
    """Reads columns of arrays side by side."""

    def __init__(self, file: InputFile, schema: Schema, uses: Sequence[ColumnUse]) -> None:
        self._file = file
        used = {use.column for use in uses}
        with self._damaged(), ExitStack() as stack:
            parts = self._parts(stack, None)
            counts = {name: rows.count for name, rows in parts.items()}
            if len(set(counts.values())) > 1:
                seen = ", ".join(f"{name}: {count:,}" for name, count in counts.items())
                raise SourceError(
                    f"{file.path} has columns of different numbers of rows ({seen}): make them one length"
                )
            arrays = {k: v for name, rows in parts.items() for k, v in self._split(name, rows.read(0)).items()}
            found = {
                name: self._arrow(name, array).type if name in used else pa.null() for name, array in arrays.items()
            }
        self.schema = pa.schema(list(found.items()))

    def pieces(self, columns: Sequence[str], row: int, *, batch_bytes: int, use_threads: bool) -> Iterator[Piece]:
        """Read the same rows of every array in turn."""
        with self._damaged(), ExitStack() as stack:
            parts = self._parts(stack, set(columns))
            total = min(rows.count for rows in parts.values())
            step = batch_rows(batch_bytes, sum(rows.row_bytes for rows in parts.values()))
            for rows in parts.values():
                rows.skip(row)
            for first in range(row, total, step):
                arrays: dict[str, NDArray[Any]] = {}
                for name, rows in parts.items():
                    arrays |= self._split(name, rows.read(step))
                found = [self._arrow(name, arrays[name]) for name in columns]
                yield Piece(pa.record_batch(found, names=list(columns)), min(total, first + step) / total)

    def _arrow(self, name: str, array: NDArray[Any]) -> Any:
        try:
            return arrow_array(array)
        except CONVERSION_ERRORS as error:
            raise SourceError(f"{self._file.path}, column {name!r}: {error}: save it as numbers or strings") from error

    @contextmanager
    def _damaged(self) -> Iterator[None]:
        """Say in a sentence what zipfile, NumPy and its parser of headers raise for damaged files."""
        try:
            yield
        except (SourceError, OSError, MemoryError):
            raise
        except Exception as error:
            raise SourceError(
                f"{self._file.path} cannot be read ({str(error) or type(error).__name__}): write it again"
            ) from error

    @abstractmethod
    def _parts(self, stack: ExitStack, wanted: set[str] | None) -> Mapping[str, ArrayRows]:
        """Open the arrays that hold the wanted columns, None: all, at their first rows."""

    @abstractmethod
    def _split(self, name: str, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the columns that one array holds."""


class NumpyReader(_ArrayReader):
    """Reads a .npz file or a folder of .npy files, a column each, or a .npy file of a structured dtype."""

    def _parts(self, stack: ExitStack, wanted: set[str] | None) -> Mapping[str, ArrayRows]:
        path = self._file.path
        if isinstance(path, Path) and path.is_dir():
            names = {one.stem: one for one in sorted(path.glob("*.npy"))}
            chosen = {name: one for name, one in names.items() if wanted is None or name in wanted}
            return {
                name: ArrayRows.of_npy(stack.enter_context(open_binary(one)), str(one)) for name, one in chosen.items()
            }
        source = stack.enter_context(open_binary(path))
        if not str(path).endswith(".npz"):
            rows = ArrayRows.of_npy(source, str(path))
            if rows.dtype.names is None:
                raise SourceError(f"{path} holds one array without names: give a folder of such files, or a .npz file")
            return {"": rows}
        archive = stack.enter_context(zipfile.ZipFile(source))
        names_in = {name.removesuffix(".npy"): name for name in archive.namelist()}
        return {
            name: ArrayRows.of_npy(stack.enter_context(archive.open(member)), f"{path}, array {name!r}")
            for name, member in names_in.items()
            if wanted is None or name in wanted
        }

    def _split(self, name: str, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        return {name: rows} if rows.dtype.names is None else {one: rows[one] for one in rows.dtype.names}


class SplitBinaryReader(_ArrayReader):
    """Reads one part of a data set that a ``feature_spec.yaml`` describes, as NVIDIA's DLRM example writes it."""

    def _parts(self, stack: ExitStack, wanted: set[str] | None) -> Mapping[str, ArrayRows]:
        path = Path(self._file.path)
        spec, parts = _spec(path), {}
        for chunk in _chunks(path, spec, self._file.split):
            names = [str(name) for name in chunk["features"]]
            if wanted is not None and not wanted & set(names):
                continue
            try:
                (dtype,) = {np.dtype(spec["feature_spec"][name]["dtype"]) for name in names}
            except (KeyError, TypeError, ValueError) as error:
                raise SourceError(
                    f"{path} gives the features {', '.join(names)} no dtype in common ({error})"
                ) from error
            where = path.parent / chunk["files"][0]
            size, width = where.stat().st_size, dtype.itemsize * len(names)
            if size % width:
                raise SourceError(f"{where} has {size:,} bytes, which are no whole rows of {width}: it is cut short")
            source = stack.enter_context(open_binary(where))
            parts["\0".join(names)] = ArrayRows(source, str(where), dtype, (size // width, len(names)))
        return parts

    def _split(self, name: str, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        return {one: rows[:, i] for i, one in enumerate(name.split("\0"))}


def _escaped_header(file: Any) -> io.BytesIO:
    """Return the header of version 3.0, which is UTF-8, as one of version 2.0: other letters as Python's escapes."""
    text = file.read(int.from_bytes(file.read(4), "little")).decode("utf-8")
    escaped = text.encode("ascii", "backslashreplace")
    return io.BytesIO(len(escaped).to_bytes(4, "little") + escaped)


def split_files(path: Path, split: str) -> list[str]:
    """Return the names of the files of one part of a split-binary data set, from the folder of its spec."""
    return [str(chunk["files"][0]) for chunk in _chunks(path, _spec(path), split)]


def _spec(path: Path) -> dict[str, Any]:
    import yaml

    try:
        spec = yaml.safe_load(read_whole(str(path)).decode("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SourceError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("source_spec"), dict):
        raise SourceError(f"{path} has no source_spec: it must be the feature_spec.yaml of a split-binary data set")
    return spec


def _chunks(path: Path, spec: dict[str, Any], split: str) -> list[dict[str, Any]]:
    known = spec["source_spec"]
    if not isinstance(known.get(split), list) or not known[split]:
        raise SourceError(f"{path} has no part {split!r}, or an empty one: it has {', '.join(map(str, known))}")
    for chunk in known[split]:
        is_whole = isinstance(chunk, dict) and chunk.get("type") == "split_binary" and chunk.get("features")
        if not is_whole or len(chunk.get("files") or ()) != 1:
            raise SourceError(
                f"{path} has a chunk of {split!r} that is no split_binary of features in one file: {chunk!r}"
            )
    return list(known[split])
