"""Process groups of torch.distributed: how they are made, how one is left, and what their errors say."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from tiercache.ranks.peers import ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tiercache.ranks.peers import Peer

T = TypeVar("T")

SECOND_LINE_SECONDS = 60.0
"""How much longer than the `Watch` torch waits for a transfer of NCCL: then it ends the process."""
LOOK_SECONDS = 0.5
LATE_SECONDS = 5.0
"""How much longer than torch was told to wait it may take to say so."""
END_SECONDS = 20.0
"""How long the groups of ranks that lost one may take to end."""
_MADE = Counter[tuple[str, tuple[int, ...]]]()
"""Groups of some ranks so far, by the group they are like: equally many on each of its ranks, which made them."""


def launched() -> bool:
    """Return whether torchrun, or whoever does as it does, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def make_default(backend: str, timeout: float) -> None:
    """Make the default group of the processes that torchrun started. Collective."""
    patience = _patience(backend, timeout)
    _made(lambda: dist.init_process_group(backend, timeout=patience), patience, ())


def new_group(
    like: dist.ProcessGroup | None, backend: str, timeout: float, peers: Sequence[Peer] = ()
) -> dist.ProcessGroup:
    """Return another group of the ranks of ``like``. Collective among these.

    Raises RuntimeError where they do not come within ``timeout`` seconds; over Gloo soon after one of ``peers`` ended.
    """
    ranks, patience = dist.get_process_group_ranks(like), _patience(backend, timeout)
    if like is None or len(ranks) == dist.get_world_size():

        def make() -> dist.ProcessGroup:
            made: dist.ProcessGroup = dist.new_group(ranks, patience, backend)
            return made

    else:
        kind = like.group_name, tuple(ranks)
        name = f"{like.group_name}/tiercache-{_MADE[kind]}"
        _MADE[kind] += 1  # also where it fails: what that leaves in the store has the name

        def make() -> dist.ProcessGroup:
            return _part_of_all(name, ranks, backend, patience)

    return _made(make, patience, peers) if backend == "gloo" else make()


def _made(make: Callable[[], T], patience: timedelta, peers: Sequence[Peer]) -> T:
    """Return what ``make`` returns; give it up where it takes longer than torch was told, or one of ``peers`` ended.

    Where a process ends while others connect to it, Gloo tries again for five times as long as it was told.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    Thread(target=run, daemon=True, name="tiercache-join").start()
    seconds = patience.total_seconds()
    until = time.monotonic() + seconds + LATE_SECONDS
    while not wait([made], LOOK_SECONDS).done:
        if who := ended(peers):
            raise dist.DistNetworkError(who)
        if time.monotonic() > until:
            raise dist.DistNetworkError(f"a rank gave no answer for {seconds:g} seconds")
    return made.result()


def _part_of_all(name: str, ranks: list[int], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Return a group of some ranks, of which the others know nothing: those cannot be asked to take part.

    As ``new_group(use_local_synchronization=True)`` does, but for two things. That one names a group after how many the
    process has: members that have unequally many never meet, and a name that comes again when groups have ended leads
    to what these left in the store. And where the default group is bound to a device, NCCL waits for the other ranks.
    """
    c10d: Any = dist.distributed_c10d
    default = c10d._get_default_group()
    bound = default.bound_device_id
    if backend == "nccl":
        default.bound_device_id = None
    try:
        made: dist.ProcessGroup = c10d._new_process_group_helper(
            len(ranks), ranks.index(default.rank()), ranks, dist.Backend(backend), c10d._world.pg_map[default][1], name,
            timeout=timeout,
        )[0]  # fmt: skip
    finally:
        if backend == "nccl":
            default.bound_device_id = bound
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def _patience(backend: str, timeout: float) -> timedelta:
    return timedelta(seconds=timeout + (SECOND_LINE_SECONDS if "nccl" in backend else 0.0))


def fill_each(pieces: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Have every rank fill its piece on all others. Collective; Gloo's all-gather wants equal sizes."""
    works = [
        dist.broadcast(piece.view(torch.uint8), dist.get_global_rank(group, rank), group=group, async_op=True)
        for rank, piece in enumerate(pieces)
        if len(piece)
    ]
    for work in works:
        work.wait()


def store_of(group: dist.ProcessGroup) -> Any:
    """Return a connection to the store by which the ranks of ``group`` met; None where this torch does not tell it."""
    find = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    store: Any = None if find is None else find(group)
    # a connection is taken for as long as a thread waits on it; older versions of torch have no second one
    return store.clone() if hasattr(store, "clone") else store


def abort(group: dist.ProcessGroup) -> None:
    """End the transfers of ``group`` on this rank's device: whoever waits for them goes on, what they brought is void.

    It waits until they have ended. Afterwards the group raises RuntimeError at every call.
    """
    backend: Any = group._get_backend(torch.device("cuda"))
    # torch 2.4 has its abort under the last name, where "shutdown" did not yet wait for other ranks
    for name in ("abort", "_abort", "_shutdown"):
        if hasattr(backend, name):
            getattr(backend, name)()
            return


def end(groups: Sequence[dist.ProcessGroup | None], *, within: float | None) -> None:
    """Leave groups that this process is in, one after the other (None: the default one, and all).

    within: the seconds that all of it may take, where groups are on the device: that waits for the other ranks, unless
    `abort` was called. What hangs or fails is logged then. None: nothing is waited for, and errors are raised.
    """

    def leave_each() -> None:
        for group in groups:
            _quietly(partial(_leave, group))

    if within is None:
        for group in groups:
            _leave(group)
    elif not each_within(within, [leave_each]):
        logging.getLogger("tiercache").warning("a process group was not left within %g seconds", within)


def _leave(group: dist.ProcessGroup | None) -> None:
    if dist.is_initialized():
        dist.destroy_process_group(group)


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        logging.getLogger("tiercache").debug("leaving the ranks", exc_info=True)


def each_within(seconds: float, calls: Iterable[Callable[[], object]]) -> bool:
    """Make all calls at once, on threads of their own; return whether all ended within so many seconds.

    For what may hang: errors are logged, and a thread that hangs does not keep the process from ending.
    """
    threads = [Thread(target=_quietly, args=(call,), daemon=True, name="tiercache-end") for call in calls]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def is_loss(error: BaseException) -> bool:
    """Return whether an error of torch.distributed means that a rank left or gave no answer, and not a fault here.

    A fault here is memory that ran out, a CUDA error, a call that NCCL does not take: they are RuntimeErrors too.
    """
    words = str(error).lower()
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    if isinstance(error, dist.DistBackendError):
        # ncclSystemError alone may be a full /dev/shm, or no more files
        return any(
            some in words
            for some in ("remote", "connection", "broken pipe", "no route", "abort", "timeout", "timed out")
        )
    # Gloo has no types: its connections and its waiting name a source file in its message
    return type(error) is RuntimeError and "gloo/transport" in words
