"""Five models in the layouts that people publish train out of core by a few more lines, with the losses of torch."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiercache as tc
from tests.adoption.deepfm.model import DeepFM
from tiercache.data.pass_builder import device_bytes
from tiercache.store.table import group_tables

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LINES = {"dlrm": 5, "sasrec": 5, "skip_gram": 5, "deepfm": 5, "rotate": 15}
"""The most lines that may be changed or added, by model."""
KILLED_AFTER = 0.55  # the share of batches after which a training is killed


def without_tiercache(name: str) -> tuple[str, int]:
    """Return a model's script without the lines that use tiercache, and the number of these."""
    text = (HERE / name / "train.py").read_text()
    ours = {"tiercache", "tc", "cache", "data"}
    kept = text.splitlines(keepends=True)
    for statement in reversed(ast.parse(text).body):
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        names |= {alias.name for node in ast.walk(statement) if isinstance(node, ast.Import) for alias in node.names}
        if names & ours:
            assert statement.end_lineno is not None
            del kept[statement.lineno - 1 : statement.end_lineno]
    return "".join(kept), text.count("\n") - len(kept)


@pytest.mark.parametrize("name", LINES)
def test_a_few_lines_are_the_whole_change(name: str) -> None:
    """They are separate statements before the loop, which stays; the model and its data do not know tiercache."""
    plain, added = without_tiercache(name)
    assert 0 < added <= LINES[name]
    for text in (plain, (HERE / name / "model.py").read_text()):
        assert not {"tiercache", "tc.", "cache"} & set(re.findall(r"tiercache|\btc\.|\bcache\b", text))
    assert plain.count(" in range(EPOCHS):") == 1


def started(name: str, script: str, folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", f"tests.adoption.{name}.train"]
    if script == "plain":
        (folder / "plain.py").write_text(without_tiercache(name)[0])
        command = [sys.executable, "plain.py"]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def losses(name: str, script: str, folder: Path) -> list[list[str]]:
    process = started(name, script, folder)
    out, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, errors
    return [line.split() for line in out.splitlines()]


def killed_losses(name: str, folder: Path, count: int) -> list[list[str]]:
    process = started(name, "adopted", folder)
    found: list[list[str]] = []
    assert process.stdout is not None
    for line in process.stdout:
        found.append(line.split())
        if sum(words[0] == "loss" for words in found) == count:
            break
    process.kill()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == -9, errors
    return found


def numbers(lines: list[list[str]], word: str) -> torch.Tensor:
    return torch.tensor([float(words[1]) for words in lines if words[0] == word], dtype=torch.float64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LINES)
def test_losses_are_those_of_torch_also_after_a_kill(name: str, tmp_path: Path) -> None:
    """Losses of every batch, and of the validation after each epoch; the second run resumes from the last commit."""
    for folder in ("plain", "adopted"):
        (tmp_path / folder).mkdir()
    expected = losses(name, "plain", tmp_path / "plain")
    theirs = numbers(expected, "loss")
    before = killed_losses(name, tmp_path / "adopted", int(len(theirs) * KILLED_AFTER))
    after = losses(name, "adopted", tmp_path / "adopted")
    mine, resumed = numbers(before, "loss"), numbers(after, "loss")
    assert 0 < len(resumed) < len(theirs) <= len(mine) + len(resumed), "the second run resumes from a commit"
    torch.testing.assert_close(mine, theirs[: len(mine)], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(resumed, theirs[-len(resumed) :], rtol=1e-5, atol=1e-5)
    tests = numbers(expected, "test")
    first, last = numbers(before, "test"), numbers(after, "test")
    of_epoch = len(tests) // 3
    torch.testing.assert_close(first, tests[: len(first)], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last[-of_epoch:], tests[-of_epoch:], rtol=1e-5, atol=1e-5)
    data = tc.PassDataset.open(tmp_path / "adopted" / "keys")
    assert len(data.passes) > 2
    with tc.Store.open(next((tmp_path / "adopted").glob("*.tc")), mode="r") as store:
        rows = {table.name: store.live_rows(table.name) for table in data.tables}
    whole = sum(device_bytes(group) * rows[table.name] for group in group_tables(data.tables) for table in group.tables)
    largest = max(
        sum(device_bytes(group) * one.rows(table.name) for group in group_tables(data.tables) for table in group.tables)
        for one in data.passes
    )
    assert largest <= whole / 4 * 1.1, f"passes have {largest:,} of {whole:,} bytes: a quarter is the budget"


def test_a_penalty_that_captured_weights_when_the_model_was_made_is_refused() -> None:
    """The published DeepFM keeps them; the error names the place. A penalty on outputs is one line of the loss."""
    with pytest.raises(
        ValueError, match=r"is also regularization_weight\[0\]\[0\]\[0\], which would keep its old values"
    ):
        tc.convert(DeepFM(l2_reg_embedding=1e-5))
    assert tc.convert(DeepFM()) is not None
