"""A rank that is lost ends the others on GPUs too, where nobody notices it by itself: with stand-ins for NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from tests.ranks.test_death import END, free_port
from tiercache.ranks import devices, process_groups, watch
from tiercache.ranks.peers import Peer
from tiercache.ranks.watch import Board, Watch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.ranks.pool import RanksPool

BODIES = "tests.ranks.watched:"


def test_ranks_that_close_in_order_leave_the_device_together(ranks_pool: RanksPool) -> None:
    """Those that closed first wait for the last; nothing is aborted."""
    assert ranks_pool.run(2, BODIES + "in_order", limit=40) == [[["left"], ["left"]]] * 2


def test_devices_are_connected_before_any_rank_can_fail(ranks_pool: RanksPool) -> None:
    """All-to-all, a broadcast of each rank, an all-reduce of the default group; who fails there gives the others up."""
    assert ranks_pool.run(2, BODIES + "connects", limit=40) == [[[("meta", 3)], 3, ["aborted"], True]] * 2


@pytest.mark.parametrize("kind", ["ValueError", "OutOfMemoryError"])
def test_an_error_of_one_rank_reaches_those_that_wait_for_it_on_the_device(ranks_pool: RanksPool, kind: str) -> None:
    """They name it; it is not lost in leaving; whatever thread waits for a transfer goes on, and all groups end."""
    words = {"ValueError": "on my own", "OutOfMemoryError": "7 GiB"}[kind]
    (name, sentence, logs), own = ranks_pool.run(2, BODIES + "fails", limit=40, kind=kind)
    assert own[:2] == [kind, words]
    assert (name, sentence) == ("RankError", f"rank 1 failed ({kind}: {words}) while rank 0 was exchanging rows{END}")
    for log in (*logs, *own[2]):
        assert log[0] == "aborted"


def test_a_rank_that_does_not_come_to_a_transfer_is_given_up_after_the_timeout(ranks_pool: RanksPool) -> None:
    """Long before torch would end the process; the rank itself is told too."""
    for rank, (said, log) in enumerate(ranks_pool.run(2, BODIES + "is_silent", limit=40)):
        assert log[0] == "aborted"
        (sentence,) = said
        assert sentence.startswith("a rank left, or gave no answer for 2 seconds, while rank ")
        assert f"while rank {rank} was " in sentence


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("memory", "OutOfMemoryError", "CUDA out of memory."),
        ("assert", "RankError", f"rank 1 failed while exchanging rows: CUDA error: device-side assert triggered{END}"),
    ],
)
def test_a_fault_of_this_rank_is_not_taken_for_a_lost_one(
    ranks_pool: RanksPool, kind: str, name: str, words: str
) -> None:
    """It says what it is, and the others hear it; afterwards nobody goes on out of step."""
    others, own = ranks_pool.run(2, BODIES + "breaks_by_itself", limit=40, kind=kind)
    fault = words.removeprefix("rank 1 failed while exchanging rows: ").removesuffix(END)
    kind = "OutOfMemoryError" if kind == "memory" else "RuntimeError"
    assert own[0][0] == [name, words]
    assert own[0][1][0] == others[0][0][0] == others[0][1][0] == "RankError"
    assert others[0][0][1].startswith(f"rank 1 failed ({kind}: {fault}) while rank 0 was ")
    assert own[1][0] == others[1][0] == "aborted"


def test_a_killed_rank_ends_those_that_wait_for_it_on_the_device() -> None:
    """Its sentence names the process; the others end by themselves, with their streams free."""
    variables = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.ranks.watched"]
    pipes: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [subprocess.Popen(command, env=variables | {"RANK": str(rank)}, **pipes) for rank in range(2)]
    try:
        out, err = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == 0, out + err
    said = json.loads(out)
    assert said["error"] == f"rank 1 (process {ranks[1].pid}) ended while rank 0 was exchanging rows{END}"
    assert said["log"] == ["aborted", "left"]
    assert "ended: the transfers of rank 0 are ended" in err


class Group:
    """A group on the device that knows only how to be aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def _get_backend(self, _: torch.device) -> Group:
        return self

    def abort(self) -> None:
        """Note it."""
        self.aborted.set()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """A group, and a watch that looks often."""
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return Group()


