"""How process groups are made: what keeps torch from making one ends in an error, not in a wait."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from tiercache.ranks import process_groups
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
    peers, begun = [Peer.here(), Peer.of(other.pid)], time.monotonic()
    threading.Timer(0.2, other.kill).start()
    with pytest.raises(dist.DistNetworkError, match=rf"^rank 1 \(process {other.pid}\) ended$"):
        process_groups.new_group(None, "gloo", 60.0, peers)
    assert time.monotonic() - begun < 30
    other.wait()


def test_what_torch_says_is_what_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the thread that makes the group, with its type."""

    def refuse(*_: Any, **__: Any) -> None:
        raise dist.DistStoreError("no store")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(dist.DistStoreError, match=r"^no store$"):
        process_groups.make_default("gloo", 1.0)
