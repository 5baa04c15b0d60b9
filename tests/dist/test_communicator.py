"""Ranks exchange values, splits and rows, compare facts, and all fail if one fails."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tiercache
from tests.dist.pool import RanksPool, RunFailedError
from tiercache.dist import consistency
from tiercache.dist.communicator import AnyCommunicator, communicator_of
from tiercache.dist.pipeline import StageInput
from tiercache.errors import BudgetError, RankError
from tiercache.values.batch import Batch

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])


def who(ranks: AnyCommunicator) -> list[int]:
    return [ranks.rank, ranks.size]


def small_values(ranks: AnyCommunicator) -> list[Any]:
    """Exchange values of many kinds, nothing at all, numbers beyond 32 bits, and minima."""
    told = {"rank": ranks.rank, "words": "é" * ranks.rank, "list": list(range(ranks.rank)), "none": None}
    none, zeros = torch.empty(0, dtype=torch.float32), [0] * ranks.size
    nothing = [len(ranks.all_to_all(none, zeros, zeros)), len(ranks.all_gather(none, zeros))]
    to = [[ranks.rank, target, 2**40 + ranks.rank] for target in range(ranks.size)]
    splits = ranks.exchange_splits(np.array(to, dtype=np.int64)).tolist()
    return [ranks.all_gather_object(told), nothing, splits, ranks.all_reduce_min([ranks.rank, -(2**40) * ranks.rank])]


@SIZES
def test_every_rank_knows_itself_and_hears_all(ranks_pool: RanksPool, size: int) -> None:
    """Values arrive in rank order, whatever their kinds and lengths; no rank waits for missing bytes."""
    assert ranks_pool.run(size, who) == [[rank, size] for rank in range(size)]
    expected = [{"rank": r, "words": "é" * r, "list": list(range(r)), "none": None} for r in range(size)]
    for rank, found in enumerate(ranks_pool.run(size, small_values)):
        splits = [[source, rank, 2**40 + source] for source in range(size)]
        assert found == [expected, [0, 0], splits, [0, -(2**40) * (size - 1)]]


def exchange_unevenly(ranks: AnyCommunicator, dtype: str, silent: bool = False) -> list[Any]:
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


@pytest.mark.sampled(6)
@SIZES
@pytest.mark.parametrize("dtype", ["int64", "int32", "float32", "bfloat16", "float16", "uint8"])
def test_uneven_pieces_of_any_dtype_arrive_in_rank_order(ranks_pool: RanksPool, size: int, dtype: str) -> None:
    for silent in (False, True):
        got = ranks_pool.run(size, exchange_unevenly, dtype=dtype, silent=silent)
        for rank in range(size):
            from_each = [(16 * s + rank, 0 if silent and s == 0 else 3 * s + rank) for s in range(size)]
            assert got[rank] == [value for value, count in from_each for _ in range(count)]


def gather_unevenly(ranks: AnyCommunicator, dtype: str, sizes: list[int]) -> list[float]:
    """Gather ``sizes[r]`` elements of value r + 1 from every rank r."""
    mine = torch.full((sizes[ranks.rank],), ranks.rank + 1).to(getattr(torch, dtype))
    gathered = ranks.all_gather(mine, sizes)
    assert gathered.dtype == mine.dtype
    return gathered.to(torch.float64).tolist()


@pytest.mark.sampled(4)
@SIZES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_pieces_of_uneven_sizes_are_gathered_in_rank_order(ranks_pool: RanksPool, size: int, dtype: str) -> None:
    for sizes in ([3, 0, 2, 5], [0, 0, 1, 0], [1, 4, 0, 0]):
        got = ranks_pool.run(size, gather_unevenly, dtype=dtype, sizes=sizes[:size])
        assert got == [[float(rank + 1) for rank in range(size) for _ in range(sizes[rank])]] * size


def gather_a_number_each(ranks: AnyCommunicator) -> list[float]:
    with patch.object(dist, "broadcast", side_effect=AssertionError("one for each rank")) as broadcast:
        gathered = ranks.all_gather(torch.full((1,), ranks.rank + 0.5, dtype=torch.float64), [1] * ranks.size)
    return [broadcast.call_count, *gathered.tolist()]


@SIZES
def test_a_number_of_each_rank_is_gathered_in_one_collective(ranks_pool: RanksPool, size: int) -> None:
    """Clipping and overflow checks use one collective, not one per rank."""
    assert ranks_pool.run(size, gather_a_number_each) == [[0, *(rank + 0.5 for rank in range(size))]] * size


def exchange_on_two_threads(ranks: AnyCommunicator) -> list[float]:
    """Exchange on a second thread: before the main thread's exchanges on even ranks, after them on odd ranks."""
    other = ranks.clone()
    ones, one_each, sums = torch.ones(ranks.size), [1] * ranks.size, dict[str, float]()

    def exchange(name: str, on: AnyCommunicator, scale: float) -> None:
        sums[name] = sum(float(on.all_to_all(ones * scale * i, one_each, one_each).sum()) for i in range(20))

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


