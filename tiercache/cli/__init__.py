"""The command ``tiercache``: an error is one sentence on standard error and exit code 1."""

from __future__ import annotations

import sys

import typer

from tiercache.cli.extract import extract
from tiercache.cli.plan import plan
from tiercache.cli.store import app as store_app
from tiercache.cli.warmup import warmup
from tiercache.errors import StoreError, TierCacheError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Embedding tables larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("extract")(extract)
app.command("plan")(plan)
app.command("warmup")(warmup)
app.add_typer(store_app, name="store")


def main() -> None:
    """Run the command line of this process."""
    try:
        app()
    except (TierCacheError, StoreError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        typer.echo(f"error: {place}{error.strerror or error}", err=True)
        sys.exit(1)
