"""Opening a store: missing, foreign and locked ones."""

import copy
import gc
import json
import os
import pickle
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
import pytest

from tests.apart import command
from tests.store.conftest import Home, engine_of, small_tables
from tests.store.world import World
from tiercache.store import SGD, Cursor, MemoryEngine, SegmentLayout, Store, Table, Zeros, verify
from tiercache.store.store_errors import (
    CorruptStoreError,
    FormatVersionError,
    NotAStoreError,
    StoreClosedError,
    StoreInUseError,
    StoreMissingError,
    TableMismatchError,
)


def one(name: str = "t", **changes: Any) -> Table:
    values: dict[str, Any] = {"name": name, "dim": 2, "optimizer": SGD(learning_rate=0.1), "initializer": Zeros()}
    return Table(**values | changes)


def test_a_missing_store_is_an_error_without_tables_and_for_reading(tmp_path: Path) -> None:
    with pytest.raises(StoreMissingError, match=r"no store at .*: check the path, or pass tables"):
        Store.open(tmp_path / "a")
    with pytest.raises(StoreMissingError, match="no store in"):
        Store.open(None, engine=MemoryEngine())
    for path, engine in ((tmp_path / "a", None), (None, MemoryEngine())):
        with pytest.raises(StoreMissingError):
            Store.open(path, tables=[one()], engine=engine, mode="r")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "words"),
    [("photo.jpg", "is a file"), ("photo.jpg/below", "is a file"), (".", "holds 'photo.jpg', not a")],
)
def test_a_file_and_a_folder_of_other_things_are_no_stores(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "photo.jpg").write_text("mine")
    with pytest.raises(NotAStoreError, match=words):
        Store.open(tmp_path / path, tables=[one()])
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("photo.jpg", "mine")]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}', "\x00\xff"])
def test_a_marker_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(NotAStoreError):
        Store.open(tmp_path, tables=[one()])


@pytest.mark.parametrize(
    ("version", "words"),
    [(6, "use a newer tiercache"), (4, "use the tiercache that wrote it"), (3, "use the tiercache")],
)
@pytest.mark.parametrize("mode", ["a", "r"])
def test_another_format_version_is_refused(tmp_path: Path, version: int, words: str, mode: str) -> None:
    Store.open(tmp_path, tables=[one()]).close()
    marker = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps({**marker, "version": version}))
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(FormatVersionError, match=f"has format version {version}, but .* reads version 5: {words}"):
        Store.open(tmp_path, mode=mode)
    assert (tmp_path / "data.mdb").read_bytes() == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([one("t")], "has a table 'u' that was not given"),
        ([one("t"), one("u"), one("v")], "has no table 'v'"),
        ([one("t"), one("u", dim=3)], "table 'u' of .* has dim 2, but 3 was given"),
        ([one("t", seed=1), one("u")], "table 't' of .* has seed 0, but 1 was given"),
        ([one("t", optimizer=SGD(learning_rate=0.2)), one("u")], "table 't' of .* has optimizer"),
        (
            [one("t", optimizer=SGD(learning_rate=0.1, momentum=0.5)), one("u")],
            "{'momentum': 0.0}, but {'momentum': 0.5} was",
        ),
    ],
)
def test_other_tables_are_refused(home: Home, given: list[Table], words: str) -> None:
    """The error has the first difference and a remedy."""
    home.open([one("t"), one("u")])
    remedy = r": pass the tables it has, alter the store with tiercache\.store\.alter"
    with pytest.raises(TableMismatchError, match=f"{words}.*{remedy}"):
        home.open(given)
    assert len(home.open([one("u"), one("t")]).tables) == 2


HOLDER = """
import sys
from pathlib import Path
from tests.store.conftest import engine_of
from tiercache.store import Store
store = Store.open(None, engine=engine_of(sys.argv[1], Path(sys.argv[2]), create=False))
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
def test_a_second_writer_is_refused_whatever_way_the_first_was_opened(tmp_path: Path, kind: str) -> None:
    """Instances of an engine hold the lock too: in this process and another, and against stores opened by path."""

    def refused(words: str, pid: int) -> None:
        for second in (lambda: engine_of(kind, tmp_path, create=False), lambda: Store.open(tmp_path)):
            with pytest.raises(StoreInUseError, match=rf"is being written by process .*{words}") as caught:
                second()
            assert caught.value.pid == pid
        with Store.open(tmp_path, mode="r") as reader:
            assert reader.tables == (one(),)

    Store.open(tmp_path, tables=[one()], engine=kind).close()
    with Store.open(None, engine=engine_of(kind, tmp_path, create=False)):
        refused("this process", os.getpid())
    with Popen(command(HOLDER, kind, tmp_path), stdin=PIPE, stdout=PIPE) as holder:
        assert holder.stdout.readline() == b"open\n"
        refused("", holder.pid)
        holder.kill()
        holder.wait()
    engine_of(kind, tmp_path, create=False).close()
    Store.open(tmp_path).close()


def test_a_store_is_not_used_across_a_fork(tmp_path: Path) -> None:
    """The child gets an error, and neither its close nor its garbage affects the parent's store."""
    store, world = Store.open(tmp_path, tables=small_tables()), World(small_tables())
    world.run(store, 1)
    pid = os.fork()
    if pid == 0:  # pragma: no cover - in the child
        warnings.simplefilter("error")
        status = 1
        try:
            with pytest.raises(StoreClosedError, match="is used in its fork"):
                store.state()
            store.close()
            del store
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    world.run(store, 1)
    world.check(store, after=1)
    store.close()
    assert verify(tmp_path)["problems"] == []


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_store_goes_to_other_processes_by_its_path(tmp_path: Path, how: Callable[[Store], object]) -> None:
    with (
        Store.open(tmp_path / "s", tables=[one()]) as store,
        pytest.raises(TypeError, match=r"cannot be copied or pickled: pass its path, and open it .* mode='r'"),
    ):
        how(store)


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    """Such as a loader's worker that outlives training."""
    store = Store.open(tmp_path, tables=[one()])
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - in the child
        os.write(told, b"x")
        signal.pause()
    try:
        os.read(ready, 1)
        store.close()
        Store.open(tmp_path).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("left", [["writer.lock"], ["writer.lock", "data.mdb"], ["writer.lock", "store.json.new"]])
