"""Concurrent requests to an object store, up to a limit; URLs of object stores."""

import asyncio
import builtins
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from tests.store.blobs import bytes_of, check, drop_all, layout_of, plain, publish, put, segment, some_bytes
from tests.store.damage import assert_sentence
from tiercache.store.engines import zarr_layout
from tiercache.store.engines.zarr_engine import ZarrEngine
from tiercache.store.engines.zarr_objects import Objects, object_store
from tiercache.store.store_errors import StoreError


class SlowStore(MemoryStore):
    """A store with slow requests: each records how many had to end, one after another, before it began."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self.depth = self.in_flight = self.most = 0

    def reset(self) -> None:
        self.requests = self.depth = self.most = 0

    async def _wait(self) -> None:
        depth = self.depth + 1
        self.requests += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0.1)
        self.depth = max(self.depth, depth)
        self.in_flight -= 1

    async def set(self, key: str, *arguments: Any) -> None:
        """Put."""
        await self._wait()
        await super().set(key, *arguments)

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        """Get."""
        await self._wait()
        return await super().get(key, *arguments, **options)

    async def getsize(self, key: str) -> int:
        """Return the size."""
        await self._wait()
        if key not in self._store_dict:
            raise FileNotFoundError(key)
        return len(self._store_dict[key])

    async def delete(self, key: str) -> None:
        """Delete."""
        await self._wait()
        await super().delete(key)


@pytest.fixture
def one_block_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one block per chunk, as for blocks of 64 MiB."""
    monkeypatch.setattr(zarr_layout, "PART_BYTES", 5000)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("one_block_a_chunk")
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_puts_reads_and_deletes_are_in_flight_together(compression: str | None) -> None:
    """Eight blocks of two fields and their keys take a few latencies: for a segment, its deletion, or 50 objects."""
    store = SlowStore()
    engine = ZarrEngine(store, create=True, keep_for=0.0)
    publish(engine, 0)
    contents = segment(layout_of([3200], page_rows=100, block_rows=400, compression=compression), 1, changed=False)
    requests = 25 if compression is None else 30  # the state of three blocks is one chunk, or three
    store.reset()
    put(engine, contents)
    assert store.requests == requests
    assert store.most >= 20
    assert store.depth <= 5
    check(engine, contents)
    states = [plain(f"states/0.{i}", some_bytes(100, i)) for i in range(50)]
    store.reset()
    put(engine, states)
    assert (store.requests, store.most) == (50, 32)
    assert store.depth <= 5
    store.reset()
    drop_all(engine, states, shrink=True)
    assert (store.requests, store.most) == (50, 32)
    assert store.depth <= 5
    store.reset()
    drop_all(engine, contents, shrink=True)
    assert store.requests == requests
    assert store.depth <= 5
    engine.close()


@pytest.mark.usefixtures("one_block_a_chunk")
def test_a_read_asks_for_all_that_it_needs_at_once() -> None:
    """Fields of a page together, then, for compressed tables, their parts; and all objects of a large blob."""
    store = SlowStore()
    engine = ZarrEngine(store, create=True)
    state = plain("states/0.1", some_bytes(60_000))
    rows = segment(layout_of([400], page_rows=100, block_rows=400), 1)[1]
    packed = segment(layout_of([400], page_rows=100, block_rows=400, compression="zstd"), 2)[1]
    put(engine, [state, rows, packed])
    for one, requests, depth in ((state, 12, 1), (rows, 2, 1), (packed, 4, 2)):
        store.reset()
        assert bytes_of(engine, one.blob, 0, one.blob.size) == one.pieces[0].tobytes()
        assert (store.requests, store.depth) == (requests, depth)
    engine.close()


def test_the_list_of_a_store_reads_descriptions_together() -> None:
    """One for each unknown group."""
    store = SlowStore()
    engine = ZarrEngine(store, create=True)
    contents = [one for i in range(6) for one in put(engine, segment(layout_of([10]), i))]
    engine.close()
    engine = ZarrEngine(store, create=False)
    store.reset()
    found = engine.list()
    assert found.keys() == {one.blob.name for one in contents}
    assert {name: one.size for name, one in found.items()} == {one.blob.name: one.blob.size for one in contents}
    assert store.requests == len(store._store_dict) - 2 + 6
    assert store.most == 32
    assert store.depth <= 5
    engine.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("concurrency", [1, 5])
