"""``tiercache extract``: the function as a command; an error is one sentence and exit code 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data.cases import write_parquet
from tiercache.cli import main
from tiercache.data.dataset import PassDataset

ROOT = Path(__file__).parents[2]
SCHEMA = """
[label]
column = "y"
[tables.a]
dim = 4
optimizer = { name = "sgd", learning_rate = 1.0 }
initializer = { name = "zeros" }
[features.a]
"""


def tiercache(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder."""
    command = [sys.executable, "-m", "tiercache.cli", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a schema and two files."""
    (tmp_path / "schema.toml").write_text(SCHEMA)
    write_parquet(tmp_path, {"a": np.arange(5000) % 700, "y": np.zeros(5000)}, [0, 2000, 5000])
    return tmp_path


def test_the_command_extracts(folder: Path) -> None:
    """Files, patterns and options go to the function; one line says what was made."""
    arguments = (
        "extract", "part-*.parquet", "--schema", "schema.toml", "--out", "passes",
        "--device-budget", "64MiB", "--split-by", "rows=1000", "--batch-multiple", "1000", "--min-count", "2",
        "--memory-limit", "32MiB",
    )  # fmt: skip
    done = tiercache(folder, *arguments)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("passes: 5 passes, 5,000 samples, ")
    assert len(PassDataset.open(folder / "passes")) == 5
    again = tiercache(folder, *arguments)
    assert (again.returncode, again.stdout) == (0, "")
    assert again.stderr.startswith("passes: 5 passes, 5,000 samples, extracted before, ")


def test_quiet_says_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With --quiet only errors are shown; earlier datasets may be given."""
    monkeypatch.chdir(folder)
    for out, more in (("first", []), ("second", ["--prior-counts", "first"])):
        arguments = ["part-0.parquet", "--schema", "schema.toml", "--out", out, "--min-count", "2", "--quiet", *more]
        monkeypatch.setattr(sys, "argv", ["tiercache", "extract", "--device-budget", "1MiB", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
    assert capsys.readouterr() == ("", "")
    assert PassDataset.open(folder / "second").samples == 2000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-*.csv", "--schema", "schema.toml"], "error: no file matches 'no-*.csv': give files, folders or"),
        (["part-0.parquet", "--schema", "none.toml"], "error: the schema none.toml cannot be read"),
        (["part-0.parquet", "--schema", "schema.toml", "--split-by", "day"], "error: split_by is 'day': one of budget"),
        (["part-0.parquet", "--schema", "schema.toml", "--memory-limit", "much"], "error: 'much' is no size"),
        (["part-0.parquet", "--schema", "schema.toml", "--out", "part-1.parquet"], "error: part-1.parquet is no direc"),
    ],
)
def test_an_error_is_one_sentence_and_exit_code_1(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """No traceback: what was seen, what is allowed, what to do."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["tiercache", "extract", "--device-budget", "1MiB", "--out", "passes", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert not (folder / "passes").exists()
