"""Arrival: the gradient of one output of a lookup, as backward brings it."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiercache.train.anchors import Anchor


class State(Enum):
    """Where an arrival is on its way."""

    WAITING = auto()
    DUE = auto()
    """The step that runs applies it."""
    GONE = auto()
    """Stepped or dropped."""


class Arrival:
    """The gradient of one output of a lookup, from its backward to the step."""

    __slots__ = ("_gradient", "_placeholder", "_version", "anchor", "is_accumulated", "is_passed_over", "state",
                 "tables", "task")  # fmt: skip

    def __init__(self, anchor: Anchor, gradient: torch.Tensor, tables: frozenset[str], task: int) -> None:
        self.anchor, self.tables, self.task = anchor, tables, task
        self._gradient: torch.Tensor | None = gradient
        self._version, self.state = gradient._version, State.WAITING
        self._placeholder: torch.Tensor | None = None
        self.is_accumulated = False
        """True once its backward has ended and added to the anchor's gradient."""
        self.is_passed_over = False
        """True once another optimizer has stepped."""

    @property
    def placeholder(self) -> torch.Tensor:
        """A leaf of the output's shape that has the gradient; made when somebody asks, as most steps go without."""
        if self._placeholder is None:
            assert self._gradient is not None, "a placeholder was asked for of a gradient that is gone"
            none = torch.zeros((), dtype=self._gradient.dtype, device=self._gradient.device)
            self._placeholder = none.expand(self._gradient.shape).requires_grad_()
            self._placeholder.grad = self._gradient
        return self._placeholder

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient now; None if it was dropped."""
        return self._gradient if self._placeholder is None else self._placeholder.grad

    @property
    def is_waiting(self) -> bool:
        """True until it is stepped or dropped."""
        now = self._gradient if self._placeholder is None else self._placeholder.grad
        return now is not None and self.state is State.WAITING

    @property
    def is_due(self) -> bool:
        """True if the step that runs applies it."""
        return self.state is State.DUE

    @property
    def is_untouched(self) -> bool:
        """True if the gradient is the one that came, and no in-place write that torch counts has changed it."""
        now = self.gradient
        return now is not None and now is self._gradient and now._version == self._version

    def flat(self, array_of: Callable[[torch.Tensor], Any]) -> Any:
        """Return the gradient as it is now, as a flat float32 array: a copy where it is not contiguous."""
        gradient = self.gradient
        assert gradient is not None, "a gradient is stepped that was dropped"
        if gradient.dtype != torch.float32:
            gradient = gradient.float()
        return array_of(gradient.reshape(-1))

    def take(self) -> None:
        """Have the step that runs apply it."""
        self.state = State.DUE

    def end(self) -> None:
        """Note that it was stepped or dropped, and free its memory."""
        self.state, self._gradient = State.GONE, None
        if self._placeholder is not None:
            self._placeholder.grad = None
