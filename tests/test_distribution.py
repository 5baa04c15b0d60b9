"""The name of the distribution: one constant in every hint; and another project with the name of our package."""

import re
import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.apart import ran
from tests.lowest import lowest
from tiercache.distribution import DISTRIBUTION, install_command, warn_of_foreign_files

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOREIGN = (
    "Metadata-Version: 2.4\nName: tiercache\nVersion: 0.1.13\n"
    "Project-URL: Homepage, https://github.com/madtunebk/tiercache\nAuthor-email: Cornea Valentin <v@example.com>\n\n"
)
OURS = (
    "Metadata-Version: 2.4\nName: tiercache\nVersion: 0.1.0\nLicense: Apache-2.0\n\nNot github.com/madtunebk/tiercache"
)
SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".cff", ".ipynb", ".txt", ""}


def texts() -> list[Path]:
    found = [path for path in ROOT.rglob("*") if path.is_file() and path.suffix in SUFFIXES]
    hidden = [path for path in found if any(one.startswith(".") for one in path.relative_to(ROOT).parts[:-1])]
    built = {"build", "dist", "site", "scratch", "demo"}
    kept = {*found} - {*hidden} | {*(ROOT / ".github").rglob("*.yml")}
    return sorted(path for path in kept if path.relative_to(ROOT).parts[0] not in built and path != Path(__file__))


def test_the_distribution_has_one_name() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert install_command("dask") == f"pip install '{DISTRIBUTION}[dask]'"


def test_no_text_says_to_install_the_other_project() -> None:
    """``tiercache`` is never what pip installs, with an extra or without; only removing it is said."""
    named = re.compile(r"\binstall\b(?! *\))[^\n`)]*?[\s'\"]tiercache(?![-\w./])|(?<![-\w/.])tiercache\[\w+\]")
    assert named.search("pip install tiercache")
    assert named.search("pip install -U 'tiercache[dask]'")
    assert named.search("install tiercache[cuda13], or")
    assert not named.search(install_command("dask"))
    paths = texts()
    assert ROOT / "README.md" in paths
    found = [(path.name, hit[0]) for path in paths if (hit := named.search(path.read_text(errors="replace")))]
    assert not found


def test_every_extra_that_is_named_exists() -> None:
    extras = {*PROJECT["optional-dependencies"]}
    named = re.compile(rf"(?:{DISTRIBUTION}|['\"]\.)\[([\w,]+)\]['\"]|install_command\(['\"](\w+)")
    found = {one for path in texts() for hit in named.findall(path.read_text(errors="replace")) for one in hit if one}
    assert {"dask", "obstore", "plots", "safetensors", "cuda12", "cuda13"} <= found <= extras


@pytest.mark.parametrize(("metadata", "warns"), [(FOREIGN, True), (OURS, False)])
def test_the_other_project_in_the_same_folder_is_named(tmp_path: Path, metadata: str, warns: bool) -> None:
    """By its author and URL: earlier checkouts of ours have its name."""
    place = tmp_path / "tiercache-0.1.13.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(metadata)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_foreign_files(tmp_path)
    assert [one.category for one in caught] == [RuntimeWarning] * warns
    if warns:
        assert "tiercache-0.1.13.dist-info: run `pip uninstall tiercache`, then `pip install" in str(caught[0].message)


def test_importing_next_to_the_other_project_warns(tmp_path: Path) -> None:
    (tmp_path / "tiercache").symlink_to(ROOT / "tiercache")
    (tmp_path / "tiercache-0.1.13.dist-info").mkdir()
    (tmp_path / "tiercache-0.1.13.dist-info" / "METADATA").write_text(FOREIGN)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import tiercache as tc; print(tc.__version__)"
    ended = ran(code)
    assert ended.stderr.count("RuntimeWarning") == 1
    assert "unrelated distribution" in ended.stderr
    assert ended.stdout.strip()


def test_the_lowest_versions_are_the_lower_bounds() -> None:
    assert lowest(Requirement("numba>=0.60,<0.69")) == "numba==0.60"
    assert lowest(Requirement("tbb>=2021.6; platform_machine == 'x86_64'")).startswith("tbb==2021.6 ; platform_machine")
    with pytest.raises(ValueError, match="numpy has no lower bound"):
        lowest(Requirement("numpy"))
    assert len([lowest(Requirement(one)) for one in PROJECT["dependencies"]]) > 10
    assert all("<" in one for one in PROJECT["dependencies"] if one.startswith(("torch", "numba", "zarr")))


def test_private_parts_of_other_projects_are_used_where_the_bounds_say() -> None:
    """A release of torch, numba or zarr beyond the bound may change them: pyproject.toml names each file."""
    private = {
        r"torch\._C|torch\._dynamo\.|_execution_engine|_found_inf": {"values/torch_internals.py"},
        r"\bnumba\.(core|np|cpython)\b": {"kernels/cpu/simd.py"},
        r"\b_nrt=|\"_nrt\"": {"kernels/cpu/compile.py"},
        r"\bzarr\.(core|_)": {"store/engines/zarr_objects.py"},
    }
    package = ROOT / "tiercache"
    sources = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    for pattern, places in private.items():
        assert {name for name, text in sources.items() if re.search(pattern, text)} == places, pattern
