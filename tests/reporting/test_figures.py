"""The figure of a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tiercache.reporting.figures import draw_passes
from tiercache.reporting.report import PassReport

if TYPE_CHECKING:
    from pathlib import Path


def report(pass_index: int, *, losses: list[float] | None = None) -> PassReport:
    """Build the report of a pass that trained for one second."""
    begun = pass_index * 1.2
    return PassReport(
        pass_index=pass_index, epoch=pass_index // 2, sub_dataset=pass_index % 2, rows=10, rows_kept=1,
        rows_generated=2, rows_from_host=3, rows_read=4, rows_read_planned=4, bytes_loaded=90, bytes_read=40,
        bytes_read_planned=40, rows_written=9,
        wait_seconds={"store": 0.01, "durable": 0.02}, work_seconds={"pack": 0.03, "unpack": 0.04, "commit": 0.05},
        spans={"read": (begun - 0.5, begun - 0.2), "train": (begun, begun + 1), "write": (begun + 1, begun + 1.5)},
        losses=losses if losses is not None else [0.7, 0.6],
    )  # fmt: skip


def test_a_figure_is_written_for_trained_passes(tmp_path: Path) -> None:
    """The file is a PNG; a pass without losses and one that was never trained do no harm."""
    pytest.importorskip("matplotlib")
    untrained = report(3)
    untrained.spans = {"read": (0.0, 0.1)}

    path = draw_passes([report(0), report(1, losses=[]), report(2), untrained], tmp_path / "run.png", title="a run")

    assert path.read_bytes().startswith(b"\x89PNG")


def test_no_trained_pass_is_an_error(tmp_path: Path) -> None:
    """There is nothing to draw."""
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no pass was trained"):
        draw_passes([], tmp_path / "run.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the extra."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tiercache-embeddings\[plots\]'"):
        draw_passes([report(0)], tmp_path / "run.png")
