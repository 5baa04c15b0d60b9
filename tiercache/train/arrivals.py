"""Arrivals: the gradients of lookups' outputs, from their backward to the step."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiercache.train.anchors import Anchor


class State(Enum):
    """How far the gradient of an output has come."""

    PENDING = auto()
    STEPPING = auto()
    """The running step applies it."""
    ENDED = auto()
    """Stepped or dropped."""


class Arrival:
    """The gradient of one output of a lookup, from its backward to the step."""

    __slots__ = ("_gradient", "_placeholder", "_version", "anchor", "is_accumulated", "is_passed_over", "state",
                 "tables", "task")  # fmt: skip

    def __init__(self, anchor: Anchor, gradient: torch.Tensor, tables: frozenset[str], task: int) -> None:
        self.anchor, self.tables, self.task = anchor, tables, task
        self._gradient: torch.Tensor | None = gradient
        self._version, self.state = gradient._version, State.PENDING
        self._placeholder: torch.Tensor | None = None
        self.is_accumulated = False
        """True once its backward has ended and added to the anchor's gradient."""
        self.is_passed_over = False
        """True once another optimizer has stepped."""

    @property
    def placeholder(self) -> torch.Tensor:
        """A leaf of the output's shape that has the gradient; made on demand, as most steps need none."""
        if self._placeholder is None:
            assert self._gradient is not None, "a placeholder was requested of a gradient that was dropped"
            zero = torch.zeros((), dtype=self._gradient.dtype, device=self._gradient.device)
            self._placeholder = zero.expand(self._gradient.shape).requires_grad_()
            self._placeholder.grad = self._gradient
        return self._placeholder

    @property
    def gradient(self) -> torch.Tensor | None:
        """The current gradient; None if it was dropped."""
        return self._gradient if self._placeholder is None else self._placeholder.grad

    @property
    def is_pending(self) -> bool:
        """True until it is stepped or dropped."""
        current = self._gradient if self._placeholder is None else self._placeholder.grad
        return current is not None and self.state is State.PENDING

    @property
    def is_untouched(self) -> bool:
        """True if the gradient is the one that arrived, and no in-place write that torch counts has changed it."""
        current = self.gradient
        return current is not None and current is self._gradient and current._version == self._version

    def flat(self, array_of: Callable[[torch.Tensor], Any]) -> Any:
        """Return the current gradient as a flat float32 array: a copy if it is not contiguous."""
        gradient = self._gradient if self._placeholder is None else self._placeholder.grad
        assert gradient is not None, "a gradient is stepped that was dropped"
        if gradient.dtype != torch.float32:
            gradient = gradient.float()
        return array_of(gradient.reshape(-1))

    def end(self) -> None:
        """Free its memory, as it was stepped or dropped."""
        self.state, self._gradient = State.ENDED, None
        if self._placeholder is not None:
            self._placeholder.grad = None
