"""Writes of anchors and their gradients, by the loop or its hooks: such changes miss the rows."""

from __future__ import annotations

import math
import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiercache.train.table_module import TableModule


_OR_STEPPED = (
    "; if an optimizer of your own stepped them, cache.optimizer was not stepped: pass that optimizer to the cache "
    "(optimizer=...)"
)


class _Seen(NamedTuple):
    """A parameter at some time."""

    version: int
    place: int
    value: float | None  # None on a GPU, where reading it would wait
    num_resets: int

    def differs(self, other: _Seen) -> bool:
        """Return True if the loop wrote the parameter in between; False if the module was moved or cast."""
        if self.num_resets != other.num_resets:
            return False
        is_value = self.value is None or other.value is None or self.value == other.value or math.isnan(self.value)
        is_place = self.place == other.place or num_ranks() > 1  # wrappers of several ranks may move parameters
        return self.version != other.version or not (is_value and is_place)


class SeenGradient(NamedTuple):
    """An anchor's gradient at some time."""

    grad: weakref.ref[torch.Tensor]
    version: int
    value: float | None  # None on a GPU, where reading it would wait

    @classmethod
    def of(cls, grad: torch.Tensor, value: float | None) -> SeenGradient:
        """Return a gradient as it is now."""
        return cls(weakref.ref(grad), grad._version, value)

    def differs(self, grad: torch.Tensor, value: float | None) -> bool:
        """Return True if a gradient is another one, or was written since."""
        is_same = value is None or self.value is None or value == self.value or math.isnan(value)
        return self.grad() is not grad or grad._version != self.version or not is_same


class ParameterWrites:
    """Compares an anchor with itself after the last backward and after the last step."""

    def __init__(self, module: TableModule, value_of: Callable[[torch.Tensor], float | None]) -> None:
        """value_of: returns None if reading it would wait."""
        self._tables, self._value_of = ", ".join(map(repr, module.tables)), value_of
        self._first = self._see(module.anchor, module.num_resets)  # when registered, until a backward or step
        if self._first is not None and not module.anchor.is_meta:
            self._first = self._first._replace(value=module.anchor.item())
        self._after_backward: _Seen | None = None  # the parameter after a backward that has not been stepped yet
        self._after_step: _Seen | None = None  # the parameter after the last step that it took part in
        self._is_stepped = False  # True once rows were stepped; a copy of a model, such as an average, may be written
        self._is_perturbed = False  # True once parameters were changed while gradients were pending, then dropped

    def _see(self, parameter: torch.Tensor | None, num_resets: int) -> _Seen | None:
        if parameter is None or parameter.is_inference() or hasattr(parameter, "to_local"):
            return None  # this process may have no element of a DTensor
        return _Seen(parameter._version, parameter.data_ptr(), self._value_of(parameter.detach()), num_resets)

    def end_backward(self, parameter: torch.Tensor | None, num_resets: int) -> None:
        """Record the parameter after a backward; None: it belongs to a wrapper."""
        self._first, self._after_backward = None, self._see(parameter, num_resets)

    def end_step(self, parameter: torch.Tensor | None, num_resets: int, *, has_stepped: bool) -> None:
        """Record the parameter after a step. has_stepped: True if gradients of rows were stepped."""
        self._is_stepped |= has_stepped
        if self._is_stepped:
            self._after_step = self._see(parameter, num_resets)
        self.end_pass()

    def end_pass(self) -> None:
        """Forget the backward passes, whose gradients are gone."""
        self._after_backward, self._is_perturbed = None, False

    def forget(self) -> None:
        """Allow a dense optimizer to write the parameter."""
        self._first = self._after_backward = self._after_step = None

    def drop(self, parameter: torch.Tensor | None, num_resets: int, *, pending: bool) -> None:
        """Record that the gradients were dropped. pending: True if there were any."""
        if pending and self._after_backward is not None and (now := self._see(parameter, num_resets)) is not None:
            self._is_perturbed = self._after_backward.differs(now)
        self._after_backward = None

    def check(self, parameter: torch.Tensor, num_resets: int, *, steps: bool) -> None:
        """Raise StateError, once, if the loop changed parameters since a backward, a step, or their registration.

        Only warn if it may have dropped the gradients of the backward first, as after a skipped batch. steps: True
        before a step, which applies no dropped gradients; False before a lookup.
        """
        if self._is_perturbed and not steps:
            self._refuse_perturbed()
        if self._first is None and self._after_backward is None and self._after_step is None:
            return
        if (now := self._see(parameter, num_resets)) is None:
            return
        if self._first is not None and self._first.differs(now) and parameter.item() != self._first.value:
            self._first = None
            raise StateError(
                "parameters were overwritten after their model was passed to the cache, as to initialize them, but "
                f"the rows of {self._tables} were not: initialize the model before tc.convert, or leave out the "
                "parameters of the modules that look up rows and set the initializers of tables"
            )
        if self._after_backward is not None and self._after_backward.differs(now):
            self._after_backward = None
            if parameter.grad is not None:
                self._refuse_perturbed()
            if self._after_step is None:
                warnings.warn(
                    f"parameters were changed after a backward that was never stepped: if that was sharpness-aware "
                    f"minimization, the rows of {self._tables} did not move with them",
                    stacklevel=5,
                )
        if self._after_step is not None and self._after_step.differs(now):
            self._after_step = None
            raise StateError(
                f"parameters were changed by hand since the last optimizer.step(), as to clamp, decay or average "
                f"them, but the rows of {self._tables} were not: leave out the parameters of the modules that look up "
                f"rows, and change rows with cache.optimizer.register_row_hook(table, hook){_OR_STEPPED}"
            )

    def _refuse_perturbed(self) -> None:
        self._after_step = None
        raise StateError(
            f"parameters were changed between a backward and its optimizer.step(), as in sharpness-aware "
            f"minimization, but the rows of {self._tables} cannot be: leave out the parameters of the modules that "
            f"look up rows, or change parameters in the optimizer{_OR_STEPPED}"
        )


