"""The long description: README.md with absolute links, because relative ones lead nowhere on a package index."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]


def absolute(text: str) -> str:
    """Return Markdown whose links to files of the repository are absolute."""
    return re.sub(r"\]\((?!https?:|#|mailto:)([^)\s]+)\)", rf"]({SOURCE}/blob/main/\1)", text)


setup(
    long_description=absolute((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
