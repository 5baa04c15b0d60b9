"""Modules of the store import each other in one direction, whichever is imported first."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tiercache.store

FOLDER = Path(tiercache.store.__file__).parent
MODULES = {
    ".".join(("tiercache", "store", *path.relative_to(FOLDER).with_suffix("").parts)): path
    for path in FOLDER.rglob("*.py")
    if path.name != "__init__.py"
}
BELOW_ENGINES = {
    "bits", "direct_io", "files", "initializer", "layout", "locks", "optimizer", "records", "store_errors", "table",
}  # fmt: skip


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys()


def test_no_module_imports_what_imports_it() -> None:
    """Nor does one import the package, which has the names of all modules."""
    TopologicalSorter({name: imported(path) for name, path in MODULES.items()}).prepare()
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "tiercache.store":
                assert {f"tiercache.store.{alias.name}" for alias in node.names} <= MODULES.keys(), path


def test_engines_know_files_and_layouts_and_nothing_of_commits() -> None:
    below = {f"tiercache.store.{name}" for name in BELOW_ENGINES}
    for name, path in MODULES.items():
        if ".engines." in name:
            assert {one for one in imported(path) if ".engines." not in one} <= below, name
        elif name in below:
            assert imported(path) <= below, name


@pytest.mark.parametrize("module", ["store", "rank_writer", "rank_folder", "bulk_load", "engines.lmdb_engine"])
def test_every_module_can_be_imported_first(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import tiercache.store.{module}"], check=True)
