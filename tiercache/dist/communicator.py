"""Communicator: the collectives of the ranks. All torch.distributed calls of training are here.

`communicator_of` returns one for a process group; for one rank, a `LocalCommunicator`, which does nothing.
"""

from __future__ import annotations

import json
import os
import time
import warnings
import zlib
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tiercache.errors import RankError, StoreError, TierCacheError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

AGREEMENT_TIMEOUT = timedelta(days=30)
"""Longer than any disk takes: the other rank either arrives, or its process ends and Gloo reports it."""
MOST_NAMED = 8
SPLITS_FRAME = 32
_FRAME = 8
_AGREEING, _COMPARING = 1, 2
"""Marks of agreement kinds; other marks are checksums of the description."""
_POLL_SECONDS = 5e-5


class Communicator:
    """The ranks of a process group and their collectives.

    Every method but ``close`` is collective: all ranks call the same methods in the same order, from one thread at a
    time. Use ``clone`` for another thread. The user's own collectives do not interfere with these.

    ``raise_on_all``, ``agree``, ``all_gather_object``, ``all_reduce_min`` and ``barrier`` are agreements. They wait for
    a rank as long as its process is alive, so a slow disk on one rank does not end the training. The other methods move
    data and wait for torch's default process group timeout. Creating process groups waits for the timeout of the group
    they are created from. CPU tensors go over Gloo, GPU tensors over NCCL on the current stream: those calls return
    when the transfer is queued.

    A collective that fails raises RankError, with torch's own error as its cause. Over Gloo that is immediate if a
    process ended; on a GPU, NCCL's watchdog ends this process. In both cases torchrun ends the others and names the
    rank that failed first.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of ranks.
        device: the device of this rank's rows.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Only `communicator_of` and ``clone`` call this."""
        self.rank, self.size, self.device = dist.get_rank(group), dist.get_world_size(group), device
        self._like = group
        self._is_part = self.size < dist.get_world_size()
        self._closed = False
        data = self._new_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
        host = self._new_group("gloo")
        self._data: dist.ProcessGroup | None = data
        self._host: dist.ProcessGroup | None = host
        self.barrier("connecting the ranks")  # else one rank could finish and close while another still connects
        if device.type == "cuda":  # NCCL takes memory at the first transfer: before rows do
            torch.cuda.set_device(device)
            ones = [1] * self.size
            self.all_to_all(torch.zeros(self.size, device=device), ones, ones, what="connecting the devices")
            torch.cuda.synchronize(device)  # synchronize!
        c10d._set_pg_timeout(c10d.default_pg_timeout, data)
        c10d._set_pg_timeout(AGREEMENT_TIMEOUT, host)

    def _new_group(self, backend: str) -> dist.ProcessGroup:
        ranks = dist.get_process_group_ranks(self._like or dist.group.WORLD)
        with self._reaching("making process groups"):
            made: dist.ProcessGroup = dist.new_group(
                ranks, _timeout_of(self._like), backend, use_local_synchronization=self._is_part
            )
        return made

    def clone(self, device: str | torch.device | None = None) -> Communicator:
        """Return the same ranks with separate process groups, for another thread; close it too.

        device: "cpu" if it only moves host memory.
        """
        return Communicator(self._like, self.device if device is None else torch.device(device))

    def close(self, *, failed: bool = False) -> None:
        """Destroy the process groups. Not collective; a second call does nothing.

        failed: this rank leaves with an error and waits for no other. NCCL's groups then stay until the process ends.
        """
        if self._closed:
            return
        host, data = self._host, self._data
        self._closed, self._host, self._data = True, None, None
        # torch may give the next group of a subset of processes the name of a destroyed one: they then fail to connect
        if not self._is_part and dist.is_initialized():
            dist.destroy_process_group(host)
            if not (failed and self.device.type == "cuda"):
                dist.destroy_process_group(data)

    # -- agreements ---------------------------------------------------------------------------------------

    @contextmanager
    def raise_on_all(self, what: str) -> Iterator[None]:
        """Run the body, then ``agree`` on the outcome, so no rank waits for one that failed.

        The body may take any time but must not run a collective.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # sent to all ranks, and raised again by agree
            error = raised
        self.agree(what, error)

    def agree(self, what: str, error: BaseException | None = None) -> None:
        """Check that all ranks got through ``what``: if any rank has an error, every rank raises.

        A rank with an error raises it; the others raise RankError with the message of the first rank that has one.
        ``what`` follows "while": "opening the store".
        """
        try:
            failures = self._all(b"" if error is None else sentence_of(error).encode(), what)
        except RankError as lost:
            if error is None:
                raise
            error.add_note(str(lost))
            raise error from error.__cause__
        if error is not None:
            raise error
        if failed := [rank for rank, words in enumerate(failures) if words]:
            also = f" (and {rank_names(failed[1:])} too)" if failed[1:] else ""
            raise RankError(f"rank {failed[0]} failed while {what}{also}: {failures[failed[0]].decode()}")

    def all_gather_object(self, own: Any, what: str = "exchanging values") -> list[Any]:
        """Return every rank's value, in rank order. Values must be JSON serializable; tuples arrive as lists."""
        return [json.loads(gathered) for gathered in self._all(json.dumps(own).encode(), what)]

    def all_reduce_min(self, numbers: Sequence[int], what: str = "comparing numbers") -> list[int]:
        """Return the elementwise minimum (int64) over all ranks; all must pass the same number of values."""
        return [int(number) for number in self._gather_frames(numbers, _COMPARING, what).min(axis=0)]

    def barrier(self, what: str = "waiting for all ranks") -> None:
        """Return when all ranks have called it."""
        self.all_reduce_min([0], what)

    def _all(self, own: bytes, what: str) -> list[bytes]:
        """Return every rank's bytes, in rank order. Costs one small collective if all are empty."""
        sizes = self._gather_frames([len(own)], _AGREEING, what)[:, 0].tolist()
        gathered = self._gather(torch.from_numpy(np.frombuffer(own, np.uint8).copy()), sizes, self._host, what)
        return [piece.numpy().tobytes() for piece in torch.split(gathered, sizes)]

    def _gather_frames(self, numbers: Sequence[int], mark: int, what: str) -> NDArray[np.int64]:
        """Return the numbers (size, n) of all ranks, which must all pass n numbers and the same mark."""
        work, received = self._begin_frames(numbers, mark)
        with self._reaching(what):
            work.wait()
        self._check_marks(received, mark, what)
        return received[:, 1 : len(numbers) + 1]

    def _begin_frames(self, numbers: Sequence[int], mark: int) -> tuple[Any, NDArray[np.int64]]:
        """Send a mark and numbers to all ranks; return the pending work and the array that receives theirs."""
        own = np.zeros(splits_width(len(numbers), _FRAME), np.int64)
        own[0], own[1 : len(numbers) + 1] = mark, numbers
        received = np.empty((self.size, own.size), np.int64)
        into = [*torch.from_numpy(received)]
        return dist.all_gather(into, torch.from_numpy(own), group=self._host, async_op=True), received

    def _check_marks(self, received: NDArray[np.int64], mark: int, what: str) -> None:
        """Raise RankError if another rank is in a different call."""
        if others := np.nonzero(received[:, 0] != mark)[0].tolist():
            raise RankError(
                f"{rank_names(others)} did something else while rank {self.rank} was {what}: all ranks must make the "
                "same batches, and step, discard, commit and evaluate after the same ones. To skip a step on all, "
                "a GradScaler must be registered: cache.register(scaler=scaler)"
            )

    # -- data ---------------------------------------------------------------------------------------------

    def exchange_splits(self, to: NDArray[np.int64], what: str = "exchanging splits") -> NDArray[np.int64]:
        """Send row r of ``to`` (size, n; int64) to rank r; row r of the result is the row that rank r sent here.

        ``what`` is the same on all ranks. Raises RankError if another rank exchanges splits for something else.
        """
        with self._reaching(what):
            work, received = self._begin_splits(to, what)
            work.wait()
        self._check_marks(received, zlib.crc32(what.encode()), what)
        return np.ascontiguousarray(received[:, 1 : to.shape[1] + 1])

    def _begin_splits(self, to: NDArray[np.int64], what: str) -> tuple[Any, NDArray[np.int64]]:
        sent = np.zeros((self.size, splits_width(to.shape[1])), np.int64)
        sent[:, 0], sent[:, 1 : to.shape[1] + 1] = zlib.crc32(what.encode()), to
        received = np.empty_like(sent)
        pair = torch.from_numpy(received), torch.from_numpy(sent)
        return dist.all_to_all_single(*pair, group=self._data, async_op=True), received

    def meet(self, data: AnyCommunicator, to: NDArray[np.int64], what: str) -> NDArray[np.int64]:
        """Do ``data.exchange_splits``, but raise RankError on all ranks if another rank makes an agreement instead.

        For calls that a training loop may wrongly make on one rank only, such as validation. The other ranks may then
        be in a step, which exchanges on ``data``, or at the end of a pass, which is an agreement of this communicator.
        """
        assert isinstance(data, Communicator)
        mark = zlib.crc32(what.encode())
        with self._reaching(what):
            agreement, marks = self._begin_frames([], mark)
            exchange, received = data._begin_splits(to, what)
        failed: RankError | None = None
        waiting = [(agreement, marks), (exchange, received)]
        while waiting:
            for one in [one for one in waiting if one[0].is_completed()]:
                waiting.remove(one)
                try:
                    with self._reaching(what):
                        one[0].wait()
                except RankError as error:  # a rank ended; the other answer may show what it did before
                    failed = error
                else:
                    self._check_marks(one[1], mark, what)
            time.sleep(_POLL_SECONDS if waiting else 0)
        if failed is not None:
            raise failed
        return np.ascontiguousarray(received[:, 1 : to.shape[1] + 1])

    def all_to_all(
        self,
        send: Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        into: Tensor | None = None,
        what: str = "exchanging rows",
    ) -> Tensor:
        """Send ``send_splits[r]`` elements of the flat ``send``, which is in rank order, to every rank r.

        Returns ``receive_splits[r]`` elements from each rank r, in rank order: in ``into`` if given, else in a new
        tensor of the same dtype and device. Any dtype; splits may be 0.
        """
        received = torch.empty(sum(receive_splits), dtype=send.dtype, device=send.device) if into is None else into
        width = send.element_size()
        # as bytes: same transfer for every dtype, and Gloo in older versions of torch has no bfloat16
        come, go = _bytes_of(received), _bytes_of(send.contiguous())
        with self._reaching(what):
            dist.all_to_all_single(
                come, go, [n * width for n in receive_splits], [n * width for n in send_splits], group=self._data
            )
        return received

    def all_gather(self, own: Tensor, sizes: Sequence[int], what: str = "gathering rows") -> Tensor:
        """Return every rank's flat tensor, in rank order; rank r passes ``sizes[r]`` elements, any dtype; 0 allowed."""
        return self._gather(own, sizes, self._data, what)

    def _gather(self, own: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None, what: str) -> Tensor:
        """Gather pieces of equal size in one collective, and others in one per rank, as all-gather requires."""
        gathered = torch.empty(sum(sizes), dtype=own.dtype, device=own.device)
        pieces = torch.split(gathered, list(sizes))
        if sizes[0] and len(set(sizes)) == 1:
            with self._reaching(what):
                dist.all_gather([_bytes_of(piece) for piece in pieces], _bytes_of(own.contiguous()), group=group)
            return gathered
        pieces[self.rank].copy_(own)
        with self._reaching(what):
            assert group is not None
            works = [
                dist.broadcast(_bytes_of(piece), dist.get_global_rank(group, rank), group=group, async_op=True)
                for rank, piece in enumerate(pieces)
                if len(piece)
            ]
            for work in works:
                work.wait()
        return gathered

    @contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        """Raise RankError if the body, a collective, fails; an out-of-memory error of the device passes through."""
        if self._closed:
            raise RankError(f"rank {self.rank} was {what} on a closed communicator: open the store again")
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RankError(
                f"a rank ended or did not answer while rank {self.rank} was {what} ({_first_line(error)}): restart all "
                "ranks to resume from the last commit"
            ) from error


