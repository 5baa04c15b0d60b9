"""The moments at which a store touches the disk, detected at run time: calls of the system, of files and of LMDB."""

import io
import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, NamedTuple

_SYSTEM = {
    "copy_file_range", "fdatasync", "fsync", "ftruncate", "link", "mkdir", "open", "posix_fallocate", "pwrite",
    "pwritev", "remove", "rename", "replace", "rmdir", "sendfile", "truncate", "unlink", "write", "writev",
}  # fmt: skip
_FILE = {"__exit__", "close", "flush", "truncate", "write", "writelines"}
_LMDB = {
    "Environment": {"begin", "close", "reader_check", "sync"},
    "Transaction": {"__exit__", "abort", "commit", "delete", "drop", "put"},
}
_NAMES = frozenset().union(_SYSTEM, _FILE, *_LMDB.values())
"""Names that can be a point at all; rejects nearly all other calls quickly."""
_WRITING = {"pwrite", "pwritev", "write", "writev", "flush", "__exit__", "commit", "close"}


class Point(NamedTuple):
    """A moment: just before a call, or just after it."""

    call: str  # the call, such as ``posix.pwritev`` or ``Transaction.__exit__``
    after: bool

    @property
    def tearable(self) -> bool:
        """True if a write has just ended that could have stopped half-way."""
        return self.after and self.call.rpartition(".")[2] in _WRITING

    @property
    def commits_lmdb(self) -> bool:
        """True if a transaction of LMDB may just have been committed."""
        return self.after and self.call in {"Transaction.__exit__", "Transaction.commit"}

    @property
    def syncs_lmdb(self) -> bool:
        """True if LMDB has just synced its file."""
        return self.after and self.call == "Environment.sync"


def watch(reached: Callable[[int, Point], None]) -> None:
    """From now on call ``reached(number, point)`` at every point, in its thread; numbers count from 0.

    Uses the profiling hook of the interpreter, for this thread and future ones. Calls by the harness
    do not count.
    """
    count = itertools.count()

    def hook(frame: FrameType, event: str, call: Any) -> None:
        if event in {"c_call", "c_return", "c_exception"} and call.__name__ in _NAMES:
            name = _name(call)
            if name and not frame.f_globals.get("__name__", "").startswith("tests.crash."):
                reached(next(count), Point(name, event != "c_call"))

    threading.setprofile(hook)
    sys.setprofile(hook)


def unwatch() -> None:
    threading.setprofile(None)
    sys.setprofile(None)


def _name(call: Any) -> str:
    """Return the name of a call that touches the disk; otherwise nothing."""
    name, owner = call.__name__, getattr(call, "__self__", None)
    if isinstance(owner, ModuleType):
        if (owner.__name__ in {"posix", "nt"} and name in _SYSTEM) or (
            owner.__name__ in {"io", "_io"} and name == "open"
        ):
            return f"{owner.__name__}.{name}"
    elif isinstance(owner, io.IOBase):
        if name in _FILE and not isinstance(owner, io.BytesIO | io.StringIO):
            return f"{type(owner).__name__}.{name}"
    elif name in _LMDB.get(type(owner).__name__, ()):
        return f"{type(owner).__name__}.{name}"
    return ""
