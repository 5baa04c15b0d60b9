"""Figures of a run, and a page with them: threads at work, tiers that rows came from, bytes, and the loss."""

from __future__ import annotations

import html
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tiercache.distribution import install_command
from tiercache.reporting.report import PassReport
from tiercache.sizes import format_bytes
from tiercache.store.files import local_path, read_whole, reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_LANES = ("train", "switch", "reader", "writer")
_BARS = {
    "train": (0, "#3b6fb6"),
    "wait": (1, "#d62728"),
    "pack, unpack": (1, "#9aa0a6"),
    "read": (2, "#e8963a"),
    "write": (3, "#4f9d69"),
}
"""Name, lane and color."""
_TIERS: tuple[tuple[str, str, Callable[[PassReport], int]], ...] = (
    ("kept on the device", "#1f3f73", lambda r: r.rows_kept),
    ("from host memory", "#6fa8dc", lambda r: r.rows_from_host),
    ("read from the store", "#e8963a", lambda r: r.rows_read),
    ("new (generated)", "#d5d8dc", lambda r: r.rows_generated),
)


def draw_passes(
    reports: Sequence[PassReport], path: str | Path | IO[str], *, title: str = "", kind: str | None = None
) -> Path | None:
    """Draw finished passes to the file ``path`` and return it; its suffix is the kind (png, svg, pdf).

    Three parts over the same seconds: the work of the training, reader and writer threads; the rows of each pass by
    the tier they came from, and the number written; the loss of every batch that was logged. Passes that were never
    trained are left out.

    Raises ModuleNotFoundError without matplotlib, ValueError if no pass was trained.
    """
    if isinstance(path, str | Path):
        path = local_path(path, "a picture")
    figure, trained = new_figure(13, 9), trained_passes(reports)
    zero = min(span[0] for r in trained for span in r.spans.values())
    lanes, rows, loss = figure.subplots(3, 1, sharex=True, height_ratios=[1.1, 1.4, 1.0])
    _draw_lanes(lanes, trained, zero)
    _draw_rows(rows, trained, zero)
    _draw_loss(loss, trained, zero)
    for before, after in pairwise(trained):
        if before.epoch != after.epoch:
            for axes in (lanes, rows, loss):
                axes.axvline(after.spans["train"][0] - zero, color="black", linewidth=0.8, linestyle=":")
    for epoch in sorted({r.epoch for r in trained}):
        begun = min(r.spans["train"][0] for r in trained if r.epoch == epoch) - zero
        lanes.annotate(f" epoch {epoch + 1}", (begun, 1.0), xycoords=("data", "axes fraction"), va="bottom", fontsize=9)
    if title:
        figure.suptitle(title)
    loss.margins(x=0.01)
    loss.set_xlabel("seconds since the first load began")
    if not isinstance(path, Path):
        figure.savefig(path, format=kind)
        return None
    figure.savefig(path, dpi=130, format=kind)
    return path


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of ``width`` by ``height`` inches. Raises ModuleNotFoundError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"the figure needs matplotlib: {install_command('plots')}") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def trained_passes(reports: Sequence[PassReport]) -> list[PassReport]:
    """Return the reports of passes that were trained. Raises ValueError if there is none."""
    trained = [r for r in reports if r.spans.get("train", (0.0, 0.0))[1] > r.spans.get("train", (0.0, 0.0))[0]]
    if not trained:
        raise ValueError("no pass was trained: nothing to draw")
    return trained


def _draw_lanes(axes: Any, reports: list[PassReport], zero: float) -> None:
    """Draw a lane for each activity; pack and waits are after their pass's training, load before it."""
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in _BARS}
    for r in reports:
        begun, ended = r.spans["train"]
        spans["train"].append((begun, ended))
        unpack, store = r.work_seconds.get("unpack", 0.0), r.wait_seconds.get("store", 0.0)
        spans["pack, unpack"].append((begun - unpack, begun))
        spans["wait"].append((begun - unpack - store, begun - unpack))
        waited = ended + r.wait_seconds.get("durable", 0.0) + r.wait_seconds.get("room", 0.0)
        spans["wait"].append((ended, waited))
        spans["pack, unpack"].append((waited, waited + r.work_seconds.get("pack", 0.0)))
        for activity in ("read", "write"):
            if activity in r.spans:
                spans[activity].append(r.spans[activity])
    for name, (lane, color) in _BARS.items():
        bars = [(first - zero, last - first) for first, last in spans[name] if last > first]
        edge = "white" if name == "train" else color  # thin bars would drown in white edges
        axes.broken_barh(bars, (lane - 0.38, 0.76), facecolor=color, edgecolor=edge, linewidth=0.5, label=name)
    seconds = max(r.spans["train"][1] for r in reports) - min(r.spans["train"][0] for r in reports)
    waited = sum(r.waited for r in reports)
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.invert_yaxis()
    title = f"{len(reports)} passes in {seconds:.1f} s; the training thread waited {waited:.2f} s and packed and "
    title += f"unpacked rows for {sum(r.switched for r in reports):.2f} s"
    axes.set_title(title, fontsize=10, pad=16)
    _legend(axes)


