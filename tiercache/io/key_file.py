"""Keys that a user lists: as text, one per line of a text file, or in a ``.npy`` file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from tiercache.io.numpy_format import map_array
from tiercache.store.lookup import check_keys

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def integer_of(text: str) -> int | None:
    """Return the integer that a text spells in decimal ASCII digits; None for any other text, such as "1_2"."""
    text = text.strip(" \t\r")
    return int(text) if len(text) <= 4000 and re.fullmatch(r"[+-]?[0-9]+", text, re.ASCII) else None


def read_keys(path: Path) -> NDArray[np.int64]:
    """Return the keys of a file. Raises ValueError for other content, and ImportExportError for a damaged ``.npy``.

    A ``.npy`` file may be of any integer type whose values fit in int64. A FIFO is refused, since opening one without a
    writer waits forever; a pipe that the shell opened, as ``<(...)``, has no path of its own and is read.
    """
    if path.is_fifo() and path.resolve().exists():
        raise ValueError(f"{path} is a FIFO: pass a file of keys, or <(...) to read those of a command")
    with path.open("rb") as file:
        data = file.read(8)
        if data.startswith(b"PK\x03\x04"):
            raise ValueError(f"{path} is an archive (.npz): save one array of keys with np.save, as a .npy file")
        if path.suffix != ".npy" and not data.startswith(b"\x93NUMPY"):
            return _text_keys(path, data + file.read())
    keys = map_array(path)
    if keys.dtype.kind not in "iu" or keys.ndim != 1:
        raise ValueError(f"{path} has {keys.shape} of {keys.dtype}: expected integers of shape (n,)")
    try:
        return np.array(check_keys(keys))
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from error


def _text_keys(path: Path, data: bytes) -> NDArray[np.int64]:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{path} is UTF-16 text: save it as UTF-8")
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): pass one key per line, or a .npy file") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        key = integer_of(line)
        if key is None or not -(1 << 63) <= key < 1 << 63:
            raise ValueError(f"line {number} of {path} is {line[:40]!r}: expected one int64 key per line")
        found.append(key)
    return np.array(found, np.int64)
