"""Loops that fetch batches ahead of their training, across the ends of passes: the same bits and commits."""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tiercache as tc
from tests.train.cases import SPECS, Case, Net, Result, assert_same_bits, result_of, result_of_resident, table
from tests.train.devices import DEVICE, DEVICES
from tiercache.errors import StateError
from tiercache.store import MemoryEngine

CASE = Case(
    tables=(table("a", 4, tc.optim.Adagrad(learning_rate=0.1)), table("b", 6, tc.optim.SGD(learning_rate=0.1))),
    specs=SPECS,
)  # 4 passes of 4 batches, 2 epochs
STEPS = 32


class Training:
    def __init__(self, cache: Any) -> None:
        torch.manual_seed(1)
        self.cache = cache
        self.net = Net(cache, CASE).to(cache.device)
        self.model = nn.parallel.DistributedDataParallel(self.net) if dist.is_initialized() else self.net
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=5, gamma=0.9)
        cache.register(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self.optimizer = cache.optimizer
        self.losses: dict[tuple[int, int], float] = {}

    def fetched(self, **options: Any) -> Iterator[tuple[tc.Pass, int, tc.Batch]]:
        """Yield all batches, like a loader that does not know passes."""
        for p in self.cache.passes(epochs=2):
            for batch in p.batches(CASE.batch, shuffle=True, **options):
                yield p, batch.end, batch

    def step(self, p: tc.Pass, end: int, batch: tc.Batch) -> None:
        self.optimizer.zero_grad()
        logits = self.model(batch)
        kept = (torch.rand(logits.shape) < 0.8).to(logits.device)
        loss = (nn.functional.binary_cross_entropy_with_logits(logits, batch.label, reduction="none") * kept).mean()
        (loss * batch.weight).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.losses[p.index, end] = loss.item()

    def run(self, depth: int, *, steps: int | None = None, **options: Any) -> None:
        self.loader = ahead(self.fetched(**options), depth)
        for fetched in islice(self.loader, steps):
            self.step(*fetched)


def ahead(iterator: Iterator[Any], depth: int) -> Iterator[Any]:
    """Yield an iterator's items after fetching ``depth`` more, as prefetching loaders do."""
    held: deque[Any] = deque()
    for one in iterator:
        held.append(one)
        if len(held) > depth:
            yield held.popleft()
    yield from held


def opened(passes: tc.PassDataset, store: tc.Store, **options: Any) -> tc.TierCache:
    return tc.TierCache(store, passes, device_budget="48KiB", host_budget="16MiB", progress=False, **options)


def store_of(passes: tc.PassDataset) -> tc.Store:
    return tc.Store.open(None, engine=MemoryEngine(), tables=passes.tables)


Plain = tuple[Result, dict[tuple[int, int], float]]


def go_on(
    store: tc.Store, passes: tc.PassDataset, losses: dict[tuple[int, int], float], plain: Plain, *, at: tuple[int, int]
) -> None:
    """Train to the end from the last commit, ``at`` a pass and a sample, and compare with the plain loop."""
    assert (store.commit.cursor.pass_index, store.commit.cursor.sample) == at
    with opened(passes, store) as cache:
        training = Training(cache)
        training.run(2)
    assert losses | training.losses == plain[1]
    assert_same_bits(result_of(store, passes, training.net), plain[0])


@pytest.fixture(scope="module")
def plain(passes: tc.PassDataset) -> Plain:
    return plain_on(passes, "cpu")


def plain_on(passes: tc.PassDataset, device: Any) -> Plain:
    with store_of(passes) as store:
        with opened(passes, store, device=device) as cache:
            training = Training(cache)
            training.run(0)
        assert len(training.losses) == STEPS
        return result_of(store, passes, training.net), training.losses


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_loop_that_fetches_ahead_ends_with_the_same_bits(
    passes: tc.PassDataset, plain: Plain, depth: int, prefetch: int, device: str
) -> None:
    if device == DEVICE == "cuda":  # whose dense part has different bits
        plain = plain_on(passes, device)
    with store_of(passes) as store:
        with opened(passes, store, commit_every=3, device=DEVICES[device]()) as cache:
            training = Training(cache)
            training.run(depth, prefetch=prefetch)
            assert len(cache.reports) == 8
            cache.drain(staged=False)
            assert store.commit.cursor.pass_index == 6
        assert training.losses == plain[1]
        assert_same_bits(result_of(store, passes, training.net), plain[0])
        assert store.commit.cursor.pass_index == 8


def test_a_cache_in_memory_ends_with_the_same_bits(passes: tc.PassDataset, plain: Plain) -> None:
    with tc.InMemoryCache(passes) as cache:
        training = Training(cache)
        training.run(2)
        assert training.losses == plain[1]
        assert_same_bits(result_of_resident(cache, training.net), plain[0])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("steps", range(1, STEPS, 3))
def test_a_loop_given_up_at_any_step_goes_on_to_the_same_bits(passes: tc.PassDataset, plain: Plain, steps: int) -> None:
    with store_of(passes) as store:
        with suppress(InterruptedError), opened(passes, store) as cache:
            training = Training(cache)
            training.run(2, steps=steps)
            cache.drain(staged=False)
            raise InterruptedError
        go_on(store, passes, training.losses, plain, at=(max(0, (steps - 1) // 4), 0))


def test_a_commit_inside_counts_what_was_trained(passes: tc.PassDataset, plain: Plain) -> None:
    with store_of(passes) as store:
        with opened(passes, store) as cache:
            training = Training(cache)
            training.run(1, steps=6)
            cache.commit()
        go_on(store, passes, training.losses, plain, at=(1, 2 * CASE.batch))


def test_a_last_batch_that_was_not_trained_is_not_counted(passes: tc.PassDataset, plain: Plain) -> None:
    """The loop stops a batch before its loader: close commits after the trained batches, with a warning."""
    with store_of(passes) as store:
        cache = opened(passes, store)
        training = Training(cache)
        fetched = training.fetched()
        held = next(fetched)
        while (following := next(fetched, None)) is not None:
            training.step(*held)
            held = following
        with pytest.raises(StateError, match="pass 7 ended with 3 of its 4 batches"):
            cache.close()
        go_on(store, passes, training.losses, plain, at=(7, 3 * CASE.batch))


@pytest.mark.parametrize("by", [lambda cache: [*cache.passes(epochs=2)], lambda cache: cache.commit()])
def test_a_loop_or_a_commit_behind_one_that_fetched_ahead_commits_its_last_pass(passes: Any, by: Any) -> None:
    with store_of(passes) as store:
        with suppress(ZeroDivisionError), opened(passes, store) as cache:
            Training(cache).run(1)
            cache.drain(staged=False)
            assert store.commit.cursor.pass_index == 7
            assert not by(cache)
            raise ZeroDivisionError
        assert store.commit.cursor.pass_index == 8


def evaluate_of_the_next_pass(cache: Any) -> None:
    training = Training(cache)
    fetched = training.fetched()
    held = [next(fetched) for _ in range(5)]
    for one in held[:3]:
        training.step(*one)
    with torch.no_grad():
        training.net(held[3][2])
        with pytest.raises(StateError, match="a batch of pass 1 was looked up without gradients before any"):
            training.net(held[4][2])
    training.step(*held[3])
    training.step(*held[4])
    with torch.no_grad():
        training.net(held[4][2])
    with pytest.raises(RuntimeError, match="belongs to pass 0, which has ended"):
        training.net(held[3][2])


def leave_gradients(cache: Any) -> None:
    training = Training(cache)
    fetched = training.fetched()
    held = [next(fetched) for _ in range(5)]
    for one in held[:2]:
        training.step(*one)
    for _, _, batch in held[2:4]:
        training.model(batch).sum().backward()
    with pytest.raises(StateError, match=r"pass 0 ended between backward and step, and .* its last 2 batches would"):
        training.net(held[4][2])
    training.optimizer.step()
    training.step(*held[4])


@pytest.mark.parametrize("what", [evaluate_of_the_next_pass, leave_gradients])
def test_what_would_lose_gradients_or_read_absent_rows_is_refused(passes: tc.PassDataset, what: Any) -> None:
    with store_of(passes) as store, opened(passes, store) as cache:
        what(cache)