def _draw_rows(axes: Any, reports: list[PassReport], zero: float) -> None:
    """Stack the rows of each pass by source."""
    begun = np.array([r.spans["train"][0] - zero for r in reports])
    width = np.array([r.spans["train"][1] - r.spans["train"][0] for r in reports])
    below, style = np.zeros(len(reports)), {"align": "edge", "edgecolor": "white", "linewidth": 0.3}
    for name, color, count in _TIERS:
        height = np.array([count(r) for r in reports], dtype=np.float64)
        axes.bar(begun, height, width, bottom=below, color=color, label=name, **style)
        below += height
    written = [r.rows_written for r in reports]
    axes.plot(begun + width / 2, written, linestyle="none", marker="_", color="black", label="written to the store")
    axes.set_ylim(0, 1.06 * max(r.rows for r in reports))
    axes.set_ylabel("rows of the pass")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _legend(axes)


def _draw_loss(axes: Any, reports: list[PassReport], zero: float) -> None:
    """Draw the logged losses, evenly over each pass's training, and their mean over each pass."""
    seconds, losses = list[float](), list[float]()
    for r in reports:
        begun, ended = r.spans["train"]
        count = len(r.losses)
        seconds += [begun - zero + (ended - begun) * (i + 0.5) / count for i in range(count)]
        losses += r.losses
    logged = [r for r in reports if r.losses]
    middle = [sum(r.spans["train"]) / 2 - zero for r in logged]
    axes.plot(seconds, losses, color="#9db8dc", linewidth=0.8, label="each batch")
    axes.plot(
        middle, [float(np.mean(r.losses)) for r in logged], color="#1f3f73", linewidth=1.6, label="mean of a pass"
    )
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    _legend(axes)


