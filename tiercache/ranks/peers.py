"""Which processes the ranks are, so that a broken exchange can name the rank that ended."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

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
    started: int
    """In ticks since the system did: a clock that nobody sets; 0 where it cannot be read."""

    @classmethod
    def here(cls) -> Peer:
        """Return this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, process: int) -> Peer:
        """Return a process of this host."""
        found = _state(process)
        return cls(_host(), process, found[1] if found else 0)

    def fate(self) -> str | None:
        """Return what kept this process from answering, in words; None where it runs or is on another host."""
        if not self.host or self.host != _host():
            return None
        try:
            found = _state(self.process)
        except OSError:  # not to be read is not ended
            return None
        if found is None or found[1] != self.started or found[0] in "ZX":
            return "ended"
        return "was stopped" if found[0] == "T" else None


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


def ended(peers: Sequence[Peer]) -> str | None:
    """Return which of ``peers`` on this host are gone, in the words of `blame`; it does not wait."""
    gone = [f"rank {rank} (process {peer.process}) ended" for rank, peer in enumerate(peers) if peer.fate() == "ended"]
    return ", ".join(gone) or None


def rank_names(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 0 and 2" or, of many, the first of them and how many more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))} and {len(ranks) - MOST_NAMED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _state(process: int) -> tuple[str, int] | None:
    """Return a process's state, in the letters of proc_pid_stat(5), and when it started; None where there is none."""
    try:
        words = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return words[0].decode(), int(words[19])


@cache
def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