def test_a_creation_that_was_killed_is_done_again(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / name).touch()
    with pytest.raises(StoreMissingError):
        Store.open(tmp_path)
    Store.open(tmp_path, tables=[one()]).close()
    assert Store.open(tmp_path).tables == (one(),)


@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
def test_a_creation_killed_just_before_its_marker_is_done_again(kind: str, tmp_path: Path) -> None:
    """Even with other tables, because the first ones were never visible."""
    Store.open(tmp_path, tables=[one()], engine=kind).close()
    (tmp_path / "store.json").unlink()
    Store.open(tmp_path, tables=[one("u")], engine=kind).close()
    with Store.open(tmp_path) as store:
        assert store.tables == (one("u"),)


@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
def test_a_store_with_commits_that_lost_its_marker_is_not_made_again(kind: str, tmp_path: Path) -> None:
    with Store.open(tmp_path, tables=small_tables(), engine=kind) as store:
        World(small_tables()).run(store, 1)
    (tmp_path / "store.json").unlink()
    held = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "lock" not in path.name}
    for engine in ("lmdb", "zarr"):
        with pytest.raises(NotAStoreError, match="lost its marker"):
            Store.open(tmp_path, tables=small_tables(), engine=engine)
    assert {path: path.read_bytes() for path in held} == held


@pytest.mark.parametrize("name", ["data.mdb", "blocks.bin"])
def test_a_missing_data_file_is_refused(tmp_path: Path, name: str) -> None:
    Store.open(tmp_path, tables=[one()]).close()
    (tmp_path / name).unlink()
    for mode in ("a", "r"):
        with pytest.raises(CorruptStoreError, match=f"{name} is missing"):
            Store.open(tmp_path, mode=mode)


@pytest.mark.parametrize(("kind", "other"), [("lmdb", "zarr"), ("zarr", "lmdb")])
def test_a_store_opens_with_the_engine_it_was_made_with(kind: str, other: str, tmp_path: Path) -> None:
    Store.open(tmp_path, tables=[one()], engine=kind).close()
    for mode in ("a", "r"):
        Store.open(tmp_path, mode=mode).close()
        Store.open(tmp_path, mode=mode, engine=kind).close()
        with pytest.raises(ValueError, match=rf"was created with engine '{kind}', not '{other}': omit engine"):
            Store.open(tmp_path, mode=mode, engine=other)


def test_an_engine_that_this_version_lacks_is_refused(tmp_path: Path) -> None:
    Store.open(tmp_path, tables=[one()]).close()
    marker = json.loads((tmp_path / "store.json").read_text())
    assert marker["engine"] == "lmdb"
    (tmp_path / "store.json").write_text(json.dumps({**marker, "engine": "tape"}))
    with pytest.raises(FormatVersionError, match="engine 'tape', but this tiercache has lmdb and zarr: use a newer"):
        Store.open(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "w"}, "expected 'a'"),
        ({"engine": "files"}, "expected 'lmdb'"),
        ({"path": None}, "needs a path"),
        ({"tables": []}, "at least one"),
        *(
            ({"store_budget": size}, f"store_budget is {size!r}: expected a number of bytes, at least 1")
            for size in ("64MiB", True, 1.5, 0, -1)
        ),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused_before_anything_is_made(tmp_path: Path, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Store.open(**{"path": tmp_path / "s", "tables": [one()]} | options)
    assert list(tmp_path.iterdir()) == []


def counting(name: str, counted: Counter[str]) -> Any:
    """Return a function of ``os`` that counts its calls."""
    real = getattr(os, name)

    def call(*args: Any, **options: Any) -> Any:
        counted[name] += 1
        return real(*args, **options)

    return call


@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_an_opening_asks_the_file_system_as_often_whatever_the_number_of_blocks(
    engine: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 TB in blocks of 4 MiB are 2.5 million of them."""
    table, calls = Table(name="u", dim=1, optimizer=SGD()), []
    for blocks in (10, 1000):
        path = tmp_path / str(blocks)
        layout = SegmentLayout(
            row_bytes=4, page_rows=1, block_bytes=4, next_use_R=np.array([9]), table_rows_RT=np.array([[blocks]])
        )
        rows = ((0, block, np.zeros(4, np.uint8), np.array([block])) for block in range(blocks))
        with Store.open(path, tables=[table], engine=engine) as store:
            store.append(0, [layout], rows)
            store.publish(Cursor(1), state=b"", schedule_digest="", settings={}, environment={})
        counted = Counter[str]()
        with monkeypatch.context() as patched:
            for name in ("fstat", "stat", "lstat", "open", "pread", "preadv", "scandir", "listdir"):
                patched.setattr(os, name, counting(name, counted))
            Store.open(path, mode=mode).close()
        calls.append(counted)
    assert calls[0] == calls[1]
    assert sum(calls[0].values()) > 3
