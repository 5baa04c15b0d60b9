"""kill -9 in the middle of an export or import: no complete-looking result exists, and the same call succeeds."""

import signal
from pathlib import Path

import pytest

import tiercache as tc
from tests.crash.told import finish, start
from tests.io.cases import FORMATS, all_tables, filled, random_rows, rows_of
from tiercache.store import Store, info

TABLES = all_tables()
ROWS = random_rows(TABLES, [400, 300, 200, 100, 100])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    filled(folder / "a.tc", TABLES, ROWS).close()
    return folder


def die(folder: Path, call: str, format_: str, fatal: int) -> int:
    """Export or import in a separate process, which dies after ``fatal`` exported tables or imported chunks."""
    from tests.io.killed import run

    return finish(start(run, folder, call, format_, fatal))


@pytest.mark.parametrize("format_", FORMATS)
def test_a_killed_export_leaves_nothing_under_the_final_name(place: Path, format_: str) -> None:
    out = place / format_
    for fatal in (1, len(TABLES)):
        assert die(place, "export", format_, fatal) == -signal.SIGKILL
        assert not out.exists()
        assert (place / f".{format_}.unfinished").exists()
    assert die(place, "export", format_, -1) == 0
    assert not (place / f".{format_}.unfinished").exists()
    with Store.open(None, tables=TABLES, engine=tc.store.MemoryEngine()) as copy:
        tc.import_store(out, copy, initial_state=True)
        assert {name: set(mine) for name, mine in rows_of(copy).items()} == {n: set(mine) for n, mine in ROWS.items()}


def test_a_killed_import_leaves_an_empty_store(place: Path, tmp_path: Path) -> None:
    """While rows are sorted and while they are written; the same call then succeeds."""
    with Store.open(place / "a.tc", mode="r") as store:
        tc.export_store(store, tmp_path / "numpy", format="numpy")
    for fatal in (2, 6):
        assert die(tmp_path, "import", "numpy", fatal) == -signal.SIGKILL
        assert info(tmp_path / "b.tc")["commit"] is None
    assert die(tmp_path, "import", "numpy", -1) == 0
    with Store.open(tmp_path / "b.tc") as store:
        assert rows_of(store) == ROWS
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["b.tc", "numpy"]
