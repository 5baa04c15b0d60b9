"""What a person sees while rows move."""

from __future__ import annotations

import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["shown_rows"]


@contextmanager
def shown_rows(*, as_json: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each stage on a terminal, with rows per second; warnings become a line each on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        console = Console(stderr=True)
        hidden = as_json or not console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
            tasks: dict[str, Any] = {}
            begun: dict[str, float] = {}

            def tell(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bar.add_task(stage, total=total, rate="")
                    begun[stage] = time.perf_counter()
                seconds = time.perf_counter() - begun[stage]
                rate = f"{done / seconds:,.0f} rows/s" if seconds > 0.5 else ""
                bar.update(tasks[stage], completed=done, total=total, rate=rate)

            yield tell
    for warning in caught:
        typer.echo(f"warning: {warning.message}", err=True)
