"""Objects other than files in place of a small file."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def a_socket(path: Path) -> None:
    """Make a socket, by a short path: those of sockets have at most 107 bytes."""
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{handle}/{path.name}")
    finally:
        os.close(handle)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": os.mkdir,
    "a socket": a_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a link to a FIFO": lambda path: (os.mkfifo(f"{path}.fifo"), path.symlink_to(f"{path}.fifo")),
    "a link to itself": lambda path: path.symlink_to(path),
}
"""By name, the function that makes one."""


@contextmanager
def at_once(seconds: int = 30) -> Iterator[None]:
    def waited(*_: object) -> None:
        raise AssertionError("it waits without end")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
