"""Output of a run: its passes on a terminal, and ``tiercache report``, one self-contained page."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console

import tiercache as tc
from tests.cli.command import error_of, run, told
from tests.train.cases import Case, Spec, registered, table, tiered, train
from tiercache.reporting.figures import write_html
from tiercache.reporting.progress import TrainingProgress
from tiercache.reporting.report import PassReport

if TYPE_CHECKING:
    from pathlib import Path


CASE = Case(tables=(table("item", 4),), specs=(Spec(name="a", table="item"),), num_samples=96, pass_rows=24, batch=8)


class Page(HTMLParser):
    """The tags, references and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.places, self.said = list[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record a tag and its references."""
        self.tags.append(tag)
        self.places += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}]

    def handle_data(self, data: str) -> None:
        """Record a text."""
        self.said.append(data)


def test_a_run_is_one_page(tmp_path: Path) -> None:
    """With every pass and embedded pictures, and without external resources; the title is escaped."""
    data = CASE.cut(tmp_path / "passes")
    with tiered(tmp_path / "m.tc", data) as cache:
        model, optimizer = registered(cache, CASE)
        for p in cache.passes(epochs=2):
            for batch in p.batches(CASE.batch):
                loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                p.log_loss(loss.item())
        cache.write_report(tmp_path / "run.jsonl")
        reports, told_to = cache.reports, list[tuple[str, float, int]]()
        for _ in range(2):  # the second time there is nothing new
            cache.write_scalars(SimpleNamespace(add_scalar=lambda *one: told_to.append(one)))  # type: ignore[arg-type]
    assert [(value, step) for tag, value, step in told_to if tag == "tiercache/rows"] == [
        (one.rows, one.pass_index) for one in reports
    ]
    assert {"tiercache/wait_seconds/store", "tiercache/losses"} <= {tag for tag, _, _ in told_to}
    records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [one["rows"] for one in records] == [one.rows for one in reports]
    out = tmp_path / "page.html"
    assert (
        told("report", tmp_path / "run.jsonl", "-o", out, "--title", "<b>a run", "--png")["passes"] == len(reports) > 4
    )
    for what in ("timeline", "bytes"):
        assert (tmp_path / f"page-{what}.png").read_bytes().startswith(b"\x89PNG")
    text = out.read_text()
    page = Page(text)
    assert all(place.startswith("#") for place in page.places)
    assert not re.search(r"@import|url\((?!#)", text)
    assert page.tags.count("svg") == 2
    assert page.tags.count("tr") == 1 + len(reports)
    assert "<b>a run" in page.said
    assert page.tags.count("b") == 0
    assert page.said.count("exact") == len(reports)
    assert f"{len(reports)} of {len(reports)} passes" in page.said
    assert f"{sum(reports[0].losses) / len(reports[0].losses):.4f}" in page.said


def test_what_is_no_run_is_a_sentence(tmp_path: Path) -> None:
    """Another file, an empty one, and a missing one."""
    (tmp_path / "other.jsonl").write_text('{"rows": 3}\n')
    assert "line 1 of" in error_of("report", tmp_path / "other.jsonl")
    (tmp_path / "none.jsonl").write_text("")
    assert "no pass was trained: nothing to draw" in error_of("report", tmp_path / "none.jsonl")
    assert "No such file" in error_of("report", tmp_path / "gone.jsonl")
    assert "report" in run("--help")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sub_dataset": "<script>alert(1)</script>"}, "sub_dataset is '<script>.*: expected int"),
        ({"pass_index": "7"}, "pass_index is '7': expected int"),
        ({"epoch": 0.5}, r"epoch is 0\.5: expected int"),
        ({"rows": True}, "rows is True: expected int"),
        ({"rows": None}, "rows is None: expected int"),
        ({"bytes_read": 10**40}, "bytes_read is 1000.*: expected int"),
        ({"losses": ["<b>"]}, "losses is .*: expected list"),
        ({"losses": 0.5}, "losses is .*: expected list"),
        ({"wait_seconds": {"store": "<b>"}}, "wait_seconds is .*: expected dict"),
        ({"spans": {"train": [0, "<b>"]}}, "spans is .*: expected dict"),
        ({"spans": {"train": [0, 1, 2]}}, "spans is .*: expected dict"),
        ({"bound_predicted": 3}, r"bound_predicted is 3: expected str"),
        ({"seconds_predicted": "<b>"}, "seconds_predicted is .*: expected float"),
    ],
)
def test_a_report_of_other_types_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """By line, name and value: nothing of them reaches a page."""
    (tmp_path / "run.jsonl").write_text(json.dumps(report().record() | changes) + "\n")
    error = error_of("report", tmp_path / "run.jsonl", "-o", tmp_path / "page.html")
    assert re.search(f"line 1 of .* is not a report of a pass .{message}", error), error
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("line", "message"), [("{}", "it has no 'pass_index'"), ("[1]", "it is of type list: expected an object")]
)
def test_another_json_value_is_no_report(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "run.jsonl").write_text(line + "\n")
    assert f"is not a report of a pass ({message}): pass a file" in error_of("report", tmp_path / "run.jsonl")


def test_a_report_that_nests_without_end_is_refused(tmp_path: Path) -> None:
    """Python's parser gives up, without a traceback."""
    (tmp_path / "run.jsonl").write_text('{"losses": ' + "[" * 100_000 + "\n")
    assert "is not a report of a pass" in error_of("report", tmp_path / "run.jsonl")


def test_every_value_of_a_page_is_escaped(tmp_path: Path) -> None:
    """Those of reports that were made in memory too."""
    hostile = report()
    hostile.sub_dataset = "<script>alert(1)</script>"  # type: ignore[assignment]
    write_html([hostile], tmp_path / "page.html", title="</title><script>")
    text = (tmp_path / "page.html").read_text()
    assert "script" not in Page(text).tags
    assert "&lt;script&gt;alert(1)" in text


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


@pytest.mark.parametrize("name", ["rows_read", "bytes_read", "rows_written", "bytes_written"])
def test_a_number_that_differs_from_its_plan_is_reported(name: str) -> None:
    same = report(bytes_read_planned=3 << 20)
    assert same.planned_equals_measured
    setattr(same, name, getattr(same, name) + 1)
    assert not same.planned_equals_measured
    assert same.record()["planned_equals_measured"] is False


def test_the_last_passes_show_where_their_rows_came_from() -> None:
    """One line for each, the bar divided by tier, and no output if it is off."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system="standard")
    shown = TrainingProgress(1000, shown=True, console=console)
    for _ in range(9):
        shown.pass_done(100, report(rows_kept=50, rows_from_host=30, rows_read=10, rows_generated=10))
    shown.batch(8, 50)
    shown.stop()

    text = screen.getvalue()
    last = text.rpartition("kept")[2]
    assert last.count("0.5000") == 6, "the last six passes and no more"
    bars = re.findall(r"\x1b\[32m(━+)\x1b\[0m\x1b\[36m(━+)\x1b\[0m\x1b\[33m(━+)\x1b\[0m\x1b\[35m(━+)", last)
    assert [len(part) for part in bars[0]] == [15, 9, 3, 3]
    assert "3.0" in last
    assert "waited 13.50 s" in last

    quiet = io.StringIO()
    silent = TrainingProgress(1000, shown=False, console=Console(file=quiet, force_terminal=True))
    silent.pass_done(100, report(rows_kept=100))
    silent.batch(0, 10)
    silent.stop()
    assert not quiet.getvalue()


def test_a_training_shows_its_passes_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar, and each pass with its rows."""
    screen = io.StringIO()
    monkeypatch.setattr(
        "tiercache.reporting.progress.Console", lambda **_: Console(file=screen, force_terminal=True, width=120)
    )
    data = CASE.cut(tmp_path / "passes")
    with tiered(tmp_path / "model.tc", data, progress=True) as cache:
        train(cache, CASE)
    assert "samples/s" in screen.getvalue()
    assert "from host" in screen.getvalue()


def test_a_script_that_has_nothing_left_to_train_keeps_the_report_of_its_run(tmp_path: Path) -> None:
    """A rerun does not overwrite it with an empty one."""
    data = CASE.cut(tmp_path / "passes")
    for _ in range(2):
        with tc.TierCache(tmp_path / "m.tc", data, device_budget="1MiB", host_budget="64MiB", progress=False) as cache:
            for p in cache.passes(epochs=1):
                p.skip()
            cache.write_report(tmp_path / "run.jsonl")
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == len(data.passes)
