"""Stands in for a GPU and NCCL where there are none, as far as a rank that is lost can tell the difference.

A transfer is begun when its call returns, and a stream of the device does one after the other. It ends when all ranks
have begun it; where one never does it waits for ever, also where that rank is dead: only ``abort`` ends it. To leave a
group waits for all ranks to leave it. Tensors that travel are on torch's device "meta": nobody looks at them.
"""

from __future__ import annotations

import queue
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tiercache.ranks import group, process_groups, watch
from tiercache.ranks.group import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiercache.ranks.peers import Peer


class Stream:
    """The device: does what it was given, one after the other."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self._change = threading.Condition()
        self._given: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def give(self, work: Any) -> None:
        """Begin something."""
        self.begun += 1
        self._given.put(work)

    def synchronize(self, *_: object) -> None:
        """Wait until all is done, as ``.item()`` does."""
        with self._change:
            self._change.wait_for(lambda: self.ended == self.begun)

    def _work(self) -> None:
        while True:
            self._given.get()()
            with self._change:
                self.ended += 1
                self._change.notify_all()


class Nccl:
    """A group of NCCL, with Gloo underneath: how ``torch.distributed`` and an abort see it."""

    def __init__(self, under: dist.ProcessGroup, stream: Stream) -> None:
        self.log: list[str] = []
        self._under, self._stream, self._aborted = under, stream, threading.Event()

    def _get_backend(self, _: torch.device) -> Nccl:
        return self

    def transfer(self) -> None:
        """Begin one."""
        if self._aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted on rank 0.")
        self._stream.give(self._meet)

    def abort(self) -> None:
        """End all transfers; wait until they have."""
        self.log.append("aborted")
        self._aborted.set()
        self._stream.synchronize()

    def shutdown(self) -> None:
        """Leave together with all ranks, unless aborted."""
        self.log.append("left")
        self._meet()

    def _meet(self) -> None:
        with suppress(RuntimeError):
            met = dist.barrier(group=self._under, async_op=True)
            while not self._aborted.is_set() and not met.is_completed():  # type: ignore[union-attr]
                self._aborted.wait(0.005)
            if self._aborted.is_set() or not met.exception():  # type: ignore[union-attr]
                return
        self._aborted.wait()  # a rank is gone, which nobody notices


class Event:
    """A mark in the stream."""

    stream: Stream

    def record(self, _: object) -> None:
        """Note where the stream's end is."""
        self.at = self.stream.begun

    def query(self) -> bool:
        """Return whether the stream has come so far."""
        return self.stream.ended >= self.at


@contextmanager
def ranks_on_device(timeout: float = 30.0) -> Iterator[tuple[Ranks, Nccl, Stream]]:
    """Put the stand-ins in place, where a default group of Gloo is; give ranks, their wires and the device."""
    stream, Event.stream = (made := Stream()), made
    kept: list[tuple[Any, str, Any]] = []

    def put(where: Any, name: str, what: Any) -> None:
        kept.append((where, name, getattr(where, name)))
        setattr(where, name, what)

    def all_to_all(come: Any, go: Any, *sizes: Any, group: Any = None) -> Any:
        return group.transfer() if isinstance(group, Nccl) else real_all_to_all(come, go, *sizes, group=group)

    def broadcast(piece: Any, source: int, group: Any = None, async_op: bool = False) -> Any:
        if not isinstance(group, Nccl):
            return real_broadcast(piece, source, group=group, async_op=async_op)
        group.transfer()
        return SimpleNamespace(wait=lambda: None)

    def global_rank(group: Any, rank: int) -> int:
        return rank if isinstance(group, Nccl) else real_global_rank(group, rank)

    def destroy(group: Any = None) -> None:
        group.shutdown() if isinstance(group, Nccl) else real_destroy(group)

    def new_group(like: Any, backend: str, timeout: float, peers: Sequence[Peer] = ()) -> Any:
        made = process_groups_new_group(like, "gloo", timeout, peers)
        return Nccl(made, stream) if backend == "nccl" else made

    real_all_to_all, real_destroy = dist.all_to_all_single, dist.destroy_process_group
    real_broadcast, real_global_rank = dist.broadcast, dist.get_global_rank
    process_groups_new_group = process_groups.new_group
    put(dist, "all_to_all_single", all_to_all)
    put(dist, "broadcast", broadcast)
    put(dist, "get_global_rank", global_rank)
    put(dist, "destroy_process_group", destroy)
    put(group, "new_group", new_group)
    put(torch.cuda, "Event", Event)
    put(torch.cuda, "current_stream", lambda _: stream)
    put(torch.cuda, "set_device", lambda _: None)
    put(torch.cuda, "synchronize", stream.synchronize)
    put(watch, "LOOK_SECONDS", 0.05)
    put(watch, "GRACE_SECONDS", 0.1)
    try:
        host, wires = new_group(None, "gloo", timeout), new_group(None, "nccl", timeout)
        yield Ranks(device=torch.device("meta"), timeout=timeout, host=host, wires=wires), wires, stream
    finally:
        for where, name, what in reversed(kept):
            setattr(where, name, what)


def exchange(ranks: Ranks, stream: Stream) -> None:
    """Exchange a byte on the device and wait for it."""
    ones = [1] * ranks.size
    ranks.exchange(torch.zeros(ranks.size, dtype=torch.uint8, device="meta"), ones, ones)
    stream.synchronize()
