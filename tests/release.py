"""make release-check: build both archives, install each in a fresh environment, train there, and test the sources.

python -m tests.release [--publish] [--out DIR]. With ``--publish``, as in the workflow of a release, placeholders among
the project's URLs and a version that is not that of the tag are errors too. The archives stay in ``--out`` (dist/).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

from tiercache.distribution import DISTRIBUTION
from tiercache.version import __version__

ROOT = Path(__file__).parents[1]
OF_THE_SOURCES = (
    "test_sizes.py",
    "test_errors.py",
    "test_distribution.py",
    "data/test_sub_dataset.py",
    "store/test_format_vectors.py",
)
"""Tests that the unpacked source archive runs on itself."""

TINY_TRAINING = """
import sys
import numpy as np, pyarrow as pa, pyarrow.parquet as pq, torch
import tiercache as tc

assert "site-packages" in tc.__file__, tc.__file__
folder = sys.argv[1]
initializer = tc.init.Uniform(low=-1.0, high=1.0)
table = tc.Table(name="t", dim=4, optimizer=tc.optim.Adagrad(learning_rate=0.1), initializer=initializer)
schema = tc.Schema(label="label", features=(tc.Feature(name="f", table="t"),), tables=(table,))
rng = np.random.default_rng(0)
pq.write_table(pa.table({"f": rng.integers(0, 50, 96), "label": rng.integers(0, 2, 96)}), folder + "/data.parquet")
options = dict(device_budget="1MiB", split_by="rows=32", batch_multiple=32, progress=False)
passes = tc.extract(folder + "/data.parquet", schema, folder + "/passes", **options)
with tc.Store.open(folder + "/model.tc", tables=schema.tables) as store:
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
    """Run a command and return what it printed. Raises RuntimeError, with its output, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def outside() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def copy_sources(target: Path) -> Path:
    """Copy what git tracks or would track, or all of an unpacked archive, so that no leftovers of builds count."""
    if not (ROOT / ".git").exists():
        ignored = shutil.ignore_patterns(
            ".*cache", ".venv*", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist"
        )
        return Path(shutil.copytree(ROOT, target, symlinks=True, ignore=ignored, dirs_exist_ok=True))
    for name in filter(None, run("git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z").split("\0")):
        source, copy = ROOT / name, target / name
        if not (source.exists() or source.is_symlink()):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(source.readlink())
        else:
            copy.write_bytes(source.read_bytes())
    return target


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


def check_project(tag: str | None) -> list[str]:
    """Return what forbids to publish the project as it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [f"the URL {name} is a placeholder: {url}" for name, url in project["urls"].items() if ".example" in url]
    if tag is not None and tag.removeprefix("v") != __version__:
        found.append(f"the tag is {tag} and the version {__version__}: change tiercache/version.py, or the tag")
    if f"## {__version__}" not in (ROOT / "CHANGELOG.md").read_text():
        found.append(f"CHANGELOG.md has no section '## {__version__}'")
    return found


def check_installed(archive: Path, folder: Path) -> None:
    """Install an archive with its requirements in a fresh environment; run its command, and train."""
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    install = (python, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", str(ROOT / "constraints.txt"))
    run(*install, str(archive), cwd=folder, env=outside())
    run(python, "-m", "pip", "check", env=outside())
    told = run(str(folder / "venv" / "bin" / "tiercache"), "--version", cwd=folder, env=outside())
    if told.split() != ["tiercache", __version__]:
        raise RuntimeError(f"{archive.name} says that it is {told!r}: expected version {__version__}")
    (folder / "tiny.py").write_text(TINY_TRAINING)
    run(python, "tiny.py", str(folder), cwd=folder, env=outside())


def main() -> int:
    parser = argparse.ArgumentParser(description="Build both archives, and install, run and test them.")
    parser.add_argument("--publish", action="store_true", help="refuse placeholders, and another tag than the version")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the archives stay")
    options = parser.parse_args()
    tag = os.environ.get("GITHUB_REF_NAME") if options.publish else None
    for one in (problems := check_project(tag)):
        print(f"{'error' if options.publish else 'before a release'}: {one}")
    if problems and options.publish:
        return 1
    shutil.rmtree(options.out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        run(sys.executable, "-m", "build", "--outdir", str(options.out), str(copy_sources(folder / "sources")))
        archives = sorted(options.out.iterdir())
        run(sys.executable, "-m", "twine", "check", "--strict", *map(str, archives))
        for archive in archives:
            place = folder / archive.suffix.removeprefix(".")
            place.mkdir()
            check_installed(archive, place)
            print(f"{archive.name}: installed in a fresh environment, and trained")
        sources = unpack(next(one for one in archives if one.suffix == ".gz"), folder / "unpacked")
        tests = [f"tests/{name}" for name in OF_THE_SOURCES]
        run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests, cwd=sources, env=outside())
        print(f"{DISTRIBUTION} {__version__}: the unpacked sources pass {len(tests)} files of their tests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
