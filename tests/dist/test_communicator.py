"""Ranks exchange values, splits and rows, compare facts, and all fail if one fails."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import tiercache
from tests.dist.pool import RanksPool, RunFailedError
from tiercache.dist.communicator import communicator_of

SIZES = (1, 2, 3, 4)
BODIES = "tests.dist.bodies:"


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_knows_itself_and_hears_all(ranks_pool: RanksPool, size: int) -> None:
    """Values arrive in rank order, whatever their kinds and lengths; no rank waits for missing bytes.

    Row r of the splits that a rank gets came from rank r; all ranks know the minimum.
    """
    assert ranks_pool.run(size, BODIES + "who") == [[rank, size] for rank in range(size)]
    expected = [{"rank": r, "words": "é" * r, "list": list(range(r)), "none": None} for r in range(size)]
    for rank, found in enumerate(ranks_pool.run(size, BODIES + "small_values")):
        splits = [[source, rank, 2**40 + source] for source in range(size)]
        assert found == [expected, [0, 0], splits, [0, -(2**40) * (size - 1)]]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["int64", "int32", "float32", "bfloat16", "float16", "uint8"])
def test_uneven_pieces_of_any_dtype_arrive_in_rank_order(ranks_pool: RanksPool, size: int, dtype: str) -> None:
    """Rank r gets the piece from each rank s, in order."""
    for silent in (False, True):
        got = ranks_pool.run(size, BODIES + "uneven_exchange", dtype=dtype, silent=silent)
        for rank in range(size):
            from_each = [(16 * s + rank, 0 if silent and s == 0 else 3 * s + rank) for s in range(size)]
            assert got[rank] == [value for value, count in from_each for _ in range(count)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_pieces_of_uneven_sizes_are_gathered_in_rank_order(ranks_pool: RanksPool, size: int, dtype: str) -> None:
    """Everybody has everybody's, empty pieces left out."""
    for sizes in ([3, 0, 2, 5], [0, 0, 1, 0], [1, 4, 0, 0]):
        got = ranks_pool.run(size, BODIES + "uneven_gather", dtype=dtype, sizes=sizes[:size])
        assert got == [[float(rank + 1) for rank in range(size) for _ in range(sizes[rank])]] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_number_of_each_rank_is_gathered_in_one_collective(ranks_pool: RanksPool, size: int) -> None:
    """Clipping and overflow checks use one collective, not one per rank."""
    assert ranks_pool.run(size, BODIES + "even_gather") == [[0, *(rank + 0.5 for rank in range(size))]] * size


@pytest.mark.parametrize("size", SIZES)
def test_two_threads_exchange_in_any_order_where_one_has_a_clone(ranks_pool: RanksPool, size: int) -> None:
    """Half the ranks run the thread's exchanges first, half last, and nothing waits or mixes."""
    total = float(size * sum(range(20)))
    assert ranks_pool.run(size, BODIES + "two_threads") == [[total, 2 * total]] * size


@pytest.mark.parametrize("size", SIZES)
def test_dense_layers_in_ddp_train_beside_the_ranks(ranks_pool: RanksPool, size: int) -> None:
    """DistributedDataParallel averages over the default group between exchanges of ours."""
    mean = sum(range(size)) / size
    assert ranks_pool.run(size, BODIES + "dense_layers") == [[mean, mean]] * size


def test_a_group_of_some_of_the_processes_is_joined(ranks_pool: RanksPool) -> None:
    """Ranks count within the group; a process outside gets an error."""
    outside, *inside = ranks_pool.run(3, BODIES + "joins_a_part")
    assert outside == ["this process is not in the given process group: pass a group that includes it"]
    told = [[1, 2], [1, 2], [1, 2], [2, 3]]
    assert inside == [[0, 2, told], [1, 2, told]]


def test_an_error_on_one_rank_is_raised_on_all(ranks_pool: RanksPool) -> None:
    """Its rank keeps the error's type, the others name the rank, its operation and the message; no rank hangs."""
    assert ranks_pool.errors(1, BODIES + "fails_in_the_body", who=[0], kind="OSError") == [("OSError", "no room 0")]
    got = ranks_pool.errors(3, BODIES + "fails_in_the_body", who=[1], kind="BudgetError")
    other = ("RankError", "rank 1 failed while opening the store: no room 1")
    assert got == [other, ("BudgetError", "no room 1"), other]


