"""``tiercache info`` of a dataset: sizes, overlap, reuse and skew, and the effect of host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.cli.output import new_table
from tiercache.distribution import install_command
from tiercache.errors import DatasetError, TierCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console

    from tiercache.data.dataset import PassDataset
    from tiercache.planning.capacity import Point
    from tiercache.planning.reuse import Reuse
    from tiercache.planning.schedule import OrderRule


def describe(path: Path, *, plot: Path | None = None, curve: bool = False) -> tuple[dict[str, Any], list[Point]]:
    """Return the facts of a dataset as plain values, and its capacity curve, by a sweep of its key sets.

    curve: include the rows and bytes of an epoch at several host budgets. plot: a file for the same as plots. Raises
    DatasetError, CheckpointError for either if rows start from files that are not there, and TierCacheError for a plot
    without matplotlib.
    """
    from tiercache.data.dataset import PassDataset

    data = PassDataset.open(path)
    reuse = reuse_of(data, None, counted=True)
    points = _points(data, reuse) if curve or plot is not None else []
    record = {"path": str(path), **_record(data, reuse)} | ({"curve": list(map(curve_record, points))} if curve else {})
    if plot is not None:
        _draw(record, points, plot)
    return record, points if curve else []


def show(console: Console, record: dict[str, Any], points: Sequence[Point]) -> None:
    """Print the record and the curve."""
    for table in (_pass_table(record), _table_table(record), *([curve_table(points)] if points else [])):
        console.print(table)


def verify(path: Path, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Read and check a dataset; "problems" has a message for the first damage."""
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


def reuse_of(data: PassDataset, order: OrderRule, *, counted: bool = False) -> Reuse:
    """Return the reuse of the keys of a dataset in a repeated order; counted: include occurrences of keys."""
    from tiercache.planning.reuse import Reuse
    from tiercache.planning.row_offsets import RowOffsets
    from tiercache.planning.schedule import Schedule
    from tiercache.store.table import group_tables

    positions = RowOffsets.of(data, group_tables(data.tables))
    names = [table.name for table in positions.tables]
    schedule = Schedule.of(data, order)
    counts_of = (lambda p, t: data.passes[p].counts(names[t])) if counted else None
    return Reuse.of(schedule, positions, positions.keys_of(data), counts_of)


def curve_record(point: Point) -> dict[str, Any]:
    """Return a point of the capacity curve as plain values: sums over a later epoch."""
    names = ("rows_read", "bytes_read", "rows_from_host", "rows_written", "bytes_written", "bytes_loaded")
    return {
        "host_bytes": point.host_budget,
        "commit_every": point.commit_every,
        **{name: point.total(name) for name in names},
        "seconds": point.epoch_seconds,
    }


def curve_table(points: Sequence[Point], *, seconds: bool = False) -> Any:
    """Return the curve as a table."""
    from tiercache.sizes import format_bytes

    names = ["rows read", "read", "rows written", "written", *(["predicted seconds"] if seconds else [])]
    shown = new_table("one epoch by host memory", "host budget", *names)
    for one in map(curve_record, points):
        shown.add_row(
            format_bytes(one["host_bytes"]), f"{one['rows_read']:,}", format_bytes(one["bytes_read"]),
            f"{one['rows_written']:,}", format_bytes(one["bytes_written"]),
            *([f"{one['seconds']:,.3g}"] if seconds else []),
        )  # fmt: skip
    return shown


def _points(data: PassDataset, reuse: Reuse) -> list[Point]:
    from psutil import virtual_memory

    from tiercache.planning.capacity import Capacity
    from tiercache.planning.plan_file import Rates
    from tiercache.store.checkpoint import tensor_sizes

    no_rates = Rates(read=1, write=1, copy=1, link=1, commit_seconds=0)  # seconds are not shown
    capacity = Capacity(reuse, [p.samples for p in data], no_rates, tensors=tensor_sizes(data.tables))
    return capacity.curve(max(capacity.least(), virtual_memory().total))