def _legend(axes: Any) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False, fontsize=9)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; margin-bottom: 0 } h2 { font-size: 1.15em; margin: 2em 0 .4em }
p.note { color: #666; margin: .2em 0 1em } svg { width: 100%; height: auto }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: .8em; margin: 1.2em 0 }
dl div { background: #f4f6f9; border-radius: 6px; padding: .6em .9em }
dt { color: #666; font-size: .85em } dd { margin: 0; font-size: 1.25em; font-variant-numeric: tabular-nums }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85em }
th, td { text-align: right; padding: .25em .7em; white-space: nowrap } th { border-bottom: 2px solid #ccc }
tr:nth-child(even) td { background: #f8f9fb } td.off { color: #b00; font-weight: bold }
"""
_PLANNED, _MEASURED = "#c9d3e0", "#3b6fb6"


def read_reports(path: Path) -> list[PassReport]:
    """Read the reports that ``TierCache.write_report`` wrote. Raises ValueError for any other file."""
    found, place = [], local_path(path, "a report")
    try:
        text = read_whole(str(place)).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"the report {path} cannot be read: {reason(error)}") from error
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found.append(PassReport.from_record(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"line {number} of {path} is not a report of a pass ({error}): pass a file of cache.write_report()"
            ) from error
    return found


def write_html(reports: Sequence[PassReport], out: Path, *, title: str) -> None:
    """Write the page: one file, including pictures and styles. Raises as `draw_passes`."""
    out, passes = local_path(out, "a page"), trained_passes(reports)
    picture = io.StringIO()
    draw_passes(reports, picture, kind="svg")
    exact = sum(r.planned_equals_measured for r in passes)
    seconds, waited = sum(r.seconds for r in passes), sum(r.waited for r in passes)
    read, written = sum(r.bytes_read for r in passes), sum(max(0, r.bytes_written) for r in passes)
    rows, kept = sum(r.rows for r in passes), sum(r.rows_kept + r.rows_from_host for r in passes)
    facts = {
        "passes": f"{len(passes):,} in {1 + max(r.epoch for r in passes) - min(r.epoch for r in passes)} epochs",
        "time": f"{seconds:,.1f} s",
        "waited for the store": f"{waited:,.2f} s ({waited / max(seconds, 1e-9):.1%})",
        "rows that were already there": f"{kept / max(rows, 1):.1%}",
        "read from the store": format_bytes(read),
        "written to it": format_bytes(written),
        "planned = measured": f"{exact} of {len(passes)} passes",
    }
    if any(r.losses for r in passes):
        facts["loss, first and last pass"] = " to ".join(_mean_loss(r) for r in (passes[0], passes[-1]) if r.losses)
    items = (f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in facts.items())
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<dl>{''.join(items)}</dl>",
        "<h2>What happened when</h2>",
        '<p class="note">Above: the training thread, and the threads that read the next pass and write the last one. '
        "Middle: the rows of each pass by where they came from. Below: the loss.</p>",
        _svg(picture.getvalue()),
        "<h2>Bytes of each pass, planned and measured</h2>",
        _svg(_bytes_drawn(passes).getvalue()),
        "<h2>Every pass</h2>",
        f'<div class="wide">{_table(passes)}</div>',
    ]
    page = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
    out.write_text(f"{page}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n", encoding="utf-8")


def _svg(text: str) -> str:
    """Return a picture without the header of a file."""
    return text[text.index("<svg") :]


def _mean_loss(report: PassReport) -> str:
    return f"{sum(report.losses) / len(report.losses):.4f}" if report.losses else ""


def write_pngs(reports: Sequence[PassReport], out: Path) -> list[Path]:
    """Write the page's pictures next to it, as NAME-timeline.png and NAME-bytes.png. Raises as `draw_passes`."""
    timeline, amounts = (out.with_name(f"{out.stem}-{what}.png") for what in ("timeline", "bytes"))
    draw_passes(reports, timeline)
    _bytes_drawn(trained_passes(reports), amounts)
    return [timeline, amounts]


def _bytes_drawn(passes: Sequence[PassReport], path: Path | None = None) -> io.StringIO:
    """Draw the bytes that were read and written, next to the planned ones: to a file, or the SVG that is returned."""
    figure = new_figure(13, 3.4)
    of_reads, of_writes = figure.subplots(1, 2, sharex=True)
    places = [r.pass_index for r in passes]
    for axes, name, planned, measured in (
        (of_reads, "read", [r.bytes_read_planned for r in passes], [r.bytes_read for r in passes]),
        (of_writes, "written", [r.bytes_written_planned for r in passes], [max(0, r.bytes_written) for r in passes]),
    ):
        axes.bar(places, [one / 2**20 for one in planned], width=0.9, color=_PLANNED, label="planned")
        axes.bar(places, [one / 2**20 for one in measured], width=0.5, color=_MEASURED, label="measured")
        axes.set_title(f"MiB {name}", fontsize=10, loc="left")
        axes.set_xlabel("pass")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, 1.05 * max(*planned, *measured, 1 << 10) / 2**20)
        axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    picture = io.StringIO()
    if path is None:
        figure.savefig(picture, format="svg")
    else:
        figure.savefig(path, dpi=130)
    return picture


def _table(passes: Sequence[PassReport]) -> str:
    names = (
        "pass", "epoch", "data", "rows", "kept", "from host", "read", "new", "MiB read", "MiB written", "train s",
        "switch ms", "wait ms", "loss", "plan",
    )  # fmt: skip
    lines = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for r in passes:
        begun, ended = r.spans["train"]
        cells: list[Any] = [
            r.pass_index, r.epoch + 1, r.sub_dataset, f"{r.rows:,}", f"{r.rows_kept:,}", f"{r.rows_from_host:,}",
            f"{r.rows_read:,}", f"{r.rows_generated:,}", f"{r.bytes_read / 2**20:,.1f}",
            f"{max(0, r.bytes_written) / 2**20:,.1f}", f"{ended - begun:.2f}", f"{r.switched * 1e3:.0f}",
            f"{r.waited * 1e3:.0f}", _mean_loss(r),
        ]  # fmt: skip
        plan = "<td>exact</td>" if r.planned_equals_measured else '<td class="off">off</td>'
        lines.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + plan + "</tr>")
    return f"<table>{''.join(lines)}</table>"