def test_errors_on_several_ranks_are_named_together(ranks_pool: RanksPool) -> None:
    """The first rank's message is used for all; foreign errors include their type."""
    got = ranks_pool.errors(4, BODIES + "fails_in_the_body", who=[1, 2, 3], kind="KeyError")
    assert got[0] == (
        "RankError",
        "rank 1 failed while opening the store (and ranks 2 and 3 too): KeyError: 'no room 1'",
    )
    assert [kind for kind, _ in got[1:]] == ["KeyError"] * 3


def test_gradients_that_are_given_back_before_their_backward_are_refused_on_all_ranks(ranks_pool: RanksPool) -> None:
    """After it they may be returned: each rank gets the gradients of its samples, times the number of ranks."""
    told = ranks_pool.run(3, BODIES + "gives_back_too_early")

    sentence = "collected vectors have no gradient: run the pipeline's step with them before give_back"
    other = f"RankError: rank 0 failed while returning gradients of collected vectors: ValueError: {sentence}"
    assert [one[0] for one in told] == [f"ValueError: {sentence}", other, other]
    assert [one[1] for one in told] == pytest.approx([2 * 3 * size / 9 for size in (2, 3, 4)])


def test_ranks_talk_on_after_an_agreed_error(ranks_pool: RanksPool) -> None:
    """An agreed error leaves no half-done collective."""
    assert ranks_pool.run(3, BODIES + "goes_on_after_an_error") == [["OSError", "RankError", "RankError"]] * 3


def test_an_error_keeps_its_cause(ranks_pool: RanksPool) -> None:
    """The rank itself sees the error as it was raised."""
    with pytest.raises(AssertionError) as failed:
        ranks_pool.run(2, BODIES + "keeps_its_cause")
    assert [error.cause for error in failed.value.errors] == ["KeyError", None]  # type: ignore[attr-defined]


def test_a_rank_that_leaves_on_its_own_ends_the_others(ranks_pool: RanksPool) -> None:
    """When it closes, agreements and data break at once; the message says what the others were doing."""
    got = ranks_pool.errors(3, BODIES + "leaves_early", limit=40)
    assert got[0] == ("ValueError", "on my own")
    for rank in (1, 2):
        kind, sentence = got[rank] or ("", "")
        assert kind == "RankError"
        assert sentence.startswith(f"a rank ended or did not answer while rank {rank} was waiting for rank 0 (")
        assert sentence.endswith("): restart all ranks to resume from the last commit")


def test_a_closed_communicator_says_so(ranks_pool: RanksPool) -> None:
    """Closing twice is nothing; talking after it is an error."""
    got = ranks_pool.errors(2, BODIES + "talks_after_leaving")
    assert all(one is not None and "on a closed communicator" in one[1] for one in got)


def test_ranks_that_exchange_splits_for_different_things_say_so(ranks_pool: RanksPool) -> None:
    """A checksum of their purpose travels with them."""
    got = ranks_pool.errors(3, BODIES + "waits_for_different_things")
    assert [one and one[1].partition(":")[0] for one in got] == [
        "rank 1 did something else while rank 0 was asking for rows",
        "ranks 0 and 2 did something else while rank 1 was stepping rows",
        "rank 1 did something else while rank 2 was asking for rows",
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "after", "part"), [(2, 0, False), (2, 3, False), (3, 1, True)])
def test_a_rank_that_is_gone_while_groups_are_made_is_waited_for_no_longer_than_was_said(
    ranks_pool: RanksPool, size: int, after: int, part: bool
) -> None:
    """By the time-out of the parent group: agreements may last for days only once all have met."""
    *others, gone = ranks_pool.errors(size, BODIES + "groups_without_the_last", limit=12.0, after=after, part=part)
    if part:
        assert gone is None
        gone = others.pop()
    assert gone == ("SystemError", "this rank is gone")
    for error in others:
        assert error is not None
        assert error[0] == "RankError"
        assert re.search(r"did not answer while rank \d was (making process groups|connecting the ranks)", error[1])


def test_agreements_wait_for_days_once_all_ranks_have_met(ranks_pool: RanksPool) -> None:
    """Data transfers wait for torch's default."""
    assert ranks_pool.run(2, BODIES + "waits_of_groups") == [[30 * 86400.0, 45.0]] * 2


