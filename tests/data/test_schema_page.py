"""docs/schema.md: its schemas load, its commands and its code run."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tests.data.test_sources import write_split_binary
from tiercache.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "schema.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with the page's schemas and the data that it speaks of."""
    monkeypatch.chdir(tmp_path)
    for language, text in BLOCKS:
        if language == "toml":
            (tmp_path / text.split()[1]).write_text(text)
    for month in (1, 2):
        data = {
            "late": [1.0, None, 0.0], "distance": [100, 300, 2500], "delay": [5.0, None, -3.0],
            "origin": ["VIE", "GRZ", "VIE"], "dest": ["GRZ", "VIE", "LNZ"], "carrier": ["OS", None, "OS"],
        }  # fmt: skip
        (tmp_path / "flights" / f"month={month}").mkdir(parents=True)
        pq.write_table(pa.table(data), tmp_path / "flights" / f"month={month}" / "a.parquet")
    (tmp_path / "ratings.csv").write_text("user,rating,genres\n7,4.5,Action|Drama\n8.0,3\n9,,Drama\n9,1,Drama,x\n")
    (tmp_path / "day_0").write_text("\t".join(["1", *["3"] * 13, *["a0"] * 26]) + "\n")
    (tmp_path / "wordnet").mkdir()
    (tmp_path / "wordnet" / "train.txt").write_text("dog\tis a\tanimal\ncat\tis a\tanimal\n")
    lists = {"user": [1, 2], "clicked": [0, 1], "history": [[5, 6], []], "ratings": [[0.5, 1.0], []]}
    pq.write_table(pa.table(lists), tmp_path / "histories.parquet")
    write_split_binary(tmp_path / "dlrm", 1000)
    return tmp_path


def test_every_schema_of_the_page_is_one(folder: Path) -> None:
    """And what it leaves out has the defaults that the page names."""
    schemas = {path.stem: tc.Schema.load(path) for path in folder.glob("*.toml")}
    assert sorted(schemas) == ["clicks", "criteo", "dlrm", "flights", "histories", "ratings", "triples"]
    user = schemas["clicks"].tables[0]
    assert (user.dim, user.optimizer, user.initializer) == (
        16,
        tc.optim.Adagrad(learning_rate=0.01),
        tc.init.Uniform(low=-0.05, high=0.05),
    )


@pytest.mark.parametrize("command", [text.strip() for language, text in BLOCKS if language == "sh"])
def test_every_command_of_the_page_runs(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a new user would type it."""
    samples, bad_rows = {
        "flight_passes": (4, "2 rows dropped without a label"),
        "rating_passes": (2, "1 row skipped, 1 row padded, 1 row dropped without a label"),
        "criteo_passes": (1, ""),
        "dlrm_passes": (1000, ""),
        "triple_passes": (2, ""),
        "history_passes": (2, ""),
    }[command.split("--out ")[1].split("/", maxsplit=1)[0]]
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 0, told
    assert f"{samples:,} sample" in told
    assert bad_rows in told


def test_the_code_of_the_page_runs(folder: Path) -> None:
    """It makes a dataset of the batches that it gives."""
    (text,) = [text for language, text in BLOCKS if language == "python"]
    (folder / "page.py").write_text(text)
    found = runpy.run_path(str(folder / "page.py"))["data"]
    assert found.samples == 15_000
    assert np.unique(np.concatenate([p.keys("user") for p in found])).size == 1000
