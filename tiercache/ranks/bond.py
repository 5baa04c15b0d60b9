"""What holds ranks together: where it breaks, every call says in one sentence why."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from tiercache.errors import RankError, StoreError, TierCacheError
from tiercache.ranks.call import elsewhere
from tiercache.ranks.peers import blame, rank_names
from tiercache.ranks.process_groups import each_within, is_loss
from tiercache.ranks.watch import no_answer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import NoReturn

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.ranks.call import Call
    from tiercache.ranks.peers import Peer
    from tiercache.ranks.watch import Board, Watch

ADVICE = "training goes on from the last commit: start all ranks again"
_BOARD_SECONDS = 2.0
"""What the board is given to answer: the host that keeps it may be gone."""


class Bond:
    """The bond of one rank to the others, for one thread's collectives.

    Attributes:
        peers: the process of every rank.
        watch: what ends transfers on the device, where there are any; all bonds of a process share it.
        board: where there is no watch: on which a rank that leaves by an error says so.
        broken: the sentence that every collective raises from now on.
    """

    def __init__(self, *, rank: int, timeout: float, peers: Sequence[Peer], watch: Watch | None) -> None:
        self.peers, self.watch = list(peers), watch
        self.board: Board | None = None
        self.broken: str | None = None
        self._rank, self._timeout = rank, timeout

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Raise RankError where the body cannot be reached by all ranks any more, or fails. ``what``: "reading rows".

        Memory that ran out on the device is raised as it is.
        """
        if self.broken is None and self.watch is not None and self.watch.lost is not None:
            self._lose(self.watch.lost, what)
        if self.broken is not None:
            raise RankError(self.broken)
        try:
            yield
        except RuntimeError as error:
            self._break(what, error)

    def expect(self, sent: torch.Tensor) -> None:
        """Note that a transfer of this tensor was begun, where it is on the device."""
        if self.watch is not None and sent.device.type != "cpu":
            self.watch.expect()

    def check_call(self, call: Call, mine: NDArray[np.int64], came: NDArray[np.int64], what: str) -> None:
        """Raise RankError, from now on, where frames say that other ranks are in another call."""
        if found := elsewhere(call, mine, came):
            others, words, advice = found
            were = f"{rank_names(others)} {'were' if others[1:] else 'was'} {words}"
            self.broken = f"{were} while rank {self._rank} was {what}: {advice}"
            raise RankError(self.broken)

    def give_up(self, error: BaseException) -> None:
        """Do as `Ranks.give_up` says."""
        if isinstance(error, SystemExit) and not error.code:
            return
        lost = None if self.watch is None else self.watch.lost
        if lost is None and is_loss(error):
            lost = blame(self.peers) or no_answer(self._timeout)
        if lost is not None and lost not in str(error):  # an error of torch, or of void numbers
            note = f"{lost.rstrip(',')}: {ADVICE}"
            error.__notes__ = [*(one for one in getattr(error, "__notes__", ()) if one != note), note]
        known = isinstance(error, RankError)  # of another rank's making
        if self.watch is not None:
            self.watch.lose(f"rank {self._rank} failed ({sentence_of(error)})", tell=not known)
        elif self.board is not None and not known:
            board, who = self.board, f"rank {self._rank} failed ({sentence_of(error)})"
            each_within(_BOARD_SECONDS, [lambda: board.tell(who)])

    def _break(self, what: str, error: RuntimeError) -> NoReturn:
        """Raise what an error of a collective means; another collective would meet ranks out of step."""
        faulty = isinstance(error, torch.cuda.OutOfMemoryError)
        lost = self._told() if self.watch is None else self.watch.lost
        who = None if faulty else lost or blame(self.peers) or (no_answer(self._timeout) if is_loss(error) else None)
        if who is not None:
            self._lose(who, what)
            raise RankError(self.broken) from error
        self.broken = f"rank {self._rank} failed while {what}: {first_line(error)}: {ADVICE}"
        if self.watch is not None:
            self.watch.lose(f"rank {self._rank} failed ({sentence_of(error)})")
        if faulty:
            raise error
        raise RankError(self.broken) from error

    def _told(self) -> str | None:
        """Return what a rank that left by an error has said."""
        found: list[str | None] = [None]
        if (board := self.board) is not None:
            each_within(_BOARD_SECONDS, [lambda: found.append(board.told())])
        return found[-1]

    def _lose(self, who: str, what: str) -> None:
        if self.watch is not None:  # so that this thread unwinds behind no transfer
            who = self.watch.lose(who)
        self.broken = f"{who} while rank {self._rank} was {what}: {ADVICE}"


def raise_told(told: Sequence[bytes], what: str) -> None:
    """Raise RankError with the first of the sentences, in JSON, that ranks told while ``what``; empty: all is well."""
    failed = [rank for rank, words in enumerate(told) if words]
    if failed:
        also = f" (and {rank_names(failed[1:])} too)" if failed[1:] else ""
        raise RankError(f"rank {failed[0]} failed while {what}{also}: {json.loads(told[failed[0]])}")


def sentence_of(error: BaseException) -> str:
    """Return what an error says, with its type where it is not one of ours."""
    words = first_line(error)
    return words if isinstance(error, (TierCacheError, StoreError)) else f"{type(error).__name__}: {words}"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says: torch adds many."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
