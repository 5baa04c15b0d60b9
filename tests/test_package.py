"""The package as installed: wheel and sdist hold kernels and store, and imports are light."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tiercache.data.dataset_writer import write_dataset
from tiercache.data.raw_batch import RawBatch
from tiercache.kernels.cpu.compile import cache_folder

pytestmark = pytest.mark.disk

ROOT = Path(__file__).parent.parent

TINY_TRAINING = """
import sys
import numpy as np, torch
import tiercache as tc
from tiercache.FROM_ARRAYS import write_dataset
from tiercache.KEYBATCH import RawBatch

assert "site-packages" in tc.__file__, tc.__file__
initializer = tc.init.Uniform(low=-1.0, high=1.0)
table = tc.Table(name="t", dim=4, optimizer=tc.optim.Adagrad(learning_rate=0.1), initializer=initializer)
schema = tc.Schema(label="label", features=(tc.Feature(name="f", table="t"),), tables=(table,))
rng = np.random.default_rng(0)
batches = [RawBatch.of(schema, {"f": rng.integers(0, 50, 32)}, label=rng.integers(0, 2, 32)) for _ in range(3)]
passes = write_dataset(sys.argv[1] + "/passes", schema, batches)
with tc.Store.open(sys.argv[1] + "/model.tc", tables=schema.tables) as store:
    with tc.TierCache(store, passes, device_budget="1MiB", host_budget="4MiB") as cache:
        bag = tc.EmbeddingBagCollection(cache.schema)
        cache.register(model=bag)
        for p in cache.passes(epochs=2):
            for batch in p.batches(8):
                bag(batch).sum().backward()
                cache.optimizer.step()
        assert all(report.planned_equals_measured for report in cache.reports)
    assert store.commit.cursor.pass_index == 6
print("trained")
"""


def run(*command: str, **options: object) -> str:
    """Run a command and return its output; its errors fail the test."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build sdist and wheel once, from a copy of the files that git tracks, so that build leftovers do not count."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    listed = run("git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z").split("\0")
    for name in filter(None, listed):
        source, target = ROOT / name, copy / name
        if not (source.exists() or source.is_symlink()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            target.write_bytes(source.read_bytes())
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
        for folder in copy.glob("cpu_*"):  # numba names it by the folder of the sources
            folder.rename(copy / f"cpu_{hashlib.sha1(str(kernels).encode()).hexdigest()}")
    script = TINY_TRAINING.replace("tiercache.FROM_ARRAYS", write_dataset.__module__)
    script = script.replace("tiercache.KEYBATCH", RawBatch.__module__)
    program = tmp_path / "tiny.py"
    program.write_text(script)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it may name a checkout
    printed = run(str(home / "bin" / "python"), str(program), str(tmp_path), cwd=tmp_path, env=outside)
    assert printed.strip().endswith("trained")


def test_wheel_and_sdist_hold_the_linked_folders(built: Path) -> None:
    """Kernels and store are inside the package in the wheel, and in the sdist's sources."""
    names = zipfile.ZipFile(next(built.glob("*.whl"))).namelist()
    assert "tiercache/kernels/cpu/update.py" in names
    assert "tiercache/store/store.py" in names
    assert not [name for name in names if not name.startswith("tiercache")], "nothing else may be installed"
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        members = sdist.getnames()
    assert any(name.endswith("tiercache/kernels/cpu/update.py") for name in members)
    assert any(name.endswith("tiercache/store/store.py") for name in members)
    sources = {f"tiercache/kernels/cuda/{path.name}" for path in (ROOT / "kernels" / "cuda").glob("*.cu*")}
    assert len(sources) > 2
    assert sources <= set(names), "a CUDA source is compiled on the user's machine"
    assert all(any(member.endswith(source) for member in members) for source in sources)


@pytest.mark.parametrize("module", ["tiercache", "tiercache.store", "tiercache.kernels"])
def test_public_names_resolve(module: str) -> None:
    """Every name in ``__all__`` is there, once, and is shown; others are errors."""
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
        ("import tiercache", "torch cupy zarr lmdb"),
        (f"import tiercache as m; {EVERY_NAME}", "cupy zarr tiercache.rows.backends.cuda"),
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
        sys.executable, "-c", f"import sys; {code}; print(sorted(set({absent.split()}) & set(sys.modules)))", cwd=ROOT
    )
    assert said.strip() == "[]"


def test_every_file_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    """Pytest passes folders of some names over: "dist" is one of them by default."""
    passed_over = pytestconfig.getini("norecursedirs")
    folder = Path(__file__).parent
    for file in folder.rglob("test_*.py"):
        for name in file.relative_to(folder).parent.parts:
            assert not any(fnmatch(name, pattern) for pattern in passed_over), file
