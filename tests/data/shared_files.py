"""A file system for URLs ``shared://PATH`` that can kill a process of the test.

Workers import this module before they start.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

FATAL = "TIERCACHE_TEST_FATAL"
"""The variable that names a folder; a file in it, named after a call, makes that call kill once, and lists spared
ones.
"""


class SharedFileSystem(DirFileSystem):
    """Local files that act as remote ones."""

    protocol = "shared"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(path="/", fs=LocalFileSystem(), **options)

    def open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Open a file, or die."""
        die_once("open")
        return super().open(path, *args, **kwargs)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        """Copy a file to its place, or copy half of it and die."""
        data = Path(lpath).read_bytes()
        with super().open(rpath, "wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            die_once("put_file")
            file.write(data[len(data) // 2 :])


def die_once(call: str) -> None:
    """Kill this process if it is the first one to take the file of this name, unless it is spared."""
    order = Path(os.environ.get(FATAL, "/nowhere")) / call
    with suppress(FileNotFoundError):
        if order.read_text() != str(os.getpid()):
            order.rename(order.with_suffix(".done"))  # by only one process
            os.kill(os.getpid(), signal.SIGKILL)


fsspec.register_implementation("shared", SharedFileSystem, clobber=True)
