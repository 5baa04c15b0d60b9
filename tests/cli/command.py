"""Running a command in this process."""

import json
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from tiercache.cli import app


def invoke(*arguments: object) -> Result:
    """Run a command with output of unlimited width."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def run(*arguments: object, code: int = 0) -> str:
    """Run a command that ends with ``code``, and return its standard output."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout


def told(*arguments: object, code: int = 0) -> Any:
    """Run a command with --json and return the printed value."""
    return json.loads(run(arguments[0], "--json", *arguments[1:], code=code))


def error_of(*arguments: object) -> str:
    """Run a command that fails with code 1, and return its one-line error: the only output."""
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (1, ""), result.output + repr(result.exception)
    assert result.stderr.startswith("error: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("error: ").strip()
