"""Writes docs/results.md from the files in benchmarks/results: python -m benchmarks.results_page.

A file is the JSON object that a command wrote with --json, or the text that it printed. Its name is DATE-COMMAND, with
the form of the command if there are several. Figures with a goal come first, then other comparisons, then the rest in
the order of the file, up to a limit; parts of a file have a limit each. Facts about the machine, texts and lists of
numbers are in the file only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import console, shown
from tiercache.sizes import format_bytes

ROOT = Path(__file__).parents[1]
RESULTS, PAGE, LINK = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md", "../benchmarks/results/"
MOST_FIGURES, MOST_OF_PART, MOST_LINES, MOST_TEXT = 16, 8, 16, 40
MACHINE = {
    "command", "date", "cpu", "cores", "memory_bytes", "load_before", "kernel", "huge_pages", "python", "size",
    "file_system", "gpu", "device", "ended", "model",
}  # fmt: skip
"""Keys that are not figures."""
COMPARISON = re.compile(r"ratio|fraction|share|speed|_vs_|_over_|percent|different|equal|exact")
"""Keys of figures that compare within one run."""
COMMANDS = {
    "continual": "python -m examples.continual",
    "dlrm": "python -m examples.dlrm",
    "flights": "python -m examples.flights",
    "knowledge_graph-codex_m": "python -m examples.knowledge_graph --data ARCHIVE",
    "knowledge_graph-wordnet": "python -m examples.knowledge_graph --data ARCHIVE --epochs 5 --parts 4 "
    "--device-budget 512MiB",
    "serve": "python -m examples.serve",
    "word_vectors": "python -m examples.word_vectors",
}
"""Commands of the examples, whose results lack them."""
RENAMED = {"benchmarks.crash": "tests.crash training", "benchmarks.store_crash": "tests.crash store"}
MAIN = {
    "python -m benchmarks.scale": {
        "rows_different": "rows that differ after a kill and a resume, of a store of ten times the memory limit",
        "data_over_limit": "its peak memory relative to the limit",
        "throughput_ratio": "samples/s relative to a smaller model of the same shape in memory",
    },
    "python -m benchmarks.out_of_core": {
        "throughput_ratio": "samples/s out of core relative to in memory",
        "rows_read_over_optimal": "rows read relative to the minimum",
        "bytes_read_per_useful_byte": "bytes read relative to useful bytes",
    },
    "python -m benchmarks.adoption": {
        "speedup_of_epochs": "epoch time of a model with 26 `nn.EmbeddingBag`s relative to the same model converted",
        "speedup": "including extraction and import",
        "speedup_at_most": "if lookups took no time",
    },
    "python -m benchmarks.embedding_step": {
        "speedup_vs_torch": "speed of a step relative to `nn.EmbeddingBag` and `optim.Adagrad`, at least",
        "speedup_vs_fbgemm": "relative to FBGEMM on the CPU, at least",
    },
    "python -m benchmarks.store": {
        "lmdb_dump_ratio": "time of the bare disk relative to ours: a dump with its commit",
        "lmdb_load_ratio": "a cold load",
        "lookup_over_rocksdict": "speed of a cold lookup of 5 % of all keys relative to RocksDB",
    },
    "python -m benchmarks.exchange": {
        "wire_ratio": "bytes sent by two ranks relative to the minimum for unique rows",
        "time_ratio": "time added to a step relative to a bare all-to-all of the same bytes",
    },
}
"""The figures at the top of the page, and their descriptions."""
HEAD = """# Results

The newest result of each command and kind of machine, written by `python -m benchmarks.results_page` from the files in
[benchmarks/results](../benchmarks/results/). Do not edit this page.

[Benchmarks](benchmarks.md) says what each command measures, and `--help` of a command describes its figures. A figure
with a goal has a verdict: it reached the `goal`, reached the `least` acceptable value, or `missed` both. Results are of
different machines, some of them shared, so compare figures of the same result.

## Main figures

