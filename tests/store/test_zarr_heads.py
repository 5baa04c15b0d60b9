"""Heads of the Zarr engine: durable before they are valid, and invalid if they failed."""

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from tests.files import flip
from tests.store.blobs import (
    assert_broken_by_a_failed_sync,
    check,
    drop_all,
    head_of,
    layout_of,
    plain,
    publish,
    put,
    segment,
    some_bytes,
)
from tests.store.test_zarr_engine import DAMAGES, made, objects, spoil
from tiercache.store.engines import zarr_chunks, zarr_engine, zarr_objects
from tiercache.store.engines.zarr_engine import ZarrEngine
from tiercache.store.records import encode
from tiercache.store.store_errors import CorruptStoreError, StoreError, StoreFullError

pytestmark = pytest.mark.disk


def fail_syncs(monkeypatch: pytest.MonkeyPatch, where: Callable[[str], bool]) -> None:
    """Make syncs of some paths fail."""
    sync = zarr_objects.sync

    def failing(path: str, **options: bool) -> None:
        if where(path):
            raise OSError(5, "the disk broke")
        sync(path, **options)

    monkeypatch.setattr(zarr_objects, "sync", failing)


def test_a_head_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its name before the publish returns; one that cannot be synced is removed."""
    engine, seen = ZarrEngine(tmp_path, create=True), []
    sync = zarr_objects.sync

    def watching(path: str, **options: bool) -> None:
        seen.append((Path(path).name, sorted(entry.name for entry in (tmp_path / "heads").iterdir())))
        sync(path, **options)

    (tmp_path / "heads").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(zarr_objects, "sync", watching)
        kept = publish(engine, 0, segment(layout_of([10]), 1))
    (draft,) = {name for name, _ in seen if name.startswith("1.") and name.endswith(".partial")}
    files = [path.name for path in (tmp_path / "segments").rglob("*")] + ["zarr.json", "commits", "segments", "0"]
    for name in (*files, tmp_path.name):
        assert seen.index((name, [])) < seen.index((draft, [draft])) < seen.index(("heads", ["1"])), name
    assert all(name != "1" or names == ["1"] for name, names in seen)

    fail_syncs(monkeypatch, lambda path: path.endswith(".partial"))
    with pytest.raises(StoreError, match="the disk broke"):
        publish(engine, 1)
    assert [file.name for file in (tmp_path / "heads").iterdir()] == ["1"]
    assert engine.newest() == head_of(0)
    monkeypatch.undo()
    engine.publish(head_of(1), head_of(0))
    engine.close()
    engine = ZarrEngine(tmp_path, create=False)
    assert engine.newest() == head_of(1)
    assert [file.name for file in (tmp_path / "heads").iterdir()] == ["3"]
    check(engine, kept)


def test_a_sync_that_failed_is_never_called_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ZarrEngine(tmp_path, create=True)
    publish(engine, 0)
    put(engine, [plain("states/0.1", some_bytes(10))])
    assert_broken_by_a_failed_sync(engine, monkeypatch, zarr_objects, "sync")
    reopened(tmp_path, 0)


def reopened(path: Path, number: int) -> None:
    """Open a store at a commit, drop later data, and publish the next."""
    engine = ZarrEngine(path, create=False)
    assert engine.newest() == head_of(number)
    engine.drop([(name, None) for name in engine.list() if name.startswith(("commits", "states"))])
    publish(engine, number + 1)


@pytest.mark.parametrize(("broken", "newest"), [("sync", 0), ("unlink", 1)])
def test_a_head_that_cannot_be_withdrawn_stops_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, newest: int
) -> None:
    """It may exist after a power failure or not, so nothing of either commit is dropped."""
    engine = ZarrEngine(tmp_path, create=True)
    kept = publish(engine, 0, segment(layout_of([10]), 1))

    def refuse(_: str) -> None:
        raise OSError(5, "the disk broke")

    if broken == "sync":
        fail_syncs(monkeypatch, lambda path: path.endswith("heads") or "heads/" in path)
    else:
        fail_syncs(monkeypatch, lambda path: path.endswith("heads/2"))
        monkeypatch.setattr(zarr_objects.os, "unlink", refuse)
    with pytest.raises(StoreError, match=r"cannot be written .*the disk broke"):
        publish(engine, 1)
    monkeypatch.undo()
    for call in (
        engine.newest,
        lambda: engine.publish(head_of(1), head_of(0)),
        lambda: drop_all(engine, kept),
        lambda: put(engine, [plain("states/0.1", some_bytes(10))]),
    ):
        with pytest.raises(StoreError, match="did not confirm its newest commit: open it again"):
            call()
    check(engine, kept)
    engine.close()
    reopened(tmp_path, newest)


def test_an_interrupt_after_the_head_is_durable_is_a_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ZarrEngine(tmp_path, create=True)
    publish(engine, 0)
    put(engine, [plain("commits/1", np.frombuffer(b"commit 1" * 9, np.uint8))])
    delete = engine._objects.delete

    def interrupted(names: list[str]) -> None:
        delete(names)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._objects, "delete", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.publish(head_of(1), head_of(0))
    monkeypatch.undo()
    assert engine.newest() == head_of(1)
    publish(engine, 2)
    assert engine.newest() == head_of(2)


def test_what_is_dropped_before_it_is_published_is_not_synced(tmp_path: Path) -> None:
    engine = ZarrEngine(tmp_path, create=True)
    contents = put(engine, segment(layout_of([30], compression="zstd"), 1) + segment(layout_of([30]), 2))
    engine.drop([(one.blob.name, 2 * 4096) for one in contents if one.blob.of])
    drop_all(engine, contents[4:])
    kept = publish(engine, 0)
    check(engine, kept + contents[:1])


def test_a_full_disk_is_an_error_in_words_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it fills up, in chunks, metadata, records or the head, the store stays at its commit."""
    engine = ZarrEngine(tmp_path, create=True)
    layout = layout_of([10, 20])
    kept = publish(engine, 0, segment(layout, 0))
    left = 0

    def spending(call: Callable[..., object]) -> Callable[..., object]:
        def spend(*args: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(28, "No space left on device")
            return call(*args)

        return spend

    for module, name in ((zarr_objects, "write_whole"), (zarr_chunks, "write_at"), (os, "posix_fallocate")):
        monkeypatch.setattr(module, name, spending(getattr(module, name)))
    for writes in count():
        left = writes
        try:
            contents = publish(engine, 1, segment(layout, 1))
            break
        except StoreFullError as error:
            assert "free some" in str(error)  # noqa: PT017 - what else is raised fails the test
            left = 1000
            engine.drop([(name, None) for name in engine.list() if name not in {one.blob.name for one in kept}])
            assert engine.newest() == head_of(0)
            check(engine, kept)
            assert {file.name for file in (tmp_path / "heads").iterdir()} == {"1"}
    assert writes > 10
    check(engine, kept + contents)
    engine.close()
    engine = ZarrEngine(tmp_path, create=False)
    assert engine.newest() == head_of(1)


def test_a_full_disk_keeps_room_for_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows leave it free, records use it; if data does not fit, its source is not read."""
    free = 0

    def room(_: Path, needed: int) -> None:
        if needed > free:
            raise OSError(28, "No space left on device")

    def source() -> object:
        raise AssertionError("a part was asked for")
        yield

    engine = ZarrEngine(tmp_path, create=True)
    monkeypatch.setattr(zarr_engine, "check_room", room)
    free = 1 << 20
    blobs = [one.blob for one in segment(layout_of([10]), 1)]
    with pytest.raises(StoreFullError, match=r"1,048,576 of them kept free for records, but the file system of"):
        engine.put(blobs, source())  # type: ignore[arg-type]
    publish(engine, 0)
    monkeypatch.undo()
    engine.close()
    engine = ZarrEngine(tmp_path, create=False, store_budget=5000)
    with pytest.raises(StoreFullError, match=r"needs 4,929 more bytes but .* take 72 and may hold 5,000: raise"):
        put(engine, [plain("states/0.1", some_bytes(4929))])
    put(engine, [plain("states/0.1", some_bytes(4928))])


def test_a_reader_returns_the_newest_head_whatever_a_writer_does_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a head disappears during its read it reads again; it never returns an older head than before."""
    writer = ZarrEngine(tmp_path, create=True)
    publish(writer, 0)
    reader = ZarrEngine(tmp_path, create=False, readonly=True)
    assert reader.newest() == head_of(0)
    get, number = reader._objects.get, 0

    def meanwhile(key: str) -> bytes | None:
        nonlocal number
        if number < 5:
            number += 1
            publish(writer, number)
        return get(key)

    monkeypatch.setattr(reader._objects, "get", meanwhile)
    assert reader.newest() == head_of(5)
    monkeypatch.undo()
    older = (tmp_path / "heads/6").read_bytes()
    publish(writer, 6)
    assert reader.newest() == head_of(6)
    (tmp_path / "heads/7").unlink()
    (tmp_path / "heads/6").write_bytes(older)
    with pytest.raises(CorruptStoreError, match="is at head 6, but was at 7 before: restore the store from a copy"):
        reader.newest()
    with pytest.raises(StoreError, match=r"the newest head of .* is 6, but this process wrote 7: .*open it again"):
        publish(writer, 7)
    reader.close()


UNWRITTEN: list[dict[str, object]] = [
    {},
    {"number": 2, "before": ""},
    {"number": 1, "before": "x"},
    {"number": 1, "before": "", "name": "commits/1"},
    {"number": 1, "before": "", "name": "commits/1", "size": -1, "digest": "0" * 64},
    {"number": 1, "before": "", "name": "commits/1", "size": 1, "digest": "0" * 63},
    {"number": True, "before": ""},
]
"""Heads that no writer wrote, with correct checksums."""


@pytest.mark.parametrize("damage", [*DAMAGES, "flipped", *UNWRITTEN], ids=str)
def test_a_damaged_head_is_refused(tmp_path: Path, damage: str | dict[str, object]) -> None:
    """An older commit does not replace it, a store without a head is no new one, and nothing is deleted."""
    made(tmp_path, *segment(layout_of([10]), 1))
    head, words = tmp_path / "heads/1", "restore the store from a copy|fix that"
    data = head.read_bytes()
    if isinstance(damage, dict):
        words = r"head 1 of .* cannot be read .*: restore the store from a copy"
        head.write_bytes(encode("head", damage, {}))
    elif damage == "flipped":
        flip(head, len(data) // 2)
    else:
        words = "the head of .* is missing: restore" if damage == "missing" else words
        spoil(head, damage)
    before = objects(tmp_path)
    for options in ({"create": False}, {"create": True}, {"create": False, "readonly": True}):
        with pytest.raises(CorruptStoreError, match=words):
            ZarrEngine(tmp_path, **options)
    assert objects(tmp_path) == before
    if head.is_dir():
        head.rmdir()
    head.unlink(missing_ok=True)
    head.write_bytes(data)
    assert ZarrEngine(tmp_path, create=False).newest() == head_of(0)
