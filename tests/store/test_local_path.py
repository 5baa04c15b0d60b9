"""Path arguments: made absolute once, and no folder for a mistyped URL."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore
from zarr.storage import ObjectStore

from tests.store.big import BIG, dump, load, publish
from tests.store.damage import assert_sentence
from tiercache.store import LmdbEngine, MemoryEngine, Store, StoreMissingError, ZarrEngine, info, verify
from tiercache.store.engines import zarr_objects
from tiercache.store.files import ScratchFile, is_url, local_path
from tiercache.store.initializer import Checkpoint

URLS = [
    "s3://bucket/model.tc", "gs://b/m", "abfss://c@a.dfs.core.windows.net/m", "hdfs:/x", "file:///tmp/m",
    "simplecache::s3://b/m", Path("s3://bucket/model.tc"), "memory://x",
]  # fmt: skip


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("mode", ["a", "r"])
@pytest.mark.parametrize("engine", ["lmdb", "zarr", None])
def test_a_url_is_no_local_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: Any, mode: str, engine: str | None
) -> None:
    """Other URLs are refused with advice, URLs of object stores are opened; no folder is created."""
    is_object_store = str(url).split("://", maxsplit=1)[0] in {"s3", "gs", "abfss"}
    if is_object_store:
        monkeypatch.setattr(zarr_objects, "object_store", lambda _: ObjectStore(MemoryStore()))
    monkeypatch.chdir(tmp_path)
    opens = is_object_store and engine != "lmdb"
    if opens and mode == "a":
        with Store.open(url, tables=[BIG], mode=mode, engine=engine) as store:
            assert store.commit is None
    else:
        with pytest.raises(StoreMissingError if opens else ValueError) as caught:
            Store.open(url, tables=[BIG], mode=mode, engine=engine)
        assert_sentence(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", URLS)
def test_no_door_of_the_store_takes_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: Any) -> None:
    """Nor creates anything for one. If an engine is given, the path only names the store in messages."""
    monkeypatch.chdir(tmp_path)
    for door in (info, verify, partial(LmdbEngine, create=True), partial(ZarrEngine, create=True)):
        with pytest.raises(ValueError, match="is a URL"):
            door(url)
    with Store.open(url, tables=[BIG], engine=MemoryEngine()) as store:
        assert str(url).partition("/")[0] in store.label
    assert list(tmp_path.iterdir()) == []


def test_scratch_is_that_of_the_folder_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late rows are read; a URL is refused at once."""
    (tmp_path / "1" / "tmp").mkdir(parents=True)
    folders, usual = list[Any](), ScratchFile.__init__

    def noted(self: ScratchFile, folder: Any, *others: Any, **options: Any) -> None:
        folders.append(folder[0])
        usual(self, folder, *others, **options)

    monkeypatch.setattr(ScratchFile, "__init__", noted)
    with Store.open(tmp_path / "s", tables=[BIG]) as store:
        for pass_index in range(3):
            dump(store, pass_index, {90: 400})
            publish(store, pass_index + 1)
        monkeypatch.chdir(tmp_path / "1")
        chunks = store.scan("big", memory_bytes=1, scratch=Path("tmp"))
        monkeypatch.chdir(tmp_path)
        assert sum(keys.size for keys, _ in chunks) == 1200
        assert {*folders} == {tmp_path / "1" / "tmp"}
        for url in URLS:
            with pytest.raises(ValueError, match="is a URL"):
                store.scan("big", scratch=url)


def test_names_with_colons_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If they do not look like a URL, or are marked as local."""
    monkeypatch.chdir(tmp_path)
    for name in ("a:b", "12:30/x", "C:/x", "run:1", "./s3:/x", "x/s3:/y", str(tmp_path / "s3:" / "x"), "a b:/c"):
        assert not is_url(name)
        assert local_path(name, "a store").is_absolute()
    Store.open("./s3:/x", tables=[BIG]).close()
    assert (tmp_path / "s3:" / "x" / "store.json").exists()


def test_a_store_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the file of an initializer may; a folder that only begins with ~ is taken as it is, and so is ./~."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Store.open("~/model.tc", tables=[BIG]).close()
    Store.open(Path("~/model.tc"), mode="r").close()
    assert (tmp_path / "home" / "model.tc" / "store.json").exists()
    assert Checkpoint(path="~/x.safetensors", tensor="e").path == str(tmp_path / "home" / "x.safetensors")
    assert local_path("~no such user/x", "a store") == tmp_path / "~no such user" / "x"
    assert local_path("./~/x", "a store") == tmp_path / "~" / "x"


def test_a_path_of_bytes_is_refused() -> None:
    with pytest.raises(TypeError, match=r"the path b'model.tc' is bytes: pass a str or a Path"):
        Store.open(b"model.tc", mode="r")  # type: ignore[arg-type]


def test_a_relative_path_without_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with pytest.raises(ValueError, match=r"is relative, and the current folder was deleted: pass an absolute path"):
        Store.open("model.tc", tables=[BIG])
    Store.open(tmp_path / "model.tc", tables=[BIG]).close()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """A path is made absolute, not resolved."""
    (tmp_path / "run-1").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "run-1")
    with Store.open(tmp_path / "latest" / ".." / "latest", tables=[BIG]) as store:
        assert store.path == tmp_path / "latest" / ".." / "latest"


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
@pytest.mark.parametrize("name", ["caf\udce9", "\udcff\udcfe", "a b", "ü", "new\nline", "%s", "x" * 200, "-r"])
def test_a_folder_may_have_any_name(tmp_path: Path, kind: str, name: str) -> None:
    """Any that the file system accepts, also if it is not UTF-8."""
    with Store.open(tmp_path / name, tables=[BIG], engine=kind) as store:
        stored = dump(store, 0, {1: 10})
        publish(store, 1)
    with Store.open(tmp_path / name) as store:
        assert load(store, 1) == {0: stored[1]}
    assert verify(tmp_path / name)["problems"] == []