def test_no_more_requests_are_in_flight_than_allowed(concurrency: int) -> None:
    """Over all threads."""
    store = SlowStore()
    engine = ZarrEngine(store, create=True, concurrency=concurrency, keep_for=0.0)
    states = [plain(f"states/0.{i}", some_bytes(100, i)) for i in range(8)]
    put(engine, states)
    drop_all(engine, states)
    sync(store.clear())
    assert store.most == concurrency
    engine.close()
    with pytest.raises(ValueError, match="0 requests in flight are too few: allow at least 1"):
        ZarrEngine(store, create=True, concurrency=0)


def test_one_put_that_fails_fails_the_whole_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any of them, after the others in flight have ended; no object of it is left."""
    store = MemoryStore()
    engine = ZarrEngine(store, create=True)
    kept, set_ = publish(engine, 0), MemoryStore.set
    before = {*store._store_dict}
    contents = segment(layout_of([10, 20]), 1)
    for broken in ("c.0.0", "c.0", "zarr.json", "meta"):

        async def failing(self: MemoryStore, key: str, *arguments: Any, broken: str = broken) -> None:
            if key.endswith(broken):
                raise RuntimeError("a node is down")
            await set_(self, key, *arguments)

        monkeypatch.setattr(MemoryStore, "set", failing)
        with pytest.raises(StoreError, match="a node is down"):
            put(engine, contents)
        monkeypatch.undo()
        assert {*store._store_dict} == before
    check(engine, put(engine, contents) + kept)
    engine.close()


@pytest.mark.usefixtures("one_block_a_chunk")
def test_chunks_wait_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incomplete chunks are put early if too many are pending, and read back for the rest of their blocks."""
    monkeypatch.setattr(zarr_layout, "PART_BYTES", 64 << 10)
    engine = ZarrEngine(MemoryStore(), create=True)
    engine.memory_bytes = 20_000
    contents = segment(layout_of([20_000], page_rows=100, block_rows=500, dim=7), 1)
    most = 0
    count = engine._writer._count  # type: ignore[attr-defined]

    def counting(num_bytes: int) -> None:
        nonlocal most
        count(num_bytes)
        most = max(most, engine._writer._bytes)  # type: ignore[attr-defined]

    monkeypatch.setattr(engine._writer, "_count", counting)
    check(engine, put(engine, contents, order=np.random.default_rng(3)))
    assert most <= 2 * 20_000 + 2 * (64 << 10)  # out of 880,000 bytes
    assert engine._writer._bytes == 0  # type: ignore[attr-defined]
    engine.close()


# -- URLs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("s3://bucket/model.tc", "S3Store"),
        ("gs://bucket/models/a.tc", "GCSStore"),
        ("az://container/model.tc", "AzureStore"),
    ],
)
def test_a_url_of_an_object_store_is_a_store_of_obstore(url: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rest of the path as its prefix, and credentials from the environment; messages show its URL."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    found = object_store(url)
    engine_label = f"the store in {Objects(found).store}"
    assert engine_label == f"the store in {url}"
    assert isinstance(found.store, getattr(obstore.store, kind))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "url", ["file:///tmp/x", "memory:///", "https://host/x", "hdfs://host/x", "ftp://x/y", "x", ""]
)
def test_a_url_of_another_kind_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With advice, and no folder is created."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"is not the URL of an object store: .*engine=ZarrEngine\(store") as caught:
        object_store(url)
    assert_sentence(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["s3://", "gs://"])
def test_a_url_that_obstore_refuses_is_an_error_in_words(url: str) -> None:
    """The message has one line."""
    with pytest.raises(ValueError, match="cannot be opened as an object store") as caught:
        object_store(url)
    assert_sentence(caught.value)


def test_without_obstore_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra of that name."""
    import_ = builtins.__import__

    def missing(name: str, *arguments: Any) -> Any:
        if name.startswith("obstore"):
            raise ImportError("No module named 'obstore'")
        return import_(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(
        StoreError, match=r"needs obstore .*: run `pip install 'tiercache-embeddings\[obstore\]'`"
    ) as caught:
        object_store("s3://bucket/model.tc")
    assert_sentence(caught.value)
