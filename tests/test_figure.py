"""The figure of a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tiercache.tiers.report import VisitReport
from tiercache.training.figure import draw_visits

if TYPE_CHECKING:
    from pathlib import Path


def report(visit: int, *, losses: list[float] | None = None) -> VisitReport:
    """Build the report of a visit that trained for one second."""
    return VisitReport(
        visit=visit, epoch=visit // 2, pass_index=visit % 2, rows=10, rows_kept=1, rows_generated=2, rows_from_host=3,
        rows_read=4, rows_read_planned=4, bytes_loaded=90, bytes_read=40, bytes_read_planned=40, rows_written=9,
        wait_seconds={"store": 0.01, "durable": 0.02}, work_seconds={"pack": 0.03, "unpack": 0.04, "commit": 0.05},
        spans={"read": (visit * 1.2 - 0.5, visit * 1.2 - 0.2), "train": (visit * 1.2, visit * 1.2 + 1),
               "write": (visit * 1.2 + 1, visit * 1.2 + 1.5)},
        losses=losses if losses is not None else [0.7, 0.6],
    )  # fmt: skip


def test_a_figure_is_written_for_trained_visits(tmp_path: Path) -> None:
    """The file is a PNG; a visit without losses and one that was never trained do no harm."""
    pytest.importorskip("matplotlib")
    untrained = report(3)
    untrained.spans = {"read": (0.0, 0.1)}

    path = draw_visits([report(0), report(1, losses=[]), report(2), untrained], tmp_path / "run.png", title="a run")

    assert path.read_bytes().startswith(b"\x89PNG")


def test_no_trained_visit_is_an_error(tmp_path: Path) -> None:
    """There is nothing to draw."""
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no visit was trained"):
        draw_visits([], tmp_path / "run.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names the extra."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install tiercache\[plots\]"):
        draw_visits([report(0)], tmp_path / "run.png")