def test_alone_nothing_is_copied_and_nobody_is_asked() -> None:
    """Without a process group there is one rank, and torch.distributed stays untouched."""
    ranks = communicator_of()
    assert not torch.distributed.is_initialized()
    assert (ranks.rank, ranks.size) == (0, 1)
    sent, to = torch.arange(5), np.array([[5]])
    assert ranks.all_to_all(sent, [5], [5]) is sent
    assert ranks.all_gather(sent, [5]) is sent
    assert ranks.exchange_splits(to) is to
    assert torch.equal(ranks.all_to_all(sent, [5], [5], torch.empty(5, dtype=torch.int64)), sent)
    assert ranks.clone().all_gather_object((1, "a")) == [[1, "a"]]
    ranks.barrier()
    ranks.close()


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_ranks_on_cuda_need_nccl(ranks_pool: RanksPool) -> None:
    """A torch for CPUs names the cause, not a missing rank."""
    told = ranks_pool.errors(2, BODIES + "is_on_cuda")
    assert all(one is not None and "need NCCL, which torch lacks" in one[1] for one in told)


def test_torch_distributed_is_called_in_one_module() -> None:
    """Everything else knows a communicator only."""
    package = Path(__file__).parents[2] / "tiercache"
    uses = re.compile(r"^(import|from) torch\.distributed", re.M)  # not for types alone
    users = set()
    for file in [*package.rglob("*.py"), *(package / "kernels").glob("*.py"), *(package / "store").rglob("*.py")]:
        if uses.search(file.read_text("utf-8")):
            users.add(str(file.relative_to(package)))
    assert users == {"dist/communicator.py"}


# -- facts that must agree on all ranks ------------------------------------------------------------------------

COMPARE = "tests.dist.bodies:compare"
END = ": pass the same values on all ranks and restart them"


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_with_the_same_facts_go_on(ranks_pool: RanksPool, size: int) -> None:
    """Order within a fact does not count."""
    facts = [{"the schema": {"a": 1, "b": [1, 2]}, "the seed": 5}] * 2 + [
        {"the seed": 5, "the schema": {"b": [1, 2], "a": 1}}
    ]
    assert ranks_pool.errors(size, COMPARE, by_rank=facts) == [None] * size


def test_what_differs_is_named_with_its_values_and_ranks(ranks_pool: RanksPool) -> None:
    """On every rank the same sentence, of all differences."""
    facts = [{"the seed": 1, "the schema": "aa"}, {"the seed": 2, "the schema": "aa"}, {"the seed": 1}]
    seed, schema = "the seed (1 on ranks 0 and 2, 2 on rank 1)", "the schema (aa on ranks 0 and 1, nothing on rank 2)"
    sentence = f"ranks differ in {seed}; {schema}{END}"
    assert ranks_pool.errors(3, COMPARE, by_rank=facts) == [("RankError", sentence)] * 3


def test_long_facts_are_told_by_digest(ranks_pool: RanksPool) -> None:
    """Two sharding plans that differ in one letter of many."""
    facts = [{"the sharding": "x" * 500}, {"the sharding": "x" * 499 + "y"}]
    (first, second) = ranks_pool.errors(2, COMPARE, by_rank=facts)
    assert first == second is not None
    words = first[1].removeprefix("ranks differ in the sharding (digest ").removesuffix(f" on rank 1){END}").split()
    assert words[1:5] == ["on", "rank", "0,", "digest"]
    assert words[0] != words[5]


def test_ranks_with_different_versions_do_not_train_together(ranks_pool: RanksPool) -> None:
    """The version is always compared."""
    here = tiercache.__version__
    sentence = f"ranks differ in the version of tiercache ({here} on ranks 0 and 1, 9.9 on rank 2){END}"
    assert ranks_pool.errors(3, COMPARE, by_rank=[{}] * 3, version="9.9") == [("RankError", sentence)] * 3


# -- the pool that tests share -------------------------------------------------------------------------------


@pytest.mark.long
def test_a_rank_that_hangs_fails_its_test_and_no_other(tmp_path: Path) -> None:
    """The test gets each rank's stack and output; new processes serve the next run."""
    with RanksPool(tmp_path, most=2) as pool:
        pool.run(2, "tests.dist.bodies:who")
        begin = time.monotonic()
        with pytest.raises(RunFailedError, match=r"(?s)hanging: \[1\].*about to hang.*in hangs"):
            pool.run(2, "tests.dist.bodies:hangs", limit=3)
        assert time.monotonic() - begin < 30
        assert pool.run(2, "tests.dist.bodies:who") == [[0, 2], [1, 2]]


@pytest.mark.long
def test_a_rank_that_dies_fails_its_test_and_no_other(tmp_path: Path) -> None:
    """The others say who died."""
    with RanksPool(tmp_path, most=2) as pool:
        with pytest.raises(RunFailedError, match=r"rank 1 died|rank 1: died") as failed:
            pool.run(2, "tests.dist.bodies:dies")
        assert "while rank 0 was waiting for all ranks" in str(failed.value)
        assert pool.run(2, "tests.dist.bodies:who") == [[0, 2], [1, 2]]
