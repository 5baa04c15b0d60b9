"""Compilation: progress, cache, one set of types."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tiercache.kernels.cpu import compile as compiling
from tiercache.kernels.cpu.compile import KERNELS, cache_folder, is_cached, prepare
from tiercache.kernels.cpu.hashing import hash_keys

ROOT = Path(__file__).parents[2]


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": str(ROOT), **environment}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_prepare_compiles_every_kernel_and_tells_how_far_it_is() -> None:
    told: list[tuple[str, int, int]] = []
    prepare(lambda *arguments: told.append(arguments))
    prepare(narrow=True)
    assert [done for _, done, _ in told] == list(range(len(told)))
    assert told[-1] == ("done", told[-1][2], told[-1][2])
    modules = {path.stem for path in (ROOT / "kernels" / "cpu").glob("[!_]*.py")}
    assert modules <= {name.rpartition(".")[2] for name in sys.modules if name.startswith("tiercache.kernels.cpu.")}
    assert [kernel.name for kernel in KERNELS if set(kernel.compiled) != {False, *[True] * bool(kernel.rows)}] == []
    assert is_cached(narrow=True)


def test_kernels_that_read_vectors_have_two_sets_of_types_and_the_others_one() -> None:
    """Another set would be compiled in the middle of training."""
    prepare(narrow=True)
    several = {kernel.name for kernel in KERNELS if len(kernel.compiled) > 1}
    assert several == {"_gather", "_pool_one", "_spread_one", "_pool_bags", "_weight_gradient", "_update"}
    with pytest.raises(ValueError, match=r"keys is 1-dimensional float64: pass an aligned .* array of int64"):
        hash_keys(np.zeros(3), 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="No matching definition"):
        hash_keys(np.zeros(3, np.int64), None)  # type: ignore[arg-type]
    assert all(len(one.signatures) == 1 for kernel in KERNELS for one in kernel.compiled.values())


def test_importing_kernels_loads_no_numba() -> None:
    """The package imports none of its modules: numba takes a second."""
    code = "import tiercache.kernels, sys; print('numba' in sys.modules or 'torch' in sys.modules)"
    assert run(code) == "False"


def test_compiled_code_lies_in_one_folder_that_the_next_process_finds(tmp_path: Path) -> None:
    """NUMBA_CACHE_DIR is the parent of the folder; numba's own value, for other functions, is restored."""
    code = (
        "from tiercache.kernels.cpu import compile, hashing; import numba, numpy as np;"
        "hashing.hash_keys(np.arange(3), 5);"
        "stats = next(k for k in compile.KERNELS if k.name == '_hash_keys').compiled[False].stats;"
        "print(compile.is_cached(), sum(stats.cache_hits.values()), sum(stats.cache_misses.values()),"
        "      compile.cache_folder(), numba.config.CACHE_DIR)"
    )
    for hits, misses in (("0", "1"), ("1", "0")):
        *found, folder, config = run(code, NUMBA_CACHE_DIR=str(tmp_path)).split()
        assert found == ["False", hits, misses]
        assert (Path(folder).parent, config) == (tmp_path, str(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == [Path(folder).name]
        assert list(Path(folder).rglob("hashing._hash_keys-*.nbi"))


def test_kernels_compile_where_nothing_can_be_cached(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    code = (
        "from tiercache.kernels.cpu import compile, hashing; import numpy as np;"
        "print(compile.cache_folder(), int(hashing.hash_keys(np.arange(1), 5)[0] > 0), compile.is_cached())"
    )
    assert run(code, NUMBA_CACHE_DIR=str(blocked / "cache")) == "None 1 False"


def test_an_edited_source_has_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code contains copies of the functions that it calls, which may be in other modules."""
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "hashing.py"))
    edited = compiling.cache_folder.__wrapped__()
    monkeypatch.undo()
    assert edited is not None
    assert cache_folder() == cache_folder.__wrapped__() != edited
    edited.rmdir()


def test_parallel_kernels_run_on_threads_that_sleep() -> None:
    """OpenMP's threads spin, and those of the last resort abort if two threads run parallel kernels at once."""
    code = "from tiercache.kernels.cpu.compile import prepare; import numba; prepare(); print(numba.threading_layer())"
    assert run(code, **{k: os.environ[k] for k in ("HOME", "NUMBA_CACHE_DIR") if k in os.environ}) == "tbb"
