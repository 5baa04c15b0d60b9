"""Compiled CUDA code between processes: kept as long as nothing it depends on changes, and never half."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tiercache.kernels.cpu.jit import KERNELS, cache_folder
from tiercache.kernels.cuda import kernel_cache as cubins


class Compiler:
    """Counts what it makes."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> bytes:
        """Make the next code."""
        self.made += 1
        return b"code %d" % self.made


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Begin with nothing in memory."""
    monkeypatch.setattr(cubins, "_IN_MEMORY", {})
    return Compiler()


def in_a_new_process(folder: Path | None, made_from: str, make: Compiler) -> bytes:
    """Ask where memory is empty."""
    cubins._IN_MEMORY.clear()
    return cubins.kept(folder, "sorting.sm_90.cuda", made_from, make)


def test_code_is_made_once_for_all_processes(tmp_path: Path, compiler: Compiler) -> None:
    """Of one folder; and once for each process where there is none."""
    assert {in_a_new_process(tmp_path, "source", compiler) for _ in range(3)} == {b"code 1"}
    assert [path.name for path in tmp_path.iterdir()] == ["sorting.sm_90.cuda"]
    assert in_a_new_process(None, "source", compiler) == b"code 2"
    assert cubins.kept(None, "sorting.sm_90.cuda", "source", compiler) == b"code 2"


def test_code_of_anything_else_is_made_anew_and_takes_its_place(tmp_path: Path, compiler: Compiler) -> None:
    """Another source, another option, another compiler: whatever it was made from."""
    in_a_new_process(tmp_path, "source", compiler)
    assert in_a_new_process(tmp_path, "edited", compiler) == b"code 2"
    assert in_a_new_process(tmp_path, "edited", compiler) == b"code 2"
    assert in_a_new_process(tmp_path, "source", compiler) == b"code 3"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_file_is_made_anew(tmp_path: Path, compiler: Compiler) -> None:
    """Cut anywhere, or with any byte changed."""
    in_a_new_process(tmp_path, "source", compiler)
    path = tmp_path / "sorting.sm_90.cuda"
    whole = path.read_bytes()
    flipped = [bytes(b ^ (i == at) for i, b in enumerate(whole)) for at in (0, 40, len(whole) - 1)]
    for damaged in (b"", whole[:1], whole[:64], whole[:-1], *flipped):
        path.write_bytes(damaged)
        made = compiler.made
        assert in_a_new_process(tmp_path, "source", compiler) == b"code %d" % (made + 1)
        assert in_a_new_process(tmp_path, "source", compiler) == b"code %d" % (made + 1)


def test_a_folder_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, compiler: Compiler) -> None:
    """The code is there all the same; an error of the compiler is no file either."""
    (tmp_path / "sorting.sm_90.cuda").mkdir()
    assert in_a_new_process(tmp_path, "source", compiler) == b"code 1"
    assert [path.name for path in tmp_path.iterdir()] == ["sorting.sm_90.cuda"]
    assert in_a_new_process(tmp_path / "missing", "source", compiler) == b"code 2"

    def fails() -> bytes:
        raise RuntimeError("does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        cubins.kept(tmp_path, "rows.sm_90.cuda", "other", fails)
    assert not (tmp_path / "rows.sm_90.cuda").exists()


def test_it_lies_where_numba_keeps_its_code() -> None:
    """So one folder holds all that is compiled, and NUMBA_CACHE_DIR moves both."""
    importlib.import_module("tiercache.kernels.cpu.hashing")
    assert cache_folder() == Path(KERNELS[0].compiler._cache.cache_path)
