"""The change in docs/model.md is the complete change of a script that runs, and the losses stay the same."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "model.md"


def scripts() -> tuple[str, str, list[str]]:
    """Return the script of the page before and after its change, and the lines of the change."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    lines = diff.splitlines()
    assert all(not line or line[0] in " +" for line in lines), "a line is removed"
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines)
    return before, after, [line for line in lines if line.startswith("+")]


def losses(script: str) -> list[float]:
    """Run a script with samples in their order, and return its losses."""
    script = script.replace("shuffle=True", "shuffle=False")
    script = script.replace("loss = criterion", "loss = recorded(criterion", 1).replace(", label)\n", ", label))\n", 1)
    found: list[float] = []

    def recorded(loss: torch.Tensor) -> torch.Tensor:
        found.append(loss.item())
        return loss

    torch.manual_seed(5)
    names: dict[str, Any] = {"recorded": recorded}
    exec(compile(script, "model.md", "exec"), names)
    if "cache" in names:
        assert len(names["data"].passes) > 2
        names["cache"].close()
    return found


def test_the_change_of_the_page_runs_and_keeps_the_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, added = scripts()
    assert 0 < len(added) <= 5
    monkeypatch.chdir(tmp_path)
    plain, adopted = losses(before), losses(after)
    assert len(plain) == 40
    torch.testing.assert_close(torch.tensor(adopted), torch.tensor(plain), rtol=1e-5, atol=1e-6)