def _record(data: PassDataset, reuse: Reuse) -> dict[str, Any]:
    tables = reuse.positions.tables
    passes = [
        {
            "index": p,
            "samples": data.passes[p].samples,
            "rows": reuse.positions.num_rows(p),
            "row_bytes": reuse.positions.row_bytes(p),
            "rows_of_pass_before": int(reuse.kept_PT[p].sum()),
            "tables": {
                table.name: {
                    "rows": data.passes[p].rows(table.name),
                    "bytes": data.passes[p].rows(table.name) * table.row_bytes,
                    "rows_of_pass_before": int(reuse.kept_PT[p, t]),
                }
                for t, table in enumerate(tables)
            },
        }
        for p in range(len(data))
    ]
    return {
        "digest": data.digest,
        "summary": data.summary,
        "samples": data.samples,
        "passes": passes,
        "tables": [
            {
                "name": table.name,
                "dim": table.dim,
                "row_bytes": table.row_bytes,
                "keys": found.keys,
                "bytes": found.keys * table.row_bytes,
                "occurrences": found.occurrences,
                "top_1_percent_share": found.top_share,
                "keys_by_passes": found.keys_in_N.tolist(),
                "uses_by_distance": found.distance_N.tolist(),
            }
            for table, found in zip(tables, reuse.tables, strict=True)
        ],
    }


def _pass_table(record: dict[str, Any]) -> Any:
    from tiercache.sizes import format_bytes

    title = f"{record['path']}: {record['summary']}"
    shown = new_table(title, "pass", "samples", "rows", "bytes", "rows of the previous pass", "overlap")
    for one in record["passes"]:
        share = one["rows_of_pass_before"] / max(1, one["rows"])
        shown.add_row(
            f"{one['index']}", f"{one['samples']:,}", f"{one['rows']:,}", format_bytes(one["row_bytes"]),
            f"{one['rows_of_pass_before']:,}", f"{share:.1%}",
        )  # fmt: skip
    return shown


def _table_table(record: dict[str, Any]) -> Any:
    from tiercache.planning.reuse import TOP_SHARE
    from tiercache.sizes import format_bytes

    shown = new_table(
        "tables", "table", "dim", "keys", "bytes", "in one pass only", "passes per key", "passes between uses",
        f"occurrences of the top {TOP_SHARE:.0%}",
    )  # fmt: skip
    for one in record["tables"]:
        uses = sum(n * keys for n, keys in enumerate(one["keys_by_passes"]))
        apart = sum(n * times for n, times in enumerate(one["uses_by_distance"]))
        shown.add_row(
            one["name"], f"{one['dim']}", f"{one['keys']:,}", format_bytes(one["bytes"]),
            f"{one['keys_by_passes'][1] / max(1, one['keys']):.1%}", f"{uses / max(1, one['keys']):.1f}",
            f"{apart / max(1, uses):.1f}", f"{one['top_1_percent_share']:.1%}",
        )  # fmt: skip
    return shown


def _draw(record: dict[str, Any], points: Sequence[Point], path: Path) -> None:
    """Draw rows of passes, keys by passes, uses by distance, and the capacity curve."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise TierCacheError(f"a plot needs matplotlib: {install_command('plots')}") from error
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    ((rows, recurring), (distances, curve)) = figure.subplots(2, 2)
    kept = [one["rows_of_pass_before"] for one in record["passes"]]
    places = range(len(kept))
    rows.bar(places, kept, label="also in the previous pass")
    others = [one["rows"] - n for one, n in zip(record["passes"], kept, strict=True)]
    rows.bar(places, others, bottom=kept, label="others")
    rows.set(title="rows of each pass", xlabel="pass")
    for one in record["tables"]:
        recurring.plot(range(1, len(kept) + 1), one["keys_by_passes"][1:], label=one["name"])
        distances.plot(range(1, len(kept) + 1), one["uses_by_distance"][1:], label=one["name"])
    recurring.set(title="keys by the number of passes that have them", xlabel="passes", yscale="symlog")
    distances.set(title="uses by passes since the last one", xlabel="passes", yscale="symlog")
    sizes = [point.host_budget / 2**20 for point in points]
    for name in ("bytes_read", "bytes_written"):
        curve.plot(sizes, [point.total(name) / 2**20 for point in points], marker="o", label=name.replace("_", " "))
    curve.set(title="MiB of an epoch by host budget", xlabel="MiB of host budget", xscale="log")
    for axes in (rows, recurring, distances, curve):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
