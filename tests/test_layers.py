"""Borders of the package: no circle of imports between packages nor inside store and rows, one name for one module."""

import ast
import dataclasses
import importlib.util
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tiercache

FOLDER = Path(tiercache.__file__).parent
TWINS = {"tiercache.kernels.cpu", "tiercache.kernels.cuda"}
"""Two packages with the same kernels for two kinds of device, under the same names."""


def name_of(path: Path, folder: Path) -> str:
    parts = (folder.name, *path.relative_to(folder).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else str(node.module)


@cache
def graph_of(folder: Path) -> dict[str, set[str]]:
    """Return each module's imports from its package."""
    modules = {name_of(path, folder): path for path in sorted(folder.rglob("*.py"))}
    return {name: set(imports_of(path, modules)) - {name} for name, path in modules.items()}


def circle_of(graph: Mapping[str, set[str]]) -> list[str]:
    """Return nodes that reach each other in a circle, if there are any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return sorted({*error.args[1]})
    return []


def between_packages(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between packages and top-level modules; the front door is left out."""
    found: dict[str, set[str]] = {}
    for name, targets in graph.items():
        if "." in name:
            package = name.split(".")[1]
            found.setdefault(package, set()).update({one.split(".")[1] for one in targets if "." in one} - {package})
    return found


def test_packages_import_each_other_one_way() -> None:
    """Imports for types and inside functions count. Nothing imports the front door."""
    assert not circle_of(between_packages(graph_of(FOLDER)))
    assert not [name for name, targets in graph_of(FOLDER).items() if "tiercache" in targets]


@pytest.mark.parametrize("package", ["store", "rows"])
def test_modules_of_a_package_import_each_other_one_way(package: str) -> None:
    """Imports for types and inside functions count; a package's own front door is left out."""
    inside = {name for name in graph_of(FOLDER) if name.startswith(f"tiercache.{package}.")}
    assert inside
    assert not circle_of({name: graph_of(FOLDER)[name] & inside for name in inside})


def test_a_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "made"
    (package / "low").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "low" / "__init__.py").touch()
    (package / "low" / "one.py").write_text("def run():\n    from made.low import two\n")
    (package / "low" / "two.py").write_text("if TYPE_CHECKING:\n    from made.high import Name\n")
    (package / "high.py").write_text("from made.low.one import run\n")
    graph = graph_of(package)
    assert circle_of(graph) == ["made.high", "made.low.one", "made.low.two"]
    assert circle_of(between_packages(graph)) == ["high", "low"]


def test_two_modules_never_share_a_name() -> None:
    """Except kernels of the CPU and of a GPU, which are twins; packages are named by their folders."""
    last = Counter(path.stem for path in FOLDER.rglob("*.py") if not path.stem.startswith("__"))
    twins = {name.rsplit(".", 1)[1] for name in graph_of(FOLDER) if name.rsplit(".", 1)[0] in TWINS}
    shared = {stem for stem, count in last.items() if count > 1}
    assert shared <= twins
    for stem in shared:
        found = {
            name.rsplit(".", 1)[0] for name in graph_of(FOLDER) if name.endswith(f".{stem}") and name.count(".") > 1
        }
        assert found == TWINS, stem


VALUES = sorted(path for path in (FOLDER / "values").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_values_import_nothing_else_of_ours_and_are_frozen(path: Path) -> None:
    name = name_of(path, FOLDER)
    assert all(target.startswith("tiercache.values.") for target in graph_of(FOLDER)[name])
    module = importlib.import_module(name)
    for _, kind in inspect.getmembers(module, inspect.isclass):
        if kind.__module__ == module.__name__ and dataclasses.is_dataclass(kind):
            assert kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]


def test_no_public_name_of_a_package_is_hidden_by_a_module_of_that_name() -> None:
    """Importing ``package.name`` sets the attribute ``name`` of the package to the module."""
    packages = [name_of(path, FOLDER) for path in FOLDER.rglob("__init__.py")]
    hidden = []
    for package in map(importlib.import_module, packages):
        for name in getattr(package, "__all__", ()):
            module = f"{package.__name__}.{name}"
            if importlib.util.find_spec(module) and getattr(package, name) is not importlib.import_module(module):
                hidden.append(module)
    assert hidden == []


def test_the_links_at_the_top_level_are_not_packages_of_their_own() -> None:
    """``import store`` from the checkout would be a second copy of ``tiercache.store``."""
    root = FOLDER.parent
    if not (root / "store").is_symlink():
        pytest.skip("installed without the checkout's links")
    for link in ("store", "kernels"):
        assert (root / link).resolve() == FOLDER / link
        with pytest.raises(ImportError, match=rf"import tiercache\.{link}"):
            importlib.import_module(link)


def test_no_file_is_longer_than_500_lines() -> None:
    sources = [path for kind in ("*.py", "*.cu", "*.cuh") for path in FOLDER.rglob(kind)]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert not {path.name: length for path, length in lengths.items() if length > 500}
