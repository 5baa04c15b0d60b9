"""Commits of the Zarr engine: a manifest is durable before it counts, and one that failed does not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.engine_contract import check, layout_of, put, segment_blocks, some_bytes, state_block
from tiercache.store.engines import zarr_chunks, zarr_objects
from tiercache.store.engines.zarr_engine import ZarrEngine
from tiercache.store.store_errors import CorruptStoreError, StoreError, StoreFullError

pytestmark = pytest.mark.disk


def test_a_manifest_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its name before the commit returns; one that cannot be synced leaves nothing."""
    engine, seen = ZarrEngine(tmp_path, create=True), []
    sync = zarr_objects.sync

    def watching(path: str, **options: bool) -> None:
        seen.append((Path(path).name, sorted(entry.name for entry in (tmp_path / "manifests").iterdir())))
        sync(path, **options)

    (tmp_path / "manifests").mkdir()
    monkeypatch.setattr(zarr_objects, "sync", watching)
    engine.commit({"commit/1": b"1"})
    (draft,) = {name for name, _ in seen if name.startswith("1.") and name.endswith(".partial")}
    assert seen.index(("1-commit.1", [])) < seen.index((draft, [draft])) < seen.index(("manifests", ["1"]))
    assert all(name != "1" or names == ["1"] for name, names in seen)

    def failing(path: str, **options: bool) -> None:
        if path.endswith(".partial"):
            raise OSError(5, "the disk broke")
        sync(path, **options)

    monkeypatch.setattr(zarr_objects, "sync", failing)
    with pytest.raises(StoreError, match="the disk broke"):
        engine.commit({"commit/1": b"2"})
    assert [file.name for file in (tmp_path / "manifests").iterdir()] == ["1"]
    monkeypatch.undo()
    assert engine.records() == {"commit/1": b"1"}
    engine.commit({"commit/1": b"3"})
    engine.close()
    engine = ZarrEngine(tmp_path, create=False)
    assert engine.records() == {"commit/1": b"3"}
    assert [file.name for file in (tmp_path / "records").iterdir()] == ["3-commit.1"]
    engine.close()


@pytest.mark.parametrize("at", ["file", "manifest"])
def test_a_sync_that_failed_is_never_called_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """The commit fails, those after it too, and the store opens where it stood."""
    engine = ZarrEngine(tmp_path, create=True)
    engine.commit({"r": b"1"})
    put(engine, [state_block(some_bytes(10))])

    sync = zarr_objects.sync

    def failing(path: str, **options: bool) -> None:
        if at == "file" or "manifests" in path:
            raise OSError(5, "the disk broke")
        sync(path, **options)

    monkeypatch.setattr(zarr_objects, "sync", failing)
    with pytest.raises(StoreError, match=r"cannot be written .*the disk broke"):
        engine.commit({"r": b"2"})
    monkeypatch.undo()
    assert engine.records() == {"r": b"1"}
    with pytest.raises(StoreError, match="could not be synced: mend that and open the store again"):
        engine.commit({"r": b"3"})
    engine.close()
    engine = ZarrEngine(tmp_path, create=False)
    assert engine.records() == {"r": b"1"}
    engine.retain([])
    engine.commit({"r": b"4"})
    engine.close()


