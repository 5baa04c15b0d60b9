"""SteppedGradient: an anchor's gradient that was stepped and not zeroed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.train.parameter_writes import SeenGradient

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class SteppedGradient:
    """Tells if a loop steps gradients again that it did not zero: torch applies them again, rows do not."""

    def __init__(self, value_of: Callable[[torch.Tensor], float | None]) -> None:
        """value_of: returns None if reading it would wait."""
        self._value_of = value_of
        self._seen: SeenGradient | None = None
        """The gradient that was stepped last, until a backward adds to it."""
        self._is_added_to = False
        """True once a backward has added to a gradient that was stepped."""

    def end_step(self, grad: torch.Tensor | None) -> None:
        """Record a gradient that was stepped."""
        self._seen, self._is_added_to = None, False
        if grad is not None:
            self._seen = SeenGradient.of(grad, self._value_of(grad))

    def begin_backward(self, grad: torch.Tensor | None) -> None:
        """Record that a backward adds to the gradient."""
        self._is_added_to = grad is not None and (self._is_added_to or self._is_still(grad))
        self._seen = None

    def drop(self) -> None:
        """Record that the gradient was zeroed."""
        self._seen, self._is_added_to = None, False

    def is_repeated(self, grad: torch.Tensor | None, *, has_new: bool) -> bool:
        """Return True if a step would apply a gradient again. has_new: True if there are others to step."""
        return self._is_added_to if has_new else grad is not None and self._is_still(grad)

    def _is_still(self, grad: torch.Tensor) -> bool:
        """Return True if a gradient is the one that was stepped."""
        value = self._value_of(grad)
        return self._seen is not None and value != 0.0 and not self._seen.differs(grad, value)
