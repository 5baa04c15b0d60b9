"""Progress bars, on terminals only: training and its last passes, rewrites, and the compilation of kernels."""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table as Shown
from rich.text import Text

from tiercache.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import RenderableType
    from rich.progress import TaskID

    from tiercache.reporting.report import PassReport
    from tiercache.store.table import Table


@contextmanager
def progress_bars(*, shown: bool = True, unit: str = "rows") -> Iterator[Callable[[str, int, int | None], None]]:
    """Yield ``tell(stage, done, total)``: a bar appears with the first call of a stage, and disappears at the end.

    ``done`` and ``total`` (None: not known) are counted in ``unit``; "bytes" are shown as KiB, MiB and so on.
    """
    console, rate = Console(stderr=True), TextColumn("{task.fields[rate]}")
    if not (shown and console.is_terminal):  # a disabled bar prints an empty line in older releases of rich
        yield lambda *_: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), rate, TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, tuple[TaskID, float]] = {}

        def tell(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, rate=""), time.perf_counter()
            task, began = tasks[stage]
            seconds, rate = time.perf_counter() - began, ""
            if seconds > 0.5:
                rate = (
                    f"{format_bytes(int(done / seconds))}/s" if unit == "bytes" else f"{done / seconds:,.0f} {unit}/s"
                )
            bar.update(task, completed=done, total=total, rate=rate)

        yield tell


REFRESH_SECONDS = 0.2
_LAST_PASSES = 6
_BAR_WIDTH = 30
_TIERS = {"kept": "green", "from host": "cyan", "read": "yellow", "new": "magenta"}
"""The sources of a pass's rows, in the order of ``_tier_bar``, and their colors."""
_STAGES = {"sort": "sorting keys", "read": "reading", "write": "writing"}


class _PassView(Progress):
    """A bar below the last passes: the source of each one's rows, bytes read, waits and loss."""

    def __init__(self, *columns: ProgressColumn, **options: Any) -> None:
        self.passes: deque[PassReport] = deque(maxlen=_LAST_PASSES)
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the contents of the screen."""
        if self.passes:
            yield self._table()
        yield self.make_tasks_table(self.tasks)

    def _table(self) -> Shown:
        table = Shown(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        legend = Text(" ").join(Text(name, style=color) for name, color in _TIERS.items())
        for name in ("pass", "data", "rows", legend, "read MiB", "waited s", "seconds", "loss"):
            table.add_column(name, justify="left" if name is legend else "right")
        for r in tuple(self.passes):  # the thread that draws is another one
            loss = f"{sum(r.losses) / len(r.losses):.4f}" if r.losses else "-"
            table.add_row(
                f"{r.pass_index}", f"{r.sub_dataset}", f"{r.rows:,}", _tier_bar(r), f"{r.bytes_read / (1 << 20):,.1f}",
                f"{r.waited:.2f}", f"{r.seconds:.2f}", loss,
            )  # fmt: skip
        return table


def _tier_bar(report: PassReport) -> Text:
    """Return a bar with the share of each source in a pass's rows."""
    counts, bar, done = (report.rows_kept, report.rows_from_host, report.rows_read, report.rows_generated), Text(), 0
    for count, color in zip(counts, _TIERS.values(), strict=True):
        first, done = done, done + count
        begin, last = (_BAR_WIDTH * place // max(1, report.rows) for place in (first, done))
        bar.append("━" * (last - begin), style=color)
    return bar


class TrainingProgress:
    """The last passes, and a bar with samples per second, time left and seconds waited; nothing if not ``shown``."""

    def __init__(self, total_samples: int, *, shown: bool, console: Console | None = None) -> None:
        state = "{task.percentage:>3.0f} %  pass {task.fields[pass_index]}  {task.fields[rate]} samples/s"
        columns = TextColumn("training"), BarColumn(), TextColumn(state), TimeRemainingColumn()
        waited = TextColumn("waited {task.fields[waited]:.2f} s")
        options = {"console": console or Console(stderr=True), "disable": not shown, "transient": True}
        self._progress = _PassView(*columns, waited, **options)
        self._shown = shown
        self._task = self._progress.add_task("training", total=total_samples, pass_index="-", rate="-", waited=0.0)
        self._before, self._waited, self._begun, self._next = 0, 0.0, time.perf_counter(), 0.0
        self._progress.start()

    def batch(self, pass_index: int, samples_in_pass: int) -> None:
        """Show the progress of a pass; cheap enough for every batch."""
        now = time.perf_counter()
        if self._shown and now >= self._next:
            self._next = now + REFRESH_SECONDS
            done = self._before + samples_in_pass
            rate = done / max(1e-9, now - self._begun)
            self._progress.update(
                self._task, completed=done, pass_index=pass_index, rate=f"{rate:,.0f}", waited=self._waited
            )

    def pass_done(self, samples: int, report: PassReport) -> None:
        """Show a pass that ended."""
        self._before += samples
        self._waited += report.waited
        self._progress.passes.append(report)
        self._progress.update(self._task, waited=self._waited)
        self._next = 0.0

    def stop(self) -> None:
        """Remove the bar."""
        self._progress.stop()


@contextmanager
def rewrite_bars(rows: int, *, shown: bool) -> Iterator[Callable[[str, int], None]]:
    """Yield ``advance(what, rows)`` for ``Store.rewrite`` and ``Store.compact``, shown as bars.

    ``rows``: the rows of the store, the number of keys to sort and the most rows to read and to write.
    """
    done = dict.fromkeys(_STAGES, 0)
    with progress_bars(shown=shown) as tell:

        def advance(what: str, more: int) -> None:
            done[what] += more
            tell(_STAGES[what], done[what], done["read"] if what == "write" and done["read"] else rows)

        yield advance


def prepare_kernels(tables: Iterable[Table] = (), *, narrow: bool = False) -> None:
    """Compile the CPU kernels with a message, unless this machine has compiled them before: it takes a minute.

    Those for 16-bit dtypes are compiled if one of ``tables`` has such a dtype, or if ``narrow``.
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