@SIZES
def test_two_threads_exchange_in_any_order_where_one_has_a_clone(ranks_pool: RanksPool, size: int) -> None:
    total = float(size * sum(range(20)))
    assert ranks_pool.run(size, exchange_on_two_threads) == [[total, 2 * total]] * size


def join_a_part(ranks: AnyCommunicator) -> list[Any]:
    """Have ranks 1 and above communicate in a separate group, several times."""
    group: Any = dist.new_group(list(range(1, ranks.size)))
    if ranks.rank == 0:
        with pytest.raises(RankError) as caught:
            communicator_of(group)
        return [str(caught.value)]
    told = []
    for turn in range(2):
        inner = communicator_of(group)
        told.append(inner.all_gather_object(ranks.rank))
        other = inner.clone()
        told.append(other.all_gather_object(ranks.rank + turn))
        other.close()
        inner.close()
    return [inner.rank, inner.size, told]


def test_a_group_of_some_of_the_processes_is_joined(ranks_pool: RanksPool) -> None:
    outside, *inside = ranks_pool.run(3, join_a_part)
    assert outside == ["this process is not in the given process group: pass a group that includes it"]
    told = [[1, 2], [1, 2], [1, 2], [2, 3]]
    assert inside == [[0, 2, told], [1, 2, told]]


# -- errors --------------------------------------------------------------------------------------------------


def fail(ranks: AnyCommunicator, who: list[int], kind: str) -> Any:
    """Fail on some ranks inside ``raise_on_all``, before the others' next collective; then go on."""
    try:
        with ranks.raise_on_all("opening the store"):
            if ranks.rank in who:
                raise {"BudgetError": BudgetError, "KeyError": KeyError, "OSError": OSError}[kind](
                    f"no room {ranks.rank}"
                ) from ZeroDivisionError()
    finally:
        assert ranks.all_gather_object(ranks.rank) == [*range(ranks.size)], "an agreed error leaves a collective"


def test_an_error_on_some_ranks_is_raised_on_all(ranks_pool: RanksPool) -> None:
    """A rank that failed keeps the error's type and cause; the others name the first rank, its operation and the
    message, with the type of a foreign error.
    """
    assert ranks_pool.errors(1, fail, who=[0], kind="OSError") == [("OSError", "no room 0")]
    other = ("RankError", "rank 1 failed while opening the store: no room 1")
    assert ranks_pool.errors(3, fail, who=[1], kind="BudgetError") == [other, ("BudgetError", "no room 1"), other]
    first, *others = ranks_pool.errors(4, fail, who=[1, 2, 3], kind="KeyError")
    words = "rank 1 failed while opening the store (and ranks 2 and 3 too): KeyError: 'no room 1'"
    assert first == ("RankError", words)
    assert others == [("KeyError", f"'no room {rank}'") for rank in (1, 2, 3)]
    with pytest.raises(RunFailedError) as failed:
        ranks_pool.run(2, fail, who=[0], kind="KeyError")
    assert [error and error.cause for error in failed.value.errors] == ["ZeroDivisionError", None]


def give_back_too_early(ranks: AnyCommunicator) -> list[Any]:
    """Return gradients of collected vectors before their backward and after it, for each rank's samples."""
    outputs = torch.full((2 + ranks.rank, 3), 1.0, requires_grad=True)
    stage = StageInput(ranks)
    found = stage.collect(outputs * 2, Batch(torch.empty(0), torch.empty(0), {}, None, 2 + ranks.rank))  # type: ignore[arg-type]
    with pytest.raises((ValueError, RankError)) as caught:
        stage.give_back(found)
    if found is not None:
        found.mean().backward()
    stage.give_back(found)
    assert outputs.grad is not None
    return [f"{caught.type.__name__}: {caught.value}", outputs.grad.sum().item()]


