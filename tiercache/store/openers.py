"""Openers of folders that hold more than one plain store.

A sharded store reads and writes through ``Store``, so ``Store`` cannot import it. ``tiercache/store/__init__.py``
registers a function here that does, and ``Store.open`` calls it for a folder with the manifest of a sharded store.
Python runs ``__init__`` before any module of the package: ``Store`` opens both, wherever it was imported from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SHARD_MANIFEST = "shards.json"
"""The file that says which shards a sharded store has."""

OPENERS: dict[str, Callable[..., Any]] = {}
"""By the name of a file in the folder: takes the arguments of ``Store.open``, with an absolute path, and returns a
store; None where a plain one is there, or none at all."""