class SteppedGradient:
    """Tells if a loop steps gradients again that it did not zero: torch applies them again, rows do not."""

    def __init__(self, value_of: Callable[[torch.Tensor], float | None]) -> None:
        """value_of: returns None if reading it would wait."""
        self._value_of = value_of
        self._seen: SeenGradient | None = None  # the gradient that was stepped last, until a backward adds to it
        self._is_added_to = False  # True once a backward has added to a gradient that was stepped

    def end_step(self, grad: torch.Tensor | None) -> None:
        """Record a gradient that was stepped; None: it was zeroed."""
        self._seen = None if grad is None else SeenGradient.of(grad, self._value_of(grad))
        self._is_added_to = False

    def begin_backward(self, grad: torch.Tensor | None) -> None:
        """Record that a backward adds to the gradient."""
        self._is_added_to = grad is not None and (self._is_added_to or self._is_still(grad))
        self._seen = None

    def is_repeated(self, grad: torch.Tensor | None, *, has_new: bool) -> bool:
        """Return True if a step would apply a gradient again. has_new: True if there are others to step."""
        return self._is_added_to if has_new else grad is not None and self._is_still(grad)

    def _is_still(self, grad: torch.Tensor) -> bool:
        value = self._value_of(grad)
        return self._seen is not None and value != 0.0 and not self._seen.differs(grad, value)


def watch_hooks(parameter: torch.Tensor, changed: Callable[[], None]) -> None:
    """Make hooks call ``changed`` if they change a gradient, except to zeros; bounds leave the anchor's as it is."""
    hooks: Any = parameter._backward_hooks
    for number, hook in (hooks or {}).items():
        own = hook.args[0] if getattr(hook, "func", None) is _watched else hook
        hooks[number] = partial(_watched, own, changed)


def _watched(hook: Callable[[torch.Tensor], Any], changed: Callable[[], None], gradient: torch.Tensor) -> Any:
    """Call a hook; waits for a GPU if it returns another tensor."""
    found = hook(gradient)
    if found is not None and found is not gradient and bool((found != 0).any()):
        changed()
    return found


def check_hooks(parameter: torch.Tensor, module: str, tables: str) -> None:
    """Raise StateError if the loop registered hooks that run once a gradient is accumulated.

    module: whose functions are ours; torch's own belong to its wrappers of models.
    """
    hooks: Any = parameter._post_accumulate_grad_hooks
    for hook in (hooks or {}).values():
        source = str(getattr(getattr(hook, "func", hook), "__module__", ""))
        if source != module and not source.startswith("torch."):
            raise StateError(
                f"a hook of register_post_accumulate_grad_hook is on the parameter of the module that looks up "
                f"{tables}, but it cannot change or step the rows: register it on the parameters of other modules, "
                "and on rows use cache.clip_grad_norm_(max_norm), or hooks on the outputs of lookups"
            )


def num_ranks() -> int:
    """Return the number of ranks of torch's default process group, 1 without one."""
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if has_ranks else 1
