"""Bodies of the communication tests: each function runs on every rank of a run."""

import os
import signal
import sys
import threading
import time
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tiercache.dist.communicator import AnyCommunicator, communicator_of
from tiercache.dist.consistency import check_same
from tiercache.dist.pipeline import StageInput
from tiercache.errors import BudgetError, RankError
from tiercache.values.batch import Batch


def who(ranks: AnyCommunicator) -> list[int]:
    """Return this rank's number and the number of ranks."""
    return [ranks.rank, ranks.size]


def small_values(ranks: AnyCommunicator) -> list[Any]:
    """Exchange values of many kinds, nothing at all, numbers beyond 32 bits, and minima."""
    told = {"rank": ranks.rank, "words": "é" * ranks.rank, "list": list(range(ranks.rank)), "none": None}
    none, zeros = torch.empty(0, dtype=torch.float32), [0] * ranks.size
    nothing = [len(ranks.all_to_all(none, zeros, zeros)), len(ranks.all_gather(none, zeros))]
    to = [[ranks.rank, target, 2**40 + ranks.rank] for target in range(ranks.size)]
    splits = ranks.exchange_splits(np.array(to, dtype=np.int64)).tolist()
    return [ranks.all_gather_object(told), nothing, splits, ranks.all_reduce_min([ranks.rank, -(2**40) * ranks.rank])]


def uneven_exchange(ranks: AnyCommunicator, dtype: str, silent: bool = False) -> list[Any]:
    """Send ``3 s + r`` elements from rank s to rank r, each element 16 s + r; nothing from rank 0 if ``silent``."""

    def size(source: int, target: int) -> int:
        return 0 if silent and source == 0 else 3 * source + target

    kind = getattr(torch, dtype)
    send_sizes = [size(ranks.rank, target) for target in range(ranks.size)]
    receive_sizes = [size(source, ranks.rank) for source in range(ranks.size)]
    send = torch.tensor([16 * ranks.rank + target for target in range(ranks.size) for _ in range(send_sizes[target])])
    send = send.to(kind)
    received = ranks.all_to_all(send, send_sizes, receive_sizes)
    into = torch.empty(sum(receive_sizes), dtype=kind)
    again = ranks.all_to_all(send, send_sizes, receive_sizes, into)
    assert again is into
    assert torch.equal(again, received)
    assert received.dtype == kind
    return received.to(torch.float64).tolist()


def uneven_gather(ranks: AnyCommunicator, dtype: str, sizes: list[int]) -> list[float]:
    """Gather ``sizes[r]`` elements of value r + 1 from every rank r."""
    mine = torch.full((sizes[ranks.rank],), ranks.rank + 1).to(getattr(torch, dtype))
    gathered = ranks.all_gather(mine, sizes)
    assert gathered.dtype == mine.dtype
    return gathered.to(torch.float64).tolist()


def even_gather(ranks: AnyCommunicator) -> list[float]:
    """Gather one number of every rank, and count torch's collectives."""
    with patch.object(dist, "broadcast", side_effect=AssertionError("one for each rank")) as broadcast:
        gathered = ranks.all_gather(torch.full((1,), ranks.rank + 0.5, dtype=torch.float64), [1] * ranks.size)
    return [broadcast.call_count, *gathered.tolist()]


def two_threads(ranks: AnyCommunicator) -> list[float]:
    """Exchange on a second thread: before the main thread's exchanges on even ranks, after them on odd ranks."""
    other = ranks.clone()
    ones = torch.ones(ranks.size)
    one_each = [1] * ranks.size
    sums: dict[str, float] = {}

    def exchange(name: str, on: AnyCommunicator, scale: float) -> None:
        total = torch.zeros(ranks.size)
        for step in range(20):
            total += on.all_to_all(ones * scale * step, one_each, one_each)
        sums[name] = float(total.sum())

    thread = threading.Thread(target=exchange, args=("other", other, 2.0))
    if ranks.rank % 2:
        exchange("main", ranks, 1.0)
        thread.start()
    else:
        thread.start()
        exchange("main", ranks, 1.0)
    thread.join()
    other.close()
    return [sums["main"], sums["other"]]


def dense_layers(ranks: AnyCommunicator) -> list[float]:
    """Train one step of a layer in DistributedDataParallel between exchanges; return its weights."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    ranks.barrier()
    model(torch.full((1, 2), float(ranks.rank))).sum().backward()
    ranks.barrier()
    weight = model.module.weight
    assert weight.grad is not None
    return [float(each) for each in weight.grad.flatten()]


def gives_back_too_early(ranks: AnyCommunicator) -> list[Any]:
    """Return gradients of collected vectors before their backward and after it, for each rank's samples."""
    outputs = torch.full((2 + ranks.rank, 3), 1.0, requires_grad=True)
    stage, said = StageInput(ranks), ""
    found = stage.collect(outputs * 2, Batch(torch.empty(0), torch.empty(0), {}, None, 2 + ranks.rank))  # type: ignore[arg-type]
    try:
        stage.give_back(found)
    except (ValueError, RankError) as raised:
        said = f"{type(raised).__name__}: {raised}"
    if found is not None:
        found.mean().backward()
    stage.give_back(found)
    assert outputs.grad is not None
    return [said, outputs.grad.sum().item()]


