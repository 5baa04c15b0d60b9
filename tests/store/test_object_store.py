"""Writers of one object store, which has no locks: each takes over by a conditional put and fences the previous one."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import obstore
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import MemoryStore, S3Store
from zarr.storage import ObjectStore

from tests.store.blobs import (
    Content,
    bytes_of,
    check,
    drop_all,
    drop_fronts,
    head_of,
    layout_of,
    plain,
    publish,
    put,
    segment,
    some_bytes,
)
from tests.store.damage import assert_sentence
from tiercache.store.engines.zarr_engine import Heads, ZarrEngine
from tiercache.store.engines.zarr_objects import object_store
from tiercache.store.store_errors import BlockReadError, CorruptStoreError, StoreError, StoreInUseError

Make = Callable[[], Any]
"""Returns a new client of the test's object store."""


LOGIN = {"aws_access_key_id": "id", "aws_secret_access_key": "secret", "region_name": "us-east-1"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Run a local S3 server with conditional puts; yield its address."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture(params=["memory", "s3"])
def make(request: pytest.FixtureRequest) -> Make:
    """Return a function that opens an initially empty object store."""
    if request.param == "memory":
        memory = MemoryStore()
        return lambda: ObjectStore(memory)
    endpoint = request.getfixturevalue("server")
    bucket = f"b{abs(hash(request.node.name)) % 10**9}"
    boto3.client("s3", endpoint_url=endpoint, **LOGIN).create_bucket(Bucket=bucket)
    return lambda: ObjectStore(
        S3Store(
            bucket, endpoint=endpoint, region="us-east-1", access_key_id="id", secret_access_key="secret",
            client_options={"allow_http": True}, virtual_hosted_style_request=False,
        )
    )  # fmt: skip


def opened(make: Make, *, create: bool = False, keep_for: float = 0.0, **options: Any) -> ZarrEngine:
    return ZarrEngine(make(), create=create, keep_for=keep_for, **options)


def names_of(make: Make) -> set[str]:
    return {str(entry["path"]) for page in obstore.list(make().store) for entry in page}


def of_epoch(contents: list[Content], engine: ZarrEngine) -> list[Content]:
    """Return blobs with the writer's epoch in their names, as the store does."""
    found = []
    for one in contents:
        folder, word, *rest = one.blob.name.split("/")
        found.append(one._replace(blob=one.blob._replace(name="/".join([folder, f"{word}-{engine.epoch}", *rest]))))
    return found


def sweep(engine: ZarrEngine, needed: list[Content]) -> None:
    """Drop unneeded blobs, as a store does when it is opened for writing."""
    names = {one.blob.name for one in needed}
    engine.drop([(name, None) for name in engine.list() if name not in names])


def test_a_store_is_written_by_one_writer_after_another(make: Make) -> None:
    commits, before = 0, list[Content]()
    for _ in range(3):
        engine = opened(make, create=not commits)
        assert engine.newest() == (head_of(commits - 1) if commits else None)
        sweep(engine, before)
        check(engine, before)
        for _ in range(2):
            contents = of_epoch(segment(layout_of([10, 20]), 1 + commits), engine)
            contents = publish(engine, commits, contents)
            drop_all(engine, before)
            before, commits = contents, commits + 1
        engine.close()
    engine = opened(make, readonly=True)
    assert engine.newest() == head_of(commits - 1)
    assert engine.list().keys() == {one.blob.name for one in before}
    check(engine, before)
    engine.close()
    names = names_of(make)
    assert sum(name.startswith("heads/") for name in names) == 1
    (word,) = {name.split("/")[1] for name in names if name.startswith("segments/0")}
    assert word == before[0].blob.name.split("/")[1]
    assert not any(name.startswith(("free/", "probes/")) for name in names)


@pytest.mark.parametrize("keep_for", [0.0, 60.0])
def test_what_is_dropped_stays_for_those_who_may_read_it(make: Make, keep_for: float) -> None:
    """For the configured time, because remote readers are unknown."""
    engine = opened(make, create=True, keep_for=keep_for)
    contents = publish(engine, 0, segment(layout_of([30], compression="zstd"), 1) + segment(layout_of([9]), 2))
    reader = opened(make, readonly=True)
    drop_all(engine, contents[4:8])
    left = drop_fronts(engine, contents[:4], 2)
    engine.drop([], shrink=True)
    check(engine, left)
    assert engine.list().keys() == {one.blob.name for one in left + contents[8:]}
    assert engine.list()[left[1].blob.name].dropped == 2 * 4096
    if keep_for:
        check(reader, contents)
    else:
        check(reader, left)
        for blob, pieces in contents[1:8]:
            with pytest.raises(BlockReadError, match=r"is missing: .* does not exist"):
                bytes_of(reader, blob, 0, pieces[0].size)
    reader.close()
    engine.close()
    engine = opened(make)  # deletes what the previous one kept, once that is dropped again
    sweep(engine, left + contents[8:])
    drop_fronts(engine, contents[:4], 2)
    engine.close()
    words = {name.split("/")[1] for name in names_of(make) if name.startswith("segments/0")}
    assert words == {"0.1"}
    assert "segments/0.1/0/vector/c.1.0" not in names_of(make)
    assert "segments/0.1/0/vector/c.2.0" in names_of(make)


def test_a_writer_that_was_overtaken_changes_nothing(make: Make) -> None:
    """The new writer does not treat its blobs as its own, and a late drop does not affect a later writer's."""
    old = opened(make, create=True)
    kept = publish(old, 0, of_epoch(segment(layout_of([10]), 1), old))
    added = put(old, of_epoch([*segment(layout_of([10]), 2), plain("commits/1", some_bytes(10))], old))
    new = opened(make)
    assert {one.blob.name for one in added} <= new.list().keys()
    sweep(new, kept)
    mine = put(new, of_epoch(segment(layout_of([12]), 2), new))
    assert not {one.blob.name for one in mine} & old.list().keys()
    with pytest.raises(StoreInUseError, match="another writer has opened") as caught:
        old.publish(head_of(1), head_of(0))
    assert_sentence(caught.value)
    for call in (lambda: publish(old, 1), lambda: old.drop([]), lambda: put(old, added)):
        with pytest.raises(StoreError, match="another writer has opened"):
            call()
    old.close()
    mine += publish(new, 1)
    check(new, kept + mine)
    new.close()
    reader = opened(make, readonly=True)
    assert reader.newest() == head_of(1)
    check(reader, kept + mine)


def test_a_writer_whose_number_is_free_again_is_refused(make: Make) -> None:
    """The new writer took it and has deleted that head since; the head of the old one is not left either."""
    old = opened(make, create=True)
    publish(old, 0)
    new = opened(make)
    for number in (1, 2):
        publish(new, number)
    before = names_of(make)
    with pytest.raises(StoreInUseError, match="another writer has opened"):
        old.publish(head_of(7), head_of(0))
    assert names_of(make) == before
    publish(new, 3)
    for engine in (old, new):
        engine.close()
    reader = opened(make, readonly=True)
    assert reader.newest() == head_of(3)


def test_of_two_writers_at_once_one_wins_whole(make: Make) -> None:
    """They open and publish at any time: each commit is refused, or stays until the end."""
    engine = opened(make, create=True)
    publish(engine, 0)
    engine.close()
    start, lost, done = threading.Barrier(2), list[str](), list[int]()

    def write() -> None:
        start.wait()
        try:
            engine = opened(make)
            head = engine.newest()
            assert head is not None
            first = int(head.name.rpartition("/")[2]) + 1
            for number in range(first, first + 3):
                put(engine, of_epoch(segment(layout_of([10]), number), engine))
                engine.publish(head_of(number), head_of(number - 1))
                done.append(number)
            engine.close()
        except StoreInUseError as error:
            assert_sentence(error)
            lost.append(str(error))

    with ThreadPoolExecutor(2) as pool:
        for writer in [pool.submit(write) for _ in range(2)]:
            writer.result()
    assert done == sorted(set(done))
    assert lost or len(done) == 6
    engine = opened(make)
    assert engine.newest() == head_of(done[-1])


def test_the_blobs_of_tables_are_listed_and_dropped(make: Make) -> None:
    """Each writer that created the store has one, by its epoch."""
    engine = opened(make, create=True)
    put(engine, [plain(f"tables-{engine.epoch}", some_bytes(100))])
    publish(engine, 0)
    engine._objects.put("tables-old.txt", b"mine")
    engine.close()
    engine = opened(make)
    kept = put(engine, [plain(f"tables-{engine.epoch}", some_bytes(50))])
    assert engine.list().keys() == {"tables-1", f"tables-{engine.epoch}", "commits/0"}
    engine.drop([("tables-1", None)], shrink=True)
    check(engine, kept)
    engine.close()
    assert {name for name in names_of(make) if name.startswith("tables")} == {kept[0].blob.name, "tables-old.txt"}


def test_an_error_of_an_object_store_is_a_sentence(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any exception of the client; a store that cannot be reached is not called corrupt."""
    engine = opened(make, create=True)
    kept = publish(engine, 0, segment(layout_of([10]), 1))

    async def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("the network is down")

    async def failing_list(*_: Any) -> Any:
        raise RuntimeError("the network is down")
        yield

    objects, lists = {"set": failing, "get": failing}, {"list_prefix": failing_list, "_list": failing_list}
    calls: tuple[tuple[dict[str, Any], Callable[[], object], str], ...] = (
        (objects, lambda: put(engine, segment(layout_of([10]), 2)), ""),
        (objects, lambda: put(engine, [plain("states/0.1", some_bytes(200_000))]), ""),
        (objects, lambda: check(opened(make, readonly=True), kept), ""),
        (lists, engine.list, "cannot be read .*"),
        (lists, engine.newest, "cannot be read .*"),
        ({"set_if_not_exists": failing}, lambda: publish(engine, 1), ""),
    )
    for broken, call, words in calls:
        check(engine, kept)
        with monkeypatch.context() as patch:
            for name, fails in broken.items():
                patch.setattr(ObjectStore, name, fails)
            with pytest.raises(StoreError, match=f"{words}the network is down") as caught:
                call()
        assert not isinstance(caught.value, CorruptStoreError)
        assert_sentence(caught.value)


@pytest.mark.parametrize("at", ["answer", "interrupt"])
def test_a_head_that_the_store_did_not_confirm_is_whole_or_not_there(
    make: Make, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The put arrived, its answer did not: nothing more is written, and the next writer finds it."""
    engine = opened(make, create=True)
    kept = publish(engine, 0)
    set_, create = ObjectStore.set_if_not_exists, Heads._create

    async def unheard(*arguments: Any) -> None:
        await set_(*arguments)
        raise RuntimeError("the network is down")

    def interrupted(*arguments: Any) -> None:
        create(*arguments)
        raise KeyboardInterrupt

    if at == "answer":
        monkeypatch.setattr(ObjectStore, "set_if_not_exists", unheard)
    else:
        monkeypatch.setattr(Heads, "_create", interrupted)
    with pytest.raises((StoreError, KeyboardInterrupt)):
        publish(engine, 1)
    monkeypatch.undo()
    assert engine.newest() == head_of(1)
    if at == "answer":
        with pytest.raises(StoreError, match="did not confirm its newest commit: open it again") as caught:
            publish(engine, 2)
        assert_sentence(caught.value)
        engine.close()
        engine = opened(make)
    assert engine.newest() == head_of(1)
    check(engine, kept + publish(engine, 2))


def test_a_url_is_the_store_below_its_path(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stores of one bucket do not see each other."""
    boto3.client("s3", endpoint_url=server, **LOGIN).create_bucket(Bucket="urls")
    for name, value in {**LOGIN, "aws_endpoint": server, "aws_allow_http": "true"}.items():
        monkeypatch.setenv(name.upper().replace("REGION_NAME", "AWS_REGION"), value)
    kept, urls = [], [f"s3://urls/models/{i}.tc" for i in range(2)]
    for i, url in enumerate(urls):
        engine = ZarrEngine(object_store(url), create=True)
        assert engine.newest() is None
        kept.append(publish(engine, 0, segment(layout_of([10 + i]), i)))
        engine.close()
    for contents, url in zip(kept, urls, strict=True):
        engine = ZarrEngine(object_store(url), create=False, readonly=True)
        assert engine.label == f"the store in {url}"
        check(engine, contents)
        assert engine.list().keys() == {one.blob.name for one in contents}
        engine.close()
