"""The command ``tiercache``: exit code 0 for success, 1 for an error or damage, 2 for wrong usage, 130 for Ctrl-C.

An expected failure is one line on standard error. Every command takes ``--json``, which prints one JSON value and
nothing else, and ``--quiet``, which prints nothing but errors.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tiercache.cli import (
    alter_commands,
    estimate_command,
    extract_command,
    info,
    plan_command,
    store_commands,
    transfer,
)
from tiercache.cli.output import expanding_home
from tiercache.errors import CudaError, StoreError, TierCacheError
from tiercache.sizes import printable


class _Commands(TyperGroup):
    """Turns an expected failure of a command into one line and exit code 1, or 130 for Ctrl-C."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the whole first sentence of each command, on as many lines as it needs."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(1000)) for name, command in self.commands.items()])

    def invoke(self, ctx: Any) -> Any:
        code = 1
        try:
            return super().invoke(ctx)
        except (TierCacheError, StoreError, CudaError, ValueError) as error:
            message = str(error)
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            message = f"{place}{error.strerror or error}"
        except MemoryError:
            message = "out of memory: free some memory, or lower the command's memory options"
        except KeyboardInterrupt:
            message, code = "interrupted: you can run the same command again", 130
        typer.echo(printable(f"error: {message.strip()}".replace("\n", " ")), err=True)
        raise typer.Exit(code)


app = typer.Typer(
    cls=_Commands,
    help="Embedding tables larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's panels and markdown take half of the time of `tiercache --help`
)
for name, command in (
    ("extract", extract_command.extract),
    ("info", info.info),
    ("estimate", estimate_command.estimate),
    ("plan", plan_command.plan),
    ("verify", info.verify),
    ("lookup", store_commands.lookup),
    ("changes", store_commands.changes),
    ("diff", store_commands.diff),
    ("compact", store_commands.compact),
    ("rollback", store_commands.rollback),
    ("pin", store_commands.pin),
    ("unpin", store_commands.unpin),
    ("alter", alter_commands.alter),
    ("forget", alter_commands.forget),
    ("reorganize", store_commands.reorganize),
    ("repartition", store_commands.repartition),
    ("export", transfer.export),
    ("import", transfer.import_),
    ("report", extract_command.report),
    ("warmup", extract_command.warmup),
):
    app.command(name)(expanding_home(command))


def _show_version(requested: bool) -> None:
    if requested:
        from tiercache.version import __version__

        typer.echo(f"tiercache {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Embedding tables larger than memory, trained in PyTorch from an SSD store."""


def main() -> None:
    """Run the command line of this process."""
    app()
