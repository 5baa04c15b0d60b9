"""``tiercache warmup``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.cli.command import error_of, invoke
from tiercache.data.progress import ProgressReporter
from tiercache.kernels.cpu import compile as kernels

if TYPE_CHECKING:
    import pytest


def test_warmup_compiles_all_kernels_and_says_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for 16-bit dtypes too; and it says so before it begins."""
    asked: list[Any] = []
    monkeypatch.setattr(kernels, "is_cached", lambda *, narrow: False)
    monkeypatch.setattr(kernels, "prepare", lambda notify=None, *, narrow=False: asked.append(narrow))
    done = invoke("warmup")
    assert (done.exit_code, asked) == (0, [True])
    assert "compiling the CPU kernels of tiercache" in done.output
    assert "kernels are compiled: " in done.stdout
    monkeypatch.setattr(kernels, "is_cached", lambda *, narrow: True)
    assert "it must be 'cpu', 'cuda'" in error_of("warmup", "--device", "tpu")


def test_an_extraction_without_a_terminal_says_that_it_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    """One line on standard error; none where nothing is to be shown."""
    for shown, said in ((True, "compiling kernels (first run, about half a minute) ...\n"), (False, "")):
        ProgressReporter(shown, 1).begin("compile")
        assert capsys.readouterr().err == said
