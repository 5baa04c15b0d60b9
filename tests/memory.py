"""The memory of a process that is not backed by files: what something takes of it at most."""

from __future__ import annotations

import multiprocessing
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def anonymous_bytes() -> int:
    """Return what this process has now."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class Peak(threading.Thread):
    """Watches this process from when it is made, and counts anew from ``begin`` on."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before = self._most = 0
        self.start()

    def begin(self) -> None:
        """Count what is taken beside what there is now."""
        self._before = self._most = anonymous_bytes()

    @property
    def taken(self) -> int:
        """The most that was taken."""
        return self._most - self._before

    def run(self) -> None:
        """Watch."""
        while True:
            self._most = max(self._most, anonymous_bytes())
            time.sleep(0.005)


def run_alone(measure: Callable[[Path], None], folder: Path) -> None:
    """Measure in a process of its own, which has nothing else in its memory."""
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(folder,))
    process.start()
    process.join(300)
    assert process.exitcode == 0
