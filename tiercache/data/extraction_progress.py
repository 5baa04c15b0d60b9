"""Progress of an extraction: a bar on a terminal, one closing line elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tiercache.sizes import printable

if TYPE_CHECKING:
    from collections.abc import Callable

_STAGES = {"count": "counting keys", "number": "extracting", "close": "closing a pass"}


@dataclass(frozen=True, slots=True)
class ExtractionProgress:
    """Progress of an extraction."""

    stage: Literal["count", "number", "close", "done"]
    samples: int
    """Samples read since this process began, in this stage."""
    passes: int
    """Passes that are closed or being closed, earlier processes included."""
    done_bytes: int
    """Approximate bytes of the files that are done."""
    total_bytes: int
    seconds: float
    """Seconds since this stage began."""


class ProgressReporter:
    """Reports the progress of an extraction to the user, or to a function of the user.

    progress: True shows a bar on a terminal, with samples per second, time left and passes so far, and elsewhere a
    closing line on standard error. False shows nothing. A function is called with each ExtractionProgress.
    """

    def __init__(self, progress: bool | Callable[[ExtractionProgress], None], total_bytes: int) -> None:
        self._call = progress if callable(progress) else None
        self._is_shown, self._total, self._stage = progress is True, total_bytes, ""
        self._bar: Any = None
        self._task: Any = None
        self._began = self._stage_began = time.monotonic()
        self.samples = self.passes = 0
        if self._is_shown and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("reading", total=total_bytes, rate="", passes=0)
            self._bar.start()

    def begin(self, stage: Literal["count", "number"]) -> None:
        """Start the clock of a stage."""
        self._stage, self._stage_began, self.samples = stage, time.monotonic(), 0
        self.update(0)

    def update(self, done_bytes: int, stage: Literal["close"] | None = None) -> None:
        """Report ``samples``, ``passes`` and the bytes done."""
        seconds = time.monotonic() - self._stage_began
        name: Any = stage or self._stage
        if self._call is not None:
            self._call(ExtractionProgress(name, self.samples, self.passes, done_bytes, self._total, seconds))
        elif self._bar is not None:
            rate = f"{self.samples / seconds:,.0f} samples/s" if seconds > 0.5 else ""
            self._bar.update(self._task, description=_STAGES[name], completed=done_bytes, rate=rate, passes=self.passes)

    def finish(self, samples: int, what: str, bad_rows: str) -> None:
        """Report the end: ``samples`` of all passes, a description of the result, and of bad rows, if any."""
        self.close()
        seconds = time.monotonic() - self._began
        if self._call is not None:
            self._call(ExtractionProgress("done", samples, self.passes, self._total, self._total, seconds))
        elif self._is_shown:
            text = f"{what}, {seconds:.1f} s" + ("; " + bad_rows if bad_rows else "")
            print(printable(text), file=sys.stderr)  # noqa: T201

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(), TextColumn("{task.fields[passes]} passes"),
    )  # fmt: skip
    return Progress(*columns, console=Console(stderr=True), transient=True)
