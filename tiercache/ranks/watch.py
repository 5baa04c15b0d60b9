"""What ends the transfers of this process on the device where a rank is lost: NCCL itself would wait for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from tiercache.ranks.peers import blame, ended
from tiercache.ranks.process_groups import END_SECONDS, abort, each_within

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiercache.ranks.peers import Peer

LOOK_SECONDS = 1.0
GRACE_SECONDS = 2.0
"""What transfers in flight are given to end by themselves: a rank may end right after the last one of all."""


class Board:
    """Where one rank says that a rank was lost, for all to read. It is the store by which they met."""

    def __init__(self, store: Any, name: str) -> None:
        """store: of torch.distributed; None: nothing is told and nothing heard. name: the same on all ranks."""
        self._store, self._name = store, name

    def turn(self) -> Board:
        """Return an empty one for what begins now; all ranks turn theirs equally often."""
        return Board(self._store, f"{self._name}+")

    def tell(self, who: str) -> None:
        """Say it, where nobody has said anything."""
        store = self._store
        if self.told() is None and store is not None:
            store.set(self._name, who)

    def told(self) -> str | None:
        """Return what was said."""
        try:
            store = self._store
            if store is None or not store.check([self._name]):
                return None
            return str(store.get(self._name), "utf-8")
        except RuntimeError:  # it ends with the process that keeps it
            self._store = None
            return None


class Watch:
    """The groups of this process on the device, and a thread that aborts them when a rank is lost.

    A transfer whose other side is gone never ends, and whoever waits for the device waits with it: only an abort from
    another thread lets it go on, with void numbers, to the next collective, which raises RankError. Every second the
    thread looks whether a process of this host ended, whether a rank gave up or lost another one, and whether a
    transfer takes longer than ``timeout`` seconds; what is in flight then gets `GRACE_SECONDS`. It logs the sentence
    too. It also aborts where the main thread of this process ended, and that which made this, and left transfers, which
    would keep it from ending. A CUDA graph is to be captured with ``capture_error_mode="thread_local"``: questions of
    another thread to its marks would end a capture in the "global" mode.

    Groups that are not guarded here, as a default group of the user's own, torch itself ends: its watchdog ends the
    process (SIGABRT, with words of its own) after the group's timeout and about a minute, or a minute after a
    connection to another host broke.

    Attributes:
        lost: who was lost first, in words, as "rank 1 (process 77) ended".
    """

    def __init__(self, *, rank: int, peers: Sequence[Peer], device: torch.device, timeout: float, board: Board) -> None:
        self.lost: str | None = None
        self._rank, self._peers, self._device, self._timeout = rank, list(peers), device, timeout
        self._board = board
        self._groups: list[Any] = []
        self._expected: deque[tuple[float, Any]] = deque()
        self._makers = threading.main_thread(), threading.current_thread()
        self._lock, self._stop, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="tiercache-watch")
        self._thread.start()

    def guard(self, group: Any) -> None:
        """Abort this group too when a rank is lost."""
        with self._lock:
            self._groups.append(group)

    def release(self, group: Any) -> None:
        """Abort it no more; with the last one the thread ends."""
        with self._lock:
            self._groups = [one for one in self._groups if one is not group]
            left = bool(self._groups)
        if not left:
            self._stop.set()

    def expect(self) -> None:
        """Note that a transfer was begun on the current stream: with what is before it it may take ``timeout``."""
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        with self._lock:
            self._forget_ended()
            self._expected.append((time.monotonic(), mark))

    def lose(self, who: str, *, tell: bool = True) -> str:
        """End all transfers of this process; return who was lost first, as ``lost``. Any thread.

        It returns when they have ended, or after `END_SECONDS`. tell: whether the other ranks are told.
        """
        with self._lock:
            first, self.lost = self.lost is None, self.lost or who
            groups, lost = list(self._groups), self.lost
        if not first:
            self._over.wait(END_SECONDS)
            return lost
        calls: list[Callable[[], object]] = [lambda group=group: abort(group) for group in groups]  # type: ignore[misc]
        if tell:
            # also where no call of this process will raise it: torch ends processes by itself
            logging.getLogger("tiercache").error("%s: the transfers of rank %d are ended", who, self._rank)
            calls.append(lambda: self._board.tell(who))
        each_within(END_SECONDS, calls)
        self._over.set()
        return lost

    def _look(self) -> None:
        torch.cuda.set_device(self._device)  # else to ask for a mark makes a context on GPU 0
        while not self._stop.wait(LOOK_SECONDS) and self.lost is None:
            if who := self._found():
                until = time.monotonic() + GRACE_SECONDS
                while self._waits() and time.monotonic() < until and not self._stop.wait(0.05):
                    pass
                self.lose(who)
                return
            if not any(maker.is_alive() for maker in self._makers):
                self.lose(f"rank {self._rank} ended without leaving the ranks")
                return

    def _found(self) -> str | None:
        """Return `_who`; what keeps this from looking now may not do so the next time."""
        try:
            return self._who()
        except Exception:  # of the system: a process that cannot be looked at, no file left
            logging.getLogger("tiercache").warning("rank %d could not look for lost ranks", self._rank, exc_info=True)
            return None

    def _who(self) -> str | None:
        if found := self._board.told() or ended(self._peers):
            return found
        if self._waits(since=self._timeout):
            return blame(self._peers) or no_answer(self._timeout)
        return None

    def _waits(self, since: float = 0.0) -> bool:
        with self._lock:
            self._forget_ended()
            return bool(self._expected) and self._expected[0][0] <= time.monotonic() - since

    def _forget_ended(self) -> None:
        while self._expected and _has_ended(self._expected[0][1]):
            self._expected.popleft()


def no_answer(timeout: float) -> str:
    """Return how a rank is called of which nothing else is known."""
    return f"a rank left, or gave no answer for {timeout:g} seconds,"


def _has_ended(mark: Any) -> bool:
    try:
        return bool(mark.query())
    except RuntimeError:  # of the device: the thread that trains gets it too, and does more than this one can
        return True
