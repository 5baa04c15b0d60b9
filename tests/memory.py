"""The peak memory of a process that is not backed by files."""

import multiprocessing
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class Peak(threading.Thread):
    """Watches this process's memory from its creation; ``begin`` resets the peak."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before = self._most = 0
        self.start()

    def begin(self) -> None:
        """Reset: count memory in addition to the current one."""
        self._before = self._most = anonymous_bytes()

    @property
    def taken(self) -> int:
        return self._most - self._before

    def run(self) -> None:
        while True:
            self._most = max(self._most, anonymous_bytes())
            time.sleep(0.005)


def run_alone(measure: Callable[[Path], None], folder: Path) -> None:
    """Measure in a separate process, whose memory has nothing else."""
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(folder,))
    process.start()
    process.join(300)
    assert process.exitcode == 0
