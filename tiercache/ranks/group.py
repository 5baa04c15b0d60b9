"""Ranks: this process among all; every call of torch.distributed is here."""

from __future__ import annotations

import json
import secrets
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from tiercache.errors import RankError
from tiercache.ranks.at_work import AT_WORK, AtWork
from tiercache.ranks.bond import Bond, first_line, raise_told, sentence_of
from tiercache.ranks.call import Call, framed, unframed
from tiercache.ranks.devices import check_device, device_of
from tiercache.ranks.peers import Peer
from tiercache.ranks.pieces import bytes_of, check_size, target
from tiercache.ranks.process_groups import END_SECONDS, end, fill_each, launched, make_default, new_group, store_of
from tiercache.ranks.watch import Board, Watch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from numpy.typing import NDArray
    from torch import Tensor

DEFAULT_TIMEOUT = 300.0


class Ranks:
    """This process among the ranks that train together: who it is, and everything that they tell each other.

    Every method but ``close`` and ``give_up`` is collective where there are several ranks: all ranks call the same
    methods in the same order, from one thread at a time (``beside`` gives another thread ranks of its own). What is
    small goes by host over Gloo; ``exchange`` and ``gather`` take tensors on the CPU (Gloo) or on the device (NCCL, on
    the current stream, begun when they return). One rank alone talks to nobody, and copies nothing.

    A collective that fails, because a rank ended or did not answer within ``timeout`` seconds, raises RankError on the
    ranks that are left, at it and at every later call: over Gloo at once where a process ended; on the device when
    the `Watch` has ended the transfers in flight, a few seconds later, at the next collective.

    Attributes:
        rank: the number of this process, from 0.
        size: how many ranks there are.
        device: where the rows of this rank are.
        timeout: seconds after which a rank that does not answer is given up.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        timeout: float,
        host: dist.ProcessGroup | None = None,
        wires: dist.ProcessGroup | None = None,
        owns_default: bool = False,
        peers: Sequence[Peer] = (),
        watch: Watch | None = None,
        board: Board | None = None,
    ) -> None:
        self.rank = 0 if host is None else host.rank()
        self.size = 1 if host is None else host.size()
        self.device = device
        self.timeout = timeout
        self._host = host
        self._wires = wires
        self._owns_default = owns_default
        self._work = AtWork(partial(self._sizes, AT_WORK), timeout)
        self._bond = bond = Bond(rank=self.rank, timeout=timeout, peers=peers, watch=watch)
        bond.board = board
        if not peers:
            told = self.values([asdict(Peer.here()), secrets.token_hex(8)], "joining")
            bond.peers = [Peer(**peer) for peer, _ in told]
            board = None if host is None else Board(store_of(host), f"lost {told[0][1]}")
            if board is not None and wires is not host:
                bond.watch = Watch(rank=self.rank, peers=bond.peers, device=device, timeout=timeout, board=board)
            else:
                bond.board = board
        if bond.watch is not None:
            bond.watch.guard(wires)
            if owns_default:
                bond.watch.guard(dist.group.WORLD)

    @classmethod
    def join(
        cls,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        device: str | torch.device = "cpu",
    ) -> Ranks:
        """Join the ranks of ``group``, else of the initialised default group, else of torchrun; else be alone.

        Under torchrun with nothing initialised, the default process group is made too (and ended by ``close``), so that
        ``DistributedDataParallel`` works. The ranks talk over groups of their own beside the one given, so other
        collectives do not mix with theirs. ``device="cuda"`` is the GPU of ``LOCAL_RANK``, or the only one that this
        process sees; it becomes torch's current one here. Collective.

        Between hosts Gloo listens at the address of the host's name; where that is not the one that the others reach,
        set ``GLOO_SOCKET_IFNAME`` to the name of the network interface (NCCL: ``NCCL_SOCKET_IFNAME``). Raises RankError
        where ranks are missing after ``timeout`` seconds, this process is not in ``group``, or NCCL is missing.
        """
        device = device_of(device)
        if device.type == "cuda" and not dist.is_nccl_available():
            raise RankError(
                "ranks on CUDA need NCCL, which this torch lacks: install torch for CUDA, or join on the CPU"
            )
        owns_default = False
        try:
            if group is None and dist.is_available() and not dist.is_initialized() and launched():
                make_default("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout)
                owns_default = True
            if group is None and not (dist.is_available() and dist.is_initialized()):
                return cls(device=device, timeout=timeout)
            if dist.get_rank(group) < 0:
                raise RankError("this process is not in the group to join: give a group that it is in")
            if dist.get_world_size(group) == 1:
                return cls(device=device, timeout=timeout, owns_default=owns_default)
            host = new_group(group, "gloo", timeout)
            wires = host if device.type == "cpu" else new_group(group, "nccl", timeout)
        except BaseException as error:
            if owns_default:
                end([None], within=END_SECONDS)
            if isinstance(error, RankError) or not isinstance(error, (RuntimeError, ValueError)):
                raise
            raise RankError(
                f"the ranks did not find each other within {timeout:g} seconds ({first_line(error)}): "
                "start as many processes as WORLD_SIZE says, all with the same MASTER_ADDR and MASTER_PORT"
            ) from error
        return cls(device=device, timeout=timeout, host=host, wires=wires, owns_default=owns_default)._connected()

    def check(self, what: str) -> None:
        """Raise RankError where a rank is known to be lost; ``what`` follows "was". Not collective."""
        with self._bond.collective(what):
            pass

    def beside(self) -> Ranks:
        """Return the same ranks in process groups of their own, for another thread. Collective; close it too.

        On the device they are connected when this returns: what NCCL needs there is taken.
        """
        if self._host is None:
            return Ranks(device=self.device, timeout=self.timeout)
        with self._bond.collective("joining beside"):
            host = wires = new_group(self._host, "gloo", self.timeout, self._bond.peers)
            if self._wires is not self._host:
                wires = new_group(self._host, "nccl", self.timeout)
        board = self._bond.board = self._bond.board and self._bond.board.turn()
        return Ranks(
            device=self.device, timeout=self.timeout, host=host, wires=wires, peers=self._bond.peers,
            watch=self._bond.watch, board=board,
        )._connected()  # fmt: skip

    def _connected(self) -> Self:
        """Connect the devices as ours and a default group's transfers need it, and leave where that fails.

        NCCL would do so at the first of them, take memory for it then, and wait, where nothing ends it, for a rank that
        failed before.
        """
        if self._wires is not self._host:
            ones, what = [1] * self.size, "connecting the devices"
            try:
                torch.cuda.set_device(self.device)
                mine = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
                self.exchange(mine, ones, ones, what=what)
                self.gather(mine[:1], ones, what=what)
                with self._bond.collective(what):
                    if self._owns_default:
                        dist.all_reduce(mine)
                        self._bond.expect(mine)
                    torch.cuda.synchronize(self.device)  # synchronize!
            except BaseException as error:
                self.__exit__(type(error), error, None)
                raise
        return self

    def give_up(self, error: BaseException) -> None:
        """Say that this rank leaves by ``error``, before it unwinds: call it before ``close``. Not collective.

        Transfers of this process on the device end, those of `beside` too, so that closing waits for none of them, and
        the other ranks raise RankError with the sentence of ``error``: on the CPU when ``close`` breaks what they wait
        for, or this process ends. Where a lost rank is behind ``error`` and not named in it, that is noted at it.
        """
        if self.size > 1:
            self._bond.give_up(error)

    def close(self) -> None:
        """Leave the ranks; a rank that still waits for this one gets RankError. May be called twice.

        Not collective on the CPU. On the device, where nothing was lost or given up, it waits up to ``timeout`` seconds
        for all ranks to close, and as long for NCCL, which takes leave together; else it waits for no rank.
        """
        self._work.end()
        host, wires, watch = self._host, self._wires, self._bond.watch
        together = watch is not None and host is not None and self._leaves_together(watch)
        self._host, self._wires, self._bond.watch = None, None, None
        if self.size > 1 and self._bond.broken is None:
            self._bond.broken = f"rank {self.rank} has left the ranks: join again"
        # the host's first: the others see by it that a rank has left; the default one, and all that are left, last
        groups = [*dict.fromkeys(group for group in (host, wires) if group is not None), *[None] * self._owns_default]
        self._owns_default = False
        end(groups, within=None if watch is None else self.timeout if together else END_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.give_up(error)
        self.close()

    def _leaves_together(self, watch: Watch) -> bool:
        """Return whether all ranks close now, none of them by an error; else end the transfers of this process."""
        try:
            self.barrier("leaving the ranks")
        except RankError as lost:
            watch.lose(str(lost), tell=False)
            return False
        watch.release(self._wires)
        if self._owns_default:
            watch.release(dist.group.WORLD)
        return True

    def agree(self, what: str, error: BaseException | None = None) -> None:
        """Agree that all ranks got through ``what``: where any brings an error, every rank raises. Collective.

        A rank with an error raises its own; the others RankError with the sentence of the first rank that has one.
        ``what`` follows "while": "opening the store".
        """
        words = b"" if error is None else json.dumps(sentence_of(error)).encode()
        try:
            told = self._all(words, what)
        except RankError as broken:
            if error is None:
                raise
            if str(error) != str(broken):
                error.add_note(str(broken))
            raise error from error.__cause__
        if error is not None:
            raise error
        raise_told(told, what)

    def meet(
        self, call: Call, what: str, numbers: Sequence[int] = (), error: BaseException | None = None
    ) -> NDArray[np.int64]:
        """Agree as ``agree`` does, and return every rank's numbers, (size, n). Collective.

        Where some ranks are in another call of these ranks that begins with ``counts``, or in ``meet`` for another
        ``call``, all raise RankError: so none waits for one that went another way.
        """
        to = np.array([[*numbers, error is not None]] * self.size, dtype=np.int64)
        told = self.counts(to, what, call)
        if told[:, -1].any():
            self.agree(what, error)
        return told[:, :-1]

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the body, then ``agree`` on how it ended, so that no rank waits for one that failed. Collective.

        The body may have collectives only where all ranks reach them, or where they are ``together`` themselves.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # told to all, and raised again by agree
            error = raised
        except BaseException as interrupt:  # of which nobody tells them
            self.give_up(interrupt)
            raise
        self.agree(what, error)

    @contextmanager
    def patiently(self, what: str) -> Iterator[None]:
        """As ``together``, where the body may take longer than ``timeout`` on some ranks: on a slow disk. Collective.

        The others wait for as long as it lives: one that ended or was stopped is given up as ever. The body has no
        collective of these ranks.
        """
        with self.together(what), self._work.at(what) if self.size > 1 else nullcontext():
            yield

    def values(self, mine: Any, what: str = "exchanging values") -> list[Any]:
        """Return every rank's value, in rank order; ``mine`` is what JSON can say (tuples arrive as lists)."""
        return [json.loads(said) for said in self._all(json.dumps(mine).encode(), what)]

    def least(self, numbers: Sequence[int], what: str = "comparing numbers") -> list[int]:
        """Return, place by place, the least number of all ranks (int64); all bring equally many."""
        if self.size == 1:
            return [int(number) for number in numbers]
        least = torch.tensor(numbers, dtype=torch.int64)
        with self._bond.collective(what):
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._host)
        return [int(number) for number in least]

    def barrier(self, what: str = "waiting for all ranks") -> None:
        """Return when all ranks have come."""
        self.least([0], what)

    def counts(
        self, to: NDArray[np.int64], what: str = "exchanging counts", call: Call = Call.COUNTS
    ) -> NDArray[np.int64]:
        """Send row r of ``to`` (size, H; int64) to rank r; row r of what is returned is what rank r sent here.

        One rank alone gets ``to`` itself back. Raises RankError, from then on, where ranks are in different calls.
        """
        if to.ndim != 2 or to.shape[0] != self.size:
            raise ValueError(f"counts of shape {to.shape} for {self.size} ranks: give one row for each rank")
        if self.size == 1:
            return to
        frame, rest = framed(call, to)
        self._bond.check_call(call, frame, came := self._transposed(frame, what), what)
        return unframed(came, self._transposed(rest, what) if rest.size else rest)

    def _transposed(self, to: NDArray[np.int64], what: str) -> NDArray[np.int64]:
        received = np.empty_like(to)
        with self._bond.collective(what):
            dist.all_to_all_single(torch.from_numpy(received), torch.from_numpy(to), group=self._host)
        return received

    def exchange(
        self,
        send: Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        into: Tensor | None = None,
        what: str = "exchanging rows",
    ) -> Tensor:
        """Send ``send_sizes[r]`` elements of the flat ``send``, which stand in rank order, to every rank r.

        Returns what came, ``receive_sizes[r]`` elements from rank r, in rank order: in ``into`` where given, else in a
        new tensor of the same dtype and device. Any dtype; sizes may be 0. One rank alone gets ``send`` itself back
        where ``into`` is not given.
        """
        check_size(send, sum(send_sizes))
        received = target(into, send, receive_sizes)
        if self.size == 1:
            return send if into is None else into.copy_(send)
        width = send.element_size()
        # as bytes: the same transfer whatever the dtype, and Gloo has no bfloat16 in older versions of torch
        come, go = bytes_of(received), bytes_of(send.contiguous())
        with self._bond.collective(what):
            dist.all_to_all_single(
                come,
                go,
                [size * width for size in receive_sizes],
                [size * width for size in send_sizes],
                group=self._wires_of(send),
            )
            self._bond.expect(send)
        return received

    def gather(self, mine: Tensor, sizes: Sequence[int], what: str = "gathering rows") -> Tensor:
        """Return every rank's flat tensor one after the other, in rank order; rank r brings ``sizes[r]`` elements.

        Any dtype; sizes may be 0. One rank alone gets ``mine`` itself back.
        """
        check_size(mine, sizes[self.rank])
        if self.size == 1:
            return mine
        gathered = torch.empty(sum(sizes), dtype=mine.dtype, device=mine.device)
        self._gather(gathered, mine, sizes, self._wires_of(mine), what)
        return gathered

    def _all(self, mine: bytes, what: str) -> list[bytes]:
        """Return every rank's bytes, in rank order; where nobody has any, one small collective is all it costs."""
        if self.size == 1:
            return [mine]
        while AT_WORK in (sizes := self._sizes(len(mine), what)):
            pass
        said = torch.empty(sum(sizes), dtype=torch.uint8)
        self._gather(said, torch.from_numpy(np.frombuffer(mine, np.uint8).copy()), sizes, self._host, what)
        return [piece.numpy().tobytes() for piece in torch.split(said, sizes)]

    def _sizes(self, mine: int, what: str) -> list[int]:
        """Return the bytes that each rank has to say, `AT_WORK` of one that is at work."""
        told = torch.empty(self.size, dtype=torch.int64)
        with self._bond.collective(what):
            dist.all_gather(list(torch.split(told, 1)), torch.tensor([mine]), group=self._host)
        return [int(size) for size in told]

    def _gather(
        self, gathered: Tensor, mine: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None, what: str
    ) -> None:
        assert group is not None
        pieces = torch.split(gathered, list(sizes))
        pieces[self.rank].copy_(mine)
        with self._bond.collective(what):
            fill_each(pieces, group)
            self._bond.expect(mine)

    def _wires_of(self, tensor: Tensor) -> dist.ProcessGroup | None:
        check_device(tensor, self.device)
        return self._host if tensor.device.type == "cpu" else self._wires
