"""A damaged dataset ends in a sentence: neither training nor evaluation crashes, or goes on with other keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.training.damaged import BARE, CASE, REFUSED

if TYPE_CHECKING:
    from collections.abc import Iterator


def flipped(folder: Path, flips: int) -> Iterator[dict[str, Any]]:
    """Flip bytes of the passes in ``folder`` and yield what each led to; a process that dies is followed by another."""
    first = 0
    while first < flips:
        command = [sys.executable, "-W", "ignore", "-m", "tests.training.damaged", str(folder), str(first), str(flips)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False
        )
        assert done.stdout, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        yield from (line for line in lines if "trained" in line)
        if done.returncode:
            yield lines[-1] | {"died": done.returncode}
        first = lines[-1]["number"] + 1


@pytest.mark.parametrize("flips", [120, pytest.param(2000, marks=pytest.mark.long)])
def test_a_flipped_byte_is_refused_or_means_nothing(tmp_path: Path, flips: int) -> None:
    """No signal, no other error, and nothing that is trained or evaluated as if it were whole."""
    CASE.cut(tmp_path / "passes")
    whole: dict[str, Any] = {}
    problems = Counter[str]()
    refused = dict.fromkeys(["the checksum of MiB", "its header does", "its checksums do"], 0)
    for line in flipped(tmp_path / "passes", flips):
        whole = whole or line
        if "died" in line:
            problems[f"died of {-line['died']}"] += 1
            continue
        for what in ("trained", "evaluated"):
            found: str = line[what]
            if found.startswith(BARE):
                problems[f"{what}, {found.splitlines()[-1].split(':')[0]}"] += 1
            elif not found.startswith(REFUSED):
                problems[f"{what} with other bytes"] += bool(line["bits"])
            else:
                problems["refused without a name"] += "sub-dataset " not in found or line["file"] not in found
                for kind in refused:
                    refused[kind] += kind in found
    assert not +problems, problems
    assert whole["bits"] == 0
    assert not whole["trained"].startswith(REFUSED)
    assert all(refused.values()), refused
