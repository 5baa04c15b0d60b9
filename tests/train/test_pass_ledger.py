"""A pass is committed as trained only if its batches were trained; anything else is an error unless requested."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import Case, Net, Spec, open_store, table, tiered
from tests.train.test_bad_input import one_sentence
from tiercache.errors import StateError

CASE = Case(
    tables=(table("a", 4, tc.optim.SGD(learning_rate=0.1)), table("b", 6)),
    specs=(Spec(name="f", table="a", hotness="ragged"), Spec(name="g", table="b")),
    num_samples=192, pass_rows=64, num_keys=60,
)  # fmt: skip
"""3 passes of 4 batches."""


class Training:
    def __init__(self, cache: Any, store: tc.Store | None) -> None:
        torch.manual_seed(1)
        self.cache, self.store = cache, store
        self.model = Net(cache, CASE)
        cache.register(model=self.model, optimizer=torch.optim.SGD(self.model.parameters(), lr=0.05))
        self.optimizer = cache.optimizer
        self.registered = self.optimizer

    def passes(self) -> Iterator[tc.Pass]:
        return self.cache.passes(epochs=1)

    def run(self, call: Callable[[tc.Batch], object] | None = None) -> None:
        """Call a function with each batch; by default train it."""
        for p in self.passes():
            for batch in p.batches(16):
                (call or self.step)(batch)

    def step(self, batch: tc.Batch) -> None:
        self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, batch: tc.Batch) -> None:
        nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.label).backward()

    def no_grad(self, batch: tc.Batch) -> torch.Tensor:
        with torch.no_grad():
            return self.model(batch)

    @property
    def committed(self) -> tuple[int, int]:
        """The pass and sample at which a following loop begins."""
        if self.store is None:
            return self.cache._rows.trained, 0
        if not self.cache._closed:
            self.cache.drain(staged=False)
        if self.store.commit is None:
            return 0, 0
        return self.store.commit.cursor.pass_index, self.store.commit.cursor.sample


@pytest.fixture(params=["tiered", "resident"])
def training(request: pytest.FixtureRequest, passes: tc.PassDataset) -> Iterator[Training]:
    if request.param == "resident":
        cache = tc.InMemoryCache(passes)
        yield Training(cache, None)
        cache._close(failed=True)
        return
    with open_store(passes.path, CASE, "memory") as store:
        tier = tiered(store, passes)
        yield Training(tier, store)
        tier._close(failed=True)


def train_but(number: int, skip: int, how: str = "continue") -> Callable[[Training], None]:
    def run(t: Training) -> None:
        for p in t.passes():
            for i, batch in enumerate(p.batches(16)):
                if p.index == number and i == skip:
                    if how == "break":
                        break
                    if how == "no_grad":
                        t.no_grad(batch)
                    continue
                t.step(batch)

    return run


def other_optimizer(t: Training) -> None:
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.05)
    t.run()


def every_batch(call: Callable[[Training, tc.Batch], object]) -> Callable[[Training], None]:
    return lambda t: t.run(lambda batch: call(t, batch))


def two_rounds(t: Training, sizes: tuple[int, int] = (16, 16)) -> None:
    for p in t.passes():
        for size in sizes:
            for batch in p.batches(size):
                t.step(batch)


def micro(t: Training, upto: int) -> None:
    for p in t.passes():
        for parts in p.steps(32, micro_batches=4):
            for part in islice(parts, upto):
                t.backward(part)
            t.optimizer.step()
            t.optimizer.zero_grad()


def left_loader(t: Training) -> None:
    for p in t.passes():
        for batch in islice(p.wrap([raw_keys(p)] * 4, dict), 2):
            t.step(batch)


def raw_keys(p: tc.Pass, count: int = 5) -> dict[str, Any]:
    found = {name: np.array(p.source.keys(name)[:count]) for name in "ab"}
    keys = {"f": (found["a"], np.arange(found["a"].size)), "g": found["b"]}
    return {"keys": keys, "label": np.ones(count, np.float32), "dense": np.ones((count, 1), np.float32)}


WRONG: dict[str, tuple[Callable[[Training], object], list[str], int]] = {
    "passes are counted": (lambda t: sum(p.num_samples for p in t.passes()), ["pass 0", "0 of its 64 samples"], 0),
    "passes are listed": (lambda t: list(t.passes()), ["pass 0", "0 of its 64 samples"], 0),
    "batches are counted": (lambda t: [len([*p.batches(16)]) for p in t.passes()], ["pass 0", "0 of its 4 batches"], 0),
    "one batch of a pass": (lambda t: [len([*p.batches(64)]) for p in t.passes()], ["pass 0", "0 of its 1 batch "], 0),
    "a batch is peeked at": (lambda t: [next(p.batches(16)) for p in t.passes()], ["pass 0", "16 of its 64"], 0),
    "max_steps": (train_but(1, 2, "break"), ["pass 1", "3 batches", "48 of its 64 samples"], 1),
    "max_steps at the last batch": (train_but(0, 3, "break"), ["pass 0", "3 of its 4 batches"], 0),
    "a batch in the middle": (train_but(1, 1), ["pass 1", "3 of its 4 batches"], 1),
    "the first batch": (train_but(0, 0), ["pass 0", "3 of its 4 batches"], 0),
    "the last batch": (train_but(1, 3), ["pass 1", "3 of its 4 batches"], 1),
    "a batch for validation": (train_but(1, 2, "no_grad"), ["pass 1", "3 of its 4 batches"], 1),
    "a metric": (every_batch(Training.no_grad), ["pass 0", "0 of its 4 batches"], 0),
    "a metric with gradients": (every_batch(lambda t, b: t.model(b)), ["pass 0", "4 batches", "no gradient"], 0),
    "zero_grad alone": (
        every_batch(lambda t, b: (t.optimizer.zero_grad(), t.model(b))), ["pass 0", "4 batches", "no gradient"], 0,
    ),
    "no step": (
        every_batch(lambda t, b: (t.backward(b), t.model.zero_grad())), ["pass 0", "4 batches", "optimizer=..."], 0,
    ),
    "gradients dropped before the step": (
        every_batch(lambda t, b: (t.backward(b), t.model.zero_grad(), t.optimizer.step())),
        ["pass 0", "4 batches", "no optimizer of this cache has stepped"], 0,
    ),
    "another optimizer": (other_optimizer, ["pass 0", "4 batches", "no optimizer of this cache has stepped"], 0),
    "two rounds": (two_rounds, ["pass 0", "iterated again", "64 samples"], 0),
    "two rounds of other sizes": (lambda t: two_rounds(t, (64, 8)), ["pass 0", "iterated again"], 0),
    "three of four micro-batches": (lambda t: micro(t, 3), ["pass 0", "6 of its 8 batches"], 0),
    "a loader that is left": (left_loader, ["pass 0", "before its loader", "2 batches"], 0),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_pass_that_was_not_trained_is_refused_and_not_committed(training: Training, what: str) -> None:
    run, words, begins = WRONG[what]
    with one_sentence(StateError, *words, *([] if "round" in what else ["p.skip()", "p.stop()"])):
        run(training)
    assert training.committed == (begins, 0)
    training.optimizer = training.registered
    training.run()
    assert training.committed == (3, 0)


def test_a_model_that_the_cache_was_not_given_trains_no_pass_in_memory(passes: tc.PassDataset) -> None:
    """A notebook cell that creates model and optimizer again."""
    training = Training(tc.InMemoryCache(passes), None)
    training.model = Net(training.cache, CASE)
    with one_sentence(StateError, "pass 0", "4 batches", "no optimizer of this cache"):
        other_optimizer(training)


def overflow(t: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    for p in t.passes():
        for batch in p.batches(16):
            scaler.scale(t.model(batch).sum() * 1e30).backward()
            scaler.step(t.optimizer)
            scaler.update(2.0**120)
            t.optimizer.zero_grad()


def frozen(t: Training) -> None:
    t.model.bag.requires_grad_(False)
    t.run()


def frozen_without_gradients(t: Training, batch: tc.Batch) -> None:
    with torch.no_grad():
        vectors = t.model.bag(batch)
    t.model.top(torch.cat([vectors, batch.dense], dim=1)).sum().backward()
    t.optimizer.step()
    t.optimizer.zero_grad()


def empty_loader(t: Training) -> None:
    """Use a loader without any batch, like DataLoader(drop_last=True)."""
    for p in t.passes():
        for batch in p.wrap([], lambda item: item):
            t.step(batch)


def ended_loader(t: Training) -> None:
    """Report the end of a loader before its first batch."""
    for p in t.passes():
        while (batch := p.batch(None)) is not None:
            t.step(batch)


def one_ahead(t: Training) -> None:
    last = None
    for p in t.passes():
        for batch in p.batches(16):
            if last is not None:
                t.step(last)
            last = batch
    assert last is not None
    t.step(last)
    t.cache.close()


def skip_after(t: Training) -> None:
    for p in t.passes():
        for i, batch in enumerate(p.batches(16)):
            if i < 3:
                t.step(batch)
        p.skip()


def max_steps(t: Training) -> None:
    """Train two batches of each pass and skip the rest; no break is needed."""
    for p in t.passes():
        for i, batch in enumerate(p.batches(16)):
            assert i < 2
            t.step(batch)
            if i == 1:
                p.skip()


RIGHT: dict[str, Callable[[Training], object]] = {
    "plain": Training.run,
    "frozen modules": frozen,
    "frozen by no_grad": every_batch(frozen_without_gradients),
    "frozen by detach": every_batch(lambda t, b: (t.model.top(torch.cat([t.model.bag(b).detach(), b.dense], 1))
                                                  .sum().backward(), t.optimizer.step())),
    "gradients dropped": every_batch(lambda t, b: (t.backward(b), t.optimizer.zero_grad())),
    "gradients dropped by the optimizer of rows": every_batch(
        lambda t, b: (t.backward(b), t.cache.optimizer.zero_grad(), t.optimizer.zero_grad())),
    "steps skipped by a scaler": overflow,
    "rows stepped by hand": every_batch(lambda t, b: (t.backward(b), t.cache.optimizer.step(), t.model.zero_grad())),
    "no batch in a loader": empty_loader,
    "no batch by hand": ended_loader,
    "a batch ahead": one_ahead,
    "a preview": every_batch(lambda t, b: (t.no_grad(b), t.step(b))),
    "micro-batches": lambda t: micro(t, 4),
    "skipped": lambda t: [p.skip() for p in t.passes()],
    "skipped after its batches": skip_after,
    "skipped in the middle": max_steps,
}  # fmt: skip


@pytest.mark.parametrize("what", RIGHT)
def test_a_pass_whose_loop_did_what_it_may_is_committed(training: Training, what: str) -> None:
    RIGHT[what](training)
    assert training.committed == (3, 0)


@pytest.mark.parametrize("at", [(0, 0), (0, 2), (1, 0), (1, 3), (2, 3)])
@pytest.mark.parametrize("how", ["stop", "break", "close"])
def test_a_loop_that_is_left_commits_nothing_more(training: Training, at: tuple[int, int], how: str) -> None:
    """By ``p.stop()``, which ends both loops, by a break, or by closing the iterator: the pass is trained again."""
    loop, steps = training.passes(), 0
    for p in loop:
        for i, batch in enumerate(p.batches(16)):
            training.step(batch)
            steps += 1
            if (p.index, i) == at:
                if how == "stop":
                    p.stop()
                    continue
                break
        if p.index == at[0] and how == "break":
            break
        if p.index == at[0] and how == "close":
            loop.close()  # type: ignore[attr-defined]
    assert steps == 4 * at[0] + at[1] + 1
    assert training.committed == (at[0], 0)
    training.run()
    assert training.committed == (3, 0)


def test_a_pass_that_is_stopped_keeps_what_was_committed_inside(passes: tc.PassDataset) -> None:
    with open_store(passes.path, CASE, "memory") as store:
        with tiered(store, passes) as cache:
            training = Training(cache, store)
            for p in training.passes():
                for i, batch in enumerate(p.batches(16)):
                    training.step(batch)
                    if i == 1:
                        cache.commit()
                    if i == 2:
                        p.stop()
        assert training.committed == (0, 32)


def test_a_last_pass_that_was_not_trained_is_refused_when_the_cache_closes(training: Training) -> None:
    """Until then a loop that fetches ahead may train it."""
    for p in training.passes():
        for batch in p.batches(16):
            if p.index < 2:
                training.step(batch)
    with one_sentence(StateError, "pass 2", "0 of its 4 batches"):
        training.cache.close()
    assert training.committed[0] in (0, 2)


@pytest.mark.parametrize("call", [tc.Pass.skip, tc.Pass.stop], ids=["skip", "stop"])
def test_an_ended_pass_is_neither_skipped_nor_stopped(training: Training, call: Callable[[tc.Pass], None]) -> None:
    p = next(training.passes())
    with one_sentence(RuntimeError, "pass 0", "0 of its 64 samples", "was not kept"):
        call(p)
    with one_sentence(RuntimeError, "pass 0", "was not kept"):
        next(p.batches(16))


def test_a_pass_that_was_left_makes_no_raw_batches(training: Training) -> None:
    for p in training.passes():
        p.stop()
        with one_sentence(StateError, "pass 0", "no more batches"):
            p.batch(**raw_keys(p))