class LocalCommunicator:
    """A single rank with the methods of `Communicator`: it never waits or copies."""

    rank, size = 0, 1

    def __init__(self, device: str | torch.device) -> None:
        self.device = device

    def clone(self, device: str | torch.device | None = None) -> LocalCommunicator:
        """Return a new LocalCommunicator."""
        return LocalCommunicator(self.device if device is None else device)

    def close(self, *, failed: bool = False) -> None:
        """Do nothing."""

    @contextmanager
    def raise_on_all(self, what: str) -> Iterator[None]:
        """Run the body."""
        yield

    def agree(self, what: str, error: BaseException | None = None) -> None:
        """Raise ``error`` if it is not None."""
        if error is not None:
            raise error

    def all_gather_object(self, own: Any, what: str = "") -> list[Any]:
        """Return ``own`` as other ranks would receive it: tuples as lists."""
        return [json.loads(json.dumps(own))]

    def all_reduce_min(self, numbers: Sequence[int], what: str = "") -> list[int]:
        """Return the numbers."""
        return [int(number) for number in numbers]

    def barrier(self, what: str = "") -> None:
        """Return."""

    def exchange_splits(self, to: NDArray[np.int64], what: str = "") -> NDArray[np.int64]:
        """Return ``to`` itself."""
        return to

    def meet(self, data: AnyCommunicator, to: NDArray[np.int64], what: str) -> NDArray[np.int64]:
        """Return ``to`` itself."""
        return to

    def all_to_all(
        self,
        send: Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        into: Tensor | None = None,
        what: str = "",
    ) -> Tensor:
        """Return ``send`` itself, or ``into`` with its elements."""
        return send if into is None else into.copy_(send)

    def all_gather(self, own: Tensor, sizes: Sequence[int], what: str = "") -> Tensor:
        """Return ``own`` itself."""
        return own


