"""One page that shows a run: what each thread did, bytes by tier, planned and measured, and every pass in a table."""

from __future__ import annotations

import html
import io
import json
from typing import TYPE_CHECKING, Any

from tiercache.sizes import format_bytes
from tiercache.store.local_path import local_path
from tiercache.tiers.report import PassReport
from tiercache.training.figure import draw_passes, new_figure, trained_passes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
    """Read the reports that ``TierCache.write_report`` wrote. Raises ValueError for a file that has others."""
    found = []
    for number, line in enumerate(local_path(path, "a report").read_text().splitlines(), 1):
        try:
            found.append(PassReport.from_record(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"line {number} of {path} is no report of a pass ({error}): give what cache.write_report() wrote"
            ) from error
    return found


def write_html(reports: Sequence[PassReport], out: Path, *, title: str) -> None:
    """Write the page: one file, with pictures and styles in it.

    Raises ModuleNotFoundError without matplotlib, ValueError where no pass was trained.
    """
    out, passes = local_path(out, "a page"), trained_passes(reports)
    picture = io.StringIO()
    draw_passes(reports, picture, kind="svg")
    exact = sum(r.planned_equals_measured for r in passes)
    seconds = sum(r.seconds for r in passes)
    waited = sum(r.waited for r in passes)
    read, written = sum(r.bytes_read for r in passes), sum(max(0, r.bytes_written) for r in passes)
    rows, kept = sum(r.rows for r in passes), sum(r.rows_kept + r.rows_from_host for r in passes)
    facts = {
        "passes": f"{len(passes):,} in {1 + max(r.epoch for r in passes) - min(r.epoch for r in passes)} epochs",
        "time": f"{seconds:,.1f} s",
        "waited for the store": f"{waited:,.2f} s ({waited / max(seconds, 1e-9):.1%})",
        "rows that were there already": f"{kept / max(rows, 1):.1%}",
        "read from the store": format_bytes(read),
        "written to it": format_bytes(written),
        "planned = measured": f"{exact} of {len(passes)} passes",
    }
    losses = [loss for r in passes for loss in r.losses]
    if losses:
        facts["loss, first and last pass"] = " to ".join(
            f"{sum(r.losses) / len(r.losses):.4f}" for r in (passes[0], passes[-1]) if r.losses
        )
    body = [
        f"<h1>{html.escape(title)}</h1>",
        "<dl>"
        + "".join(
            f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in facts.items()
        )
        + "</dl>",
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
    """Return a picture without what stands before it in a file of its own."""
    return text[text.index("<svg") :]


def write_pngs(reports: Sequence[PassReport], out: Path) -> list[Path]:
    """Write the page's pictures beside it, as NAME-timeline.png and NAME-bytes.png. Raises what ``write_html`` does."""
    timeline, amounts = (out.with_name(f"{out.stem}-{what}.png") for what in ("timeline", "bytes"))
    draw_passes(reports, timeline)
    _bytes_drawn(trained_passes(reports), amounts)
    return [timeline, amounts]


def _bytes_drawn(passes: Sequence[PassReport], path: Path | None = None) -> io.StringIO:
    """Draw the bytes that were read and written, beside what was planned: into a file, or the SVG that is returned."""
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
        loss = f"{sum(r.losses) / len(r.losses):.4f}" if r.losses else ""
        cells: list[Any] = [
            r.pass_index, r.epoch + 1, r.sub_dataset, f"{r.rows:,}", f"{r.rows_kept:,}", f"{r.rows_from_host:,}",
            f"{r.rows_read:,}", f"{r.rows_generated:,}", f"{r.bytes_read / 2**20:,.1f}",
            f"{max(0, r.bytes_written) / 2**20:,.1f}", f"{ended - begun:.2f}", f"{r.switched * 1e3:.0f}",
            f"{r.waited * 1e3:.0f}", loss,
        ]  # fmt: skip
        plan = "<td>exact</td>" if r.planned_equals_measured else '<td class="off">off</td>'
        lines.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + plan + "</tr>")
    return f"<table>{''.join(lines)}</table>"
