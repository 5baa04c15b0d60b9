"""Holes in a file: bytes that it keeps its length for, and the file system no room."""

from __future__ import annotations

import ctypes
import errno
import os

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_CANNOT = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})


def punch_hole(handle: int, offset: int, num_bytes: int) -> bool:
    """Give the room of bytes of an open file back to the file system: they read as zeros from now on.

    Returns False, and changes nothing, where system or file system have no holes. Raises OSError.
    """
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
