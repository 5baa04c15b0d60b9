"""The README's code runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.cli.command import run

if TYPE_CHECKING:
    import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()


def block(language: str, number: int = 0) -> str:
    """Return a block of code in a language, the first one where not said."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return found[number]


def test_the_main_job_of_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From files to a store with a commit for each pass; run again it has nothing left to do. Then its commands run."""
    chance, n = np.random.default_rng(0), 3000
    offsets = np.concatenate([[0], np.cumsum(chance.integers(0, 4, n))]).astype(np.int32)
    columns = {
        "user": chance.integers(0, 500, n),
        "item": chance.integers(0, 300, n),
        "history": pa.ListArray.from_arrays(offsets, chance.integers(0, 300, int(offsets[-1]))),
        "price": chance.random(n).astype(np.float32),
        "age": chance.random(n).astype(np.float32),
        "clicked": chance.integers(0, 2, n),
    }
    (tmp_path / "clicks").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "clicks" / "day.parquet")
    (tmp_path / "clicks.toml").write_text(block("toml"))
    main, again = tmp_path / "main.py", tmp_path / "again.py"
    main.write_text(block("python") + "    print('commit', cache.store.commit.id)\n")
    again.write_text(main.read_text().replace("tc.extract(", "# tc.extract("))
    told = [
        subprocess.run([sys.executable, str(one)], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for one in (main, again)
    ]
    assert told[0].splitlines()[-1] == told[1].splitlines()[-1] != "commit 0"
    monkeypatch.chdir(tmp_path)
    converted = tmp_path / "converted.py"
    begin = (
        "import torch\nimport tiercache as tc\n"
        'data, criterion = tc.PassDataset.open("passes/"), torch.nn.BCEWithLogitsLoss()\n'
    )
    converted.write_text(begin + block("python", 1) + "    print(cache.store.live_rows('user'))\n")
    done = subprocess.run([sys.executable, str(converted)], capture_output=True, text=True, check=True).stdout
    assert done.split()[-1] == "1000"
    newest = told[0].split()[-1]
    commands = re.findall(
        r"^tiercache (.*?)(?:#.*)?$", "".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL)), re.MULTILINE
    )
    assert {"extract", "info", "plan", "lookup", "export", "verify", "rollback"} == {one.split()[0] for one in commands}
    for one in commands:
        run(*one.replace("--to 12", f"--to {newest}").split())
