"""Compilation: shown, cached, one set of types."""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tiercache.kernels.cpu import jit
from tiercache.kernels.cpu.compile import is_cached, prepare
from tiercache.kernels.cpu.hashing import hash_keys

ROOT = Path(__file__).parents[2]


def run(code: str, **environment: str) -> str:
    """Run Python code in a new process and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": str(ROOT), **environment}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_prepare_compiles_every_kernel_and_tells_how_far_it_is() -> None:
    """No kernel of any module is left for the first batch; those for 16-bit dtypes come where they are asked for."""
    told: list[tuple[str, int, int]] = []
    prepare(lambda *arguments: told.append(arguments))
    prepare(narrow=True)
    assert [done for _, done, _ in told] == list(range(len(told)))
    assert told[-1] == ("done", told[-1][2], told[-1][2])
    for path in (ROOT / "kernels" / "cpu").glob("*.py"):
        __import__(f"tiercache.kernels.cpu.{path.stem}")
    assert [kernel.name for kernel in jit.KERNELS if kernel.is_available() and not kernel.entry.signatures] == []
    assert is_cached(narrow=True)


def test_a_kernel_has_one_set_of_types_and_those_that_read_vectors_two() -> None:
    """Another set would be compiled in the middle of training."""
    prepare(narrow=True)
    several = {kernel.name for kernel in jit.KERNELS if len(kernel.entry.signatures) > 1}
    assert several == {"_gather", "_pool_one", "_spread_one", "_pool_bags", "_weight_gradient", "_update"}
    with pytest.raises(ValueError, match=r"keys is 1-dimensional float64: give an aligned .* array of int64"):
        hash_keys(np.zeros(3), 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="No matching definition"):
        hash_keys(np.zeros(3, np.int64), None)  # type: ignore[arg-type]
    assert all(len(kernel.entry.signatures) <= 1 + kernel.has_narrow for kernel in jit.KERNELS)


def test_importing_kernels_loads_no_numba() -> None:
    """The package imports none of its modules: numba takes a second."""
    code = "import tiercache.kernels, sys; print('numba' in sys.modules or 'torch' in sys.modules)"
    assert run(code) == "False"


def test_a_new_process_finds_the_compiled_code(tmp_path: Path) -> None:
    """is_cached is false in an empty cache; what one process compiled, the next one loads."""
    code = (
        "from tiercache.kernels.cpu import jit, hashing, compile; import numpy as np;"
        "hashing.hash_keys(np.arange(3), 5);"
        "stats = next(k for k in jit.KERNELS if k.name == '_hash_keys').compiler.stats;"
        "print(compile.is_cached(), sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))"
    )
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == "False 0 1"
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == "False 1 0"


def test_compiled_code_of_another_version_is_compiled_anew(tmp_path: Path) -> None:
    """Also where its index names a type that this version does not have."""
    code = (
        "from tiercache.kernels.cpu import jit, hashing; import numpy as np;"
        "print(int(hashing.hash_keys(np.arange(1), 5)[0] > 0))"
    )
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == "1"
    (index,) = tmp_path.rglob("hashing._hash_keys-*.nbi")
    version = pickle.dumps(importlib.metadata.version("numba"))
    index.write_bytes(version + b"ctiercache.kernels.cpu.hashing\nGone\n.")
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == "1"
    assert b"Gone" not in index.read_bytes()


def test_kernels_compile_where_nothing_can_be_cached(tmp_path: Path) -> None:
    """A read-only installation without a home still works, only slower to start."""
    code = (
        "from numba.core import caching;"
        "caching.CacheImpl._locator_classes = [];"
        "from tiercache.kernels.cpu.hashing import mix; from tiercache.kernels.cpu.compile import is_cached;"
        "print(mix(0x9E3779B97F4A7C15), is_cached())"
    )
    assert run(code, HOME=str(tmp_path)) == f"{0xE220A8397B1DCDAF} False"


def test_an_edited_helper_makes_its_callers_stale(tmp_path: Path) -> None:
    """Compiled code belongs to the module and to every kernel module it imports."""
    jit._source_stamp.cache_clear()
    before = {name: jit._source_stamp(name) for name in ("cpu.unique_keys", "cpu.sorting")}
    assert before["cpu.unique_keys"] != before["cpu.sorting"]
    original = Path(jit.__file__).with_name("hashing.py").read_bytes()
    read = Path.read_bytes
    jit._source_stamp.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda p: original + b"#" if p.name == "hashing.py" else read(p))
        assert jit._source_stamp("cpu.unique_keys") != before["cpu.unique_keys"]
        assert jit._source_stamp("cpu.sorting") == before["cpu.sorting"]
    jit._source_stamp.cache_clear()


def test_parallel_kernels_run_on_threads_that_sleep() -> None:
    """OpenMP's spin, and those of the last resort abort when two threads of a process run parallel kernels at once."""
    code = "from tiercache.kernels.cpu.compile import prepare; import numba; prepare(); print(numba.threading_layer())"
    assert run(code, **{k: os.environ[k] for k in ("HOME", "NUMBA_CACHE_DIR") if k in os.environ}) == "tbb"


def test_annotations_are_read_where_an_array_type_is_an_alias() -> None:
    """As NumPy's NDArray is since 2.5: the kernels have the same parameters."""
    alias = (
        "import typing, numpy, numpy.typing, typing_extensions\n"
        "T = typing.TypeVar('T')\n"
        "array = numpy.ndarray[tuple[typing.Any, ...], numpy.dtype[T]]\n"
        "numpy.typing.NDArray = typing_extensions.TypeAliasType('NDArray', array, type_params=(T,))\n"
    )
    show = (
        "import tiercache.kernels.cpu.compile; from tiercache.kernels.cpu.jit import KERNELS\n"
        "print([(k.name, [(p.name, p.dtypes, p.ndim, p.written) for p in k.parameters]) for k in KERNELS])"
    )
    assert run(alias + show) == run(show)
