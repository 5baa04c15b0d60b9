"""What a person sees while training runs: one bar over all passes, and the first compilation of kernels."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tiercache.progress import progress_bars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tiercache.store.table import Table
    from tiercache.tiers.report import PassReport

REFRESH_SECONDS = 0.2
_STAGES = {"sort": "sorting keys", "read": "reading", "write": "writing"}


class TrainingProgress:
    """A bar with samples per second, time left, passes, seconds waited and rows at hand; nothing if not ``shown``.

    Rows at hand are those of the last pass that were on device or host, of those that were not new.
    """

    def __init__(self, total_samples: int, *, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %  pass {task.fields[pass_index]}  {task.fields[rate]} samples/s"),
            TimeRemainingColumn(),
            TextColumn("waited {task.fields[waited]:.2f} s  {task.fields[at_hand]} of rows at hand"),
            console=Console(stderr=True),
            disable=not shown,
            transient=True,
        )
        self._shown = shown
        self._task = self._progress.add_task(
            "training", total=total_samples, pass_index="-", rate="-", waited=0.0, at_hand="-"
        )
        self._before = 0
        self._waited = 0.0
        self._begun = time.perf_counter()
        self._next = 0.0
        self._progress.start()

    def batch(self, pass_index: int, samples_in_pass: int) -> None:
        """Show how far a pass has come; cheap enough for every batch."""
        now = time.perf_counter()
        if self._shown and now >= self._next:
            self._next = now + REFRESH_SECONDS
            done = self._before + samples_in_pass
            rate = done / max(1e-9, now - self._begun)
            self._progress.update(
                self._task, completed=done, pass_index=pass_index, rate=f"{rate:,.0f}", waited=self._waited
            )

    def pass_done(self, samples: int, report: PassReport) -> None:
        """Take in a pass that ended."""
        self._before += samples
        self._waited += report.waited
        old = report.rows - report.rows_generated
        at_hand = f"{(old - report.rows_read) / old:.0%}" if old else "-"
        self._progress.update(self._task, at_hand=at_hand)
        self._next = 0.0

    def stop(self) -> None:
        """Take the bar away."""
        self._progress.stop()


@contextmanager
def rewrite_bars(rows: int, *, shown: bool) -> Iterator[Callable[[str, int], None]]:
    """Yield ``advance(what, rows)`` for ``Store.rewrite`` and ``Store.compact``, shown as bars.

    ``rows`` are those of the store: as many keys are sorted, at most as many rows are read, and those are written.
    """
    done = dict.fromkeys(_STAGES, 0)
    with progress_bars(shown=shown) as tell:

        def advance(what: str, more: int) -> None:
            done[what] += more
            tell(_STAGES[what], done[what], done["read"] if what == "write" and done["read"] else rows)

        yield advance


def prepare_kernels(tables: Iterable[Table] = (), *, narrow: bool = False) -> None:
    """Compile the CPU kernels where this machine has not compiled them yet, and say so: it takes a minute, once.

    Those for 16-bit dtypes are compiled where one of ``tables`` has such a dtype, or ``narrow`` says so.
    """
    from tiercache.kernels.cpu.compile import is_cached, prepare

    narrow = narrow or any(table.dtype != "float32" for table in tables)
    if is_cached(narrow=narrow):
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print("compiling the CPU kernels of tiercache for this machine (once, a minute) ...")
        prepare(None, narrow=narrow)
        return
    with console.status("compiling the CPU kernels of tiercache for this machine (once)") as status:
        prepare(
            lambda name, done, total: status.update(f"compiling CPU kernels (once): {name}, {done} of {total}"),
            narrow=narrow,
        )