| command | figure | result |
|---|---|---|"""


class Result(NamedTuple):
    """A file of results."""

    path: Path
    record: dict[str, Any]
    """The JSON object, in parts or flat; empty for text."""

    @classmethod
    def read(cls, path: Path) -> Result:
        return cls(path, json.loads(path.read_text()) if path.suffix == ".json" else {})

    @property
    def facts(self) -> dict[str, Any]:
        """The command and the machine, if the file has them."""
        facts: dict[str, Any] = self.record.get("env", self.record)
        return facts

    @property
    def command(self) -> str:
        """The command, with the name that its module has today."""
        command: str = self.facts.get("command") or COMMANDS[self.path.stem[len("2026-11-29-") :]]
        for old, new in RENAMED.items():
            command = command.replace(f"{old} ", f"{new} ")
        return command

    @property
    def has_gpu(self) -> bool:
        """True if it is of a machine with a GPU."""
        return "gpu" in self.facts or "--device cuda" in self.command

    @property
    def machine(self) -> str:
        facts, date = self.facts, self.path.name[: len("2026-11-29")]
        if "cpu" not in facts:
            return f"{date}, on a machine that was not recorded"
        gpu = facts.get("gpu") or (facts.get("device") if self.has_gpu else None)
        words = [date, facts["cpu"], f"{facts['cores']} cores", format_bytes(facts["memory_bytes"])]
        words += [gpu] if gpu else []
        words += [f"torch {facts['version_torch']}"] if "version_torch" in facts else []
        return ", ".join(words)

    def lines(self) -> list[str]:
        """Return its section of the page."""
        name = self.path.name
        said = [f"## `{self.command}`", "", f"{self.machine}: [{name}]({LINK}{name})", ""]
        if not self.record:
            text = [line.rstrip() for line in self.path.read_text().splitlines() if line.strip()]
            return [*said, "```", *text[-MOST_LINES:], "```", ""]
        parts = {name: part for name, part in self.record.items() if isinstance(part, dict)}
        rows, hidden = [], 0
        for name, part in (parts or {"": self.record}).items():
            found = figures_of(part)
            most = MOST_OF_PART if name else max(MOST_FIGURES, sum(bool(verdict) for *_, verdict in found))
            hidden += max(0, len(found) - most)
            rows += [(f"{name}.{key}" if name else key, value, verdict) for key, value, verdict in found[:most]]
        has_goals = any(verdict for *_, verdict in rows)
        columns = ("figure", "result", "verdict") if has_goals else ("figure", "result")
        said += ["".join(f"| {name} " for name in columns) + "|", "|---" * len(columns) + "|"]
        said += [f"| `{key}` | {value} |" + f" {verdict} |" * has_goals for key, value, verdict in rows]
        return [*said, "", *([f"{hidden} more figures are in the file.", ""] if hidden else [])]


def figures_of(record: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the key, value and verdict of every figure, goals and comparisons first."""
    keys = [
        key for key, value in record.items()
        if key not in MACHINE and not key.startswith(("version_", "said_", "size_")) and not key.endswith("_verdict")
        and not (isinstance(value, str) and len(value) > MOST_TEXT)
    ]  # fmt: skip
    found = [(key, shown(key, record[key]).replace("|", "\\|"), record.get(f"{key}_verdict", "")) for key in keys]
    return sorted(found, key=lambda figure: (not figure[2], not COMPARISON.search(figure[0])))


def results() -> list[Result]:
    """Return all results: benchmarks, tests and examples, by command."""
    found = [Result.read(path) for path in sorted(RESULTS.iterdir())]
    order = ("python -m benchmarks", "python -m tests", "python -m examples")
    return sorted(found, key=lambda one: (next(i for i, name in enumerate(order) if name in one.command), one.command))


def page() -> str:
    """Return the text of the page."""
    found = results()
    records = {one.command: one.record for one in found if not one.has_gpu}
    main = [
        f"| {'' if number else f'`{command}`'} | {words} | {shown(key, records[command][key])} |"
        for command, figures in MAIN.items()
        for number, (key, words) in enumerate(figures.items())
    ]
    return "\n".join([HEAD, *main, "", *(line for one in found for line in one.lines())]).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    console.print(f"written: {PAGE}")
