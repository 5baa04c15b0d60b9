"""Changes of gradients by a training loop apply to rows too, or raise an error."""

import copy
import io
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import tiercache as tc
from tests.train.cases import Case, Spec, table, tiered
from tests.train.test_bad_input import one_sentence
from tiercache.errors import StateError
from tiercache.rows.backends.open_backend import open_backend
from tiercache.store.table import group_tables
from tiercache.train.row_optimizer import RowOptimizer

CASE = Case(
    tables=(table("a", 4, tc.optim.SGD(learning_rate=0.5)), table("b", 4, tc.optim.SGD(learning_rate=0.5))),
    specs=(
        Spec(name="f", table="a", hotness="ragged"),
        Spec(name="g", table="b"),
        Spec(name="h", table="b", mode="mean"),
    ),
    num_samples=64,
    pass_rows=200,
    num_keys=20,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = tc.EmbeddingBagCollection(CASE.schema, mode={"h": "mean"})
        self.top = nn.Linear(self.rows.out_features, 1)

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        return self.top(self.rows(batch)).square().mean()


class World:
    """A cache in the middle of a pass."""

    def __init__(self, passes: tc.PassDataset, *, owns: Callable[[Net], Any] = nn.Module.parameters) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.dense = torch.optim.SGD(owns(self.model), lr=0.1)
        self.cache = tc.InMemoryCache(passes, model=self.model, optimizer=self.dense)
        self.optimizer = self.cache.optimizer
        self.loop = self.cache.passes(epochs=2)
        self.current = next(self.loop)
        self.batches = list(self.current.batches(16))

    def rows(self, name: str = "a") -> np.ndarray:
        return self.cache.fields(name)[0].copy()


@pytest.fixture
def world(passes: tc.PassDataset) -> Iterator[World]:
    made = World(passes)
    yield made
    made.loop.close()
    made.cache.close()


def stepped_once(passes: tc.PassDataset, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows after one step of only the batch at that index."""
    world = World(passes)
    world.model(world.batches[index]).backward()
    world.optimizer.step()
    return world.rows("a"), world.rows("b")


DROPS: dict[str, Callable[[World], Any]] = {
    "optimizer.zero_grad": lambda w: w.optimizer.zero_grad(),
    "set_to_none=False": lambda w: w.optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda w: w.model.zero_grad(),
    "grad = None": lambda w: [setattr(p, "grad", None) for p in w.model.parameters()],
    "of the dense optimizer": lambda w: w.dense.zero_grad(),
    "zeros of the dense optimizer": lambda w: w.dense.zero_grad(set_to_none=False),
    "zeros of the model": lambda w: w.model.zero_grad(set_to_none=False),
    "of a part": lambda w: w.optimizer.part(w.dense).zero_grad(),
}


@pytest.mark.parametrize("how", DROPS)
def test_gradients_that_are_dropped_train_no_row(world: World, passes: tc.PassDataset, how: str) -> None:
    before = world.rows()
    world.model(world.batches[0]).backward()
    DROPS[how](world)
    assert not world.cache.optimizer.rows.pending
    world.optimizer.step()
    assert np.array_equal(world.rows(), before)
    world.model(world.batches[0]).backward()
    DROPS[how](world)
    world.model(world.batches[1]).backward()
    world.optimizer.step()
    for mine, other in zip((world.rows("a"), world.rows("b")), stepped_once(passes, 1), strict=True):
        assert np.array_equal(mine, other)


def test_rows_are_stepped_once_whoever_steps(world: World, passes: tc.PassDataset) -> None:
    world.model(world.batches[0]).backward()
    world.optimizer.rows.step()
    world.optimizer.step()
    world.optimizer.part(world.dense).step()
    assert np.array_equal(world.rows(), stepped_once(passes, 0)[0])
    assert world.cache.optimizer.rows.steps == 1


def test_clipping_returns_the_norm_of_all_gradients(world: World) -> None:
    """For a table's dense gradient and the dense layer; gradients below the norm do not change."""
    weights = [nn.Parameter(torch.from_numpy(world.rows(name))) for name in ("a", "b")]
    before = [one.detach().clone() for one in weights]
    world.model(world.batches[0]).backward()
    dense = [p.grad.clone() for p in world.model.top.parameters()]
    norm = world.cache.clip_grad_norm_(1e9)
    world.optimizer.step()
    rows = [(old - torch.from_numpy(world.rows(name))) / 0.5 for old, name in zip(before, ("a", "b"), strict=True)]
    expected = torch.stack([one.norm() for one in (*rows, *dense)]).norm()
    torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0)
    assert all(torch.equal(p.grad, one) for p, one in zip(world.model.top.parameters(), dense, strict=True))


def test_clipping_a_norm_that_is_not_finite_can_be_an_error(world: World) -> None:
    (world.model(world.batches[0]) * float("inf")).backward()
    with one_sentence(RuntimeError, "the norm of gradients is", "error_if_nonfinite=False"):
        world.cache.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_frozen_module_is_not_stepped(passes: tc.PassDataset) -> None:
    """It does not affect its group; the other module, with rows in the same group, is stepped as usual."""
    found = []
    for frozen in (False, True):
        world = World(passes)
        world.model.requires_grad_(False)
        assert not world.model(world.batches[0]).requires_grad
        bags = nn.ModuleDict({name: tc.EmbeddingBag(CASE.schema, name, mode="sum") for name in ("f", "g")})
        bags["f"].requires_grad_(not frozen)
        optimizer = torch.optim.SGD(bags.parameters(), lr=0.1)
        world.cache.register(bags=bags, of_bags=optimizer)
        before = world.rows("a")
        sum(bag(world.batches[0]).sum() for bag in bags.values()).backward()
        world.optimizer.part(optimizer).step()
        assert np.array_equal(world.rows("a"), before) == frozen
        found.append(world.rows("b"))
    assert np.array_equal(*found)


def test_a_module_that_no_optimizer_has_is_refused(world: World) -> None:
    other = copy.deepcopy(world.model)
    other(world.batches[0]).backward()
    with one_sentence(StateError, "'a'", "in none of the cache's optimizers", "requires_grad_(False)"):
        world.optimizer.part(world.dense).step()


def test_an_optimizer_of_dense_parameters_alone_steps_all_rows(passes: tc.PassDataset) -> None:
    world = World(passes, owns=lambda model: model.top.parameters())
    world.model(world.batches[0]).backward()
    world.optimizer.step()
    assert np.array_equal(world.rows(), stepped_once(passes, 0)[0])


def test_gradients_of_another_optimizer_have_to_be_dropped_once_their_pass_has_ended(passes: tc.PassDataset) -> None:
    """They belong to rows that have left the device."""
    world = World(passes)
    other, tables = Net(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    tables.add_param_group({"params": [*other.parameters()]})
    world.cache.register(other=other, tables=tables)
    (world.model(world.batches[0]) + other(world.batches[0])).backward()
    world.optimizer.part(world.dense).step()
    world.current.skip()
    batch = next(next(world.loop).batches(16))
    with one_sentence(StateError, "from pass 0 were neither stepped nor dropped", "zero_grad()"):
        other(batch).backward()
    tables.zero_grad()
    other(batch).backward()
    world.optimizer.part(tables).step()


def test_gradients_of_a_loop_that_was_left_are_gone_with_its_pass(world: World, passes: tc.PassDataset) -> None:
    """Dense parameters may be stepped alone then, and the next loop steps the gradients of its own backward."""
    world.model(world.batches[0]).backward()
    world.loop.close()
    world.dense.step()
    world.dense.zero_grad()
    loop = world.cache.passes(epochs=2)
    world.model(next(next(loop).batches(16))).backward()
    world.optimizer.step()
    assert world.optimizer.rows.steps == 1
    loop.close()


def test_a_schedule_multiplies_the_rates_of_rows_as_those_of_dense_parameters(world: World) -> None:
    """Without a warning; a loaded state applies to both."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = StepLR(world.optimizer, step_size=1, gamma=0.5)
        world.model(world.batches[0]).backward()
        world.optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in world.optimizer.param_groups] == [0.05, 0.25, 0.25]
    assert world.optimizer.rows.learning_rates == [0.25]
    state = copy.deepcopy(world.optimizer.state_dict())
    for group in world.optimizer.param_groups:
        group["lr"] = 9.0
    world.optimizer.load_state_dict(state)
    assert world.optimizer.rows.learning_rates == [0.25]
    assert world.dense.param_groups[0]["lr"] == 0.05


def test_weight_decay_is_read_at_each_step(world: World) -> None:
    """Like torch's optimizers: with zero gradients, rows that are looked up decay."""
    for group in world.cache.optimizer.rows.param_groups:
        group["weight_decay"] = 0.1
    before = world.rows("b")
    (world.model(world.batches[0]) * 0).backward()
    world.optimizer.step()
    changed = np.abs(world.rows("b") - before).sum(axis=1) > 0
    assert 0 < changed.sum() <= len(before)
    np.testing.assert_allclose(world.rows("b")[changed], before[changed] * 0.95, rtol=1e-6)


def test_settings_of_tables_come_back_from_a_commit() -> None:
    """After a round trip through JSON, also for a table with fewer steps than the other one in its group."""
    groups = group_tables(tuple(table(name, 4, tc.optim.Adam(learning_rate=0.5)) for name in ("a", "b")))
    first, second = (RowOptimizer(groups, open_backend("cpu", groups[0].tables)) for _ in range(2))
    StepLR(first, step_size=1)
    for group in first.param_groups:
        group["betas"], group["lr"] = (0.8, 0.99), 0.25
    first.steps, first.param_groups[0]["step"] = 7, 4
    second.restore(json.loads(json.dumps(first.settings())))
    kept = ("table", "lr", "betas", "eps", "weight_decay", "step")
    assert [{k: group[k] for k in kept} for group in second.param_groups] == [
        {k: group[k] for k in kept} for group in first.param_groups
    ]
    assert (second.steps, second.learning_rates, second.optimizer(0).beta1) == (7, [0.25], 0.8)
    assert first.param_groups[0]["step"] == next(
        group["step"] for group in second.param_groups if group["table"] == "b"
    )


def written(state: Any) -> Any:
    """Return a state that was saved and loaded."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def test_the_state_of_a_module_says_which_rows_it_belongs_to(tmp_path: Path, passes: tc.PassDataset) -> None:
    model, last = Net(), len(passes.passes) - 1
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    with tiered(tmp_path / "model.tc", passes, model=model, optimizer=dense) as cache:
        for p in cache.passes(epochs=1):
            state = copy.deepcopy(model.state_dict())
            for batch in p.batches(16):
                model(batch).backward()
                cache.optimizer.step()
                cache.optimizer.zero_grad()
        assert set(state) == {"top.weight", "top.bias"}
        assert state._metadata["rows"]["rows"]["commit"] == last
        for best in (state, written(state)):
            with one_sentence(StateError, f"belongs to the rows of commit {last} of model.tc", "roll the store back"):
                model.load_state_dict(best)
        model.load_state_dict(model.state_dict())
        for plain in (dict(state), {k: v.clone() for k, v in state.items()}):
            with pytest.warns(UserWarning, match="does not say which rows of 'a', 'b' it belongs to"):
                model.load_state_dict(plain)
    other = Net()
    other.load_state_dict(dict(state))
    other.load_state_dict(state)
    again = Net()
    for epochs in (1, 2):  # a state that was compared once has no say in later commits
        with tiered(tmp_path / "again.tc", passes, model=again) as cache:
            for p in cache.passes(epochs=epochs):
                again.load_state_dict(copy.deepcopy(again.state_dict()))
                p.skip()
    with tiered(tmp_path / "other.tc", passes) as cache, one_sentence(StateError, "belongs to the rows of commit"):
        cache.register(model=other)


@pytest.mark.parametrize("kept", [written, copy.deepcopy])
@pytest.mark.parametrize("resident", [False, True])
def test_the_best_state_of_a_pass_is_refused_once_rows_moved_on(
    tmp_path: Path, passes: tc.PassDataset, *, resident: bool, kept: Callable[[Any], Any]
) -> None:
    """Loading it would take back the dense parameters only."""
    model, path = Net(), tmp_path / "model.tc"
    given: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with tc.InMemoryCache(passes, **given) if resident else tiered(path, passes, **given) as cache:
        for p in cache.passes(epochs=1):
            initial = kept(model.state_dict())
            batches = p.batches(16)
            model(next(batches)).backward()
            cache.optimizer.step()
            best = kept(model.state_dict())
            model.load_state_dict(best)
            cache.optimizer.zero_grad()
            model(next(batches)).backward()
            cache.optimizer.step()
            for earlier in (initial, best):
                words = "rows of 'a', 'b' after", "steps, but they have taken", "cache.keep(name)"
                with one_sentence(StateError, *words):
                    model.load_state_dict(earlier)
            with pytest.warns(UserWarning, match="does not say which rows of 'a', 'b' it belongs to"):
                model.load_state_dict({name: one.detach() for name, one in model.top.state_dict(prefix="top.").items()})
            p.stop()
    with tiered(path, passes, model=Net()) as cache:
        other = Net()
        cache.register(other=other)
        other.load_state_dict(kept(model.state_dict()))


def test_an_anchor_is_where_its_module_is_and_says_the_dtype_of_outputs(world: World) -> None:
    """A model on "meta" has anchors on the CPU."""
    world.model.rows.half()
    assert world.model.rows.anchor.shape == (1, 1)
    assert world.model.rows(world.batches[0]).dtype == torch.float16
    with torch.device("meta"):
        model = Net()
    assert model.rows.anchor.device.type == "cpu"
