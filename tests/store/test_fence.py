"""The fence of a writer: once its path no longer has its store, it writes nothing, wherever the store is."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.apart import ran
from tests.files import files_of
from tests.store.big import BIG, dump, load, publish
from tests.store.blobs import check as check_blobs
from tests.store.blobs import head_of
from tests.store.blobs import publish as publish_blobs
from tests.store.damage import assert_sentence
from tiercache.store import LmdbEngine, Store, StoreError, StoreInUseError, ZarrEngine, verify
from tiercache.store.locks import WriterLock

KINDS = pytest.mark.parametrize("kind", ["lmdb", "zarr"])


def trained(path: Path, kind: str, passes: int = 2, *, first: int = 0) -> Store:
    """Return a store with commits after its first passes, and the uncommitted rows of one more pass."""
    store = Store.open(path, tables=[BIG], engine=kind, retention=2)
    for pass_index in range(first, first + passes):
        dump(store, pass_index, {90: 60, 99: 20})
        publish(store, pass_index + 1)
    dump(store, first + passes, {95: 30})
    return store


def gone(path: Path, other: Path) -> None:
    path.rename(path.with_name("away"))


def a_backup(path: Path, other: Path) -> None:
    """Replace it by a copy of the same store."""
    gone(path, other)
    shutil.copytree(path.with_name("away"), path)


def another_store(path: Path, other: Path) -> None:
    gone(path, other)
    other.rename(path)


def a_copy_of_links(path: Path, other: Path) -> None:
    """Replace it by a copy of the same store with hard links to its files, as backup tools do."""
    gone(path, other)
    shutil.copytree(path.with_name("away"), path, copy_function=os.link)


def a_file(path: Path, other: Path) -> None:
    gone(path, other)
    path.write_text("mine")


def restored_in_place(path: Path, other: Path) -> None:
    """Replace the contents of the same folder by another store's files."""
    for entry in path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.copytree(other, path, dirs_exist_ok=True)


def a_marker_that_was_copied_over(path: Path, other: Path) -> None:
    """Write a file and rename it, as tools do."""
    shutil.copy(path / "store.json", path / "store.json.tmp")
    (path / "store.json.tmp").replace(path / "store.json")


def deleted(path: Path, other: Path) -> None:
    shutil.rmtree(path)


def a_link(path: Path, other: Path) -> None:
    """Replace it by a link to another store; the path that was opened may be such a link too."""
    gone(path, other)
    path.symlink_to(other)


CHANGES = [
    gone, a_backup, another_store, a_copy_of_links, a_file, restored_in_place, a_marker_that_was_copied_over, deleted,
    a_link,
]  # fmt: skip
STEPS: dict[str, Callable[[Store], object]] = {
    "append": lambda store: dump(store, 3, {95: 10}),
    "publish": lambda store: publish(store, 3),
    "rollback": lambda store: store.rollback(0),
    "compact": lambda store: store.compact(),
    "discard": lambda store: store.discard_uncommitted(),
}


@pytest.mark.sampled(40)
@KINDS
@pytest.mark.parametrize("step", [*STEPS])
@pytest.mark.parametrize("change", CHANGES)
def test_a_writer_whose_path_has_something_else_writes_nothing(
    tmp_path: Path, kind: str, change: Callable[[Path, Path], None], step: str
) -> None:
    """Neither at the path, nor to its moved store, which opens at its last commit."""
    path, other = tmp_path / "model.tc", tmp_path / "other.tc"
    folders = path, tmp_path / "away", other
    trained(other, kind, first=4).close()
    store = trained(path, kind)
    change(path, other)
    held = {folder: files_of(folder) for folder in folders if folder.is_dir()}
    with pytest.raises(StoreError, match=r"moved, replaced or deleted while it was written") as caught:
        STEPS[step](store)
    assert_sentence(caught.value)
    store.close()
    assert {folder: files_of(folder) for folder in folders if folder.is_dir()} == held
    for folder in held:
        if folder.name == "away" or change is not a_file:
            with Store.open(folder, mode="r") as reader:
                assert reader.commit.cursor.pass_index in {2, 6}
                assert len(load(reader, 90)) == len(load(reader, 99)) == 2


@KINDS
def test_a_store_that_came_back_to_its_place_is_read_and_written_again(tmp_path: Path, kind: str) -> None:
    """The error lost nothing. A writer that opens files by name does not call rows damaged that it no longer finds."""
    path = tmp_path / "model.tc"
    store = trained(path, kind)
    held = load(store, 90)
    path.rename(tmp_path / "away")
    if kind == "zarr":
        with pytest.raises(StoreError, match="moved, replaced or deleted"):
            load(store, 90)
    with pytest.raises(StoreError, match="moved, replaced or deleted"):
        publish(store, 3)
    (tmp_path / "away").rename(path)
    assert load(store, 90) == held
    store.close()
    with Store.open(path) as again:
        assert again.commit.cursor.pass_index == 2
        stored = dump(again, 2, {3: 30})
        publish(again, 3)
        assert load(again, 3) == {2: stored[3]}


