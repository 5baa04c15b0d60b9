"""Token files, as sequences of equal length."""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import DatasetError
from tiercache.store.files import local_path, sync

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

_CHECKED = 64 << 10
_BUFFER = 1 << 20  # tokens
_TABLES = {".parquet", ".arrow", ".feather", ".ipc"}


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
        dtype: DTypeLike = np.uint16,
    ) -> None:
        """Map files; they must not change while they are used.

        Args:
            files: one or several: ``.npy`` files and arrays of integers with one axis, and other files, such as
                ``.bin``, of bare tokens. `write` makes such a file of texts.
            sequence_length: tokens of a sequence.
            dtype: of files of bare tokens, such as ``np.uint16`` or ``np.uint32``.

        Raises:
            ValueError: ``sequence_length`` or ``dtype`` is invalid.
            DatasetError: a file cannot be read, does not have integers with one axis, or is shorter than a sequence.
        """
        if isinstance(sequence_length, bool) or not isinstance(sequence_length, int) or sequence_length < 1:
            raise ValueError(f"sequence_length is {sequence_length!r}: expected the tokens per sequence, at least 1")
        if np.dtype(dtype).kind not in "iu":
            raise ValueError(f"dtype is {np.dtype(dtype)}: expected an integer dtype, such as np.uint16")
        given = [files] if isinstance(files, str | os.PathLike) or hasattr(files, "dtype") else [*files]
        self.sequence_length = sequence_length
        self._arrays = [_open(one, np.dtype(dtype)) for one in given]
        self._ends = [*accumulate(one.size // sequence_length for one in self._arrays)]
        if not len(self):
            raise DatasetError(
                f"{len(given)} files with {sum(one.size for one in self._arrays):,} tokens have no sequence of "
                f"{sequence_length:,}: use more tokens, or a smaller sequence_length"
            )

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        """Return a sequence, int64 (sequence_length,)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self):,}")
        import torch

        return torch.from_numpy(self.read(index, index + 1)[0])

    def read(self, first: int, last: int) -> NDArray[np.int64]:
        """Return sequences ``first`` to ``last``, (last - first, sequence_length)."""
        found, length = np.empty((last - first, self.sequence_length), np.int64), self.sequence_length
        at = first
        while at < last:
            number = bisect_right(self._ends, at)
            begin = self._ends[number - 1] if number else 0
            end = min(last, self._ends[number])
            tokens = self._arrays[number][(at - begin) * length : (end - begin) * length]
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
            path: of the file, which must not exist.
            texts: an iterable of texts, each with its tokens as integers; or a Parquet or Arrow file, or several,
                with a column of lists of integers. Read piece by piece.
            column: the column.
            separator: a token that is written after each text; None: none.
            dtype: of the tokens in the file.

        Raises:
            FileExistsError: the file exists.
            DatasetError: a file cannot be read or has no such column, or a token does not fit the dtype.
        """
        target, kind = local_path(path, "a file of tokens"), np.dtype(dtype)
        draft = target.with_name(f"{target.name}.tmp")
        if target.exists():
            raise FileExistsError(f"{target} exists: delete it, or choose another path")
        with draft.open("wb") as file:
            for tokens in _texts(texts, column):
                for part in (tokens, [] if separator is None else [separator]):
                    array = np.asarray(part)
                    if array.size and (array.dtype.kind not in "iu" or not _fits(array, kind)):
                        raise DatasetError(
                            f"tokens of a text are {array.dtype} from {array.min()} to {array.max()}: they do not fit "
                            f"{kind}: choose another dtype"
                        )
                    file.write(array.astype(kind).tobytes())
        sync(draft)
        draft.replace(target)
        sync(target.parent)
        return target


def _open(given: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not isinstance(given, str | os.PathLike):
        array = given.numpy() if hasattr(given, "detach") else np.asarray(given)
        what = "an array of tokens"
    else:
        path = local_path(given, "a file of tokens")
        what = str(path)
        if path.suffix in _TABLES:
            raise DatasetError(f"{path} is a table: write its tokens to one file with TokenFiles.write first")
        try:
            if path.suffix == ".npy":
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            else:
                array = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
        except (OSError, ValueError) as error:
            raise DatasetError(f"{path} cannot be read as tokens of {dtype}: {error}") from error
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DatasetError(f"{what} has {array.dtype} of shape {array.shape}: expected integers with one axis")
    return array


def _checksum(array: NDArray[Any]) -> int:
    count = _CHECKED // array.itemsize
    return zlib.crc32(array[-count:].tobytes(), zlib.crc32(array[:count].tobytes()))


def _fits(array: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return bool(limits.min <= int(array.min()) and int(array.max()) <= limits.max)


def _texts(texts: Any, column: str) -> Iterator[Any]:
    """Yield the tokens of each text, or of many texts of a table."""
    if isinstance(texts, str | os.PathLike):
        texts = [texts]
    for one in texts:
        if isinstance(one, str | os.PathLike):
            yield from _column(Path(one), column)
        else:
            yield one.numpy() if hasattr(one, "detach") else one


def _column(path: Path, column: str) -> Iterable[Any]:
    """Yield the lists of a column of a Parquet or Arrow file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            batches: Iterable[pa.RecordBatch] = pq.ParquetFile(path).iter_batches(1 << 12, columns=[column])
        else:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        for batch in batches:
            lists = batch.column(column)
            for one in lists:
                yield one.values.to_numpy(zero_copy_only=False) if one.is_valid else np.empty(0, np.int64)
    except (OSError, pa.ArrowException, KeyError, AttributeError) as error:
        raise DatasetError(f"{path} has no readable column {column!r} of lists of integers: {error}") from error
