"""The package as installed: wheel and sdist hold kernels and store, and imports are light."""

import email
import hashlib
import importlib
import re
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.release import TINY_TRAINING, copy_sources, outside, run
from tiercache.distribution import DISTRIBUTION
from tiercache.kernels.cpu.compile import cache_folder
from tiercache.version import __version__

pytestmark = pytest.mark.disk

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy, out = copy_sources(tmp_path_factory.mktemp("copy")), tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy))
    return out


def test_the_wheel_trains_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    """Installed outside the checkout, with the dependencies installed here, it trains and commits."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    site = next(home.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    wheel = next(built.glob("*.whl"))
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
    kernels, compiled = site / "tiercache" / "kernels" / "cpu", cache_folder()
    if compiled is not None:  # used only if the sources are the same
        copy = shutil.copytree(compiled, kernels / "__pycache__" / compiled.name)
        ours, theirs = (  # numba names it by the folder of the sources; there may be some of other checkouts
            copy / f"cpu_{hashlib.sha1(str(folder).encode()).hexdigest()}"
            for folder in (ROOT / "tiercache" / "kernels" / "cpu", kernels)
        )
        if ours.exists():
            ours.rename(theirs)
    program = tmp_path / "tiny.py"
    program.write_text(TINY_TRAINING)
    printed = run(str(home / "bin" / "python"), str(program), str(tmp_path), cwd=tmp_path, env=outside())
    assert printed.strip().endswith("trained")


def test_the_wheel_holds_the_linked_folders(built: Path) -> None:
    """With CUDA sources, which are compiled on the user's machine."""
    names = zipfile.ZipFile(next(built.glob("*.whl"))).namelist()
    assert {"tiercache/kernels/cpu/update.py", "tiercache/store/store.py"} <= {*names}
    assert not [name for name in names if not name.startswith(("tiercache/", "tiercache_embeddings-"))]
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tiercache/kernels/cuda").glob("*.cu*")}
    assert len(sources) > 2
    assert sources <= {*names}


def test_the_sdist_holds_what_builds_tests_and_documents_it(built: Path) -> None:
    """Every file that git tracks, but for the links at the top level and what is for git alone."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        members = {name.partition("/")[2] for name in sdist.getnames()}
    sources = copy_sources(built / "sources")
    tracked = {path.relative_to(sources).as_posix() for path in sources.rglob("*") if path.is_file()}
    left_out = {one for one in tracked - members if not one.startswith(("store/", "kernels/"))}
    assert left_out <= {".gitignore"}
    assert "tests/digests" in members
    assert not [name for name in members if "__pycache__" in name]


def test_the_metadata_of_the_wheel_are_those_of_an_index(built: Path) -> None:
    wheel = zipfile.ZipFile(next(built.glob("*.whl")))
    name = next(one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
    found = email.message_from_bytes(wheel.read(name))
    assert (found["Name"], found["Version"]) == (DISTRIBUTION, __version__)
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"
    assert "Operating System :: POSIX :: Linux" in (found.get_all("Classifier") or ())
    description = str(found.get_payload())
    links = re.findall(r"\]\(([^)\s]+)\)", description)
    assert len(links) > 10
    assert not [link for link in links if not link.startswith(("https://", "#"))]


@pytest.mark.parametrize("module", ["tiercache", "tiercache.store", "tiercache.kernels"])
def test_public_names_resolve(module: str) -> None:
    found = importlib.import_module(module)
    names = getattr(found, "__all__", [])
    assert not [name for name in names if getattr(found, name) is None]
    assert set(names) <= set(dir(found))
    assert len(set(names)) == len(names)
    with pytest.raises(AttributeError, match="has no attribute 'Shop'"):
        found.Shop  # noqa: B018 - looking is the test


EVERY_NAME = "[getattr(m, name) for name in m.__all__]"


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import tiercache", "torch numpy cupy zarr lmdb importlib.metadata"),
        (
            "import sys, contextlib, tiercache.cli; sys.argv = ['tiercache', '--help']\n"
            "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None): tiercache.cli.main()\n",
            "torch numba zarr pyarrow numpy pydantic lmdb cupy fsspec psutil yaml rich.console rich.markdown",
        ),
        (f"import tiercache as m; {EVERY_NAME}", "cupy zarr tiercache.rows.backends.cuda"),
        ("import tiercache.kernels.cuda.cupy_device, tiercache.kernels.cuda.gathering", "cupy cupy_backends"),
        ("import tiercache.store as m; m.Table, m.Store", "torch numba pyarrow lmdb zarr cupy"),
        (f"import tiercache.store as m; {EVERY_NAME}", "torch numba pyarrow"),
        (
            "from tiercache.rows.backends.open_backend import open_backend; open_backend('cpu', ())",
            "cupy tiercache.rows.backends.cuda tiercache.rows.backends.cuda_runtime",
        ),
    ],
)
def test_what_is_not_asked_for_is_not_imported(code: str, absent: str) -> None:
    """Names are lazy: neither torch nor an engine, a GPU's libraries nor the tools of tests before they are used."""
    said = run(
        sys.executable, "-c", f"import sys; {code}\nprint(sorted(set({absent.split()}) & set(sys.modules)))", cwd=ROOT
    )
    assert said.strip() == "[]"


def test_every_file_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    """Pytest passes folders of some names over: "dist" is one of them by default."""
    passed_over = pytestconfig.getini("norecursedirs")
    folder = Path(__file__).parent
    for file in folder.rglob("test_*.py"):
        for name in file.relative_to(folder).parent.parts:
            assert not any(fnmatch(name, pattern) for pattern in passed_over), file
