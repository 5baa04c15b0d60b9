"""The activity of a process when it died: a few numbers in a mapped file, which outlive the process."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

PHASES = (
    "beginning",  # of the process
    "extraction",
    "opening",  # the store, the cache and the first load
    "training",
    "commit inside",  # a pass
    "switch",  # from one pass to the next
    "end",  # waiting for the last commit, closing, opening again to read the result
    "dump",  # on the writer thread
    "publish",  # on the writer thread; the very first one on the training thread
)
_MAIN, _WRITER, _BEGUN, _DONE, _COUNTS = 0, 1, 2, 3, 4
_WORDS = _COUNTS + len(PHASES)


class Ledger:
    """Phases and commits of one process. The process writes, and others read, even after ``kill -9``."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            words = np.zeros(_WORDS, dtype=np.int64)
            words[[_WRITER, _BEGUN, _DONE]] = -1
            path.write_bytes(words.tobytes())
        with path.open("r+b") as file:
            self._words = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.int64)

    # -- written by the process ----------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        index = PHASES.index(phase)
        self._words[_MAIN] = index
        self._words[_COUNTS + index] += 1

    @contextmanager
    def writing(self, phase: str) -> Iterator[None]:
        index = PHASES.index(phase)
        self._words[_WRITER] = index
        self._words[_COUNTS + index] += 1
        yield
        self._words[_WRITER] = -1

    def begin_commit(self, number: int) -> None:
        self._words[_BEGUN] = number

    def finish_commit(self, number: int) -> None:
        self._words[_DONE] = number

    # -- read by others ------------------------------------------------------------------------------------------

    def times(self, phase: str) -> int:
        return int(self._words[_COUNTS + PHASES.index(phase)])

    @property
    def begun(self) -> int:
        """The newest commit that was begun; -1 without one."""
        return int(self._words[_BEGUN])

    @property
    def done(self) -> int:
        """The newest commit that was durable; -1 without one."""
        return int(self._words[_DONE])

    @property
    def phase(self) -> str:
        """The last phase: the writer's, if it was active during training or a switch."""
        main, writer = PHASES[int(self._words[_MAIN])], int(self._words[_WRITER])
        return PHASES[writer] if writer >= 0 and main != "commit inside" else main
