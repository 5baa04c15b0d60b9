"""MkDocs hooks: pages from the repository root, links out of docs/, and docstrings as Markdown."""

from __future__ import annotations

import posixpath
import re
from functools import partial
from pathlib import Path
from typing import Any

from griffe import Extension
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
RECORDS = "design/index.md"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> None:
    """Put every design record into the navigation."""
    records = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/design").glob("*.md"))
    for one in config.nav:
        if isinstance(one, dict) and "Design records" in one:
            one["Design records"] = [RECORDS, *records]


def on_files(files: Any, config: Any) -> None:
    """Add the pages of the repository root and the list of design records."""
    for source, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    titles = [(path.name, path.read_text().split("\n", 1)[0]) for path in sorted((ROOT / "docs/design").glob("*.md"))]
    begin = "# Design records\n\nExperiments, measurements and decisions, one page each.\n\n"
    listed = "".join(f"* [{title.lstrip('# ')}]({name})\n" for name, title in titles)
    files.append(File.generated(config, RECORDS, content=begin + listed))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to pages of the site; replace links to other files by their names."""
    uri = page.file.src_uri
    source = next((source for source, made in PAGES.items() if made == uri), f"docs/{uri}")
    return LINK.sub(partial(_link, source, uri), markdown)


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Raise PluginError if a page loads something from a network."""
    if found := re.search(r'<(?:script|img|link|iframe)\b[^>]*?(?:src|href)="?(?:https?:)?//[^">\s]+', output):
        raise PluginError(f"{page.file.src_uri} loads from a network, but pages must be self-contained: {found[0]}")


def _link(source: str, uri: str, found: re.Match[str]) -> str:
    text, target, anchor = found[1], found[2], found[3] or ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if not (ROOT / path).exists():
        return found[0]
    made = RECORDS if path == "docs/design" else PAGES.get(path, path.removeprefix("docs/"))
    if made == path:
        return text if f"`{path}`" == text else f"{text} (`{path}`)"
    return f"[{text}]({posixpath.relpath(made, posixpath.dirname(uri) or '.')}{anchor})"


class Docstrings(Extension):  # type: ignore[misc]
    """Converts docstrings to griffe's Google style and Markdown: lines of arguments become a list."""

    def on_function(self, *, func: Any, **_: Any) -> None:
        """Convert the docstring of a function."""
        if func.docstring:
            names = "|".join(re.escape(parameter.name) for parameter in func.parameters) or "(?!)"
            func.docstring.value = _markdown(func.docstring.value, names)

    def on_class(self, *, cls: Any, **_: Any) -> None:
        """Convert the docstring of a class."""
        if cls.docstring:
            cls.docstring.value = _markdown(cls.docstring.value, "(?!)")


def _markdown(text: str, names: str) -> str:
    text = re.sub(r"^Raises, (.*):$", r"Errors are raised \1.\n\nRaises:", text, flags=re.MULTILINE)
    text = re.sub(rf"^((?:`*(?:{names})`*(?:, )?)+: )", r"\n* \1", text, flags=re.MULTILINE)
    return re.sub(r"^>>> (.*)$", r"```python\n\1\n```", text, flags=re.MULTILINE)
