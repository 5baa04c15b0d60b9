"""What ``tiercache info`` and ``verify`` say of a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.cli.output import new_table
from tiercache.errors import DatasetError
from tiercache.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console

__all__ = ["describe", "show", "verify"]


def describe(path: Path) -> dict[str, Any]:
    """Return what the dataset at ``path`` holds, as plain values; opens no key set. Raises DatasetError."""
    from tiercache.data.dataset import PassDataset

    dataset = PassDataset.open(path)
    tables = []
    for table in dataset.tables:
        rows = [one.rows(table.name) for one in dataset]
        tables.append({"name": table.name, "dim": table.dim, "rows": rows, "max_rows": max(rows, default=0)})
    return {
        "path": str(path),
        "digest": dataset.digest,
        "summary": dataset.summary,
        "samples": dataset.samples,
        "file_bytes": sum(one.num_bytes() for one in dataset),
        "passes": [one.samples for one in dataset],
        "tables": tables,
    }


def show(console: Console, found: dict[str, Any]) -> None:
    """Print it."""
    console.print(
        f"{found['path']}: {found['summary']}; files take {format_bytes(found['file_bytes'])}", soft_wrap=True
    )
    shown = new_table("rows of each pass", "table", "dim", "mean", "most")
    for table in found["tables"]:
        mean = sum(table["rows"]) / max(1, len(found["passes"]))
        shown.add_row(table["name"], str(table["dim"]), f"{mean:,.0f}", f"{table['max_rows']:,}")
    console.print(shown)


def verify(path: Path, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Read all of a dataset and check it; "problems" has a sentence for the first damage that was found."""
    from tiercache.data.dataset import PassDataset

    dataset, problems = PassDataset.open(path), []
    try:
        dataset.verify(progress)
    except DatasetError as error:
        problems = [str(error)]
    return {
        "path": str(path),
        "passes": len(dataset),
        "summary": dataset.summary,
        "samples": dataset.samples,
        "problems": problems,
    }