def test_a_disk_that_is_full_is_a_sentence_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it fills up, in chunks, descriptions, records or the manifest, the store stays at its commit."""
    engine = ZarrEngine(tmp_path, create=True)
    layout = layout_of((10, 20))
    kept = put(engine, segment_blocks(layout, 0))
    engine.commit({"r": b"0"})
    left = 0

    def spending(call: Callable[..., object]) -> Callable[..., object]:
        def spend(*args: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(28, "No space left on device")
            return call(*args)

        return spend

    monkeypatch.setattr(zarr_objects, "write_whole", spending(zarr_objects.write_whole))
    monkeypatch.setattr(zarr_chunks, "write_at", spending(zarr_chunks.write_at))
    monkeypatch.setattr(zarr_chunks.os, "posix_fallocate", spending(zarr_chunks.os.posix_fallocate))
    writes = 0
    while True:
        left = writes
        written = None
        try:
            written = put(engine, segment_blocks(layout, 1))
            engine.commit({"r": b"1"})
        except StoreFullError as error:
            assert "free some" in str(error)  # noqa: PT017 - what else is raised fails the test
            left = 1000
            engine.free(written or [])
            assert engine.records() == {"r": b"0"}
            check(engine, kept)
            assert {file.name for file in (tmp_path / "manifests").iterdir()} == {"1"}
            writes += 1
        else:
            break
    assert writes > 10
    check(engine, kept | written)
    engine.close()
    engine = ZarrEngine(tmp_path, create=False)
    assert engine.records() == {"r": b"1"}
    engine.close()


def test_a_full_disk_keeps_room_for_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what is needed, and what stands against it."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    engine = ZarrEngine(tmp_path, create=True)
    monkeypatch.setattr(zarr_chunks, "check_room", full)
    with pytest.raises(StoreFullError, match=r"1,048,576 of them kept free for records, but the file system of"):
        engine.write([state_block(some_bytes(5000))])
    monkeypatch.undo()
    assert not (tmp_path / "state/1.0").exists()
    engine.close()
    engine = ZarrEngine(tmp_path, create=True, store_budget=4999)
    with pytest.raises(StoreFullError, match=r"needs 5,000 more bytes but .* may hold 4,999: raise store_budget"):
        engine.write([state_block(some_bytes(5000))])
    engine.close()


def test_a_reader_returns_the_newest_records_whatever_a_writer_does_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a manifest or a record went while it looked it looks again; what it saw before never comes back."""
    writer = ZarrEngine(tmp_path, create=True)
    writer.commit({"r": b"0", "s": b"0"})
    reader = ZarrEngine(tmp_path, create=False, readonly=True)
    assert reader.records() == {"r": b"0", "s": b"0"}
    get, number = reader._objects.get, 0

    def meanwhile(key: str) -> bytes | None:
        nonlocal number
        if number < 5:
            number += 1
            writer.commit({"r": bytes([number])})
        return get(key)

    monkeypatch.setattr(reader._objects, "get", meanwhile)
    assert reader.records() == {"r": b"\5", "s": b"0"}
    monkeypatch.undo()
    older = (tmp_path / "manifests/6").read_bytes()
    writer.commit({"r": b"newest"})
    assert reader.records() == {"r": b"newest", "s": b"0"}
    (tmp_path / "manifests/7").unlink()
    (tmp_path / "manifests/6").write_bytes(older)
    with pytest.raises(CorruptStoreError, match="is at manifest 6 and was at 7 before: restore the store from a copy"):
        reader.records()
    reader.close()
    writer.close()


def test_records_of_one_commit_have_names_of_their_own(tmp_path: Path) -> None:
    """Where two would be one object, neither is written."""
    engine = ZarrEngine(tmp_path, create=True)
    engine.commit({"a": b"1"})
    with pytest.raises(ValueError, match=r"two records .* would be object records/2-a\.b"):
        engine.commit({"a.b": b"2", "a/b": b"3"})
    assert engine.records() == {"a": b"1"}
    engine.commit({"../up": b"4"})
    assert (tmp_path / "records/3-...up").read_bytes() == b"4"
    engine.close()


def test_a_manifest_that_names_what_is_no_name_is_refused(tmp_path: Path) -> None:
    """In a sentence."""
    from tiercache.store.records import RecordManifest

    engine = ZarrEngine(tmp_path, create=True)
    engine.commit({"a": b"1"})
    engine.close()
    for name in ("a\0b", "x" * 300, "\ud800"):
        wrong = RecordManifest(number=0).after({name: b"1"})
        (tmp_path / "manifests/1").write_bytes(wrong.to_bytes())
        with pytest.raises(CorruptStoreError):
            ZarrEngine(tmp_path, create=False, readonly=True).records()
