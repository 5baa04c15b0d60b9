"""``tiercache report``: a run as one page that needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import torch

import tiercache as tc
from tests.cli.command import error_of, run, told
from tests.training.cases import Case, Net, Spec, table

if TYPE_CHECKING:
    from pathlib import Path
from types import SimpleNamespace

CASE = Case(tables=(table("item", 4),), specs=(Spec(name="a", table="item"),), num_samples=96, pass_rows=24, batch=8)


class Page(HTMLParser):
    """What a page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.places, self.said = list[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag, and what it refers to."""
        self.tags.append(tag)
        self.places += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}]

    def handle_data(self, data: str) -> None:
        """Note a text."""
        self.said.append(data)


def test_a_run_is_one_page(tmp_path: Path) -> None:
    """With every pass, pictures in it, and nothing from elsewhere; a title of any text is text."""
    data = CASE.cut(tmp_path / "passes")
    with tc.TierCache(tmp_path / "m.tc", data, device_budget="1MiB", host_budget="64MiB", progress=False) as cache:
        torch.manual_seed(1)
        model = Net(cache, CASE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cache.register(model=model, optimizer=optimizer)
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
    """Another file, one of nothing, and none."""
    (tmp_path / "other.jsonl").write_text('{"rows": 3}\n')
    assert "line 1 of" in error_of("report", tmp_path / "other.jsonl")
    (tmp_path / "none.jsonl").write_text("")
    assert "no pass was trained: there is nothing to draw" in error_of("report", tmp_path / "none.jsonl")
    assert "No such file" in error_of("report", tmp_path / "gone.jsonl")
    assert "report" in run("--help")


def test_a_script_that_has_nothing_left_to_train_keeps_the_report_of_its_run(tmp_path: Path) -> None:
    """Run again, it writes no empty one over it."""
    data = CASE.cut(tmp_path / "passes")
    for _ in range(2):
        with tc.TierCache(tmp_path / "m.tc", data, device_budget="1MiB", host_budget="64MiB", progress=False) as cache:
            for _ in cache.passes(epochs=1):
                pass
            cache.write_report(tmp_path / "run.jsonl")
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == len(data.passes)
