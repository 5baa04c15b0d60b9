"""Manifests of a store on Zarr: torn, damaged, without a name, and what they may name."""

from __future__ import annotations

import shutil
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.files import flip
from tests.store.test_zarr_engine import files, newest
from tiercache.store import CorruptStoreError, MemoryEngine, Store, StoreError, ZarrEngine, verify, zarr_objects
from tiercache.store.testing.contract import form_of, segment_blocks
from tiercache.store.testing.world import World
from tiercache.store.zarr_arrays import Arrays
from tiercache.store.zarr_manifest import BlockObjects, Manifest, RecordObject

if TYPE_CHECKING:
    from tiercache.store import Table


@pytest.fixture
def path(tmp_path: Path, tables: list[Table]) -> Path:
    """A store on Zarr with two passes in it."""
    with Store.open(tmp_path / "s", tables=tables, engine="zarr") as store:
        World(tables).run(store, 2)
    return tmp_path / "s"


@pytest.fixture
def world(tables: list[Table]) -> World:
    """The world of that store."""
    world = World(tables)
    world.run(Store.open(None, tables=tables, engine=MemoryEngine()), 2)
    return world


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_manifest_without_its_name_is_as_if_it_were_not_there(path: Path, world: World, share: float) -> None:
    """A crash while it was written: the commit before stands, whole, and goes on."""
    copy = path.with_name("copy")
    shutil.copytree(path, copy)
    with Store.open(path) as again:
        deepcopy(world).run(again, 1)
    data = newest(path).read_bytes()
    draft = copy / "manifests" / (newest(path).name + ".partial")
    draft.write_bytes(data[: int(len(data) * share)])
    before = files(copy)
    with Store.open(copy, mode="r") as reader:
        assert reader.commit is not None
        assert reader.commit.cursor.pass_index == 2
    assert files(copy) == before
    with Store.open(copy) as again:
        assert again.commit is not None
        assert again.commit.cursor.pass_index == 2
        assert not draft.exists()
        world.check(again, after=1)
        world.run(again, 2)
        world.check(again, after=3)
    assert verify(copy)["problems"] == []


@pytest.mark.parametrize("damage", ["empty", "short", "flipped", "of another"])
def test_a_damaged_manifest_is_no_older_commit(path: Path, world: World, damage: str) -> None:
    """Though one is there that a reader has open: it is refused, nothing is deleted, and its bytes bring it back."""
    with Store.open(path, mode="r"):
        older = newest(path)
        with Store.open(path) as writer:
            world.run(writer, 2)
        file = newest(path)
        assert older.exists()
        assert file != older
        data = file.read_bytes()
        flipped = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        file.write_bytes(
            {"empty": b"", "short": data[:-1], "flipped": flipped, "of another": older.read_bytes()}[damage]
        )
        before = files(path)
        for mode in ("a", "r"):
            with pytest.raises(CorruptStoreError, match=rf"manifest {file.name} of .*: restore the store from a copy"):
                Store.open(path, mode=mode)
        assert len(verify(path)["problems"]) == 1
        assert files(path) == before
        file.write_bytes(data)
        with Store.open(path) as writer:
            world.check(writer, after=3)


def test_a_damaged_manifest_that_a_reader_has_open_keeps_every_object(path: Path, world: World) -> None:
    """Nobody knows what it named; when the reader closes, all goes that the newest one does not name."""
    with Store.open(path, mode="r"):
        older = newest(path)
        with Store.open(path) as writer:
            world.run(writer, 2)
        older.write_bytes(b"")
        before = files(path)
        with Store.open(path) as writer:
            world.run(writer, 2)
        assert before.keys() <= files(path).keys()
    Store.open(path).close()
    assert not older.exists()


def test_a_manifest_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its name before the commit returns; one that cannot be synced leaves nothing."""
    engine, seen = ZarrEngine(tmp_path, create=True), []
    syncs = {name: getattr(zarr_objects, name) for name in ("sync_file", "sync_folder")}

    def watching(name: str, path: str) -> None:
        seen.append((Path(path).name, sorted(entry.name for entry in (tmp_path / "manifests").iterdir())))
        syncs[name](path)

    (tmp_path / "manifests").mkdir()
    for name in syncs:
        monkeypatch.setattr(zarr_objects, name, partial(watching, name))
    engine.commit({"r": b"1"}, [])
    (draft,) = {name for name, _ in seen if name.startswith("1.") and name.endswith(".partial")}
    assert seen.index((draft, [draft])) < seen.index(("manifests", ["1"]))
    assert all(name != "1" or names == ["1"] for name, names in seen)

    def failing(path: str) -> None:
        if path.endswith(".partial"):
            raise OSError(5, "the disk broke")
        syncs["sync_file"](path)

    monkeypatch.setattr(zarr_objects, "sync_file", failing)
    with pytest.raises(StoreError, match="the disk broke"):
        engine.commit({"r": b"2"}, [])
    assert [file.name for file in (tmp_path / "manifests").iterdir()] == ["1"]
    monkeypatch.undo()
    engine.commit({"r": b"3"}, [])
    engine.close()
    engine = ZarrEngine(tmp_path, create=False)
    assert engine.contents().records == {"r": b"3"}
    engine.close()


def test_a_damaged_manifest_without_another_is_refused(path: Path) -> None:
    """It is no crash's work: nothing is deleted, and the sentence says what to do."""
    flip(newest(path), newest(path).stat().st_size // 2)
    before = files(path)
    for mode in ("a", "r"):
        with pytest.raises(CorruptStoreError, match=r"manifest \d+ of .* has .*: restore the store from a copy"):
            Store.open(path, mode=mode)
    newest(path).unlink()
    for mode in ("a", "r"):
        with pytest.raises(CorruptStoreError, match=r"manifest .* is missing: restore the store from a copy"):
            Store.open(path, mode=mode)
    assert files(path) == {name: data for name, data in before.items() if not name.startswith("manifests/")}
    assert len(verify(path)["problems"]) == 1


def test_a_manifest_cannot_name_what_is_not_of_the_store() -> None:
    """Folders, fields and records outside it, and blocks without number, are refused before they are used."""
    form = form_of((10,))
    good = Manifest(number=3, records={"r": RecordObject("records/3.0", 1, 2)}, blocks={b"a": BlockObjects(5, 0, None)})
    assert Manifest.from_bytes(good.to_bytes(), "it") == good

    name = next(iter(segment_blocks(form)))
    for folder in ("segments/../x", "../segments/1/0", "segments/1/0/..", "/segments/1/0", "segments/1", "segments//0"):
        bad = Manifest(number=1, blocks={name: BlockObjects(8, 0, Arrays.of(folder, form))})
        with pytest.raises(CorruptStoreError, match="is no folder of arrays"):
            Manifest.from_bytes(bad.to_bytes(), "it")
    for key in ("../x", "records/../x", "records/", "/etc/passwd"):
        with pytest.raises(CorruptStoreError, match="is no object of a record"):
            Manifest.from_bytes(Manifest(number=1, records={"r": RecordObject(key, 1, 2)}).to_bytes(), "it")
    arrays = Arrays(folder="segments/1/0", rows=1, chunk_rows=1, fields=(("../x", 4),))
    with pytest.raises(CorruptStoreError, match="is no field"):
        Manifest.from_bytes(Manifest(number=1, blocks={name: BlockObjects(8, 0, arrays)}).to_bytes(), "it")
