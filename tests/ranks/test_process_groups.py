"""How process groups are made: what keeps torch from making one ends in an error, not in a wait."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from tiercache.errors import RankError
from tiercache.ranks import group, process_groups
from tiercache.ranks.group import Ranks
from tiercache.ranks.peers import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two ranks, of which the other one died while Gloo connected to it."""
    over = threading.Event()
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda *_: over.wait())
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: over.wait())
    monkeypatch.setattr(process_groups, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(process_groups, "LATE_SECONDS", 0.1)
    yield
    over.set()


@pytest.mark.usefixtures("hanging")
@pytest.mark.parametrize("make", [process_groups.make_default, partial(process_groups.new_group, None)])
def test_a_group_that_torch_cannot_make_is_given_up_after_the_timeout(make: Any) -> None:
    """Gloo would go on for five times as long."""
    with pytest.raises(dist.DistNetworkError, match=r"a rank gave no answer for 0\.2 seconds"):
        make("gloo", 0.2)


@pytest.mark.usefixtures("hanging")
def test_a_group_is_given_up_when_a_process_of_it_ends() -> None:
    """Long before the timeout, in the words that name it."""
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    peers = [Peer.here(), Peer.of(other.pid)]
    threading.Timer(0.2, other.kill).start()
    with pytest.raises(dist.DistNetworkError, match=rf"^rank 1 \(process {other.pid}\) ended$"):
        process_groups.new_group(None, "gloo", 60.0, peers)
    other.wait()


def test_what_torch_says_is_what_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the thread that makes the group, with its type."""

    def refuse(*_: Any, **__: Any) -> None:
        raise dist.DistStoreError("no store")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(dist.DistStoreError, match=r"^no store$"):
        process_groups.make_default("gloo", 1.0)


class Torch:
    """The part of torch.distributed's own functions that makes a group of some ranks."""

    def __init__(self) -> None:
        self.default = SimpleNamespace(bound_device_id="cuda:0", rank=lambda: 2)
        self.names, self.bound, self.fails = list[str](), list[Any](), False
        self._world = SimpleNamespace(pg_map={}, pg_group_ranks={})

    def _get_default_group(self) -> Any:
        self._world.pg_map = Only(("gloo", "store"))
        return self.default

    def _new_process_group_helper(self, size: int, place: int, ranks: list[int], *others: Any, timeout: Any) -> Any:
        assert (size, place, ranks, others[1], timeout.total_seconds() >= 1) == (2, 1, [1, 2], "store", True)
        self.names.append(others[2])
        self.bound.append(self.default.bound_device_id)
        if self.fails:
            raise dist.DistStoreError("nobody came")
        return f"group {others[2]}", None


class Only:
    """A dict that has one value, for whatever is asked."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, _: Any) -> Any:
        return self.value


def test_a_group_of_some_ranks_has_a_name_of_its_own_also_after_one_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name leads to what is in the store. NCCL's are not split from a default group that is bound to a device."""
    torchs, like = Torch(), SimpleNamespace(group_name="theirs")
    monkeypatch.setattr(dist, "distributed_c10d", torchs)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [1, 2])
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(process_groups, "_MADE", Counter())
    first = process_groups.new_group(like, "gloo", 1.0)  # type: ignore[arg-type]
    torchs.fails = True
    with pytest.raises(dist.DistStoreError, match="nobody came"):
        process_groups.new_group(like, "nccl", 1.0)  # type: ignore[arg-type]
    torchs.fails = False
    process_groups.new_group(like, "nccl", 1.0)  # type: ignore[arg-type]
    assert torchs.names == [f"theirs/tiercache-{number}" for number in range(3)]
    assert torchs.bound == ["cuda:0", None, None]
    assert torchs.default.bound_device_id == "cuda:0"
    assert torchs._world.pg_group_ranks[first] == {1: 0, 2: 1}


def test_leaving_a_group_is_given_up_after_so_many_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the device, where it waits for other ranks; one that fails keeps none behind it. Elsewhere errors raise."""
    over, left = threading.Event(), list[Any]()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: left.append(group) or (group and over.wait()))
    process_groups.end(["wires", None], within=0.1)  # type: ignore[list-item]
    assert left == ["wires"]
    assert caplog.messages == ["a process group was not left within 0.1 seconds"]
    over.set()
    for thread in threading.enumerate():
        if thread.name == "tiercache-end":
            thread.join()
    tried = list[Any]()

    def refuse(group: Any) -> None:
        tried.append(group)
        raise ValueError("no such group")

    monkeypatch.setattr(dist, "destroy_process_group", refuse)
    process_groups.end(["wires", None], within=10.0)  # type: ignore[list-item]
    assert tried == ["wires", None]
    with pytest.raises(ValueError, match="no such group"):
        process_groups.end([None], within=None)


@pytest.mark.parametrize("error", [RuntimeError("no such address"), RankError("rank 1 ended"), KeyboardInterrupt()])
def test_a_default_group_is_left_where_joining_fails_behind_it(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Whatever ends the joining: the process can join again."""
    left: list[Any] = []

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(group, "launched", lambda: True)
    monkeypatch.setattr(group, "make_default", lambda *_: monkeypatch.setattr(dist, "is_initialized", lambda: True))
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(group, "new_group", fail)
    monkeypatch.setattr(group, "end", lambda groups, **_: left.extend(groups))

    with pytest.raises((RankError, KeyboardInterrupt)):
        Ranks.join(timeout=1)

    assert left == [None]
