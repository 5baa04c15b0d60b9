"""Concurrent requests to an object store, up to a limit; URLs of object stores."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
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
    """A store with slow requests: each records how many had to end, one after another, before it began.

    None ends before ``together`` of them are in flight, or 5 seconds have passed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_flight = 0
        self.reset()

    def reset(self, together: int = 1) -> None:
        self.requests = self.depth = self.most = 0
        self._together, self._met = together, asyncio.Event()

    async def _wait(self) -> None:
        depth = self.depth + 1
        self.requests += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        if self.in_flight >= self._together:
            self._met.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._met.wait(), 5)
        await asyncio.sleep(0.1)
        self.depth = max(self.depth, depth)
        self.in_flight -= 1

    async def set(self, key: str, *arguments: Any) -> None:
        await self._wait()
        await super().set(key, *arguments)

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        await self._wait()
        return await super().get(key, *arguments, **options)

    async def getsize(self, key: str) -> int:
        await self._wait()
        if key not in self._store_dict:
            raise FileNotFoundError(key)
        return len(self._store_dict[key])

    async def delete(self, key: str) -> None:
        await self._wait()
        await super().delete(key)


@pytest.fixture
def one_block_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one block per chunk, as for blocks of 64 MiB."""
    monkeypatch.setattr(zarr_layout, "PART_BYTES", 5000)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("one_block_a_chunk")
@pytest.mark.parametrize(("compression", "requests"), [(None, 25), ("zstd", 30)])
def test_puts_and_deletes_are_in_flight_together(compression: str | None, requests: int) -> None:
    """Eight blocks of two fields and their keys take a few latencies: for a segment, its deletion, or 50 objects.

    The state of three blocks is one chunk, or three compressed ones.
    """
    store = SlowStore()
    engine = ZarrEngine(store, create=True, keep_for=0.0)
    publish(engine, 0)
    contents = segment(layout_of([3200], page_rows=100, block_rows=400, compression=compression), 1, changed=False)
    states = [plain(f"states/0.{i}", some_bytes(100, i)) for i in range(50)]

    def measure(call: Callable[[], object], requests: int, together: int) -> None:
        store.reset(together)
        call()
        assert store.requests == requests
        assert together <= store.most <= 32
        assert store.depth <= 5

    measure(lambda: put(engine, contents), requests, 20)
    check(engine, contents)
    measure(lambda: put(engine, states), 50, 32)
    measure(lambda: drop_all(engine, states, shrink=True), 50, 32)
    measure(lambda: drop_all(engine, contents, shrink=True), requests, 5)


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


def test_the_list_of_a_store_reads_descriptions_together() -> None:
    store = SlowStore()
    engine = ZarrEngine(store, create=True)
    contents = [one for i in range(6) for one in put(engine, segment(layout_of([10]), i))]
    engine.close()
    engine = ZarrEngine(store, create=False)
    store.reset(32)
    found = engine.list()
    assert found.keys() == {one.blob.name for one in contents}
    assert {name: one.size for name, one in found.items()} == {one.blob.name: one.blob.size for one in contents}
    assert store.requests == len(store._store_dict) - 2 + 6
    assert store.most == 32
    assert store.depth <= 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("concurrency", [1, 5])
def test_no_more_requests_are_in_flight_than_allowed(concurrency: int) -> None:
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


@pytest.mark.parametrize("broken", ["c.0.0", "c.0", "zarr.json", "meta"])
def test_one_put_that_fails_fails_the_whole_put(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the others in flight have ended; no object of it is left."""
    store = MemoryStore()
    engine = ZarrEngine(store, create=True)
    kept, set_ = publish(engine, 0), MemoryStore.set
    before, contents = {*store._store_dict}, segment(layout_of([10, 20]), 1)

    async def failing(self: MemoryStore, key: str, *arguments: Any) -> None:
        if key.endswith(broken):
            raise RuntimeError("a node is down")
        await set_(self, key, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "set", failing)
        with pytest.raises(StoreError, match="a node is down"):
            put(engine, contents)
    assert {*store._store_dict} == before
    check(engine, put(engine, contents) + kept)


def test_chunks_wait_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incomplete chunks are put early if too many wait, and read back for the rest of their blocks."""
    monkeypatch.setattr(zarr_layout, "PART_BYTES", 64 << 10)
    engine = ZarrEngine(MemoryStore(), create=True)
    engine.memory_bytes = 20_000
    contents = segment(layout_of([20_000], page_rows=100, block_rows=500, dim=7), 1)
    writer: Any = engine._writer
    count, held = writer._count, list[int]()
    monkeypatch.setattr(writer, "_count", lambda num_bytes: (count(num_bytes), held.append(writer._bytes)))
    check(engine, put(engine, contents, order=np.random.default_rng(3)))
    assert max(held) <= 2 * 20_000 + 2 * (64 << 10)  # out of 880,000 bytes
    assert writer._bytes == 0


# -- URLs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("s3://bucket/model.tc", obstore.store.S3Store),
        ("gs://bucket/models/a.tc", obstore.store.GCSStore),
        ("az://container/model.tc", obstore.store.AzureStore),
    ],
)
def test_a_url_of_an_object_store_is_a_store_of_obstore(url: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rest of the path as its prefix, and credentials from the environment; messages show its URL."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    found = object_store(url)
    assert f"the store in {Objects(found).store}" == f"the store in {url}"
    assert isinstance(found.store, kind)


ANOTHER, REFUSED = (
    r"is not the URL of an object store: .*engine=ZarrEngine\(store",
    "cannot be opened as an object store",
)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        *((url, ANOTHER) for url in ("file:///tmp/x", "memory:///", "https://x/y", "hdfs://x/y", "ftp://x/y", "x", "")),
        *((url, REFUSED) for url in ("s3://", "gs://")),
    ],
)
def test_a_url_of_another_kind_is_refused(
    url: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        object_store(url)
    assert_sentence(caught.value)
    assert not list(tmp_path.iterdir())


def test_without_obstore_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"] + ["obstore", "obstore.store"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        StoreError, match=r"needs obstore .*: run `pip install 'tiercache-embeddings\[obstore\]'`"
    ) as caught:
        object_store("s3://bucket/model.tc")
    assert_sentence(caught.value)