def watch_of(group: Group, *peers: Peer) -> Watch:
    """Return a watch of these, on no store."""
    made = Watch(rank=0, peers=peers, device=torch.device("cuda:1"), timeout=5.0, board=Board(None, ""))
    made.guard(group)
    return made


def test_a_process_that_ends_is_seen(group: Group) -> None:
    """One that lives is left alone."""
    child = subprocess.Popen(["sleep", "60"])
    peer = Peer.of(child.pid)
    watched = watch_of(group, Peer.here(), peer)
    assert not group.aborted.wait(0.2)
    child.kill()
    assert group.aborted.wait(20)
    child.wait()
    assert watched.lost == f"rank 1 (process {child.pid}) ended"


def test_a_main_thread_that_ended_leaves_no_transfer_behind(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thread that waits for one would keep the process, and all ranks, from ending."""
    ended = threading.Thread()  # as one that is not alive
    watched = watch_of(group, Peer.here())
    monkeypatch.setattr(watched, "_makers", (ended, threading.current_thread()))  # which trains
    assert not group.aborted.wait(0.2)
    monkeypatch.setattr(watched, "_makers", (ended, ended))
    assert group.aborted.wait(20)
    assert watched.lost == "rank 0 ended without leaving the ranks"


def test_what_keeps_the_watch_from_looking_once_does_not_end_it(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without a file left, say."""
    answers: list[OSError | str] = [OSError("too many open files"), "rank 1 (process 77) ended"]

    def ended(_: object) -> str:
        found = answers.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(watch, "ended", ended)
    watched = watch_of(group, Peer.here())
    assert group.aborted.wait(20)
    assert watched.lost == "rank 1 (process 77) ended"


def test_a_clock_that_is_set_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a process started is told by a clock that nobody sets."""
    peer = Peer.here()
    monkeypatch.setattr(psutil, "boot_time", lambda: 0.0)
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: 0.0)
    assert peer.fate() is None
    assert Peer(peer.host, peer.process, peer.started + 1).fate() == "ended"


def test_older_versions_of_torch_have_their_abort_under_another_name() -> None:
    """Its ``shutdown`` of then waits for nobody."""

    class Old:
        def __init__(self) -> None:
            self.aborted = False

        def _get_backend(self, _: torch.device) -> Old:
            return self

        def _shutdown(self) -> None:
            self.aborted = True

    old: Any = Old()
    process_groups.abort(old)
    assert old.aborted


def test_a_call_that_hangs_is_not_waited_for_longer_than_said() -> None:
    """And one that raises harms nobody."""
    never, done = threading.Event(), threading.Event()
    process_groups.each_within(0.1, [never.wait, lambda: 1 // 0, done.set])
    assert done.is_set()


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (torch.distributed.DistNetworkError("The client socket has timed out after 300000ms"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0."), True),
        (torch.distributed.DistBackendError("ncclRemoteError: A call failed possibly due to a network error"), True),
        (torch.distributed.DistBackendError("ncclSystemError: ...\nsocketProgress: Connection closed by peer"), True),
        (
            torch.distributed.DistBackendError("ncclSystemError: System call (e.g. socket, malloc) failed\nno space"),
            False,
        ),
        (torch.distributed.DistBackendError("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0"), False),
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("Tensors must be contiguous"), False),
    ],
)
def test_errors_of_connections_are_told_from_faults_here(error: RuntimeError, lost: bool) -> None:
    """By type, and by their words where they have no type."""
    assert process_groups.is_loss(error) is lost


@pytest.mark.parametrize(("visible", "local", "device"), [(8, "3", "cuda:3"), (1, "3", "cuda:0"), (2, None, "cuda:0")])
def test_the_gpu_of_a_rank_is_that_of_its_number_or_the_only_one_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: int, local: str | None, device: str
) -> None:
    """A launcher may give each process its own by CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert str(devices.device_of("cuda")) == device
