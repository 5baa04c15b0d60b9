"""Two who write to one place at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

import tiercache as tc
from tests.io.cases import all_tables, filled, random_rows, rows_of
from tiercache.errors import ImportExportError
from tiercache.io.staging import staging_directory
from tiercache.store import MemoryEngine, Store

if TYPE_CHECKING:
    from pathlib import Path


def test_of_two_exports_to_one_place_the_second_is_refused(tmp_path: Path) -> None:
    """It touches nothing of the first, which ends whole; when that has ended the place is taken."""
    tables = all_tables()
    rows = random_rows(tables, [40, 30, 20, 10, 10])
    out = tmp_path / "out"
    with filled(None, tables, rows) as store:
        refused: list[ImportExportError] = []

        def second(done: int, total: int) -> None:
            if not refused:
                with pytest.raises(ImportExportError, match="is being written by another process: wait until") as error:
                    tc.export_store(store, out, format="numpy")
                refused.append(error.value)

        tc.export_store(store, out, format="numpy", progress=second)
        assert refused
        with pytest.raises(ImportExportError, match="exists: give the export a path that is free"):
            tc.export_store(store, out, format="numpy")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    with Store.open(None, tables=tables, engine=MemoryEngine()) as copy:
        tc.import_store(out, copy)
        assert rows_of(copy) == rows


def test_a_draft_is_had_by_one_at_a_time_whenever_others_come(tmp_path: Path) -> None:
    """Threads that open, fill and publish the same place again and again: what is published is of one of them."""
    out, published, refused = tmp_path / "out", [], []

    def write(number: int) -> None:
        for turn in range(60):
            try:
                with staging_directory(out, replaces=True) as draft:
                    assert list(draft.iterdir()) == []
                    (draft / "a").write_text(f"{number} {turn}")
                    (draft / "b").mkdir()
                    assert sorted(entry.name for entry in draft.iterdir()) == ["a", "b"]
                    draft.rename(tmp_path / f"{number}-{turn}")
                published.append((number, turn))
            except ImportExportError:
                refused.append((number, turn))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(published) + len(refused) == 240
    assert {entry.name for entry in tmp_path.iterdir()} == {f"{number}-{turn}" for number, turn in published}
    for number, turn in published:
        assert (tmp_path / f"{number}-{turn}" / "a").read_text() == f"{number} {turn}"