def test_gradients_that_are_given_back_before_their_backward_are_refused_on_all_ranks(ranks_pool: RanksPool) -> None:
    told = ranks_pool.run(3, give_back_too_early)

    sentence = "collected vectors have no gradient: run the pipeline's step with them before give_back"
    other = f"RankError: rank 0 failed while returning gradients of collected vectors: ValueError: {sentence}"
    assert [one[0] for one in told] == [f"ValueError: {sentence}", other, other]
    assert [one[1] for one in told] == pytest.approx([2 * 3 * size / 9 for size in (2, 3, 4)])


def leave_early(ranks: AnyCommunicator) -> None:
    if ranks.rank == 0:
        raise ValueError("on my own")
    ranks.barrier("waiting for rank 0")


def test_a_rank_that_leaves_on_its_own_ends_the_others(ranks_pool: RanksPool) -> None:
    """When it closes, agreements and data break at once; the message says what the others were doing."""
    got = ranks_pool.errors(3, leave_early, limit=40)
    assert got[0] == ("ValueError", "on my own")
    for rank in (1, 2):
        kind, sentence = got[rank] or ("", "")
        assert kind == "RankError"
        assert sentence.startswith(f"a rank ended or did not answer while rank {rank} was waiting for rank 0 (")
        assert sentence.endswith("): restart all ranks to resume from the last commit")


def talk_after_leaving(ranks: AnyCommunicator) -> None:
    ranks.barrier()
    ranks.close()
    ranks.close()
    ranks.barrier()


def test_a_closed_communicator_says_so(ranks_pool: RanksPool) -> None:
    got = ranks_pool.errors(2, talk_after_leaving)
    assert all(one is not None and "on a closed communicator" in one[1] for one in got)


def exchange_for_different_things(ranks: AnyCommunicator) -> None:
    what = "stepping rows" if ranks.rank == 1 else "asking for rows"
    ranks.exchange_splits(np.zeros((ranks.size, 2), np.int64), what)


def test_ranks_that_exchange_splits_for_different_things_say_so(ranks_pool: RanksPool) -> None:
    """A checksum of their purpose travels with them."""
    got = ranks_pool.errors(3, exchange_for_different_things)
    assert [one and one[1].partition(":")[0] for one in got] == [
        "rank 1 did something else while rank 0 was asking for rows",
        "ranks 0 and 2 did something else while rank 1 was stepping rows",
        "rank 1 did something else while rank 2 was asking for rows",
    ]


def make_groups_without_the_last(ranks: AnyCommunicator, after: int, part: bool) -> None:
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

    with patch.object(dist, "new_group", new_group):
        communicator_of(group).clone()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "after", "part"), [(2, 0, False), (2, 3, False), (3, 1, True)])
def test_a_rank_that_is_gone_while_groups_are_made_is_waited_for_no_longer_than_was_said(
    ranks_pool: RanksPool, size: int, after: int, part: bool
) -> None:
    """By the time-out of the parent group: agreements may last for days only once all have met."""
    *others, gone = ranks_pool.errors(size, make_groups_without_the_last, limit=12.0, after=after, part=part)
    if part:
        assert gone is None
        gone = others.pop()
    assert gone == ("SystemError", "this rank is gone")
    for error in others:
        assert error is not None
        assert error[0] == "RankError"
        assert re.search(r"did not answer while rank \d was (making process groups|connecting the ranks)", error[1])


def waits_of_groups(ranks: AnyCommunicator) -> list[float]:
    """Return the time-outs of a clone's process groups, in seconds."""
    clone = ranks.clone()
    groups = clone._host, clone._data
    waits = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    clone.close()
    return waits


def test_agreements_wait_for_days_once_all_ranks_have_met(ranks_pool: RanksPool) -> None:
    """Data transfers wait for torch's default."""
    assert ranks_pool.run(2, waits_of_groups) == [[30 * 86400.0, 45.0]] * 2


def test_alone_nothing_is_copied_and_nobody_is_asked() -> None:
    ranks = communicator_of()
    assert not dist.is_initialized()
    assert (ranks.rank, ranks.size) == (0, 1)
    sent, to = torch.arange(5), np.array([[5]])
    assert ranks.all_to_all(sent, [5], [5]) is sent
    assert ranks.all_gather(sent, [5]) is sent
    assert ranks.exchange_splits(to) is to
    assert torch.equal(ranks.all_to_all(sent, [5], [5], torch.empty(5, dtype=torch.int64)), sent)
    assert ranks.clone().all_gather_object((1, "a")) == [[1, "a"]]
    ranks.barrier()
    ranks.close()