def fails_in_the_body(ranks: AnyCommunicator, who: list[int], kind: str) -> Any:
    """Fail on some ranks inside ``raise_on_all``, before the others' next collective."""
    with ranks.raise_on_all("opening the store"):
        if ranks.rank in who:
            raise {"BudgetError": BudgetError, "KeyError": KeyError, "OSError": OSError}[kind](f"no room {ranks.rank}")
    return ranks.all_gather_object("continued")


def goes_on_after_an_error(ranks: AnyCommunicator) -> list[Any]:
    """After an error that all agreed on, the same ranks still talk."""
    try:
        fails_in_the_body(ranks, [0], "OSError")
    except (OSError, RuntimeError) as error:
        return ranks.all_gather_object(type(error).__name__)
    return []


def keeps_its_cause(ranks: AnyCommunicator) -> None:
    """Raise an error with a cause on rank 0."""
    with ranks.raise_on_all("reading"):
        if ranks.rank == 0:
            try:
                raise KeyError("inner")
            except KeyError as inner:
                raise BudgetError("outer") from inner


def leaves_early(ranks: AnyCommunicator) -> None:
    """Leave rank 0 by an error outside of any agreement, while the others wait for it."""
    if ranks.rank == 0:
        raise ValueError("on my own")
    ranks.barrier("waiting for rank 0")


def talks_after_leaving(ranks: AnyCommunicator) -> None:
    """Use ranks that were closed."""
    ranks.barrier()
    ranks.close()
    ranks.close()
    ranks.barrier()


def compare(ranks: AnyCommunicator, by_rank: list[dict[str, Any]], version: str | None = None) -> None:
    """Compare facts; the last rank has another ``version`` of the package, if given."""
    from tiercache.dist import consistency

    kept = consistency.__version__
    try:
        if version and ranks.rank == ranks.size - 1:
            consistency.__version__ = version
        check_same(ranks, by_rank[ranks.rank])
    finally:
        consistency.__version__ = kept


def waits_of_groups(ranks: AnyCommunicator) -> list[float]:
    """Return the time-outs of a clone's process groups, in seconds."""
    clone = ranks.clone()
    groups = clone._host, clone._data
    waits = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    clone.close()
    return waits


def groups_without_the_last(ranks: AnyCommunicator, after: int, part: bool) -> None:
    """Make a clone, and another one, while the last rank stops after ``after`` process groups.

    part: use a group with one rank less than the default.
    """
    plain, made, last = dist.new_group, [0], ranks.size - 1 - part
    group = plain(list(range(ranks.size - 1))) if part else None
    if ranks.rank > last:
        return

    def new_group(*arguments: Any, **options: Any) -> Any:
        made[0] += 1
        if ranks.rank == last and made[0] > after:
            raise SystemError("this rank is gone")
        return plain(*arguments, **options)

    dist.new_group = new_group
    try:
        communicator_of(group).clone()
    finally:
        dist.new_group = plain


def waits_for_different_things(ranks: AnyCommunicator) -> None:
    """Exchange splits on rank 1 for a different purpose."""
    ranks.exchange_splits(
        np.zeros((ranks.size, 2), np.int64), "stepping rows" if ranks.rank == 1 else "asking for rows"
    )


def joins_a_part(ranks: AnyCommunicator) -> list[Any]:
    """Have ranks 1 and above communicate in a separate group, several times."""
    group: Any = dist.new_group(list(range(1, ranks.size)))
    if ranks.rank == 0:
        try:
            communicator_of(group)
        except RankError as error:
            return [str(error)]
    told = []
    for turn in range(2):
        inner = communicator_of(group)
        told.append(inner.all_gather_object(ranks.rank))
        other = inner.clone()
        told.append(other.all_gather_object(ranks.rank + turn))
        other.close()
        inner.close()
    return [inner.rank, inner.size, told]


def is_on_cuda(_: AnyCommunicator) -> None:
    """Ask for ranks on GPUs."""
    communicator_of(device="cuda:0")


def hangs(ranks: AnyCommunicator) -> None:
    """Sleep on rank 1 for longer than the test waits."""
    sys.stderr.write("about to hang\n")
    if ranks.rank == 1:
        time.sleep(60)
    ranks.barrier()


def dies(ranks: AnyCommunicator) -> None:
    """Kill rank 1."""
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.barrier()
