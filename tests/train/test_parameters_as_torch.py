"""Loops that use the parameters and gradients of modules by hand: torch's numbers, or an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.train.beside_torch import CASE as LOOPS_CASE
from tests.train.beside_torch import plain

if TYPE_CHECKING:
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
