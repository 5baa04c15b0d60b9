"""Loops that use the parameters and gradients of modules by hand: torch's numbers, or an error."""

import copy
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import tiercache as tc
from tests.train.beside_torch import CASE as LOOPS_CASE
from tests.train.beside_torch import World, plain
from tests.train.cases import tiered
from tests.train.test_bad_input import one_sentence
from tiercache.errors import StateError

CASE = LOOPS_CASE


def failing(model: nn.Module, given: Any) -> None:
    """A backward in which a hook raises, once gradients of a table have arrived."""
    parts = given if isinstance(given, tuple) else (given, given)
    first = model.bag(parts[0])

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("not finite")

    middle = first * 1.0
    middle.register_hook(fail)
    loss = torch.cat([middle, model.rows(parts[1])], dim=1)
    with pytest.raises(ArithmeticError, match="not finite"):
        model.top(loss).square().mean().backward()


@pytest.mark.parametrize("how", ["model", "parameters", "zeros", "optimizer", "no lookup"])
def test_gradients_of_a_backward_that_raised_are_dropped(world: World, how: str) -> None:
    for model, optimizer, given in world.sides(0):
        again = model(given).square().mean() if how == "no lookup" else None
        failing(model, given)
        if how == "parameters":
            for parameter in model.parameters():
                parameter.grad = None
        else:
            (optimizer if how == "optimizer" else model).zero_grad(**{"set_to_none": False} if how == "zeros" else {})
        if again is None:
            plain(model, optimizer, given)
        else:
            again.backward()
            optimizer.step()
    world.assert_same()


def test_gradients_that_arrived_before_an_error_are_kept_as_torch_keeps_them(world: World) -> None:
    """Only those that reached their parameter are added to the next ones."""
    for model, optimizer, given in world.sides(1):
        failing(model, given)
        model(given).square().mean().backward()
        optimizer.step()
    world.assert_same()


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_gradients_zeroed_in_place_are_dropped(world: World, how: str) -> None:
    """Before a backward, and before a step, in the oldest idioms of torch."""

    def zero(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                _ = parameter.grad.data.zero_() if how == "data" else parameter.grad.numpy().fill(0.0)

    model, batch = world.model, world.batches[0]
    model(batch).square().mean().backward()
    zero(model)
    with world.unmoved():
        world.optimizer.step()
    model(world.batches[1]).square().mean().backward()
    zero(model)
    model(batch).square().mean().backward()
    world.optimizer.step()
    theirs, optimizer, given = world.sides(0)[1]
    plain(theirs, optimizer, given)
    world.assert_same()


def each(change: Callable[[Any, Any], object]) -> Callable[[World], object]:
    """Return a call of ``change`` with each parameter and its gradient."""
    return lambda world: [change(one, one.grad) for one in world.model.parameters()]


CHANGES: dict[str, Callable[[World], object]] = {
    "clip_grad_norm_": lambda world: nn.utils.clip_grad_norm_(world.model.parameters(), 1e-3),
    "clip_grad_norm_ above the norm": lambda world: nn.utils.clip_grad_norm_(world.model.parameters(), 1e9),
    "clip_grad_value_": lambda world: nn.utils.clip_grad_value_(world.model.parameters(), 1e-3),
    "mul_": each(lambda _, grad: grad.mul_(0.5)),
    "replaced": each(lambda one, grad: setattr(one, "grad", grad * 1.0)),
    "data.div_": each(lambda _, grad: grad.data.div_(2)),
    "data.clamp_": each(lambda _, grad: grad.data.clamp_(-(2.0**-70), 2.0**-70)),
    "data.copy_": each(lambda _, grad: grad.data.copy_(grad * 0.5)),
    "numpy": each(lambda _, grad: np.multiply(grad.numpy(), 0.1, out=grad.numpy())),
}


@pytest.mark.parametrize("before", ["step", "backward"])
@pytest.mark.parametrize("how", CHANGES)
def test_gradients_that_are_changed_are_refused(world: World, how: str, before: str) -> None:
    """Rows would be left out. Torch counts some of these writes and others not; a backward would hide them."""
    with world.unmoved():
        world.model(world.batches[0]).square().mean().backward()
        CHANGES[how](world)
        with one_sentence(StateError, "gradients were changed", "cache.clip_grad_norm_(max_norm)"):
            if before == "step":
                world.optimizer.step()
            else:
                world.model(world.batches[1]).square().mean().backward()
    world.optimizer.zero_grad()
    world.model(world.batches[1]).square().mean().backward()
    world.cache.clip_grad_norm_(1e9)
    world.model(world.batches[1]).square().mean().backward()
    world.optimizer.step()


@pytest.mark.parametrize("is_counted", [False, True])
def test_gradients_of_all_groups_may_be_scaled(world: World, is_counted: bool) -> None:
    """Rows have theirs in the optimizer's groups; whether torch counts the writes or not."""
    (model, optimizer, batch), theirs = world.sides(0)
    (8 * model(batch).square().mean()).backward()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            (parameter.grad if is_counted else parameter.grad.data).mul_(0.125)
    optimizer.step()
    plain(*theirs)
    world.assert_same()


@pytest.mark.parametrize(
    ("through", "before", "drops"),
    [("data", "forward", False), ("data", "forward", True), ("data", "step", False), ("torch", "forward", True)],
)
def test_parameters_written_before_a_step_are_refused(world: World, through: str, before: str, drops: bool) -> None:
    """As in adversarial training, which puts them back before the step, and sharpness-aware minimization."""
    model, optimizer, batch = world.sides(0)[0]
    with world.unmoved():
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            kept, grad = parameter.data.clone(), parameter.grad
            assert grad is not None
            with torch.no_grad():
                (parameter.data if through == "data" else parameter).add_(grad / grad.norm())
            if before == "step":
                parameter.data = kept
        if drops:
            optimizer.zero_grad()
        with one_sentence(StateError, "between a backward and its optimizer.step()", "rows of 'a'", "leave out"):
            _ = model(batch) if before == "forward" else optimizer.step()


AFTER: dict[str, Callable[[nn.Module], object]] = {
    "clamp_": lambda model: [one.clamp_(-0.1, 0.1) for one in model.parameters()],
    "mul_": lambda model: [one.mul_(0.9) for one in model.parameters()],
    "data.mul_": lambda model: [one.data.mul_(0.9) for one in model.parameters()],
    "data": lambda model: [setattr(one, "data", one.data * 1.0) for one in model.parameters()],
    "copy_": lambda model: [one.copy_(one.clone()) for one in model.parameters()],
    "vector": lambda model: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters()
    ),
}


