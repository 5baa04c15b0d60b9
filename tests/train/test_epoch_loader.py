"""cache.loader replaces a loader in a loop over epochs, which stays unchanged."""

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

import tiercache as tc
from tests.train.cases import tiered
from tiercache.errors import StateError

ROWS, SAMPLES, BATCH = 64, 60, 8


class Items(Dataset[Any]):
    """A key and a target; keys drift, so that passes differ."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[int, float]:
        return (i + 7 * (i % 3)) % ROWS, float(i % 5)


def made(tmp_path: Path, *, shuffle: bool = False) -> tuple[Any, Any, DataLoader[Any], tc.PassDataset]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"item": nn.Embedding(ROWS, 4), "top": nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tc.convert(model, optimizer=optimizer)
    loader = DataLoader(Items(), BATCH, shuffle=shuffle)
    data = tc.record_key_sets(
        model, loader, tmp_path / "keys", device_budget=800, keys=lambda batch: {"item": batch[0]}, progress=False
    )
    assert len(data.passes) > 2
    return model, optimizer, loader, data


def train(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    (model["top"](model["item"](batch[0]))[:, 0] - batch[1]).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_has_every_sample_once(tmp_path: Path, shuffle: bool) -> None:
    model, optimizer, loader, data = made(tmp_path, shuffle=shuffle)
    orders = []
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        batches = cache.loader(loader, 3)
        assert batches.current_pass is None
        for epoch in range(3):
            seen: list[tuple[int, float]] = []
            count = 0
            for batch in batches:
                train(model, cache.optimizer, batch)
                seen += zip(batch[0].tolist(), batch[1].tolist(), strict=True)
                count += 1
            assert (batches.epoch, batches.current_pass.epoch) == (epoch, epoch)
            assert count == len(batches)
            assert sorted(seen) == sorted((key, target) for key, target in map(Items().__getitem__, range(SAMPLES)))
            orders.append(seen)
            cache.drain(staged=False)
            assert cache.store.commit is not None
            assert cache.store.commit.cursor.pass_index == (epoch + 1) * len(data.passes)
            with torch.no_grad():
                assert model["item"](torch.arange(ROWS)).shape == (ROWS, 4)
        assert (orders[0] != orders[1]) == shuffle
        with pytest.raises(StateError, match="created for 3 epochs but is iterated once more"):
            iter(batches)


def test_a_script_that_runs_again_goes_on_where_it_stood(tmp_path: Path) -> None:
    def run(name: str, stop: int | None) -> Iterator[Any]:
        model, optimizer, loader, data = made(tmp_path)
        with tiered(tmp_path / name, data, model=model, optimizer=optimizer) as cache:
            batches, done = cache.loader(loader, 3), 0
            for _ in range(3):
                for batch in batches:
                    if done == stop:
                        return
                    train(model, cache.optimizer, batch)
                    done += 1
                    yield done
            yield cache.store.lookup("item", torch.arange(ROWS).numpy())["vector"].tobytes()

    *_, whole = run("whole.tc", None)
    first = list(run("again.tc", 13))
    *steps, again = run("again.tc", None)
    per_epoch = len(DataLoader(Items(), BATCH))
    assert len(first) + len(steps) >= 3 * per_epoch > len(steps)
    assert whole == again


def test_an_epoch_that_is_left_early_is_an_error_at_the_next(tmp_path: Path) -> None:
    model, optimizer, loader, data = made(tmp_path)
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        batches = cache.loader(loader, 2)
        for batch in batches:
            train(model, cache.optimizer, batch)
            break
        with pytest.raises(StateError, match="pass 0 "):
            next(iter(batches))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stops_at", [(0, 0), (0, 5), (1, 0), (2, 0), (2, 3), (2, 7), (3, 1)])
def test_a_scheduler_of_epochs_has_the_rates_of_a_script_that_was_never_stopped(
    tmp_path: Path, stops_at: tuple[int, int]
) -> None:
    def run(store: Path, stop: tuple[int, int] | None) -> dict[int, list[float]]:
        model, optimizer, loader, data = made(tmp_path)
        rates: dict[int, list[float]] = {}
        with tiered(store, data, model=model, optimizer=optimizer) as cache:
            batches = cache.loader(loader, 4)
            scheduler = torch.optim.lr_scheduler.StepLR(cache.optimizer, 1, 0.5)
            cache.register(scheduler=scheduler)
            for epoch in range(4):
                for number, batch in enumerate(batches):
                    if (epoch, number) == stop:
                        return rates
                    train(model, cache.optimizer, batch)
                    rates[epoch] = [group["lr"] for group in cache.optimizer.param_groups]
                scheduler.step()
        return rates

    whole = run(tmp_path / "whole.tc", None)
    assert whole == {epoch: [0.1 * 0.5**epoch] * 2 for epoch in range(4)}
    run(tmp_path / "m.tc", stops_at)
    again = run(tmp_path / "m.tc", None)
    assert again == {epoch: rates for epoch, rates in whole.items() if epoch >= min(again)}
    assert min(again) in {stops_at[0], stops_at[0] - 1}


def test_another_loader_in_the_same_script_steps_its_scheduler_once_for_each_epoch(tmp_path: Path) -> None:
    model, optimizer, loader, data = made(tmp_path)
    rates: dict[int, float] = {}
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        scheduler = torch.optim.lr_scheduler.StepLR(cache.optimizer, 1, 0.5)
        cache.register(scheduler=scheduler)
        for epochs in (1, 2, 4):
            batches = cache.loader(loader, epochs)
            for epoch in range(epochs):
                for batch in batches:
                    rates[epoch] = cache.optimizer.param_groups[-1]["lr"]
                    train(model, cache.optimizer, batch)
                scheduler.step()
    assert rates == {epoch: 0.1 * 0.5**epoch for epoch in range(4)}


def run_to(cache: tc.TierCache, model: Any, loader: DataLoader[Any], *, last: int, epochs: int = 4) -> list[float]:
    """Train up to pass ``last`` and return the rate of rows in each pass."""
    rates = list[float]()
    for p in cache.passes(epochs):
        if p.index == last:
            p.stop()
            continue
        rates.append(cache.optimizer.param_groups[-1]["lr"])
        for batch in p.loader(loader.dataset, batch_size=BATCH):
            train(model, cache.optimizer, batch)
    return rates


@pytest.mark.parametrize("when", ["after a stop", "after restore()"])
def test_what_changes_after_a_commit_in_the_middle_of_an_epoch_is_kept(tmp_path: Path, when: str) -> None:
    model, optimizer, loader, data = made(tmp_path)
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        assert run_to(cache, model, loader, last=2) == [0.1, 0.1]
        if when == "after a stop":
            change(cache, model)
            assert run_to(cache, model, loader, last=4) == [0.05, 0.05]
    model, optimizer, loader, data = made(tmp_path)
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        cache.restore()
        at = cache.optimizer.param_groups[-1]["lr"]
        halved = change(cache, model)
        passes = iter(cache.passes(4))
        next(passes)
        torch.testing.assert_close(model["top"].weight, halved, rtol=0, atol=0)
        assert cache.optimizer.param_groups[-1]["lr"] == at / 2


def test_a_loop_that_is_left_in_a_pass_begins_at_the_last_commit(tmp_path: Path) -> None:
    model, optimizer, loader, data = made(tmp_path)
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        run_to(cache, model, loader, last=2)
        before = model["top"].weight.detach().clone()
        for p in cache.passes(4):
            train(model, cache.optimizer, next(iter(p.loader(loader.dataset, batch_size=BATCH))))
            break
        change(cache, model)
        next(iter(cache.passes(4)))
        torch.testing.assert_close(model["top"].weight, before, rtol=0, atol=0)
        assert cache.optimizer.param_groups[-1]["lr"] == 0.1


def test_a_model_that_is_registered_later_gets_the_weights_of_the_last_commit(tmp_path: Path) -> None:
    model, optimizer, loader, data = made(tmp_path)
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        run_to(cache, model, loader, last=2)
        second = copy.deepcopy(model)
        with torch.no_grad():
            second["top"].weight.zero_()
        cache.register(model=second, optimizer=torch.optim.SGD(second.parameters(), lr=0.1))
        next(iter(cache.passes(4)))
        torch.testing.assert_close(second["top"].weight, model["top"].weight, rtol=0, atol=0)


def test_a_store_that_is_rolled_back_to_another_run_at_the_same_pass_brings_its_weights(tmp_path: Path) -> None:
    model, optimizer, loader, data = made(tmp_path)
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        run_to(cache, model, loader, last=1)
        cache.keep("begin")
        run_to(cache, model, loader, last=3)
        cache.keep("first")
        first = model["top"].weight.detach().clone()
        cache.store.rollback("begin")
        cache.restore()
        change(cache, model)
        run_to(cache, model, loader, last=3)
        assert not torch.equal(model["top"].weight, first)
        assert cache.store.rollback("first").cursor.pass_index == 3
        cache.store.state, state = lambda: b"damaged", cache.store.state
        with pytest.raises(StateError, match="dense state of the last commit"):
            next(iter(cache.passes(4)))
        cache.store.state = state
        next(iter(cache.passes(4)))
        torch.testing.assert_close(model["top"].weight, first, rtol=0, atol=0)
        assert cache.optimizer.param_groups[-1]["lr"] == 0.1


def test_a_step_that_failed_is_taken_back_after_a_commit_inside_the_pass(tmp_path: Path) -> None:
    """Dense parameters had moved before the step of rows raised an error: a new loop restores the commit."""
    model, optimizer, _, data = made(tmp_path)
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        batch = torch.tensor(data.passes[0].keys("item")[:4]), torch.ones(4)
        for _ in cache.passes(1):
            train(model, cache.optimizer, batch)
            cache.commit()
            committed = model["top"].weight.detach().clone()
            cache.optimizer.param_groups[-1]["lr"] = float("nan")
            with pytest.raises(ValueError, match="learning rate nan"):
                train(model, cache.optimizer, batch)
            break
        assert next(iter(cache.passes(1))).start_batch == 1
        torch.testing.assert_close(model["top"].weight, committed, rtol=0, atol=0)
        assert cache.optimizer.param_groups[-1]["lr"] == 0.1


def test_a_cache_that_is_restored_serves_its_model_again(tmp_path: Path) -> None:
    """Plain keys were those of another cache since that got the same model."""
    model, optimizer, loader, data = made(tmp_path)
    keys = torch.arange(8)
    with tiered(tmp_path / "a.tc", data, model=model, optimizer=optimizer) as cache:
        run_to(cache, model, loader, last=2)
        with tiered(tmp_path / "b.tc", data, model=model) as other, torch.no_grad():
            other.restore()
            initial = model["item"](keys)
            for serve in (cache.restore, lambda: next(iter(cache.passes(4)))):
                serve()
                trained = torch.from_numpy(cache.store.lookup("item", keys.numpy())["vector"])
                assert torch.equal(model["item"](keys), trained)
                other.restore()
                assert torch.equal(model["item"](keys), initial)
                assert not torch.equal(initial, trained)
            with cache.lookups(local=False):
                assert torch.equal(model["item"](keys), trained)


def change(cache: tc.TierCache, model: Any) -> torch.Tensor:
    """Halve all rates and a dense weight, which is returned."""
    for group in cache.optimizer.param_groups:
        group["lr"] /= 2
    with torch.no_grad():
        return model["top"].weight.mul_(0.5).clone()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["scheduler", "by hand"])
def test_a_loop_over_passes_in_each_epoch_keeps_what_the_script_changed_between(tmp_path: Path, kind: str) -> None:
    def run(epochs: range) -> list[float]:
        model, optimizer, loader, data = made(tmp_path)
        rates: list[float] = []
        halved = None
        with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
            scheduler = torch.optim.lr_scheduler.StepLR(cache.optimizer, 1, 0.5)
            cache.register(scheduler=scheduler)
            for epoch in epochs:
                for p in cache.passes(epochs=epoch + 1):
                    if halved is not None:
                        torch.testing.assert_close(model["top"].weight, halved, rtol=0, atol=0)
                        halved = None
                    for batch in p.loader(loader.dataset, batch_size=BATCH):
                        train(model, cache.optimizer, batch)
                    if p.sub_dataset == 0:
                        rates.append(cache.optimizer.param_groups[-1]["lr"])
                if kind == "scheduler":
                    scheduler.step()
                    continue
                halved = change(cache, model)
        return rates

    assert run(range(2)) == [0.1, 0.05]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing is left to train")
        assert run(range(4)) == [0.025, 0.0125]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"batch_size": 2 * BATCH},
            f"has batch_size 16, but the key sets were recorded with {BATCH}: .* set batch_size=",
        ),
        ({"batch_size": None}, "has batch_size None"),
        ({"batch_size": BATCH, "drop_last": True}, "has drop_last True, but the key sets were recorded with False"),
        (
            {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(30))},
            "has sampler SubsetRandomSampler, but the key sets were recorded with SequentialSampler: pass the loader",
        ),
        ({"batch_sampler": [[0, 1], [2]]}, "has batch_size None"),
    ],
)
def test_a_loader_with_other_batches_than_the_recorded_one_is_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    """The recorded batches would be trained instead."""
    model, optimizer, _, data = made(tmp_path)
    loader = DataLoader(Items(), **arguments)
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        with pytest.raises(ValueError, match=message):
            cache.loader(loader, 1)
        if arguments == {"batch_size": 2 * BATCH}:
            sizes = set[int]()
            for batch in cache.loader(loader, 1, batch_size=2 * BATCH):
                train(model, cache.optimizer, batch)
                sizes.add(len(batch[0]))
            assert max(sizes) == 2 * BATCH
