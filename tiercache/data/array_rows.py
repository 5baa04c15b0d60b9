"""Arrays in files: rows of a .npy file, and the parts of a split-binary data set."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import SourceError
from tiercache.store.files import read_whole

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MOST_HEADER = 100_000
"""Bytes of a .npy header of version 3.0 with its letters escaped; NumPy's own limit is 10,000 letters."""


class ArrayRows:
    """Rows of one dtype and shape, one after another in a file that is open at the first row."""

    def __init__(self, file: Any, where: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._file, self._where, self.dtype, self._width, self._remaining = file, where, dtype, shape[1:], shape[0]
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
        except Exception as error:  # NumPy's header parser raises Python's errors, such as SyntaxError
            raise SourceError(f"{where} is not a readable .npy file ({error}): save it with numpy.save") from error
        if dtype.hasobject or not shape or len(shape) > 2 or (is_fortran and len(shape) > 1):
            raise SourceError(
                f"{where} holds {dtype} of shape {shape} in {'Fortran' if is_fortran else 'C'} order: it must be an "
                "array of numbers or strings in C order, with one or two dimensions"
            )
        return cls(file, where, dtype, shape)

    def skip(self, rows: int) -> None:
        """Skip the next rows."""
        self._file.seek(rows * self.row_bytes, 1)
        self._remaining -= rows

    def read(self, rows: int) -> NDArray[Any]:
        """Return the next rows, fewer at the end."""
        rows = min(rows, self._remaining)
        data = self._file.read(rows * self.row_bytes)
        if len(data) != rows * self.row_bytes:
            raise SourceError(f"{self._where} is truncated: its header promises {self.count:,} rows")
        self._remaining -= rows
        return np.frombuffer(data, self.dtype).reshape(rows, *self._width)


def _escaped_header(file: Any) -> io.BytesIO:
    """Return a version 3.0 header, which is UTF-8, as version 2.0, with other letters as Python escapes."""
    text = file.read(int.from_bytes(file.read(4), "little")).decode("utf-8")
    escaped = text.encode("ascii", "backslashreplace")
    return io.BytesIO(len(escaped).to_bytes(4, "little") + escaped)


def read_split_spec(path: Path, split: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a ``feature_spec.yaml`` and the chunks of one part of its data set. Raises SourceError."""
    import yaml

    try:
        spec = yaml.safe_load(read_whole(str(path)).decode("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SourceError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise SourceError(f"{path} is nested too deeply: it must be the feature_spec.yaml of a data set") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("source_spec"), dict):
        raise SourceError(f"{path} has no source_spec: it must be the feature_spec.yaml of a split-binary data set")
    parts = spec["source_spec"]
    if not isinstance(parts.get(split), list) or not parts[split]:
        raise SourceError(f"{path} has no part {split!r}, or an empty one: it has {', '.join(map(str, parts))}")
    for chunk in parts[split]:
        is_valid = isinstance(chunk, dict) and chunk.get("type") == "split_binary" and chunk.get("features")
        if not is_valid or len(chunk.get("files") or ()) != 1:
            raise SourceError(
                f"{path} has a chunk of {split!r} that is not split_binary features in one file: {chunk!r}"
            )
    return spec, parts[split]