@KINDS
@pytest.mark.parametrize("reopened", [False, True])
def test_commits_that_another_one_made_are_never_written_over(tmp_path: Path, kind: str, *, reopened: bool) -> None:
    """Nor an older state of the same files, restored by a tool that writes in place."""
    path = tmp_path / "model.tc"
    trained(path, kind, 2).close()
    older = files_of(path)
    trained(path, kind, 1, first=2).close()
    store = Store.open(path)
    if reopened:  # a writer that has written holds its environment open
        dump(store, 3, {95: 10})
        publish(store, 4)
    store.reader.stored()  # wait for pending deletions, which would affect the restored files
    for name, data in older.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    for name in files_of(path).keys() - older.keys():
        (path / name).unlink()
    held = {name: data for name, data in files_of(path).items() if name != "blocks.bin"}
    with pytest.raises(StoreError, match=r"another process has written to the store, or an older copy"):
        publish(store, 5)
    assert {name: data for name, data in files_of(path).items() if name != "blocks.bin"} == held
    store.close()


@KINDS
@pytest.mark.parametrize("just_made", [True, False])
def test_a_lock_deleted_as_stale_lets_no_second_writer_in(tmp_path: Path, kind: str, *, just_made: bool) -> None:
    """The marker is locked too: the second one is refused, here and in another process, and the first continues."""
    store = trained(tmp_path / "s", kind)
    if not just_made:
        store.close()
        store = Store.open(tmp_path / "s")
    (tmp_path / "s" / "writer.lock").unlink()
    with pytest.raises(StoreInUseError, match="is being written by another process"):
        Store.open(tmp_path / "s")
    code = "import sys; from tiercache.store import Store; Store.open(sys.argv[1])"
    assert "StoreInUseError" in ran(code, tmp_path / "s").stderr
    publish(store, 3)
    store.close()
    assert verify(tmp_path / "s")["problems"] == []
    with Store.open(tmp_path / "s") as again:
        assert again.commit.cursor.pass_index == 3


@pytest.mark.parametrize("made", [LmdbEngine, ZarrEngine])
def test_an_engine_without_a_marker_is_fenced_by_its_lock(tmp_path: Path, made: type[LmdbEngine | ZarrEngine]) -> None:
    engine = made(tmp_path, create=True)
    contents = publish_blobs(engine, 0)
    (tmp_path / "writer.lock").unlink()
    with pytest.raises(StoreError, match="moved, replaced or deleted"):
        publish_blobs(engine, 1)
    engine.close()
    engine = made(tmp_path, create=False)
    assert engine.newest() == head_of(0)
    check_blobs(engine, contents)
    engine.close()


@pytest.mark.parametrize(
    "put_there",
    [
        pytest.param(lambda path: None, id="missing"),
        pytest.param(lambda path: path.touch(), id="a file"),
        pytest.param(os.mkfifo, id="a FIFO"),
        pytest.param(lambda path: path.symlink_to("nowhere"), id="a link to nothing"),
        pytest.param(lambda path: (path.parent.rmdir(), path.parent.touch()), id="below a file"),
    ],
)
def test_a_lock_of_no_folder_is_one_sentence(tmp_path: Path, put_there: Callable[[Path], None]) -> None:
    """Whatever is in its place; no file stays open."""
    (tmp_path / "folder").mkdir()
    path, before = tmp_path / "folder" / "s", open_files()
    put_there(path)
    with pytest.raises(StoreError) as caught:
        WriterLock(path)
    assert_sentence(caught.value)
    assert open_files() == before


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize("code", ["ENOLCK", "EOPNOTSUPP", "ENOSYS", "EINVAL", "EIO", "EBADF", "EAGAIN", "EACCES"])
@pytest.mark.parametrize("name", ["writer.lock", "store.json"])
def test_no_locks_is_not_another_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, name: str) -> None:
    """Only a locked file, according to ``flock``, is blamed on a process."""
    Store.open(tmp_path, tables=[BIG]).close()
    usual, number = fcntl.flock, getattr(errno, code)

    def flock(handle: int, how: int) -> None:
        if os.path.samestat(os.fstat(handle), (tmp_path / name).stat()):
            raise OSError(number, os.strerror(number))
        usual(handle, how)

    before = open_files()
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreError) as caught:
        Store.open(tmp_path)
    monkeypatch.undo()
    assert_sentence(caught.value)
    assert isinstance(caught.value, StoreInUseError) == (code in {"EAGAIN", "EACCES"})
    if code not in {"EAGAIN", "EACCES"}:
        assert "does not lock files" in str(caught.value)
        assert os.strerror(number) in str(caught.value)
    assert open_files() == before
    Store.open(tmp_path).close()


@KINDS
def test_a_relative_path_keeps_its_folder(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has the same name in the new working directory."""
    for run in (1, 2):
        trained(tmp_path / str(run) / "model.tc", kind, first=3 * run).close()
    held = files_of(tmp_path / "2")
    monkeypatch.chdir(tmp_path / "1")
    with Store.open(Path("model.tc")) as store, Store.open("../1/./model.tc", mode="r") as reader:
        assert store.path == tmp_path / "1" / "model.tc"
        monkeypatch.chdir(tmp_path / "2")
        assert load(reader, 99)
        dump(store, 5, {95: 10})
        publish(store, 6)
        store.compact()
        assert len(list(store.scan("big", memory_bytes=1 << 16))) > 0
    assert files_of(tmp_path / "2") == held
    assert verify("../1/model.tc")["problems"] == []
