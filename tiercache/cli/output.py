"""What all commands share: options, and how results, warnings and progress are shown."""

from __future__ import annotations

import json
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tiercache.reporting.progress import progress_bars

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


def printable(text: str) -> str:
    """Return text with control characters and others that a terminal obeys as Python's escapes, but for line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command's result goes: JSON, text, or nowhere."""

    as_json: bool
    quiet: bool

    @property
    def is_text(self) -> bool:
        """Whether a person reads along."""
        return not self.as_json and not self.quiet

    @contextmanager
    def working(self, unit: str = "rows") -> Iterator[Callable[[str, int, int | None], None]]:
        """Yield ``tell(stage, done, total)``; afterward each different warning is a line on standard error."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with progress_bars(shown=self.is_text, unit=unit) as tell:
                yield tell
        for message in {} if self.quiet else dict.fromkeys(str(warning.message) for warning in caught):
            typer.echo(printable(f"warning: {message}"), err=True)

    def result(self, found: Any, text: str | Callable[[Console], None]) -> None:
        """Print what was found as JSON, or as text."""
        if self.as_json:
            typer.echo(json.dumps(found, indent=2))
        elif self.quiet:
            return
        elif isinstance(text, str):
            typer.echo(printable(text))
        else:
            text(_console())


def _console() -> Console:
    """Return a console that shows brackets and control characters of names and texts and obeys none."""
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
    """Return what a directory holds. Raises DatasetError for an unfinished dataset and NotAStoreError for neither."""
    from tiercache.data import manifest as dataset
    from tiercache.data.dataset import PassDataset
    from tiercache.store import NotAStoreError, StoreMissingError
    from tiercache.store.directory import MANIFEST, MARKER

    if (path / MARKER).exists() or (path / MANIFEST).is_file():
        return "store"
    if (path / dataset.MANIFEST).exists():
        return "dataset"
    if (path / dataset.UNFINISHED).exists():
        PassDataset.open(path)  # says what is unfinished
    if not path.exists():
        raise StoreMissingError(f"there is nothing at {path}: give the directory of a store or a dataset")
    raise NotAStoreError(f"{path} is neither a store nor a dataset: give the directory of one")


def open_store(path: Path, commit: int | None = None, *, mode: str = "r") -> Store:
    """Open a store, for reading at ``commit`` where one is given. Raises ValueError for a dataset."""
    from tiercache.store import Store

    if kind_of(path) == "dataset":
        raise ValueError(f"{path} is a dataset: give the directory of a store")
    return Store.open(path, mode=mode, commit=commit)
