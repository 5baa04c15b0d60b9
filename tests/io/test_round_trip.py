"""Every bit survives store to files to store, in every format, against a dict; concurrent writes are refused."""

import tempfile
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.files import files_of
from tests.io.cases import (
    FORMATS,
    OPTIMIZERS,
    all_tables,
    expected_after,
    filled,
    keeps_state,
    random_rows,
    rows_of,
    table,
)
from tiercache.errors import ImportExportError, ImportExportWarning
from tiercache.io.staging import staging_directory
from tiercache.store import MemoryEngine, Store

DTYPES = ("float32", "bfloat16", "float16")


@settings(max_examples=25)
@given(
    format_=st.sampled_from(FORMATS),
    shapes=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 9), st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 99),
    memory_bytes=st.sampled_from([2_000, 1 << 20]),
)
def test_bits_come_back(format_: str, shapes: list[tuple[int, int, str, str]], seed: int, memory_bytes: int) -> None:
    tables = [table(f"t{i}", dim, optimizer, dtype) for i, (_, dim, optimizer, dtype) in enumerate(shapes)]
    rows = random_rows(tables, [count for count, *_ in shapes], seed)
    whole = all(keeps_state(format_, one) for one in tables)
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = Path(place) / "out"
        with filled(None, tables, rows) as store:
            listing = tc.export_store(store, out, format=format_, memory_bytes=memory_bytes)
        assert [w.category for w in caught] == [ImportExportWarning] * (not whole)
        assert sorted(p.name for p in Path(place).iterdir()) == ["out"]
        with Store.open(None, tables=tables, engine=MemoryEngine()) as copy:
            done = tc.import_store(out, copy, initial_state=not whole, memory_bytes=memory_bytes)
            assert rows_of(copy) == expected_after(format_, tables, rows)
            tc.export_store(copy, Path(place) / "two", format=format_, memory_bytes=memory_bytes)
        assert files_of(out) == files_of(Path(place) / "two"), "rows are in hash order, however a store was filled"
    assert done == listing
    assert {one.table.name: one.rows for one in listing.tables} == {name: len(mine) for name, mine in rows.items()}


@pytest.mark.parametrize("format_", FORMATS)
def test_rows_without_their_state_are_exported_and_imported_on_request(tmp_path: Path, format_: str) -> None:
    """Files then have no state, no warning is given, and the import needs permission to use initial values."""
    tables = all_tables()
    rows = random_rows(tables, [20] * 5)
    with filled(None, tables, rows) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        listing = tc.export_store(store, tmp_path / "out", format=format_, with_state=False)
        tc.export_store(store, tmp_path / "some", format=format_, with_state=False, tables=["sgd", "adam"])
    assert not any(one.has_state for one in listing.tables)
    with pytest.raises(tc.TierCacheError, match=r"has no optimizer state of table .*: pass initial_state"):
        tc.import_store(tmp_path / "out", tmp_path / "copy.tc")
    assert not (tmp_path / "copy.tc").exists()
    tc.import_store(tmp_path / "out", tmp_path / "copy.tc", initial_state=True)
    with Store.open(tmp_path / "copy.tc") as copy:
        assert rows_of(copy) == expected_after("torch", tables, rows)
    tc.import_store(tmp_path / "some", tmp_path / "some.tc", initial_state=True)
    with Store.open(tmp_path / "some.tc") as copy:
        assert {t.name for t in copy.tables} == {"sgd", "adam"}


def test_one_warning_names_all_tables_whose_state_stays_behind(tmp_path: Path) -> None:
    tables = [table(f"t{i}", 2, "adagrad") for i in range(8)]
    with filled(None, tables, random_rows(tables, [3] * 8)) as store, pytest.warns(ImportExportWarning) as caught:
        tc.export_store(store, tmp_path / "out", format="torch")
    (only,) = caught
    assert all(f"'t{i}' (sum)" in str(only.message) for i in range(8))
    assert only.filename == __file__


