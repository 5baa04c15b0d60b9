"""Shared parts of all commands: options, results, warnings and progress."""

from __future__ import annotations

import json
import os
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tiercache.sizes import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tiercache.store import Store


AnyPath = Annotated[Path, typer.Argument(help="The directory of a store or a dataset.")]
StorePath = Annotated[Path, typer.Argument(help="The directory of the store.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def expanding_home(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that expands ``~`` in its paths: a shell leaves it in quotes, and after an equals sign."""

    def expanded(value: Any) -> Any:
        if isinstance(value, list):
            return [expanded(one) for one in value]
        return Path(os.path.expanduser(value)) if isinstance(value, Path) else value  # noqa: PTH111 - as `local_path`

    @wraps(command)
    def run(**arguments: Any) -> None:
        command(**{name: expanded(value) for name, value in arguments.items()})

    return run


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a command: JSON, text, or nothing."""

    as_json: bool
    quiet: bool

    @property
    def is_text(self) -> bool:
        """True if text is printed."""
        return not self.as_json and not self.quiet

    @contextmanager
    def working(self, unit: str = "rows") -> Iterator[Callable[[str, int, int | None], None]]:
        """Yield ``progress(stage, done, total)``; then print each distinct warning on standard error."""
        from tiercache.reporting.progress import progress_bars

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with progress_bars(shown=self.is_text, unit=unit) as progress:
                yield progress
        for message in {} if self.quiet else dict.fromkeys(str(warning.message) for warning in caught):
            typer.echo(printable(f"warning: {message}"), err=True)

    def result(self, record: Any, text: str | Callable[[Console], None]) -> None:
        """Print ``record`` as JSON, or the text."""
        if self.as_json:
            typer.echo(json.dumps(record, indent=2))
        elif self.quiet:
            return
        elif isinstance(text, str):
            typer.echo(printable(text))
        else:
            text(_console())


def _console() -> Console:
    """Return a console that prints brackets and control characters of names literally."""
    from rich.console import Console

    class Printable(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    return Printable(markup=False, highlight=False)


def new_table(title: str, first: str, *others: str) -> Table:
    """Return an empty table; the columns but the first are right-aligned."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def kind_of(path: Path) -> Literal["store", "dataset"]:
    """Return the kind of a directory. Raises DatasetError for an unfinished dataset and NotAStoreError for neither."""
    from tiercache.data import manifest as dataset
    from tiercache.data.dataset import PassDataset
    from tiercache.store import NotAStoreError, StoreMissingError
    from tiercache.store.locks import MARKER

    if (path / MARKER).exists() or (path / "shards.json").is_file():  # of an older format, which the store refuses
        return "store"
    if (path / dataset.MANIFEST).exists():
        return "dataset"
    if (path / dataset.UNFINISHED).exists():
        PassDataset.open(path)  # raises
    if not path.exists():
        raise StoreMissingError(f"nothing at {path}: pass the directory of a store or a dataset")
    raise NotAStoreError(f"{path} is neither a store nor a dataset: pass the directory of one")


def open_store(path: Path, commit: int | None = None, *, mode: str = "r") -> Store:
    """Open a store, at ``commit`` if given. Raises ValueError for a dataset."""
    from tiercache.store import Store

    if kind_of(path) == "dataset":
        raise ValueError(f"{path} is a dataset: pass the directory of a store")
    return Store.open(path, mode=mode, commit=commit)