AnyCommunicator: TypeAlias = Communicator | LocalCommunicator


class Communicators(NamedTuple):
    """The communicators of a cache, one for each thread that exchanges."""

    control: AnyCommunicator
    """For agreements and for the collectives of the training loop."""
    exchange: AnyCommunicator
    """For rows and gradients."""
    input: AnyCommunicator
    """For the inputs of batches."""

    @classmethod
    def connect(cls, ranks: AnyCommunicator) -> Communicators:
        """Clone ``ranks`` for the other two. Collective."""
        return cls(ranks, ranks.clone(), ranks.clone(device="cpu"))

    def close(self, *, failed: bool = False) -> None:
        """Close all, the last one first."""
        with ExitStack() as stack:
            for one in self:
                stack.callback(one.close, failed=failed)


def communicator_of(group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu") -> AnyCommunicator:
    """Return a communicator of the ranks of ``group``, by default of the default process group. Collective.

    It is a `LocalCommunicator` if torch.distributed is not initialized or the group has one rank. "cuda" is the GPU of
    LOCAL_RANK, or the only GPU visible to this process. The ranks get separate process groups. For that, the ranks of a
    ``group`` that does not have all processes must have created the same number of process groups so far.

    Raises RankError if this process is not in ``group``, or if a rank does not arrive.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return LocalCommunicator(device)
    device = _device_of(device)
    if dist.get_rank(group) < 0:
        raise RankError("this process is not in the given process group: pass a group that includes it")
    if dist.get_world_size(group) == 1:
        return LocalCommunicator(device)
    if device.type == "cuda" and not dist.is_nccl_available():
        raise RankError("ranks on CUDA need NCCL, which torch lacks: install a CUDA build of it, or use device='cpu'")
    return Communicator(group, device)


def only_rank(group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu") -> LocalCommunicator:
    """Return the communicator of training that is not sharded.

    Warns if ``group``, by default the default process group, has several ranks.
    """
    if dist.is_available() and dist.is_initialized() and (size := dist.get_world_size(group)) > 1:
        warnings.warn(
            f"a cache without a store does not share rows: each of the {size} ranks trains its own copy of all rows, "
            "and the copies differ if the ranks train different samples. Use a store to shard the rows",
            stacklevel=4,
        )
    return LocalCommunicator(device)


WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Wire:
    """Sends flat tensors and counts between ranks; data that stays on this rank bypasses it."""

    def __init__(self, ranks: AnyCommunicator, dtype: torch.dtype) -> None:
        """Raises ValueError for a dtype that is not in `WIRE_DTYPES`."""
        if dtype not in WIRE_DTYPES:
            raise ValueError(f"rows cannot travel as {dtype}: it must be one of {', '.join(map(str, WIRE_DTYPES))}")
        self.ranks, self.dtype = ranks, dtype
        self.bytes_sent = 0
        """Bytes sent from this rank to others so far."""

    def remote(self, sizes_W: Iterable[int]) -> list[int]:
        """Return sizes by rank, with 0 for this rank."""
        return [0 if rank == self.ranks.rank else int(size) for rank, size in enumerate(sizes_W)]

    def count(self, to: NDArray[np.int64], what: str) -> NDArray[np.int64]:
        """Send every rank its row of ``to``, and return the rows received from each. Collective."""
        self.bytes_sent += 8 * splits_width(to.shape[1]) * (self.ranks.size - 1)
        return self.ranks.exchange_splits(to, what)

    def send(self, send: torch.Tensor, sizes: list[int], receive: list[int], into: torch.Tensor, what: str) -> None:
        """Send ``send`` to the other ranks, float32 in the wire's dtype, and receive ``into``. Collective."""
        narrow = send.dtype == torch.float32 and self.dtype != torch.float32
        send = send.to(self.dtype) if narrow else send
        self.bytes_sent += send.numel() * send.element_size()
        if narrow:
            into.copy_(self.ranks.all_to_all(send, sizes, receive, what=what))
        else:
            self.ranks.all_to_all(send, sizes, receive, into, what=what)


def splits_width(num_splits: int, frame: int = SPLITS_FRAME) -> int:
    """Return the number of int64 that go to each rank for ``num_splits`` splits.

    They are padded to whole frames, so a rank that is in a different call usually sends as many numbers as are
    expected. If the numbers differed, Gloo would end the process.
    """
    return -(-(1 + num_splits) // frame) * frame


def rank_names(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 0 and 2" or, for many, the first few and the count of the rest."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))} and {len(ranks) - MOST_NAMED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def sentence_of(error: BaseException) -> str:
    """Return an error's message, prefixed with its type if it is not a tiercache error."""
    words = _first_line(error)
    return words if isinstance(error, (TierCacheError, StoreError)) else f"{type(error).__name__}: {words}"


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message: torch adds many."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """Return the timeout of a process group, or torch's default if its backend does not report one."""
    group = c10d._get_default_group() if group is None else group
    backends = (group._get_backend(device) for device in group._device_types)
    found = (getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends)
    return next((timeout for timeout in found if timeout is not None), c10d.default_pg_timeout)


def _device_of(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    if str(device) == "cuda":  # no device index
        only = torch.cuda.device_count() == 1  # e.g. CUDA_VISIBLE_DEVICES gives each process its own
        return torch.device("cuda", 0 if only else int(os.environ.get("LOCAL_RANK", "0")))
    return device


def _bytes_of(flat: Tensor) -> Tensor:
    """Return the tensor's memory. An empty tensor, such as from an empty NumPy array, may have unviewable strides."""
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=flat.device)