@pytest.mark.parametrize("format_", FORMATS)
def test_the_shared_rows_of_a_store_come_back(tmp_path: Path, format_: str) -> None:
    """The listing says that the two reserved keys are the out-of-vocabulary row and the null row."""
    tables = [table("sgd", 3, "sgd")]
    keys = [-(1 << 63), -(1 << 63) + 1, 7]
    rows = {"sgd": {key: bytes([i] * 12) for i, key in enumerate(keys)}}
    with filled(None, tables, rows) as store:
        tc.export_store(store, tmp_path / "out", format=format_)
    tc.import_store(tmp_path / "out", tmp_path / "copy.tc")
    with Store.open(tmp_path / "copy.tc") as copy:
        assert rows_of(copy) == rows
    (tmp_path / "out" / "tables.json").unlink()
    with pytest.raises(tc.TierCacheError, match="is reserved for the out-of-vocabulary row"):
        tc.import_store(tmp_path / "out", tmp_path / "other.tc", format=format_, tables=tables)
    tc.import_store(tmp_path / "out", tmp_path / "other.tc", format=format_, tables=tables, reserved_keys=True)
    with Store.open(tmp_path / "other.tc") as copy:
        assert rows_of(copy) == rows


def test_names_of_tables_cannot_leave_the_folder(tmp_path: Path) -> None:
    names = ["..", "../up", "/abs", "a/b", "tables.json", ".hidden", "x" * 300, "größe", "50%", "a%2Fb", "con dos"]
    tables = [table(name, 1, "sgd") for name in names]
    rows = random_rows(tables, [3] * len(names))
    for format_ in FORMATS:
        with filled(None, tables, rows) as store:
            tc.export_store(store, tmp_path / format_, format=format_)
        with Store.open(None, tables=tables, engine=MemoryEngine()) as copy:
            tc.import_store(tmp_path / format_, copy)
            assert rows_of(copy) == rows
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(FORMATS)


def test_a_trained_store_is_exported_at_its_commit(tmp_path: Path) -> None:
    """Live rows in many ranges of many segments, and no uncommitted dumps."""
    from tests.store.conftest import small_tables
    from tests.store.world import World

    tables = small_tables()
    world = World(tables)
    with Store.open(tmp_path / "s.tc", tables=tables) as store:
        world.run(store, 5)
        rows = dict(world.rows)
        world.train()
        world.append(store)
        tc.export_store(store, tmp_path / "out", format="numpy")
    for one in tables:
        keys = np.load(tmp_path / "out" / one.name / "keys.npy")
        fields = [np.load(tmp_path / "out" / one.name / f"{f.name}.npy") for f in one.fields]
        found = {(one.name, k): b"".join(f[i].tobytes() for f in fields) for i, k in enumerate(keys.tolist())}
        assert found == {key: row for key, row in rows.items() if key[0] == one.name}


def test_of_two_exports_to_one_place_the_second_is_refused(tmp_path: Path) -> None:
    tables = all_tables()
    rows = random_rows(tables, [40, 30, 20, 10, 10])
    out = tmp_path / "out"
    with filled(None, tables, rows) as store:
        refused, drafts = list[ImportExportError](), list[int]()

        def second(done: int, total: int) -> None:
            if not refused:
                with pytest.raises(ImportExportError, match="is being written by another process: wait until") as error:
                    tc.export_store(store, out, format="numpy")
                refused.append(error.value)
                drafts.append((tmp_path / ".out.unfinished").stat().st_ino)

        tc.export_store(store, out, format="numpy", progress=second)
        assert [out.stat().st_ino] == drafts, "it is published in one step"
        with pytest.raises(ImportExportError, match="exists: choose another path for the export"):
            tc.export_store(store, out, format="numpy")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    with Store.open(None, tables=tables, engine=MemoryEngine()) as copy:
        tc.import_store(out, copy)
        assert rows_of(copy) == rows


def test_a_draft_is_had_by_one_at_a_time_whenever_others_come(tmp_path: Path) -> None:
    """Threads that open, fill and publish the same path repeatedly: each result is from one of them."""
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
