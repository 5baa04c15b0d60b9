"""Two nodes under torchrun: two network namespaces with a cable between them, and two launchers on one host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from tests.ranks.test_death import LIMIT_SECONDS, free_port
from tests.ranks.trainings import CASES, assert_as_alone, resident, stored

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PER_NODE = 2
ADDRESSES = ("10.231.7.1", "10.231.7.2")


@dataclass(frozen=True)
class Node:
    """How a command runs on a node, and where it finds the first node."""

    prefix: list[str]
    master: str
    variables: dict[str, str]


ON_ONE_HOST = [Node([], "localhost", {})] * 2


def ip(*words: str) -> None:
    """Run the ip command; what it says against it is the error."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def two_namespaces() -> Iterator[list[Node]]:
    """Make two network namespaces with one cable between them, and take them away at the end.

    Each sees its own interface only: nothing can go through the host's loopback.

    Raises:
        OSError: there is no ip command, or it is not permitted.
    """
    names = [f"tc{os.getpid()}n{node}" for node in range(2)]
    interfaces = [f"tc{os.getpid()}v{node}" for node in range(2)]
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        first, second = interfaces
        ip("-n", names[0], "link", "add", first, "type", "veth", "peer", "name", second, "netns", names[1])
        for name, interface, address in zip(names, interfaces, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [
            Node(["ip", "netns", "exec", name], ADDRESSES[0], {"GLOO_SOCKET_IFNAME": interface})
            for name, interface in zip(names, interfaces, strict=True)
        ]


def torchrun(nodes: list[Node], *folder: str) -> list[subprocess.Popen[str]]:
    """Start the nodes' launchers with two ranks each that talk once, and train in a folder that both reach."""
    port = free_port()
    return [
        subprocess.Popen(
            [
                *node.prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                f"--nproc-per-node={PER_NODE}", f"--node-rank={number}", f"--master-addr={node.master}",
                f"--master-port={port}", "-m", "tests.ranks.launched", "talk", "60", *folder,
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | node.variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number, node in enumerate(nodes)
    ]  # fmt: skip


def check_what_they_say(launchers: list[subprocess.Popen[str]]) -> None:
    """Every rank got a number from every rank, and all know that rank 0 failed."""
    lines = []
    try:
        for launcher in launchers:
            out, err = launcher.communicate(timeout=LIMIT_SECONDS)
            assert launcher.returncode == 0, out + err
            lines += [json.loads(line) for line in out.splitlines()]
    finally:
        for launcher in launchers:
            launcher.terminate()  # a launcher takes its ranks with it
            launcher.wait()
    size = 2 * PER_NODE
    told = "rank 0 failed while opening the store: OSError: no such disk"
    assert sorted(lines, key=lambda line: int(line["rank"])) == [
        {
            "rank": rank,
            "local": str(rank % PER_NODE),
            "received": list(range(size)),
            "sentence": told if rank else "no such disk",
        }
        for rank in range(size)
    ]


@pytest.mark.parametrize("place", ["two namespaces", "one host"])
def test_ranks_of_two_nodes_talk_and_train_over_the_network(tmp_path: Path, place: str) -> None:
    """In two namespaces where they are permitted, else through one host's loopback; rows are those of one process.

    The one that does not run is skipped and says why.
    """
    passes = CASES["one"].cut(tmp_path / "passes")
    with ExitStack() as stack:
        nodes, refusal = ON_ONE_HOST, ""
        try:
            nodes = stack.enter_context(two_namespaces())
        except OSError as error:
            refusal = str(error)
        if place == "two namespaces" and refusal:
            pytest.skip(f"no network namespaces here, so the nodes are on one host: {refusal}")
        if place == "one host" and not refusal:
            pytest.skip("network namespaces are permitted here: the nodes are in two of them")
        check_what_they_say(torchrun(nodes, str(tmp_path)))
    assert_as_alone(stored(tmp_path), {}, replace(resident(CASES["one"], passes), dense={}))


@pytest.mark.long
def test_two_launchers_on_one_host_make_one_group() -> None:
    """What is tested of two nodes where namespaces are not permitted."""
    check_what_they_say(torchrun(ON_ONE_HOST))
