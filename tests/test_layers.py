"""Values are the ground floor: frozen, and without imports from the rest of the package."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest

import tiercache

FOLDER = Path(tiercache.__file__).parent
FLOORS = ("backends", "tiers", "dist", "planning", "data")
"""Packages that know nothing of a training."""


def imports_of(path: Path) -> set[str]:
    """Return the packages of ours that a module imports, for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("tiercache.")}
    return found


VALUES = sorted(path for path in (FOLDER / "values").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_values_import_nothing_else_of_ours_and_are_frozen(path: Path) -> None:
    """Type-checking imports count too."""
    assert imports_of(path) <= {"values"}
    module = importlib.import_module(f"tiercache.values.{path.stem}")
    for _, kind in inspect.getmembers(module, inspect.isclass):
        if kind.__module__ == module.__name__ and dataclasses.is_dataclass(kind):
            assert kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]


@pytest.mark.parametrize("package", FLOORS)
def test_what_is_below_a_training_knows_nothing_of_it(package: str) -> None:
    """Type-checking imports count too."""
    for path in (FOLDER / package).glob("*.py"):
        assert not imports_of(path) & {"training", "ranks"}, path
