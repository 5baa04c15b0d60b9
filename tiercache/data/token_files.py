"""Token files, as sequences of equal length."""

from __future__ import annotations

import errno
import operator
import os
import uuid
import zlib
from bisect import bisect_right
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.data.columns import is_list
from tiercache.errors import DatasetError
from tiercache.store.files import local_path, open_file, reason, sync
from tiercache.store.records import positive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import DTypeLike, NDArray

_CHECKED = 64 << 10
_MOST = (1 << 63) - 1
_TABLES = {".parquet", ".pq", ".arrow", ".feather", ".ipc"}
_LARGEST_VOCABULARY = 1 << 20
"""Larger tokens in a file are a sign of another dtype, unless the caller names it."""
_FEWEST_ZEROS = 32
"""Zeros as every other token, from this number on, are a sign of a wider dtype."""
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""Errors of file systems without hard links."""


class TokenFiles:
    """Sequences of tokens in files, or in arrays: a dataset of torch, with a length and an index.

    Sequence i is an int64 tensor of ``sequence_length`` tokens. Each file is cut from its first token on; a remainder
    at its end is left out.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | NDArray[Any] | Sequence[Any],
        sequence_length: int,
        *,
        dtype: DTypeLike | None = None,
    ) -> None:
        """Map files; they must not change while they are used.

        Args:
            files: one or several: ``.npy`` files and arrays of integers with one axis, and other files, such as
                ``.bin``, of bare tokens. `write` makes such a file of texts.
            sequence_length: tokens of a sequence.
            dtype: of files of bare tokens, such as ``np.uint16``; None: ``np.uint32``, the default of `write`.

        Raises:
            ValueError: ``sequence_length`` or ``dtype`` is invalid.
            DatasetError: a file cannot be read, does not have integers with one axis, is shorter than a sequence, or
                seems to have another dtype: every other token is 0, or, if ``dtype`` is None, a token is 2^20 or more.
        """
        length = positive(sequence_length, "sequence_length", "the tokens per sequence")
        kind = _integer_dtype(np.uint32 if dtype is None else dtype)
        given: Any = [files] if isinstance(files, str | os.PathLike) or hasattr(files, "dtype") else files
        if not hasattr(given, "__iter__"):
            raise ValueError(f"files is {files!r}: expected paths or arrays of tokens")
        given = [*given]
        self.sequence_length = length
        self._arrays = [_open(one, kind, is_default=dtype is None) for one in given]
        self._ends = [*accumulate(one.size // length for one in self._arrays)]
        if not len(self):
            raise DatasetError(
                f"{len(given)} files with {sum(one.size for one in self._arrays):,} tokens have no sequence of "
                f"{length:,}: use more tokens, or a smaller sequence_length"
            )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        """Return a sequence, int64 (sequence_length,)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self):,}")
        import torch

        return torch.from_numpy(self.read(index, index + 1)[0])

    def read(self, first: int, last: int) -> NDArray[np.int64]:
        """Return sequences, (last - first, sequence_length). Raises DatasetError for tokens of 2^63 and more."""
        found, length = np.empty((last - first, self.sequence_length), np.int64), self.sequence_length
        at = first
        while at < last:
            number = bisect_right(self._ends, at)
            begin = self._ends[number - 1] if number else 0
            end = min(last, self._ends[number])
            tokens = self._arrays[number][(at - begin) * length : (end - begin) * length]
            if tokens.dtype.kind == "u" and tokens.itemsize == 8 and int(tokens.max()) > _MOST:
                raise DatasetError(f"token {tokens.max()} does not fit int64: expected tokens below 2^63")
            found[at - first : end - first] = tokens.reshape(-1, length)
            at = end
        return found

    @property
    def facts(self) -> dict[str, Any]:
        """Identify these tokens: the size of each file, and checksums of its ends."""
        return {
            "sequence_length": self.sequence_length,
            "tokens": [int(one.size) for one in self._arrays],
            "checksums": [_checksum(one) for one in self._arrays],
        }

    @staticmethod
    def write(
        path: str | os.PathLike[str],
        texts: Any,
        *,
        column: str = "tokens",
        separator: int | None = None,
        dtype: DTypeLike = np.uint32,
    ) -> Path:
        """Write the tokens of texts to one file, one after another, and return its path; durable on return.

        Args:
            path: of the file, which must not exist: a ``.npy`` file, which stores the dtype, or a file of bare tokens.
            texts: an iterable of texts, each with its tokens as integers; or a Parquet or Arrow file, or several,
                with a column of lists of integers. Read piece by piece.
            column: the column.
            separator: a token that is written after each text; None: none.
            dtype: of the tokens in the file.

        Raises:
            FileExistsError: the file exists; several writers never mix, and the first to finish keeps the path.
            ValueError: ``dtype`` or ``separator`` is invalid.
            DatasetError: the path cannot be written; a file cannot be read or has no such column; or a token is not an
                integer that fits the dtype.
        """
        target, kind = local_path(path, "a file of tokens"), _integer_dtype(dtype)
        after = None if separator is None else _separator(separator, kind)
        suffix = target.suffix.lower()
        if suffix in {*_TABLES, ".npz"}:
            raise DatasetError(f"{target} would not be a {suffix} file: choose .npy, or .bin for bare tokens")
        if os.path.lexists(target):
            raise FileExistsError(f"{target} exists: delete it, or choose another path")
        if not hasattr(texts, "__iter__") and not isinstance(texts, os.PathLike):
            raise DatasetError(f"texts is {texts!r}: expected an iterable of texts, or the path of a table")
        with _new_file(target) as file:
            is_npy, count = suffix == ".npy", 0
            if is_npy:
                _write_header(file, kind, 0)
            for tokens in _texts(texts, column):
                for array in (tokens,) if after is None else (tokens, after):
                    _check_fit(array, kind)
                    file.write(array.astype(kind).tobytes())
                    count += array.size
            if is_npy:  # NumPy leaves room for the number
                file.seek(0)
                _write_header(file, kind, count)
        return target


@contextmanager
def _new_file(target: Path) -> Iterator[Any]:
    """Yield a file that gets its name, if that is free, when its content is on disk; after an error it is deleted."""
    draft = target.with_name(f".{uuid.uuid4().hex}.unfinished")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise DatasetError(
            f"{target} cannot be written ({reason(error)}): choose a path in a folder that exists and is writable"
        ) from error
    try:
        with open(handle, "wb") as file:  # noqa: PTH123 - a handle
            yield file
        sync(draft)
        try:
            _link(draft, target)
        except FileExistsError:
            raise FileExistsError(f"{target} exists: delete it, or choose another path") from None
    finally:
        draft.unlink(missing_ok=True)
    sync(target.parent)


def _link(draft: Path, target: Path) -> None:
    """Give a file a second name. Raises FileExistsError if the name is taken."""
    try:
        target.hardlink_to(draft)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        target.open("xb").close()
        draft.replace(target)


def _write_header(file: Any, dtype: np.dtype[Any], count: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)


def _integer_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype is {dtype!r}: expected an integer dtype, such as np.uint16") from error
    if kind.kind not in "iu":
        raise ValueError(f"dtype is {kind}: expected an integer dtype, such as np.uint16")
    return kind


def _separator(separator: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    least, most = _limits(dtype)
    try:
        token = operator.index(separator)
    except TypeError:
        token = most + 1
    if isinstance(separator, bool) or not least <= token <= most:
        raise ValueError(f"separator is {separator!r}: expected a token from {least} to {most}, to fit {dtype}")
    return np.array([token], dtype)


def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    return int(np.iinfo(dtype).min), min(int(np.iinfo(dtype).max), _MOST)


def _check_fit(array: NDArray[Any], dtype: np.dtype[Any]) -> None:
    least, most = _limits(dtype)
    if array.size and not (least <= int(array.min()) and int(array.max()) <= most):
        raise DatasetError(
            f"tokens of a text are {array.dtype} from {array.min()} to {array.max()}: they do not fit {dtype}: choose "
            "another dtype"
        )


def _open(given: Any, dtype: np.dtype[Any], *, is_default: bool) -> NDArray[Any]:
    if not isinstance(given, str | os.PathLike):
        return _tokens(given, "an array of tokens")
    path = local_path(given, "a file of tokens")
    suffix = path.suffix.lower()
    if suffix in _TABLES:
        raise DatasetError(f"{path} is a table: write its tokens to one file with TokenFiles.write first")
    if suffix == ".npz":
        raise DatasetError(f"{path} may have several arrays: save one with numpy.save to a .npy file")
    try:
        os.close(open_file(path))
        array: NDArray[Any]
        if suffix == ".npy":
            array = np.lib.format.open_memmap(path, mode="r")
        else:
            array = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
    except Exception as error:  # NumPy's header parser raises Python's errors, such as SyntaxError
        what = "an array" if suffix == ".npy" else f"tokens of {dtype}"
        raise DatasetError(f"{path} cannot be read as {what}: {_why(error)}") from error
    if suffix != ".npy":
        _check_dtype(array, path, is_default=is_default)
    return _tokens(array, str(path))


def _why(error: Exception) -> str:
    return reason(error).split("\n", maxsplit=1)[0]


def _check_dtype(array: NDArray[Any], path: Path, *, is_default: bool) -> None:
    """Raise DatasetError if the first bare tokens of a file look as if they had another dtype."""
    first = array[: _CHECKED // array.itemsize]
    if first.size >= 2 * _FEWEST_ZEROS and not first[1::2].any() and first[::2].any():
        wider = f"np.uint{16 * first.itemsize}" if first.itemsize < 8 else "another one"
        raise DatasetError(
            f"every other token in {path} is 0 if its dtype is {array.dtype}: pass the dtype that it was written with, "
            f"such as {wider}; or pass an array if this is right"
        )
    if is_default and first.size and int(first.max()) >= _LARGEST_VOCABULARY:
        raise DatasetError(
            f"{path} has token {first.max()} if its dtype is {array.dtype}, the default: pass the dtype that it was "
            f"written with, such as np.uint16; or np.{array.dtype} if this is right"
        )


def _tokens(given: Any, what: str) -> NDArray[Any]:
    """Return an array of integers with one axis. Raises DatasetError for anything else."""
    if np.ma.is_masked(given):
        raise DatasetError(f"{what} has masked values: pass an array without them, such as its compressed()")
    try:
        array: NDArray[Any] = given.detach().cpu().numpy() if hasattr(given, "detach") else np.asarray(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # bfloat16, lists of different lengths
        found = getattr(given, "dtype", type(given).__name__)
        raise DatasetError(f"{what} is {found} ({_why(error)}): expected integers with one axis") from error
    if array.shape == (0,) and not hasattr(given, "dtype"):
        return array.astype(np.int64)  # NumPy's dtype of an empty list is float64
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DatasetError(f"{what} has {array.dtype} of shape {array.shape}: expected integers with one axis")
    return array


def _checksum(array: NDArray[Any]) -> int:
    """Return a checksum of the first and last tokens: of their numbers, because a dtype may be wrong."""
    first, last = (one.astype("<i8").tobytes() for one in (array[:_CHECKED], array[-_CHECKED:]))
    return zlib.crc32(last, zlib.crc32(first))


def _texts(texts: Any, column: str) -> Iterator[NDArray[Any]]:
    if isinstance(texts, str | os.PathLike):
        texts = [texts]
    for number, one in enumerate(texts):
        if isinstance(one, str | os.PathLike):
            yield from _column(one, column)
        else:
            yield _tokens(one, f"text {number}")


def _column(given: str | os.PathLike[str], column: str) -> Iterable[NDArray[Any]]:
    """Yield the lists of a column of a Parquet or Arrow file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, row = local_path(given, "a table of tokens"), 0
    if path.suffix.lower() not in _TABLES:
        raise DatasetError(f"{os.fspath(given)!r} is not the path of a Parquet or Arrow file: pass the tokens of texts")
    try:
        os.close(open_file(path))
        if path.suffix.lower() in {".parquet", ".pq"}:
            batches: Iterable[pa.RecordBatch] = pq.ParquetFile(path).iter_batches(1 << 12, columns=[column])
        else:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        for batch in batches:
            if not is_list(kind := batch.schema.field(column).type):
                raise DatasetError(f"{path}, column {column!r}: it holds {kind}, but expected lists of integers")
            for one in batch.column(column):
                values = one.values.to_numpy(zero_copy_only=False) if one.is_valid else np.empty(0, np.int64)
                yield _tokens(values, f"column {column!r} in row {row} of {path}")
                row += 1
    except (OSError, pa.ArrowException, KeyError, AttributeError) as error:
        raise DatasetError(f"{path} has no readable column {column!r} of lists of integers: {_why(error)}") from error
