"""kill -9 in the middle of an export or import: no complete-looking result exists, and the same call succeeds."""

import random
import signal
import time
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


def test_an_export_killed_at_any_time_is_there_whole_or_not_at_all(place: Path, tmp_path: Path) -> None:
    """Deaths fall between any two instructions, and the next call overwrites the leftovers."""
    from tests.io.killed import run

    rng = random.Random(0)
    (tmp_path / "a.tc").symlink_to(place / "a.tc")
    draft, whole, deaths, seconds = tmp_path / ".numpy.unfinished", tmp_path / "numpy", 0, 0.0
    for turn in range(60):
        if turn > 12 and deaths:
            break
        lives = not turn or draft.exists()
        process = start(run, tmp_path, "export", "numpy", -1)
        while not draft.exists() and process.is_alive():
            pass  # a death before the first file does not count; an export may take a few milliseconds
        begun, latest = time.perf_counter(), rng.random() * seconds
        while not whole.exists() and process.is_alive() and (lives or time.perf_counter() < begun + latest):
            pass
        if not turn:  # sets the time range of the other deaths
            seconds = time.perf_counter() - begun
        process.kill()
        process.join(60)
        deaths += not whole.exists()
        if whole.exists():
            with Store.open(None, tables=TABLES, engine=tc.store.MemoryEngine()) as copy:
                tc.import_store(whole, copy)
                assert rows_of(copy) == ROWS
            whole.rename(tmp_path / f"done-{rng.random()}")
    assert deaths > 0


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
