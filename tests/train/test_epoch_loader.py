"""cache.loader replaces a loader in a loop over epochs, which stays unchanged."""

import copy
import warnings
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

import tiercache as tc
from tests.train.cases import tiered
from tests.train.loops import descend
from tiercache.errors import StateError

ROWS, SAMPLES, BATCH = 64, 60, 8


class Items(Dataset[Any]):
    """A key and a target; keys drift, so that passes differ."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[int, float]:
        return (i + 7 * (i % 3)) % ROWS, float(i % 5)


class Script:
    """A script that converts a model, records the keys of its loader, and opens a cache."""

    def __init__(self, folder: Path, store: str = "m.tc", *, shuffle: bool = False) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.ModuleDict({"item": nn.Embedding(ROWS, 4), "top": nn.Linear(4, 1)})
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        tc.convert(self.model, optimizer=optimizer)
        self.item, self.top = self.model["item"], self.model["top"]
        self.loader = DataLoader(Items(), BATCH, shuffle=shuffle)
        options = {"device_budget": 800, "keys": lambda batch: {"item": batch[0]}, "progress": False}
        self.data = tc.record_key_sets(self.model, self.loader, folder / "keys", **options)
        assert len(self.data.passes) > 2
        self.cache = tiered(folder / store, self.data, model=self.model, optimizer=optimizer)

    def __enter__(self) -> Self:
        self.cache.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.cache.__exit__(*error)

    def train(self, batch: Any) -> None:
        descend((self.top(self.item(batch[0]))[:, 0] - batch[1]).square().mean(), self.cache.optimizer)

    def step_rates(self) -> Any:
        """Return a registered scheduler that halves all rates."""
        scheduler = torch.optim.lr_scheduler.StepLR(self.cache.optimizer, 1, 0.5)
        self.cache.register(scheduler=scheduler)
        return scheduler

    @property
    def rate(self) -> float:
        """The learning rate of rows."""
        return self.cache.optimizer.param_groups[-1]["lr"]

    def change(self) -> torch.Tensor:
        """Halve all rates and a dense weight, which is returned."""
        for group in self.cache.optimizer.param_groups:
            group["lr"] /= 2
        with torch.no_grad():
            return self.top.weight.mul_(0.5).clone()

    def run_to(self, last: int) -> list[float]:
        """Train up to pass ``last`` and return the rate of rows in each pass."""
        rates = list[float]()
        for p in self.cache.passes(4):
            if p.index == last:
                p.stop()
                continue
            rates.append(self.rate)
            for batch in p.loader(self.loader.dataset, batch_size=BATCH):
                self.train(batch)
        return rates

    def rows(self) -> torch.Tensor:
        return torch.from_numpy(self.cache.store.lookup("item", np.arange(ROWS))["vector"])


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_has_every_sample_once(tmp_path: Path, shuffle: bool) -> None:
    orders = []
    with Script(tmp_path, shuffle=shuffle) as script:
        batches = script.cache.loader(script.loader, 3)
        assert batches.current_pass is None
        for epoch in range(3):
            seen: list[tuple[int, float]] = []
            count = 0
            for batch in batches:
                script.train(batch)
                count += 1
                seen += zip(batch[0].tolist(), batch[1].tolist(), strict=True)
            assert (batches.epoch, batches.current_pass.epoch) == (epoch, epoch)
            assert count == len(batches)
            assert sorted(seen) == sorted(Items()[i] for i in range(SAMPLES))
            orders.append(seen)
            script.cache.drain(staged=False)
            assert script.cache.store.commit.cursor.pass_index == (epoch + 1) * len(script.data.passes)
            with torch.no_grad():
                assert script.item(torch.arange(ROWS)).shape == (ROWS, 4)
        assert (orders[0] != orders[1]) == shuffle
        with pytest.raises(StateError, match="created for 3 epochs but is iterated once more"):
            iter(batches)


def test_an_epoch_that_is_left_early_is_an_error_at_the_next(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        batches = script.cache.loader(script.loader, 2)
        script.train(next(iter(batches)))
        with pytest.raises(StateError, match="pass 0 "):
            next(iter(batches))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stops_at", [(0, 0), (0, 5), (1, 0), (2, 0), (2, 3), (2, 7), (3, 1)])
def test_a_script_that_runs_again_goes_on_where_it_stood(tmp_path: Path, stops_at: tuple[int, int]) -> None:
    """With the rates of a scheduler of epochs: those that are skipped step it too. The rows have the same bits."""

    def run(store: str, stop: tuple[int, int] | None) -> tuple[dict[int, list[float]], Any]:
        rates: dict[int, list[float]] = {}
        with Script(tmp_path, store) as script:
            batches, scheduler = script.cache.loader(script.loader, 4), script.step_rates()
            for epoch in range(4):
                for number, batch in enumerate(batches):
                    if (epoch, number) == stop:
                        return rates, None
                    script.train(batch)
                    rates[epoch] = [group["lr"] for group in script.cache.optimizer.param_groups]
                scheduler.step()
            return rates, script.rows()

    whole, rows = run("whole.tc", None)
    assert whole == {epoch: [0.1 * 0.5**epoch] * 2 for epoch in range(4)}
    run("m.tc", stops_at)
    again, found = run("m.tc", None)
    assert again == {epoch: rates for epoch, rates in whole.items() if epoch >= min(again)}
    assert min(again) in {stops_at[0], stops_at[0] - 1}
    assert torch.equal(found, rows)


def test_another_loader_in_the_same_script_steps_its_scheduler_once_for_each_epoch(tmp_path: Path) -> None:
    rates: dict[int, float] = {}
    with Script(tmp_path) as script:
        scheduler = script.step_rates()
        for epochs in (1, 2, 4):
            batches = script.cache.loader(script.loader, epochs)
            for epoch in range(epochs):
                for batch in batches:
                    rates[epoch] = script.rate
                    script.train(batch)
                scheduler.step()
    assert rates == {epoch: 0.1 * 0.5**epoch for epoch in range(4)}


@pytest.mark.parametrize("when", ["after a stop", "after restore()"])
def test_what_changes_after_a_commit_in_the_middle_of_an_epoch_is_kept(tmp_path: Path, when: str) -> None:
    with Script(tmp_path) as script:
        assert script.run_to(2) == [0.1, 0.1]
        if when == "after a stop":
            script.change()
            assert script.run_to(4) == [0.05, 0.05]
    with Script(tmp_path) as script:
        script.cache.restore()
        at, halved = script.rate, script.change()
        next(iter(script.cache.passes(4)))
        assert torch.equal(script.top.weight, halved)
        assert script.rate == at / 2


def test_a_loop_that_is_left_in_a_pass_begins_at_the_last_commit(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        script.run_to(2)
        before = script.top.weight.detach().clone()
        for p in script.cache.passes(4):
            script.train(next(iter(p.loader(script.loader.dataset, batch_size=BATCH))))
            break
        script.change()
        next(iter(script.cache.passes(4)))
        assert torch.equal(script.top.weight, before)
        assert script.rate == 0.1


def test_a_model_that_is_registered_later_gets_the_weights_of_the_last_commit(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        script.run_to(2)
        second = copy.deepcopy(script.model)
        nn.init.zeros_(second["top"].weight)
        script.cache.register(model=second, optimizer=torch.optim.SGD(second.parameters(), lr=0.1))
        next(iter(script.cache.passes(4)))
        assert torch.equal(second["top"].weight, script.top.weight)


def test_a_store_that_is_rolled_back_to_another_run_at_the_same_pass_brings_its_weights(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        store = script.cache.store
        script.run_to(1)
        script.cache.keep("begin")
        script.run_to(3)
        script.cache.keep("first")
        first = script.top.weight.detach().clone()
        store.rollback("begin")
        script.cache.restore()
        script.change()
        script.run_to(3)
        assert not torch.equal(script.top.weight, first)
        assert store.rollback("first").cursor.pass_index == 3
        with (
            patch.object(store, "state", lambda: b"damaged"),
            pytest.raises(StateError, match="dense state of the last commit"),
        ):
            next(iter(script.cache.passes(4)))
        next(iter(script.cache.passes(4)))
        assert torch.equal(script.top.weight, first)
        assert script.rate == 0.1


def test_a_step_that_failed_is_taken_back_after_a_commit_inside_the_pass(tmp_path: Path) -> None:
    """Dense parameters had moved before the step of rows raised an error: a new loop restores the commit."""
    with Script(tmp_path) as script:
        batch = torch.tensor(script.data.passes[0].keys("item")[:4]), torch.ones(4)
        for _ in script.cache.passes(1):
            script.train(batch)
            script.cache.commit()
            committed = script.top.weight.detach().clone()
            script.cache.optimizer.param_groups[-1]["lr"] = float("nan")
            with pytest.raises(ValueError, match="learning rate nan"):
                script.train(batch)
            break
        assert next(iter(script.cache.passes(1))).start_batch == 1
        assert torch.equal(script.top.weight, committed)
        assert script.rate == 0.1


def test_a_cache_that_is_restored_serves_its_model_again(tmp_path: Path) -> None:
    """Plain keys were those of another cache since that got the same model."""
    keys = torch.arange(ROWS)
    with Script(tmp_path) as script:
        cache = script.cache
        script.run_to(2)
        with tiered(tmp_path / "b.tc", script.data, model=script.model) as other, torch.no_grad():
            other.restore()
            initial = script.item(keys)
            for serve in (cache.restore, lambda: next(iter(cache.passes(4)))):
                serve()
                trained = script.rows()
                assert torch.equal(script.item(keys), trained)
                other.restore()
                assert torch.equal(script.item(keys), initial)
                assert not torch.equal(initial, trained)
            with cache.lookups(local=False):
                assert torch.equal(script.item(keys), trained)


@pytest.mark.parametrize("kind", ["scheduler", "by hand"])
def test_a_loop_over_passes_in_each_epoch_keeps_what_the_script_changed_between(tmp_path: Path, kind: str) -> None:
    def run(epochs: range) -> list[float]:
        rates: list[float] = []
        halved = None
        with Script(tmp_path) as script:
            scheduler = script.step_rates()
            for epoch in epochs:
                for p in script.cache.passes(epochs=epoch + 1):
                    if halved is not None:
                        assert torch.equal(script.top.weight, halved)
                        halved = None
                    for batch in p.loader(script.loader.dataset, batch_size=BATCH):
                        script.train(batch)
                    if p.sub_dataset == 0:
                        rates.append(script.rate)
                if kind == "scheduler":
                    scheduler.step()
                else:
                    halved = script.change()
        return rates

    assert run(range(2)) == [0.1, 0.05]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing is left to train")
        assert run(range(4)) == [0.025, 0.0125]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 2 * BATCH}, f"has batch_size 16, but the key sets were recorded with {BATCH}: .* set batch_s"),
        ({"batch_size": None}, "has batch_size None"),
        ({"batch_size": BATCH, "drop_last": True}, "has drop_last True, but the key sets were recorded with False"),
        ({"batch_size": BATCH, "sampler": SubsetRandomSampler(range(30))},
         "has sampler SubsetRandomSampler, but the key sets were recorded with SequentialSampler: pass the loader"),
        ({"batch_sampler": [[0, 1], [2]]}, "has batch_size None"),
    ],
)  # fmt: skip
def test_a_loader_with_other_batches_than_recorded_is_refused(tmp_path: Path, arguments: Any, message: str) -> None:
    """The recorded batches would be trained instead."""
    loader = DataLoader(Items(), **arguments)
    with Script(tmp_path) as script:
        with pytest.raises(ValueError, match=message):
            script.cache.loader(loader, 1)
        if arguments == {"batch_size": 2 * BATCH}:
            sizes = set[int]()
            for batch in script.cache.loader(loader, 1, batch_size=2 * BATCH):
                script.train(batch)
                sizes.add(len(batch[0]))
            assert max(sizes) == 2 * BATCH
