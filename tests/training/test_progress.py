"""What a terminal shows while training runs."""

from __future__ import annotations

import io
import re

from rich.console import Console

import tiercache as tc
from tests.training.cases import Case, Spec, table
from tiercache.tiers.report import PassReport
from tiercache.training.progress import TrainingProgress


def report(**numbers: int) -> PassReport:
    """Return a report of a pass of 100 rows."""
    found = PassReport(
        pass_index=7, epoch=0, sub_dataset=3, rows=100, rows_kept=0, rows_generated=0, rows_from_host=0, rows_read=0,
        rows_read_planned=0, bytes_loaded=0, bytes_read=3 << 20, bytes_read_planned=0,
    )  # fmt: skip
    for name, value in numbers.items():
        setattr(found, name, value)
    found.losses, found.wait_seconds, found.spans = [0.25, 0.75], {"store": 1.5}, {"train": (0.0, 2.0)}
    return found


def test_the_last_passes_show_where_their_rows_came_from() -> None:
    """One line for each, the bar parted by tier, and above all nothing where nothing is to be shown."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system="standard")
    shown = TrainingProgress(1000, shown=True, console=console)
    for _ in range(9):
        shown.pass_done(100, report(rows_kept=50, rows_from_host=20, rows_read=20, rows_generated=10))
    shown.batch(8, 50)
    shown.stop()

    text = screen.getvalue()
    last = text.rpartition("kept")[2]
    assert last.count("0.5000") == 6, "the last six passes and no more"
    bars = re.findall(r"\x1b\[32m(━+)\x1b\[0m\x1b\[36m(━+)\x1b\[0m\x1b\[33m(━+)\x1b\[0m\x1b\[35m(━+)", last)
    assert [len(part) for part in bars[0]] == [15, 6, 6, 3]
    assert "3.0" in last
    assert "waited 13.50 s" in last

    quiet = io.StringIO()
    silent = TrainingProgress(1000, shown=False, console=Console(file=quiet, force_terminal=True))
    silent.pass_done(100, report(rows_kept=100))
    silent.batch(0, 10)
    silent.stop()
    assert not quiet.getvalue()


def test_a_training_shows_its_passes_on_a_terminal(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The bar, and each pass with its rows."""
    screen = io.StringIO()
    monkeypatch.setattr(
        "tiercache.training.progress.Console", lambda **_: Console(file=screen, force_terminal=True, width=120)
    )
    case = Case(tables=(table("t", 4),), specs=(Spec(name="f", table="t"),), num_samples=256, pass_rows=64)
    data = case.cut(tmp_path / "passes")
    module = tc.EmbeddingBagCollection(data.schema)
    with tc.TierCache(
        tmp_path / "model.tc", data, model=module, device_budget="1MiB", host_budget="64MiB", progress=True
    ) as cache:
        for p in cache.passes(epochs=1):
            for batch in p.batches(32):
                module(batch).sum().backward()
                cache.optimizer.step()
    assert "samples/s" in screen.getvalue()
    assert "from host" in screen.getvalue()
