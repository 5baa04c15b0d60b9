"""Compiled CUDA code, kept in memory and on disk: NVRTC takes ten seconds for all kernels.

One file for each source and architecture. It begins with a digest of what the code was compiled from and one of what
follows: a file of other sources, options or another compiler, and a damaged one, is as good as none.
"""

import hashlib
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size
_IN_MEMORY: dict[bytes, bytes] = {}


def kept(folder: Path | None, name: str, made_from: str, make: Callable[[], bytes]) -> bytes:
    """Return what `make` returns: from memory, else from the file `name` in a folder, else made, and then kept.

    made_from: all that the code depends on. Without a folder, or where it cannot be written, only memory keeps it.
    """
    key = hashlib.sha256(made_from.encode()).digest()
    if key not in _IN_MEMORY:
        path = None if folder is None else folder / name
        code = None if path is None else _read(path, key)
        if code is None:
            code = make()
            if path is not None:
                with suppress(OSError):  # read-only, or full: compiled again next time
                    _write(path, key, code)
        _IN_MEMORY[key] = code
    return _IN_MEMORY[key]


def _read(path: Path, key: bytes) -> bytes | None:
    """Return the code of a whole file that was made from the same."""
    try:
        held = path.read_bytes()
    except OSError:
        return None
    code = held[2 * _DIGEST :]
    return code if held[: 2 * _DIGEST] == key + hashlib.sha256(code).digest() else None


def _write(path: Path, key: bytes, code: bytes) -> None:
    """Write a file that is there as a whole or not at all: several processes may write it at once."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        draft.write_bytes(key + hashlib.sha256(code).digest() + code)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
