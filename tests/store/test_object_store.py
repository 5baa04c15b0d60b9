"""Writers of one object store, which has no lock: each takes over by a conditional put and fences the one before."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import obstore
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import MemoryStore, S3Store
from zarr.storage import ObjectStore

from tests.store.conftest import small_tables
from tests.store.damage import assert_sentence
from tests.store.test_rewrite import rows_of
from tests.store.world import World
from tiercache.store import CommitMissingError, Store, StoreError, StoreInUseError, ZarrEngine

Make = Callable[[], Any]
"""Return a client of its own of the one object store of a test."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Run a server of S3 that has conditional puts, on loopback; its address."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture(params=["memory", "s3"])
def make(request: pytest.FixtureRequest) -> Make:
    """Return what opens an object store that is empty at first."""
    if request.param == "memory":
        memory = MemoryStore()
        return lambda: ObjectStore(memory)
    endpoint = request.getfixturevalue("server")
    bucket = f"b{abs(hash(request.node.name)) % 10**9}"
    known = {"aws_access_key_id": "id", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint, **known).create_bucket(Bucket=bucket)
    return lambda: ObjectStore(
        S3Store(
            bucket, endpoint=endpoint, region="us-east-1", access_key_id="id", secret_access_key="secret",
            client_options={"allow_http": True}, virtual_hosted_style_request=False,
        )
    )  # fmt: skip


def opened(make: Make, world: World | None = None, **options: Any) -> Store:
    """Open the store by a client of its own."""
    readonly = options.get("mode") == "r"
    engine = ZarrEngine(make(), create=world is not None, readonly=readonly, keep_for=options.pop("keep_for", 0.0))
    return Store.open(None, tables=None if world is None else world.tables, engine=engine, **options)


def test_a_store_trains_is_opened_again_and_goes_on(make: Make) -> None:
    """Each writer's blocks have names of their own, and what no commit needs goes."""
    world = World(small_tables()[1:3])
    with opened(make, world) as store:
        world.run(store, 2)
    for _ in range(3):
        with opened(make) as store:
            assert rows_of(store) == world.rows
            world.run(store, 2)
    with opened(make, mode="r") as store:
        assert rows_of(store) == world.rows
        world.check(store, after=world.pass_index - 1)
        assert store.state() == world.state
        needed = {s.id for s in store.segments}
    names = {str(entry["path"]) for page in obstore.list(make().store) for entry in page}
    assert {int(name.split("/")[1].split("-")[0]) for name in names if name.count("/") > 1} == needed
    assert sum(name.startswith("manifests/") for name in names) == 1


@pytest.mark.parametrize("keep_for", [0.0, 60.0])
def test_what_is_free_stays_for_those_who_may_read_it(make: Make, keep_for: float) -> None:
    """For as long as was said: nobody knows of readers elsewhere, and one that was too slow is told so."""
    world = World(small_tables()[1:3])
    with opened(make, world, keep_for=keep_for) as store:
        world.run(store, 2)
        before, state = dict(world.rows), world.state
        with opened(make, mode="r") as reader:
            world.run(store, 4)
            if keep_for:
                assert (rows_of(reader), reader.state()) == (before, state)
            else:
                with pytest.raises(
                    CommitMissingError, match=r"was opened at commit 1, which .* given up since, .*keep_for"
                ):
                    rows_of(reader)
    with opened(make) as store:  # what the one before left goes
        world.run(store, 2)
    left = [one["path"].split("/") for some in obstore.list(make().store) for one in some]
    with opened(make, mode="r") as store:
        assert {path[1].partition("-")[0] for path in left if path[0] == "segments"} - {"zarr.json"} == {
            str(segment.id) for segment in store.segments
        }


def test_a_writer_that_was_overtaken_in_the_midst_of_a_training_changes_nothing(make: Make) -> None:
    """It had dumped a pass whose blocks the new one would call by the same names; both go on, one is told."""
    world, other = World(small_tables()[1:3]), World(small_tables()[1:3])
    old = opened(make, world)
    world.run(old, 2)
    other.run_to(world)
    old_rows = dict(world.rows)
    world.train()
    world.append(old)
    with opened(make) as new:
        assert rows_of(new) == old_rows
        other.run(new, 1)
        world.pass_index += 1
        with pytest.raises(StoreInUseError, match="another writer has opened") as caught:
            world.publish(old)
        assert_sentence(caught.value)
        with pytest.raises(StoreError, match="another writer has opened"):
            world.publish(old)
        old.close()
        other.run(new, 2)
        assert rows_of(new) == other.rows
    with opened(make, mode="r") as store:
        assert rows_of(store) == other.rows


def test_of_two_writers_at_once_one_wins_whole(make: Make) -> None:
    """They open, dump and commit as they like: each commit is refused, or there until the end."""
    world = World(small_tables()[1:3])
    with opened(make, world) as store:
        world.run(store, 2)
    start, lost, done = threading.Barrier(2), list[str](), list[dict[Any, bytes]]()

    def write(seed: int) -> None:
        mine = World(small_tables()[1:3])
        mine.run_to(world)
        start.wait()
        try:
            with opened(make) as store:
                if store.commit.cursor.pass_index > mine.pass_index:
                    lost.append("too late: the other one has committed")
                    return
                for i in range(3):
                    mine.schedule = 10 * seed + i
                    mine.run(store, 1)
                    done.append({**mine.rows})
        except StoreInUseError as error:
            assert_sentence(error)
            lost.append(str(error))

    threads = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost
    assert done
    with opened(make, mode="r") as store:
        assert rows_of(store) == done[-1]
    with opened(make) as store:
        assert rows_of(store) == done[-1]


def test_what_a_store_of_objects_raises_is_a_sentence(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the client calls its errors."""
    world = World(small_tables()[1:3])
    store = opened(make, world)
    world.run(store, 1)

    async def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("the network is down")

    monkeypatch.setattr(ObjectStore, "set_if_not_exists", failing)
    with pytest.raises(StoreError, match="the network is down") as caught:
        world.run(store, 1)
    assert_sentence(caught.value)
    monkeypatch.undo()
    store.close()


@pytest.mark.parametrize("at", ["answer", "interrupt"])
def test_a_commit_that_the_store_did_not_confirm_is_whole_or_not_there(
    make: Make, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The put arrived, its answer did not: another commit would overwrite the records that it names."""
    world = World(small_tables()[1:3])
    store = opened(make, world)
    world.run(store, 1)
    put, create = ObjectStore.set_if_not_exists, ZarrEngine._create

    async def unheard(*arguments: Any) -> None:
        await put(*arguments)
        raise RuntimeError("the network is down")

    def interrupted(*arguments: Any) -> None:
        create(*arguments)
        raise KeyboardInterrupt

    if at == "answer":
        monkeypatch.setattr(ObjectStore, "set_if_not_exists", unheard)
    else:
        monkeypatch.setattr(ZarrEngine, "_create", interrupted)
    with pytest.raises((StoreError, KeyboardInterrupt)):
        world.run(store, 1)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="did not say whether its newest commit is there: open it again") as caught:
        world.publish(store)
    assert_sentence(caught.value)
    store.close()
    with opened(make) as again:
        assert rows_of(again) == world.rows
        world.state = again.state()
        world.run(again, 2)
        assert rows_of(again) == world.rows
