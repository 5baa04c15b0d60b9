"""Loops that use the parameters and gradients of modules by hand: torch's numbers, or an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.train.beside_torch import CASE as LOOPS_CASE
from tests.train.beside_torch import plain
from tests.train.test_bad_input import one_sentence
from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.train.beside_torch import World

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
    """By the loop's next zero_grad(). Without it, the parameters that have them keep them, as in torch."""
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
    before = world.rows("a")
    model(batch).square().mean().backward()
    zero(model)
    world.optimizer.step()
    assert torch.equal(before, world.rows("a"))
    model(world.batches[1]).square().mean().backward()
    zero(model)
    model(batch).square().mean().backward()
    world.optimizer.step()
    theirs, optimizer, given = world.sides(0)[1]
    plain(theirs, optimizer, given)
    world.assert_same()


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "div_": lambda grad: grad.data.div_(2),
    "clamp_": lambda grad: grad.data.clamp_(-(2.0**-70), 2.0**-70),
    "copy_": lambda grad: grad.data.copy_(grad * 0.5),
    "numpy": lambda grad: np.multiply(grad.numpy(), 0.1, out=grad.numpy()),
}


@pytest.mark.parametrize("before", ["step", "backward"])
@pytest.mark.parametrize("how", WRITES)
def test_gradients_written_without_torch_counting_it_are_refused(world: World, how: str, before: str) -> None:
    """As by any other way to change them. No row moves."""
    rows = world.rows("a"), world.rows("b")
    world.model(world.batches[0]).square().mean().backward()
    for parameter in world.model.parameters():
        assert parameter.grad is not None
        WRITES[how](parameter.grad)
    with one_sentence(StateError, "gradients were changed", "cache.clip_grad_norm_(max_norm)"):
        if before == "step":
            world.optimizer.step()
        else:
            world.model(world.batches[0]).square().mean().backward()
    assert all(torch.equal(old, world.rows(name)) for old, name in zip(rows, "ab", strict=True))


def test_gradients_of_all_groups_may_be_scaled_without_torch_counting_it(world: World) -> None:
    """Rows have theirs in the optimizer's groups."""
    (model, optimizer, batch), theirs = world.sides(0)
    (8 * model(batch).square().mean()).backward()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.data.mul_(0.125)
    optimizer.step()
    plain(*theirs)
    world.assert_same()
