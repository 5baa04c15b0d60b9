"""Paths that users give: local ones, made absolute once, so that a process may change its folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/")
"""The start of a URL, also after ``Path`` made one slash of two."""


def local_path(path: str | os.PathLike[str], what: str, instead: str = "give a local path") -> Path:
    """Return the path of ``what`` as an absolute path; symbolic links stay in it.

    Raises ValueError for a URL, which says what to do ``instead``, and for a relative path in a folder that is gone.
    """
    text = os.fspath(path)
    if is_url(text):
        raise ValueError(f"{text!r} is a URL, but {what} must be a local path: {instead}")
    try:
        return Path(path).absolute()
    except FileNotFoundError:
        raise ValueError(f"{text!r} is relative, and the current folder was deleted: give an absolute path") from None


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL: such a folder of this machine has to be given as ``./`` or from the root on."""
    return _URL.match(os.fspath(path)) is not None


def store_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a store as an absolute one. Raises ValueError, as ``local_path`` does."""
    return local_path(path, "a store", "for an object store, use Store.open(None, engine=ZarrEngine(...))")
