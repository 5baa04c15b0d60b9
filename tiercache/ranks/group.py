"""Ranks: this process among all; every call of torch.distributed is here."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from tiercache.errors import RankError, StoreError, TierCacheError
from tiercache.ranks.peers import Peer, blame, rank_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

DEFAULT_TIMEOUT = 300.0
ADVICE = "training goes on from the last commit: start all ranks again"


class Ranks:
    """This process among the ranks that train together: who it is, and everything that they tell each other.

    Every method but ``close`` is collective where there are several ranks: all ranks call the same methods in the same
    order, from one thread at a time (``beside`` gives another thread ranks of its own). What is small goes by host over
    Gloo; ``exchange`` and ``gather`` take tensors on the CPU (Gloo) or on the device (NCCL, on the current stream).
    One rank alone talks to nobody, and copies nothing.

    A collective that fails, because a rank ended (seen at once) or did not answer within ``timeout`` seconds, raises
    RankError on the ranks that are left, at it and at every later call. A NCCL transfer in flight is ended by torch
    itself within the same time.

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
    ) -> None:
        self.rank = 0 if host is None else host.rank()
        self.size = 1 if host is None else host.size()
        self.device = device
        self.timeout = timeout
        self._host = host
        self._wires = wires
        self._owns_default = owns_default
        self._broken: str | None = None
        self._peers = list(peers)
        if not peers:
            self._peers = [Peer(**peer) for peer in self.values(asdict(Peer.here()), "joining")]

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
        collectives do not mix with theirs. ``device="cuda"`` is the GPU of ``LOCAL_RANK``. Collective.

        Between hosts Gloo listens at the address of the host's name; where that is not the one that the others reach,
        set ``GLOO_SOCKET_IFNAME`` to the name of the network interface (NCCL: ``NCCL_SOCKET_IFNAME``).

        Raises:
            RankError: ranks are missing after ``timeout`` seconds, this process is not in ``group``, or NCCL is.
        """
        device = _device(device)
        if device.type == "cuda" and not dist.is_nccl_available():
            raise RankError(
                "ranks on CUDA need NCCL, which this torch lacks: install torch for CUDA, or join on the CPU"
            )
        owns_default = False
        try:
            if group is None and dist.is_available() and not dist.is_initialized() and _launched():
                backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
                dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
                owns_default = True
            if group is None and not (dist.is_available() and dist.is_initialized()):
                return cls(device=device, timeout=timeout)
            if dist.get_rank(group) < 0:
                raise RankError("this process is not in the group to join: give a group that it is in")
            if dist.get_world_size(group) == 1:
                return cls(device=device, timeout=timeout, owns_default=owns_default)
            host = _new_group(group, "gloo", timeout)
            wires = host if device.type == "cpu" else _new_group(group, "nccl", timeout)
        except RankError:
            raise
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"the ranks did not find each other within {timeout:g} seconds ({_first_line(error)}): "
                "start as many processes as WORLD_SIZE says, all with the same MASTER_ADDR and MASTER_PORT"
            ) from error
        return cls(device=device, timeout=timeout, host=host, wires=wires, owns_default=owns_default)

    def beside(self) -> Ranks:
        """Return the same ranks in process groups of their own, for another thread. Collective; close it too."""
        if self._host is None:
            return Ranks(device=self.device, timeout=self.timeout)
        with self._collective("joining beside"):
            host = _new_group(self._host, "gloo", self.timeout)
            wires = host if self._wires is self._host else _new_group(self._host, "nccl", self.timeout)
        return Ranks(device=self.device, timeout=self.timeout, host=host, wires=wires, peers=self._peers)

    def close(self) -> None:
        """Leave the ranks. Not collective; a rank that still waits for this one gets RankError. May be called twice."""
        groups, self._host, self._wires = {self._wires, self._host} - {None}, None, None
        for group in groups if dist.is_initialized() else ():
            dist.destroy_process_group(group)
        if self.size > 1 and self._broken is None:
            self._broken = f"rank {self.rank} has left the ranks: join again"
        if self._owns_default and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_default = False

    def agree(self, what: str, error: BaseException | None = None) -> None:
        """Agree that all ranks got through ``what``: where any brings an error, every rank raises. Collective.

        A rank with an error raises its own; the others RankError with the sentence of the first rank that has one.
        ``what`` follows "while": "opening the store".
        """
        try:
            told = self._all(b"" if error is None else json.dumps(_sentence(error)).encode(), what)
        except RankError as broken:
            if error is None:
                raise
            if str(error) != str(broken):
                error.add_note(str(broken))
            raise error from error.__cause__
        if error is not None:
            raise error
        failed = [rank for rank, words in enumerate(told) if words]
        if failed:
            also = f" (and {rank_names(failed[1:])} too)" if failed[1:] else ""
            raise RankError(f"rank {failed[0]} failed while {what}{also}: {json.loads(told[failed[0]])}")

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
        self.agree(what, error)

    def values(self, mine: Any, what: str = "exchanging values") -> list[Any]:
        """Return every rank's value, in rank order; ``mine`` is what JSON can say (tuples arrive as lists)."""
        if self.size == 1:
            return [json.loads(json.dumps(mine))]
        return [json.loads(said) for said in self._all(json.dumps(mine).encode(), what)]

    def least(self, numbers: Sequence[int], what: str = "comparing numbers") -> list[int]:
        """Return, place by place, the least number of all ranks (int64); all bring equally many."""
        if self.size == 1:
            return [int(number) for number in numbers]
        least = torch.tensor(numbers, dtype=torch.int64)
        with self._collective(what):
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._host)
        return [int(number) for number in least]

    def barrier(self, what: str = "waiting for all ranks") -> None:
        """Return when all ranks have come."""
        self.least([0], what)

    def counts(self, to: NDArray[np.int64], what: str = "exchanging counts") -> NDArray[np.int64]:
        """Send row r of ``to`` (size, H; int64) to rank r; row r of what is returned is what rank r sent here.

        One rank alone gets ``to`` itself back.
        """
        if to.ndim != 2 or to.shape[0] != self.size:
            raise ValueError(f"counts of shape {to.shape} for {self.size} ranks: give one row for each rank")
        sent = torch.from_numpy(np.ascontiguousarray(to, dtype=np.int64))
        if self.size == 1:
            return to
        received = torch.empty_like(sent)
        with self._collective(what):
            dist.all_to_all_single(received, sent, group=self._host)
        return received.numpy()

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
        _check_size(send, sum(send_sizes))
        received = _target(into, send, receive_sizes)
        if self.size == 1:
            return send if into is None else into.copy_(send)
        width = send.element_size()
        # as bytes: the same transfer whatever the dtype, and Gloo has no bfloat16 in older versions of torch
        come, go = _bytes_of(received), _bytes_of(send.contiguous())
        with self._collective(what):
            dist.all_to_all_single(
                come,
                go,
                [size * width for size in receive_sizes],
                [size * width for size in send_sizes],
                group=self._wires_of(send),
            )
        return received

    def gather(self, mine: Tensor, sizes: Sequence[int], what: str = "gathering rows") -> Tensor:
        """Return every rank's flat tensor one after the other, in rank order; rank r brings ``sizes[r]`` elements.

        Any dtype; sizes may be 0. One rank alone gets ``mine`` itself back.
        """
        _check_size(mine, sizes[self.rank])
        if self.size == 1:
            return mine
        gathered = torch.empty(sum(sizes), dtype=mine.dtype, device=mine.device)
        self._gather(gathered, mine, sizes, self._wires_of(mine), what)
        return gathered

    def _all(self, mine: bytes, what: str) -> list[bytes]:
        """Return every rank's bytes, in rank order; where nobody has any, one small collective is all it costs."""
        if self.size == 1:
            return [mine]
        lengths = torch.empty(self.size, dtype=torch.int64)
        with self._collective(what):
            dist.all_gather(list(torch.split(lengths, 1)), torch.tensor([len(mine)]), group=self._host)
        sizes = lengths.tolist()
        said = torch.empty(sum(sizes), dtype=torch.uint8)
        self._gather(said, torch.from_numpy(np.frombuffer(mine, np.uint8).copy()), sizes, self._host, what)
        return [piece.numpy().tobytes() for piece in torch.split(said, sizes)]

    def _gather(
        self, gathered: Tensor, mine: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None, what: str
    ) -> None:
        assert group is not None
        pieces = torch.split(gathered, list(sizes))
        pieces[self.rank].copy_(mine)
        with self._collective(what):
            # a broadcast of each: Gloo's all-gather wants equal sizes
            works = [
                dist.broadcast(piece.view(torch.uint8), dist.get_global_rank(group, rank), group=group, async_op=True)
                for rank, piece in enumerate(pieces)
                if len(piece)
            ]
            for work in works:
                work.wait()

    def _wires_of(self, tensor: Tensor) -> dist.ProcessGroup | None:
        if tensor.device.type not in {"cpu", self.device.type}:
            raise ValueError(
                f"a tensor on {tensor.device} cannot travel between ranks on {self.device}: join with that device"
            )
        return self._host if tensor.device.type == "cpu" else self._wires

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        if self._broken is not None:
            raise RankError(self._broken)
        try:
            yield
        except RuntimeError as error:
            who = blame(self._peers) or f"a rank left, or gave no answer for {self.timeout:g} seconds,"
            self._broken = f"{who} while rank {self.rank} was {what}: {ADVICE}"
            raise RankError(self._broken) from error


