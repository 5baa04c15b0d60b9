"""Progress bars on standard error: one for each stage of a long job, with its rate and the time left."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import TaskID


@contextmanager
def progress_bars(*, shown: bool = True, unit: str = "rows") -> Iterator[Callable[[str, int, int | None], None]]:
    """Yield ``tell(stage, done, total)``: a bar appears with the first call of a stage, on a terminal only.

    ``done`` and ``total`` (None: not known) are counted in ``unit``; "bytes" are shown as KiB, MiB and so on. The bars
    disappear at the end. Nothing is shown where ``shown`` is false.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from tiercache.sizes import format_bytes

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
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
