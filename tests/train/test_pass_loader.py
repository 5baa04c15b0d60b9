"""p.loader: a pass is trained on exactly its samples, from the user's own dataset, in an order that resumes."""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import tiercache as tc
from tests.train.recorded import BATCH, ITEMS, SAMPLES, Clicks, indices, loader, opened, record, result, torch_step
from tests.train.test_bad_input import one_sentence
from tests.train.test_recorded_key_sets import Numbers
from tiercache.errors import DatasetError, StateError
from tiercache.train.loader_batches import made_batches


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tc.PassDataset:
    return record(tmp_path_factory.mktemp("recorded") / "keys", loader(shuffle=True))


@pytest.fixture(scope="module")
def in_order(tmp_path_factory: pytest.TempPathFactory) -> tc.PassDataset:
    return record(tmp_path_factory.mktemp("recorded") / "keys")


class Indices(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, random.random() + float(torch.rand(())) + float(np.random.rand())  # noqa: NPY002


def taken(folder: Path, data: tc.PassDataset, dataset: Any, epochs: int = 1, **arguments: Any) -> list[list[Any]]:
    found: list[list[Any]] = []
    with opened(folder, data)[0] as cache:
        for p in cache.passes(epochs=epochs):
            found.append(list(p.loader(dataset, **arguments)))
            p.skip()
    return found


# -- the same training -------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_losses_are_those_of_torch_with_the_same_batches(tmp_path: Path, data: tc.PassDataset, workers: int) -> None:
    assert len(data) > 5
    batches, losses, _ = stopped_after(
        tmp_path, data, lambda p: p.loader(Clicks(), BATCH, shuffle=p.epoch == 1, num_workers=workers), epochs=2,
        each=torch.manual_seed,
    )  # fmt: skip
    assert len(batches) == 2 * SAMPLES // BATCH
    expected = losses_of_torch(batches)
    np.testing.assert_allclose(losses, expected, atol=1e-6)
    assert max(abs(a - b) for a, b in pairwise(expected)) > 1e-3


def losses_of_torch(batches: Iterable[Any]) -> list[float]:
    """Train the same batches in torch, each with its number as the seed of dropout."""
    theirs, losses = torch_step(), []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        losses.append(theirs(batch))
    return losses


def stopped_after(
    folder: Path, data: tc.PassDataset, take: Callable[[tc.Pass], Iterable[Any]], *stops: int, epochs: int = 1,
    each: Callable[[int], object] = lambda count: None,
) -> tuple[list[Any], list[float], dict[str, Any]]:  # fmt: skip
    """Train with a stop after each number of batches of a run, committed inside a pass; a new cache goes on.

    Returns the batches that were trained, their losses and the result. ``each``: called with the count of batches
    before each one.
    """
    batches: list[Any] = []
    losses: list[float] = []
    for stop in [*stops, 10**9]:
        first = len(batches)
        cache, step = opened(folder, data)
        with cache:
            for p in cache.passes(epochs=epochs):
                for batch in take(p):
                    each(len(batches))
                    batches.append(batch)
                    losses.append(step(batch))
                    if len(batches) - first == stop:
                        cache.commit()
                        p.stop()
                        break
            found = result(cache, step)
        torch.rand(3)  # what is between two runs
    return batches, losses, found


def run(
    folder: Path, data: tc.PassDataset, stops: list[int], workers: int = 0, size: int = 15
) -> tuple[list[float], dict[str, Any]]:
    """Train two epochs whose loop draws random numbers too; return losses and result."""
    torch.manual_seed(9)
    _, losses, found = stopped_after(
        folder, data, lambda p: p.loader(Clicks(), size, shuffle=True, num_workers=workers), *stops, epochs=2,
        each=lambda _: torch.rand(()),
    )  # fmt: skip
    return losses, found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_that_stops_ends_with_the_same_bits(tmp_path: Path, data: tc.PassDataset, workers: int) -> None:
    assert run(tmp_path / "stopped", data, [3, 8, 1, 20], workers) == run(tmp_path / "whole", data, [])


def test_uncommitted_batches_are_trained_again(tmp_path: Path, data: tc.PassDataset) -> None:
    """A run that dies inside a pass resumes from its last commit, with the same bits."""
    whole = run(tmp_path / "whole", data, [], size=10)[1]
    torch.manual_seed(9)

    def train(dies: bool) -> dict[str, Any]:
        cache, step = opened(tmp_path / "store", data)
        with cache:
            for p in cache.passes(epochs=2):
                assert p.start_sample == (20 if p.index == 3 and not dies else 0)
                for number, batch in enumerate(p.loader(Clicks(), 10, shuffle=True)):
                    torch.rand(())
                    step(batch)
                    if dies and (p.index, number) == (3, 1):
                        cache.commit()
                    if dies and (p.index, number) == (3, 2):
                        raise ZeroDivisionError
            return result(cache, step)

    with pytest.raises(ZeroDivisionError):
        train(dies=True)
    assert train(dies=False) == whole


def flat(cache: tc.TierCache, ahead: int) -> Iterator[Any]:
    """Yield the batches of two epochs, each after fetching ``ahead`` more."""
    passes = (batch for p in cache.passes(epochs=2) for batch in p.loader(Clicks(), 15, shuffle=True))
    waiting: list[Any] = list(islice(passes, ahead))
    for batch in passes:
        waiting.append(batch)
        yield waiting.pop(0)
    yield from waiting


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", [0, 4, 5, 17])
def test_a_loop_may_take_one_batch_ahead(tmp_path: Path, data: tc.PassDataset, stop: int) -> None:
    """Also the first one of the next pass: a commit counts the batches that were trained."""
    whole = run(tmp_path / "whole", data, [])[1]
    torch.manual_seed(9)

    def train(last: int) -> dict[str, Any]:
        cache, step = opened(tmp_path / "store", data)
        with cache:
            for number, batch in enumerate(flat(cache, 1), 1):
                torch.rand(())
                step(batch)
                if number == last:
                    cache.commit()
                    return {}
            cache.commit()
            return result(cache, step)

    if stop:
        train(stop)
    assert train(0) == whole


def test_a_loop_that_takes_more_batches_ahead_is_refused(tmp_path: Path, data: tc.PassDataset) -> None:
    """Its lookups would be counted for the wrong batch."""
    cache, step = opened(tmp_path / "store", data)
    with one_sentence(StateError, "3 batches of pass 0 were taken before one was trained"), cache:
        for batch in flat(cache, 2):
            step(batch)


def steps(cache: tc.TierCache, per_step: int, **options: Any) -> Iterator[list[Any]]:
    """Yield the batches of steps, as trainers take them that accumulate gradients."""
    batches = iter(cache.batches(BATCH, epochs=2, dataset=Clicks(), batches_per_step=per_step, **options))
    while together := list(islice(batches, per_step)):
        yield together


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_trainer_may_take_a_steps_batches_at_once(tmp_path: Path, in_order: tc.PassDataset, shuffle: bool) -> None:
    found = []
    for per_step in (1, 2):
        torch.manual_seed(9)
        cache, step = opened(tmp_path / f"{per_step}", in_order)
        with cache:
            for together in steps(cache, per_step, shuffle=shuffle):
                assert len(together) == per_step
                for batch in together:
                    step(batch)
            found.append(result(cache, step))
    assert found[0] == found[1]


def test_a_batch_of_a_step_that_is_not_trained_is_found(tmp_path: Path, in_order: tc.PassDataset) -> None:
    cache, step = opened(tmp_path / "store", in_order)
    with one_sentence(DatasetError, "recorded batch 0 of pass 0", "did not make"), cache:
        for together in steps(cache, 2):
            step(together[0])
            step(together[0])


def test_a_step_of_two_passes_is_refused(tmp_path: Path) -> None:
    uneven = record(tmp_path / "keys", device_budget="14KiB")
    cache, _ = opened(tmp_path / "store", uneven, device_budget="18KiB")
    with cache:
        words = "sub-dataset 3 has 3 batches", "a step of 2 batches would have 1 of its pass", "multiples of 40 samples"
        with one_sentence(ValueError, *words):
            cache.batches(BATCH, epochs=1, dataset=Clicks(), batches_per_step=2)
        with one_sentence(ValueError, "batches_per_step is 0"):
            cache.batches(BATCH, epochs=1, dataset=Clicks(), batches_per_step=0)
    last = record(tmp_path / "last", loader(Clicks(SAMPLES - BATCH)))
    cache, _ = opened(tmp_path / "other", last)
    with cache:
        options = {"dataset": Clicks(SAMPLES - BATCH), "batches_per_step": 2}
        assert len(cache.batches(BATCH, epochs=1, **options)) == SAMPLES // BATCH - 1
        with one_sentence(ValueError, "sub-dataset 14 has 1 batches", "drop the last"):
            cache.batches(BATCH, epochs=2, **options)
    backward, number = (*reversed(range(len(last.passes))),), len(last.passes) - 1
    cache, _ = opened(tmp_path / "backward", last, order=backward)
    with cache, one_sentence(ValueError, f"sub-dataset {number} has 1 batches"):  # it is trained first
        cache.batches(BATCH, epochs=1, **options)


# -- batches ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_has_its_samples_in_an_order_of_each_epoch(tmp_path: Path, data: tc.PassDataset, workers: int) -> None:
    """Every sample once, in batches whose number the loader knows; random numbers differ, with any workers."""
    arguments: dict[str, Any] = {"epochs": 2, "batch_size": 7, "shuffle": True}
    passes = taken(tmp_path / "store", data, Indices(), num_workers=workers, **arguments)
    seen = [[one for batch in batches for one in batch[0].tolist()] for batches in passes]
    for recorded, first, second in zip(indices(data), seen[: len(data)], seen[len(data) :], strict=True):
        assert sorted(first) == sorted(second) == sorted(recorded.tolist())
        assert first != second
        assert first != recorded.tolist()
    drawn = [one for batches in passes for batch in batches for one in batch[1].tolist()]
    assert len(set(drawn)) == len(drawn)
    again = taken(tmp_path / "again", data, Indices(), **arguments)
    assert [one for batches in again for batch in batches for one in batch[1].tolist()] == drawn


def test_a_loader_is_sized_and_leaves_random_numbers_alone(tmp_path: Path, data: tc.PassDataset) -> None:
    cache, step = opened(tmp_path / "store", data)
    with cache:
        loop = cache.passes(epochs=1)
        p = next(loop)
        made = p.loader(Clicks(), 15)
        expected = -(-p.num_samples // 15)
        assert isinstance(made, DataLoader)
        assert len(made) == expected
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index] # noqa: NPY002
        batches = iter(made)
        first = next(batches)
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()
        assert (before[2] == np.random.get_state()[1]).all()  # type: ignore[index] # noqa: NPY002
        step(first)
        cache.commit()
        p.stop()
        loop.close()
    cache, step = opened(tmp_path / "store", data)
    with cache:
        for p in cache.passes(epochs=1):
            made = p.loader(Clicks(), 15)
            assert len(made) == (expected - 1 if p.index == 0 else -(-p.num_samples // 15))
            assert sum(step(batch) > 0 for batch in made) > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_a_batch_sampler_are_trained_as_they_were_recorded(tmp_path: Path, shuffle: bool) -> None:
    groups = [[4 * i + j for j in range(2 + i % 5)] for i in range(100)]
    data = record(tmp_path / "keys", loader(batch_sampler=groups, batch_size=1))
    passes = taken(tmp_path / "store", data, Indices(), shuffle=shuffle)
    seen = [tuple(batch[0].tolist()) for batches in passes for batch in batches]
    assert (seen == [*map(tuple, groups)]) != shuffle
    assert sorted(seen) == sorted(map(tuple, groups))
    resumed, _, _ = stopped_after(tmp_path / "resumed", data, lambda p: p.loader(Clicks(), shuffle=shuffle), 7)
    assert [one[0].tolist() for one in resumed] == [Clicks().users[list(one)].tolist() for one in seen]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize(
    "sampling",
    [
        {"batch_size": 1}, {"batch_size": 1, "sampler": range(8)}, {"batch_sampler": [[i] for i in range(8)]},
        {"batch_size": None}, {"batch_size": None, "sampler": range(8)},
    ],
)  # fmt: skip
def test_batches_have_the_shapes_of_torchs(tmp_path: Path, sampling: dict[str, Any], size: int | None) -> None:
    """Batches of one sample have one, and samples that were not batched have none, unless a batch size is passed."""
    clicks: Any = [(torch.tensor(i), torch.full((2,), i)) for i in range(8)]
    data = record(tmp_path / "keys", DataLoader(clicks, **sampling), keys=lambda batch: {"item": batch[1]})
    batches = [batch for some in taken(tmp_path / "store", data, clicks, batch_size=size) for batch in some]
    torch_sampling = sampling if size is None else {"batch_size": size}
    for batch, theirs in zip(batches, DataLoader(clicks, **torch_sampling), strict=True):
        assert type(batch) is type(theirs)
        assert all(torch.equal(one, other) for one, other in zip(batch, theirs, strict=True))


def test_a_collation_and_workers_of_the_users_are_used(tmp_path: Path, data: tc.PassDataset) -> None:
    def collate(samples: Any) -> Any:
        return torch.utils.data.get_worker_info() is not None, default_collate(samples)

    for workers in (0, 1):
        passes = taken(tmp_path / f"{workers}", data, Indices(), collate_fn=collate, num_workers=workers)
        for is_worker, batch in (one for some in passes for one in some):
            assert is_worker == bool(workers)
            assert batch[0].dtype == torch.int64


def test_an_iterable_is_made_anew_for_each_pass(tmp_path: Path) -> None:
    """Its batches before the pass, or before a commit inside it, are dropped."""
    data = record(tmp_path / "keys", lambda: loader(Numbers()))

    def made(p: tc.Pass) -> Any:
        batches = p.loader(lambda: loader(Numbers()))
        assert len(batches) == (p.num_samples - p.start_sample) // BATCH
        return batches

    _, losses, _ = stopped_after(tmp_path / "store", data, made, 11, epochs=2, each=torch.manual_seed)
    every = [one for _ in range(2) for one in made_batches(lambda: loader(Numbers()), 0)]
    np.testing.assert_allclose(losses, losses_of_torch(every), atol=1e-6)


def test_an_iterable_that_became_shorter_is_refused(tmp_path: Path) -> None:
    data = record(tmp_path / "keys", lambda: loader(Numbers()))
    cache, step = opened(tmp_path / "store", data)
    with one_sentence(DatasetError, "the function made 12 batches, but more when key sets were recorded"), cache:
        for p in cache.passes(epochs=1):
            for batch in p.loader(lambda: islice(loader(Numbers()), 12)):
                step(batch)


def test_a_sampler_feeds_a_loader_of_the_users(tmp_path: Path, data: tc.PassDataset) -> None:
    """The pass is trained when the sampler has ended; a commit inside it is refused, as its batches are not counted."""
    cache, step = opened(tmp_path / "store", data)
    batches, losses = list[Any](), []
    with cache:
        for p in cache.passes(epochs=1):
            sampler = p.sampler(shuffle=True)
            assert len(sampler) == p.num_samples
            assert sorted(sampler) == sorted(indices(data)[p.sub_dataset].tolist())
            for batch in DataLoader(Clicks(), batch_size=9, sampler=sampler):
                torch.manual_seed(len(batches))
                batches.append(batch)
                losses.append(step(batch))
            with one_sentence(StateError, "samples come from p.sampler()", "take batches from p.loader(dataset)"):
                cache.commit()
    np.testing.assert_allclose(losses, losses_of_torch(batches), atol=1e-6)
    cache, step = opened(tmp_path / "other", data)
    with one_sentence(StateError, "ended before its loader did"), cache:
        for p in cache.passes(epochs=1):
            next(iter(p.sampler()))


class Triples(nn.Module):
    """A model with its tables as plain parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.entity, self.relation = nn.Parameter(torch.rand(ITEMS, 4)), nn.Parameter(torch.rand(20, 4))

    def forward(self, triples: torch.Tensor) -> torch.Tensor:
        head = torch.index_select(self.entity, 0, triples[:, 0])
        return (head * self.relation[triples[:, 1]] * self.entity[triples[:, 2]]).sum(1)


def test_a_model_with_tables_as_parameters_is_recorded_and_trained(tmp_path: Path) -> None:
    """With a tensor as its batch, which needs no call."""
    model = tc.convert(Triples(), parameters=["entity", "relation"], optimizer=tc.optim.SGD(learning_rate=0.1))
    triples: Any = torch.from_numpy(np.random.default_rng(0).integers(0, 20, (300, 3)))
    data = record(tmp_path / "keys", DataLoader(triples, batch_size=20), model, call=None, device_budget="2KiB")
    cache, step = opened(tmp_path / "store", data, model, device_budget="4KiB")
    with cache:
        for p in cache.passes(epochs=1):
            for batch in p.loader(triples):
                step.model(batch).square().mean().backward()
                cache.optimizer.step()
                cache.optimizer.zero_grad()
