"""Code in separate processes, which import the same modules as these tests."""

import subprocess
import sys


def command(code: str, *arguments: object) -> list[str]:
    """Return the command that runs it."""
    return [sys.executable, "-c", code, *map(str, arguments)]


def ran(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run it to its end, whatever the exit code."""
    return subprocess.run(command(code, *arguments), capture_output=True, text=True, check=False)
