"""Which processes the ranks are, so that a broken exchange can name the rank that ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

SETTLING_SECONDS = 0.5
"""How long a process that dies may take from closing its sockets to being seen as dead."""
MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank's process: number and start time tell it from a later process of the same number."""

    host: str
    """The running kernel and its process namespace; empty where they cannot be read."""
    process: int
    started: float

    @classmethod
    def here(cls) -> Peer:
        """Return this process."""
        this = psutil.Process()
        return cls(_host(), this.pid, this.create_time())

    def fate(self) -> str | None:
        """Return what kept this process from answering, in words; None where it runs or is on another host."""
        if not self.host or self.host != _host():
            return None
        try:
            found = psutil.Process(self.process)
            if found.create_time() != self.started or found.status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}:
                return "ended"
            return "was stopped" if found.status() == psutil.STATUS_STOPPED else None
        except psutil.NoSuchProcess:
            return "ended"
        except psutil.AccessDenied:
            return None


def blame(peers: list[Peer]) -> str | None:
    """Return which of ``peers``, in rank order, are gone or stopped, as "rank 1 (process 77) ended"; None: unknown.

    Waits up to ``SETTLING_SECONDS`` for a process to be seen as dead.
    """
    until = time.monotonic() + SETTLING_SECONDS
    while True:
        fates = [
            f"rank {rank} (process {peer.process}) {fate}" for rank, peer in enumerate(peers) if (fate := peer.fate())
        ]
        if fates:
            return ", ".join(fates)
        if time.monotonic() > until:
            return None
        time.sleep(0.02)


def rank_names(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 0 and 2" or, of many, the first of them and how many more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))} and {len(ranks) - MOST_NAMED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


@cache
def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
