"""Imports of libraries that only `make test-stacks` installs."""

import sys
from pathlib import Path
from typing import Any

import pytest


def installed(name: str) -> Any:
    """Import a module, or skip the tests; Transformers takes the folder ``kernels`` of this root for a package."""
    before, root = list(sys.path), Path(__file__).parents[2]
    sys.path[:] = [entry for entry in before if entry and Path(entry).resolve() != root]
    try:
        return pytest.importorskip(name, reason=f"{name} is not installed: make test-stacks")
    finally:
        sys.path[:] = before
