"""What a cache is given beside tables: models as people wrap them, schedulers, and the last commit's state."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import tiercache as tc
from tests.training.cases import SPECS, Case, Net, table
from tiercache.errors import StateError
from tiercache.store import MemoryEngine

CASE = Case(tables=(table("a", 4), table("b", 6)), specs=SPECS, num_samples=64, pass_rows=32)
BUDGETS = {"device_budget": "1MiB", "host_budget": "32MiB"}


def train(cache: tc.TierCache, model: torch.nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Train to the end of an epoch."""
    for p in cache.passes(epochs=epochs):
        for batch in p.batches(16):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()


def test_the_state_of_a_compiled_model_has_the_names_of_the_model(passes: tc.PassDataset) -> None:
    """So a training goes on without compiling, or with."""
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        model = Net(passes, CASE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tc.TierCache(store, passes, model=torch.compile(model), optimizer=optimizer, **BUDGETS) as cache:
            train(cache, model, optimizer, 1)
        other = Net(passes, CASE)
        again = torch.optim.SGD(other.parameters(), lr=0.1)
        with tc.TierCache(store, passes, model=other, optimizer=again, **BUDGETS) as cache:
            assert list(cache.passes(epochs=1)) == []
        assert torch.equal(other.top.weight, model.top.weight)


def test_the_last_commit_is_restored_without_a_loop(passes: tc.PassDataset) -> None:
    """Weights as they were, and rows as an evaluation sees them; a loop that is open ends."""
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        model = Net(passes, CASE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tc.TierCache(store, passes, model=model, optimizer=optimizer, **BUDGETS) as cache:
            train(cache, model, optimizer, 1)
            committed = model.top.weight.clone()
            loop = cache.passes(epochs=2)
            batch = next(next(loop).batches(16))
            model(batch).sum().backward()
            optimizer.step()
            assert not torch.equal(model.top.weight, committed)
            cache.restore()
            assert torch.equal(model.top.weight, committed)
            with pytest.raises(StateError, match="replaced by a newer one"):
                next(loop)
            assert store.commit is not None
            assert store.commit.cursor.pass_index == 2


@pytest.mark.parametrize("whose", ["optimizer", "cache.optimizer"])
def test_a_scheduler_that_was_not_registered_is_named(passes: tc.PassDataset, whose: str) -> None:
    """A resumed training would begin its rates anew; a registered one is not named."""
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        model = Net(passes, CASE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tc.TierCache(store, passes, model=model, optimizer=optimizer, **BUDGETS) as cache:
            scheduler = StepLR(cache.optimizer if "." in whose else optimizer, 1)
            with pytest.warns(UserWarning, match=f"^{whose} has a learning-rate scheduler that was not registered"):
                train(cache, model, optimizer, 1)
            cache.register(scheduler=scheduler)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.raises(StateError, match="register the same objects"):
                    cache.restore()


def test_a_restored_optimizer_has_the_state_of_all_its_parameters(passes: tc.PassDataset) -> None:
    """Commits do not keep that of handles: what the optimizer was constructed with stays."""
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        sums = []
        for epochs in (1, 2):
            model = Net(passes, CASE)
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
            with tc.TierCache(store, passes, model=model, optimizer=optimizer, **BUDGETS) as cache:
                cache.restore()
                assert all("sum" in optimizer.state[one] for one in model.parameters())
                sums.append(optimizer.state[model.top.weight]["sum"].sum().item())
                train(cache, model, optimizer, epochs)
        assert sums[0] == 0 < sums[1]