@pytest.mark.parametrize("how", AFTER)
def test_parameters_written_after_a_step_are_refused(world: World, how: str) -> None:
    model, optimizer, batch = world.sides(0)[0]
    plain(model, optimizer, batch)
    with torch.no_grad():
        AFTER[how](model)
    words = "since the last optimizer.step()", "rows of 'a'", "register_row_hook(table, hook)", "optimizer of your own"
    with one_sentence(StateError, *words):
        model(batch)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Rprop])
def test_parameters_that_only_torch_writes_raise_nothing(passes: tc.PassDataset, kind: Any) -> None:
    world = World(passes, kind)
    model, optimizer, batch = world.sides(0)[0]
    average = torch.optim.swa_utils.AveragedModel(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(6):
            plain(model, optimizer, batch)
            average.update_parameters(model)
            if number == 1:
                model.load_state_dict(copy.deepcopy(model.state_dict()))
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif number == 2:
                model.to(torch.float64).to(torch.float32)
            elif number == 3:
                optimizer.zero_grad()
                model.top(torch.ones(1, 8)).sum().backward()
                world.dense.step()
            elif number == 4:
                with torch.no_grad():
                    for parameter in model.top.parameters():
                        parameter.mul_(0.9)
                model(batch).square().mean().backward()
                model.float()
    world.close()


def test_a_penalty_on_matrices_is_refused(world: World) -> None:
    """A loop that leaves out biases by their number of dimensions means embeddings too."""
    loss = world.model(world.batches[0]).square().mean()
    (loss + 0.1 * sum(one.square().sum() for one in world.model.parameters() if one.dim() > 1)).backward()
    with one_sentence(StateError, "the loss contains the parameters", "'a'", "put the penalty on the outputs"):
        world.optimizer.step()


def never(model: nn.Module, optimizer: Any, batch: Any) -> None:
    for _ in range(2):
        model(batch).square().mean().backward()
        optimizer.step()


def every_second(model: nn.Module, optimizer: Any, batch: Any) -> None:
    for number in range(4):
        model(batch).square().mean().backward()
        optimizer.step()
        if number % 2:
            optimizer.zero_grad()


def twice(model: nn.Module, optimizer: Any, batch: Any) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("loop", [never, every_second, twice])
def test_a_step_of_gradients_that_were_stepped_warns_once(world: World, loop: Callable[..., None]) -> None:
    """Weights of torch would move by them again."""
    with pytest.warns(UserWarning, match="call optimizer.zero_grad.. once for each step"):
        loop(*world.sides(0)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop(*world.sides(1)[0])


@pytest.mark.parametrize("how", ["before", "zeros", "model", "data", "skipped"])
def test_gradients_that_are_zeroed_before_the_next_step_raise_no_warning(world: World, how: str) -> None:
    """Also after a backward of another loss, as in adversarial training, whose gradients are dropped too."""
    model, optimizer, batch = world.sides(0)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            if how == "skipped":
                model(batch).mean().backward()
            if how in ("before", "skipped"):
                optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if how in ("zeros", "model"):
                model.zero_grad(set_to_none=how == "model")
            for parameter in model.parameters() if how == "data" else ():
                assert parameter.grad is not None
                parameter.grad.data.zero_()


def frozen(model: Any) -> None:
    model.one.requires_grad_(False)
    loss_of(model).backward()


def dropped(model: Any) -> None:
    loss_of(model).backward()
    model.one.zero_grad()


def of_inputs(model: Any) -> None:
    """A backward to the parameters of one of them."""
    loss_of(model).backward(inputs=[*model.one.parameters()])


def one_by_one(model: Any) -> None:
    """A backward for each of them, and a module that is gone."""
    model.one(KEYS).square().sum().backward()
    del model.one
    gc.collect()
    model.two(KEYS.view(2, 4)).square().sum().backward()


KEYS = torch.tensor([0, 1, 2, 3, 3, 2, 1, 5])


def loss_of(model: Any) -> torch.Tensor:
    pooled: torch.Tensor = model.top(model.one(KEYS).sum(0) + model.two(KEYS.view(2, 4)).sum(0))
    return pooled.square().sum()


@pytest.mark.parametrize("change", [frozen, dropped, of_inputs, one_by_one])
def test_modules_that_shared_a_weight_share_a_parameter(tmp_path: Path, change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    theirs: Any = nn.ModuleDict({"one": nn.Embedding(6, 4), "two": nn.EmbeddingBag(6, 4), "top": nn.Linear(4, 1)})
    theirs.two.weight = theirs.one.weight
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (theirs, ours)]
    tc.convert(ours, optimizer=optimizers[1])
    assert len([*ours.parameters()]) == len([*theirs.parameters()])
    data = tc.write_key_sets(tmp_path / "keys", ours.one.schema, [{"one": np.arange(6)}])
    with tiered(tmp_path / "m.tc", data, model=ours, optimizer=optimizers[1]) as cache:
        for p in cache.passes(epochs=1):
            for model, optimizer in ((theirs, optimizers[0]), (ours, cache.optimizer)):
                change(model)
                optimizer.step()
                optimizer.zero_grad()
            rows = torch.from_numpy(cache.live_rows().fields("one", np.arange(6))[0])
            torch.testing.assert_close(rows, theirs.two.weight.detach())
            torch.testing.assert_close(ours.top.weight, theirs.top.weight)
            p.skip()


@pytest.mark.parametrize("write", [nn.init.zeros_, lambda parameter: parameter.data.uniform_(-0.1, 0.1)])
def test_an_initialization_after_the_registration_is_refused(world: World, write: Callable[..., Any]) -> None:
    """It would not reach the rows. A value that stays the same is none, and so is a copy in inference mode."""
    for parameter in world.model.parameters():
        parameter.data.copy_(parameter.clone())
    with torch.inference_mode():
        assert torch.equal(copy.deepcopy(world.model)(world.batches[0]), world.model(world.batches[0]))
    world.model(world.batches[0])
    for parameter in world.model.parameters():
        write(parameter)
    with one_sentence(StateError, "overwritten after their model was passed", "rows of 'a'", "before tc.convert"):
        world.model(world.batches[0])


@pytest.mark.parametrize(
    "change", [lambda m: prune.l1_unstructured(m, "anchor", 0.5), lambda m: parametrizations.weight_norm(m, "anchor")]
)
def test_a_parameter_that_is_computed_from_others_is_refused(world: World, change: Callable[..., Any]) -> None:
    """As by pruning or normalizing all parameters: rows do not follow it."""
    plain(*world.sides(0)[0])
    change(world.model.rows)
    world.optimizer.zero_grad()
    with one_sentence(StateError, "looks up 'b' was replaced by a computed tensor", "dense modules only"):
        world.model(world.batches[1])
