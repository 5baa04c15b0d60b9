"""The keys that changed, as files: all of them or none, under names that a path cannot misunderstand."""

from __future__ import annotations

import errno
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.apart import ran
from tests.files import files_of
from tests.io.cases import filled, table
from tiercache.cli.store import app
from tiercache.errors import ImportExportError
from tiercache.io.column_file import ColumnFile
from tiercache.io.export_manifest import file_name

if TYPE_CHECKING:
    from pathlib import Path

TABLES = [table("a", 2, "sgd"), table("b" * 251, 2, "sgd"), table(".c/", 2, "sgd")]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with 100 rows in each table."""
    rows = {t.name: {key: bytes(t.row_bytes) for key in range(100)} for t in TABLES}
    filled(tmp_path / "s.tc", TABLES, rows).close()
    return tmp_path / "s.tc"


def changes(store: Path, out: Path) -> BaseException | None:
    """Run the command; return what it ended with."""
    done = CliRunner().invoke(app, ["changes", str(store), "--since", "-1", "--out", str(out)])
    return None if done.exit_code == 0 else done.exception


def test_a_table_has_the_name_that_an_export_gives_it(store: Path, tmp_path: Path) -> None:
    """One that a file system would not take, too."""
    assert changes(store, tmp_path / "out") is None
    assert files_of(tmp_path / "out").keys() == {f"{file_name(one)}.npy" for one in TABLES}
    for one in TABLES:
        keys = np.load(tmp_path / "out" / f"{file_name(one)}.npy")
        assert sorted(keys.tolist()) == list(range(100))


def test_keys_that_cannot_fit_are_refused_before_they_are_written(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bytes that they need, as an export says it; no folder is left."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9000, 8900, 100))  # type: ignore[attr-defined]
    error = changes(store, tmp_path / "deep" / "out")
    assert isinstance(error, ImportExportError)
    assert f"needs 14.3 KiB ({3 * 800 + 3 * 4096:,} bytes) and {tmp_path} has 100 bytes free: free some" in str(error)
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("before", [False, True])
def test_a_disk_that_fills_up_leaves_what_was_there(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Nothing, or the files of an earlier call, whichever table it is; then a sentence."""
    out, write, calls = tmp_path / "out", ColumnFile.write, [0]
    if before:
        assert changes(store, out) is None
        (out / "a.npy").write_bytes(b"older")
    there = files_of(out)

    def full(file: ColumnFile, values: np.ndarray) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, values)

    monkeypatch.setattr(ColumnFile, "write", full)
    error = changes(store, out)
    assert isinstance(error, ImportExportError)
    assert f"is full, and the file of the keys that changed needs about {3 * 800 + 3 * 4096:,} bytes" in str(error)
    assert calls == [3]
    assert files_of(out) == there
    assert out.exists() == before


def test_a_file_is_closed_where_the_disk_is_full() -> None:
    """What is left of it in memory fails once, and not again when it is forgotten."""
    code = (
        "from pathlib import Path; from tiercache.io.column_file import ColumnFile\n"
        "import numpy as np\n"
        "file = ColumnFile(Path('/dev/full')); file.write(np.zeros(5))\n"
        "try: file.close()\n"
        "except OSError as error: print(error.errno, file._file.closed)\n"
    )
    said = ran(code)
    assert (said.stdout, said.stderr) == (f"{errno.ENOSPC} True\n", "")
