"""One figure of a run: when each thread worked and waited, where the rows came from, and the loss."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tiercache.store.local_path import local_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiercache.tiers.report import PassReport

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
    """Draw finished passes into the file ``path`` and return it; its ending says which kind (png, svg, pdf).

    Three parts over the same seconds: what the training, reader and writer threads did; the rows of each pass by
    the tier they came from, and how many were written; the loss of every batch that was noted. Passes that were
    never trained are left out.

    Raises ModuleNotFoundError without matplotlib, ValueError where no pass was trained.
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
    """Return an empty figure of so many inches. Raises ModuleNotFoundError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the figure needs matplotlib: pip install '.[plots]' in the project's folder"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def trained_passes(reports: Sequence[PassReport]) -> list[PassReport]:
    """Return the reports of passes that were trained. Raises ValueError where there is none."""
    trained = [r for r in reports if r.spans.get("train", (0.0, 0.0))[1] > r.spans.get("train", (0.0, 0.0))[0]]
    if not trained:
        raise ValueError("no pass was trained: there is nothing to draw")
    return trained


def _draw_lanes(axes: Any, reports: list[PassReport], zero: float) -> None:
    """Draw a lane for each activity; pack and waits stand after their pass's training, load before it."""
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
    axes.set_title(
        f"{len(reports)} passes in {seconds:.1f} s; the training thread waited {waited:.2f} s and packed and "
        f"unpacked rows for {sum(r.switched for r in reports):.2f} s",
        fontsize=10,
        pad=16,
    )
    _legend(axes)


def _draw_rows(axes: Any, reports: list[PassReport], zero: float) -> None:
    """Stack the rows of each pass by where they came from."""
    begun = np.array([r.spans["train"][0] - zero for r in reports])
    width = np.array([r.spans["train"][1] - r.spans["train"][0] for r in reports])
    below = np.zeros(len(reports))
    for name, color, count in _TIERS:
        height = np.array([count(r) for r in reports], dtype=np.float64)
        axes.bar(
            begun,
            height,
            width,
            bottom=below,
            align="edge",
            color=color,
            edgecolor="white",
            linewidth=0.3,
            label=name,
        )
        below += height
    written = [r.rows_written for r in reports]
    axes.plot(begun + width / 2, written, linestyle="none", marker="_", color="black", label="written to the store")
    axes.set_ylim(0, 1.06 * max(r.rows for r in reports))
    axes.set_ylabel("rows of the pass")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _legend(axes)


def _draw_loss(axes: Any, reports: list[PassReport], zero: float) -> None:
    """Draw the noted losses, evenly over each pass's training, and their mean over each pass."""
    seconds: list[float] = []
    losses: list[float] = []
    for r in reports:
        begun, ended = r.spans["train"]
        count = len(r.losses)
        seconds += [begun - zero + (ended - begun) * (i + 0.5) / count for i in range(count)]
        losses += r.losses
    noted = [r for r in reports if r.losses]
    middle = [sum(r.spans["train"]) / 2 - zero for r in noted]
    axes.plot(seconds, losses, color="#9db8dc", linewidth=0.8, label="each batch")
    axes.plot(middle, [float(np.mean(r.losses)) for r in noted], color="#1f3f73", linewidth=1.6, label="mean of a pass")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    _legend(axes)


def _legend(axes: Any) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False, fontsize=9)
