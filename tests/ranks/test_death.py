"""A rank that is killed, or hangs, or never comes ends the others with a sentence, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_SECONDS = 90
END = ": training goes on from the last commit: start all ranks again"


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(size: int, of: int, how: str, timeout: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Start ``size`` of ``of`` ranks; whatever is left of them at the end is killed."""
    port = free_port()
    processes = []
    with ExitStack() as stack:
        for rank in range(size):
            variables = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(of),
                "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = [sys.executable, "-m", "tests.ranks.launched", how, str(timeout)]
            process = subprocess.Popen(
                command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def said(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Wait for a process to end by itself and return its lines."""
    out, err = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, out + err
    return [json.loads(line) for line in out.splitlines()]


def test_a_rank_that_is_killed_ends_the_others_at_once() -> None:
    """In the midst of exchanges, long before the timeout; the sentence names the rank and its process."""
    with started(3, 3, "kill", timeout=60) as ranks:
        for rank in (0, 2):
            first, last = said(ranks[rank])
            assert first["state"] == "in step"
            assert f"rank 1 (process {ranks[1].pid}) ended" in last["error"]
            assert last["error"].endswith(f" while rank {rank} was exchanging rows{END}")
            assert last["cause"] == "RuntimeError"
            assert last["seconds"] < 30
        assert ranks[1].wait() == -signal.SIGKILL


def test_a_rank_that_hangs_ends_the_others_within_the_timeout() -> None:
    """A stopped process is named as such by the ranks of its host."""
    with started(3, 3, "stop", timeout=4) as ranks:
        for rank in (0, 2):
            _, last = said(ranks[rank])
            assert f"rank 1 (process {ranks[1].pid}) was stopped" in last["error"]
            assert last["error"].endswith(f" while rank {rank} was exchanging rows{END}")
            assert last["seconds"] < 30
        assert ranks[1].poll() is None


@pytest.mark.parametrize(("how", "fate"), [("kill", "ended"), ("stop", "was stopped")])
def test_a_rank_that_is_waited_for_ends_the_others_too(how: str, fate: str) -> None:
    """It was at work for longer than the timeout before it was killed, or hung."""
    with started(2, 2, f"{how} at work", timeout=3) as ranks:
        _, last = said(ranks[0])
        assert last["error"] == f"rank 1 (process {ranks[1].pid}) {fate} while rank 0 was reading rows{END}"
        assert last["cause"] == "RuntimeError"
        assert 3 < last["seconds"] < 30


@pytest.mark.long
def test_a_rank_that_never_comes_ends_the_others_within_the_timeout() -> None:
    """With what to check."""
    with started(1, 2, "talk", timeout=3) as ranks:
        (line,) = said(ranks[0])
    assert line["error"].startswith("the ranks did not find each other within 3 seconds (")
    assert line["error"].endswith(
        "start as many processes as WORLD_SIZE says, all with the same MASTER_ADDR and MASTER_PORT"
    )