def be_on_cuda(_: AnyCommunicator) -> None:
    communicator_of(device="cuda:0")


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_ranks_on_cuda_need_nccl(ranks_pool: RanksPool) -> None:
    """A torch for CPUs names the cause, not a missing rank."""
    told = ranks_pool.errors(2, be_on_cuda)
    assert all(one is not None and "need NCCL, which torch lacks" in one[1] for one in told)


def test_torch_distributed_is_called_in_one_module() -> None:
    """Everything else knows a communicator only."""
    package = Path(__file__).parents[2] / "tiercache"
    uses = re.compile(r"^(import|from) torch\.distributed", re.M)  # not for types alone
    users = {str(file.relative_to(package)) for file in package.rglob("*.py") if uses.search(file.read_text("utf-8"))}
    assert users == {"dist/communicator.py"}


# -- facts that must agree on all ranks ------------------------------------------------------------------------

END = ": pass the same values on all ranks and restart them"


def compare(ranks: AnyCommunicator, by_rank: list[dict[str, Any]], version: str = tiercache.__version__) -> None:
    """Compare facts; the last rank has a ``version`` of the package."""
    mine = version if ranks.rank == ranks.size - 1 else tiercache.__version__
    with patch.object(consistency, "__version__", mine):
        consistency.check_same(ranks, by_rank[ranks.rank])


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_with_the_same_facts_go_on(ranks_pool: RanksPool, size: int) -> None:
    """Order within a fact does not count."""
    facts = [{"the schema": {"a": 1, "b": [1, 2]}, "the seed": 5}] * 2 + [
        {"the seed": 5, "the schema": {"b": [1, 2], "a": 1}}
    ]
    assert ranks_pool.errors(size, compare, by_rank=facts) == [None] * size


def test_what_differs_is_named_with_its_values_and_ranks(ranks_pool: RanksPool) -> None:
    """On every rank the same sentence, of all differences; the version is always compared."""
    facts = [{"the seed": 1, "the schema": "aa"}, {"the seed": 2, "the schema": "aa"}, {"the seed": 1}]
    seed, schema = "the seed (1 on ranks 0 and 2, 2 on rank 1)", "the schema (aa on ranks 0 and 1, nothing on rank 2)"
    sentence = f"ranks differ in {seed}; {schema}{END}"
    assert ranks_pool.errors(3, compare, by_rank=facts) == [("RankError", sentence)] * 3
    sentence = (
        f"ranks differ in the version of tiercache ({tiercache.__version__} on ranks 0 and 1, 9.9 on rank 2){END}"
    )
    assert ranks_pool.errors(3, compare, by_rank=[{}] * 3, version="9.9") == [("RankError", sentence)] * 3


def test_long_facts_are_told_by_digest(ranks_pool: RanksPool) -> None:
    """Two sharding plans that differ in one letter of many."""
    facts = [{"the sharding": "x" * 500}, {"the sharding": "x" * 499 + "y"}]
    (first, second) = ranks_pool.errors(2, compare, by_rank=facts)
    assert first == second is not None
    words = first[1].removeprefix("ranks differ in the sharding (digest ").removesuffix(f" on rank 1){END}").split()
    assert words[1:5] == ["on", "rank", "0,", "digest"]
    assert words[0] != words[5]


# -- the pool that tests share -------------------------------------------------------------------------------


def end(ranks: AnyCommunicator, how: str) -> None:
    """Hang on rank 1 for longer than the test waits, or kill it."""
    sys.stderr.write(f"about to {how}\n")
    if ranks.rank == 1:
        if how == "hang":
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.barrier()


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "words"),
    [("hang", [r"hanging: \[1\]", "about to hang", "in end"]), ("die", ["rank 1: died", "while rank 0 was waiting"])],
)
def test_a_rank_that_ends_fails_its_test_and_no_other(tmp_path: Path, how: str, words: list[str]) -> None:
    """The test gets each rank's stack and output; new processes serve the next run."""
    with RanksPool(tmp_path, most=2) as pool:
        pool.run(2, who)
        begin = time.monotonic()
        with pytest.raises(RunFailedError) as failed:
            pool.run(2, end, limit=3 if how == "hang" else 60, how=how)
        assert time.monotonic() - begin < 60
        assert all(re.search(one, str(failed.value)) for one in words), failed.value
        assert pool.run(2, who) == [[0, 2], [1, 2]]