def _device(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    if str(device) == "cuda":  # no number said
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def _launched() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _new_group(like: dist.ProcessGroup | None, backend: str, timeout: float) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(like)
    # ranks outside of a smaller group cannot be asked to take part in making it
    local = len(ranks) < dist.get_world_size()
    made: dist.ProcessGroup = dist.new_group(
        ranks, timedelta(seconds=timeout), backend, use_local_synchronization=local
    )
    return made


def _check_size(flat: Tensor, size: int) -> None:
    if flat.dim() != 1 or len(flat) != size:
        raise ValueError(
            f"a tensor of shape {tuple(flat.shape)} with sizes for {size} elements: give a flat one of as many"
        )


def _bytes_of(flat: Tensor) -> Tensor:
    """Return its memory. An empty tensor, as of an empty NumPy array, may have strides that no view takes."""
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=flat.device)


def _target(into: Tensor | None, send: Tensor, sizes: Sequence[int]) -> Tensor:
    count = sum(sizes)
    if into is None:
        return torch.empty(count, dtype=send.dtype, device=send.device)
    if into.dim() != 1 or len(into) != count or into.dtype != send.dtype or not into.is_contiguous():
        raise ValueError(
            f"{count} elements of {send.dtype} cannot be received in a tensor of {into.dtype} and shape "
            f"{tuple(into.shape)}: give a flat, contiguous one of the same size and dtype"
        )
    return into


def _sentence(error: BaseException) -> str:
    words = _first_line(error)
    return words if isinstance(error, (TierCacheError, StoreError)) else f"{type(error).__name__}: {words}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
