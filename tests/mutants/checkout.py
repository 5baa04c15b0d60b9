"""A copy of the checkout, in which tests run."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PYTEST = ("-m", "pytest", "-x", "-rfE", "--tb=short", "-m", "not long", "-p", "no:cacheprovider")
_COMPILE = "from tiercache.kernels.cpu.compile import prepare; prepare(narrow=True)"
_FIRST = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)
_COUNTS = re.compile(r"^\d+ (?:passed|failed|skipped|deselected|error).* in [\d.]+s.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run of pytest."""

    code: int | None  # its exit code; None: it did not end in time
    seconds: float
    output: str

    @property
    def failed(self) -> bool:
        return self.code is None or self.code == 1 or self.code < 0

    @property
    def first(self) -> str:
        """The first test that failed, or pytest's counts if none did."""
        found = _FIRST.search(self.output) if self.code else _COUNTS.search(self.output)
        return "no end" if self.code is None else found[found.lastindex or 0] if found else f"exit code {self.code}"


class Checkout:
    """A copy of all files that git tracks, as they are in the working tree."""

    def __init__(self, folder: Path) -> None:
        """Make the copy, and compile its kernels: only those of a changed source are compiled again, when called."""
        self.root = folder
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            source, copy = ROOT / name, folder / name
            if source.exists() or source.is_symlink():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy, follow_symlinks=False)
        subprocess.run([sys.executable, "-c", _COMPILE], cwd=folder, env=self._environment, check=True)

    @property
    def _environment(self) -> dict[str, str]:
        """The variables of a process that imports from the copy, and keeps compiled kernels in it."""
        given = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
        return {**given, "PYTHONPATH": str(self.root)}

    def run(self, tests: Sequence[str], *, seconds: float) -> Run:
        """Run tests up to the first failure; they and their children end after ``seconds`` at the latest."""
        command = [sys.executable, *_PYTEST, "--hypothesis-seed=0", *tests]
        begun = time.monotonic()
        process = subprocess.Popen(
            command, cwd=self.root, env=self._environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        code: int | None = None
        try:
            output, _ = process.communicate(timeout=seconds)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        return Run(code, time.monotonic() - begun, output)
