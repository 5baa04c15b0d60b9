"""What a training loop does to gradients of rows: followed through a 0-dim parameter of each module, its handle.

Rows have no ``.grad``. So backward leaves a tracer, 2^-60, in the gradient of the module's handle, which is in
``model.parameters()`` and meets with whatever happens to gradients: where it was dropped the rows' gradients are, where
it was divided (by a GradScaler) so are they, and the optimizer that owns the handle steps the module's tables.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tiercache.errors import StateError
from tiercache.training.scaled_loss import backward_number, scale_of_backward

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping, Sequence

    from torch import nn

    from tiercache.training.pass_ledger import PassLedger
    from tiercache.training.table_module import TableModule

_TRACER = 2.0**-60
"""Small enough to change no norm of gradients; a sum of up to 2^24 of them is exact, and so is one unscaled."""
_TOLERANCE = 1e-5
"""Of a factor: unscaling and clipping round."""


class Mark(NamedTuple):
    """One gradient of a module's rows, in the ``drops``-th life of its handle."""

    tracer: Tracer
    drops: int


class Tracer:
    """The gradients of a module's rows since the last step, as its handle shows them."""

    def __init__(self, handle: nn.Parameter, tables: Sequence[str]) -> None:
        self._handle = weakref.ref(handle)
        self.tables = ", ".join(map(repr, tables))
        """Names of the tables, as messages have them."""
        self.drops = 0
        """How many times gradients were dropped or stepped; those of an earlier number are no more."""
        self.reached: set[str] = set()
        """The tables that the gradients so far are of."""
        self._count, self._factor = 0, 1.0
        self._scale: torch.Tensor | None = None
        self._backward: int | None = None
        self._left = ""
        self._version = -1
        self._seen: Any = lambda: None
        self._hook: Any = handle.register_post_accumulate_grad_hook(self._settle)  # type: ignore[no-untyped-call]

    @property
    def handle(self) -> nn.Parameter | None:
        """The parameter; None where its module is gone."""
        return self._handle()

    def mark(self, tables: Iterable[str]) -> Mark:
        """Note one gradient, of the rows of ``tables``, of the backward pass that runs."""
        backward, scale = backward_number(), scale_of_backward()
        if backward != self._backward:
            self.drop_dropped(unscaled=False)
            self.check_left()
            self._backward = backward
        if self._count and (scale is None) != (self._scale is None):
            raise StateError(
                f"of the gradients of {self.tables} since the last step some are of a scaled loss and some are "
                "not: scale all with the same GradScaler, or none"
            )
        self._scale, self._count = scale, self._count + 1
        self.reached.update(tables)
        return Mark(self, self.drops)

    def _settle(self, handle: torch.Tensor) -> None:
        """Note the gradient that is there once a backward pass has added to it."""
        assert handle.grad is not None
        self._seen, self._version = weakref.ref(handle.grad), handle.grad._version

    @property
    def is_changed(self) -> bool:
        """Whether the handle's gradient was written or replaced since the last backward."""
        handle = self._handle()
        grad = None if handle is None else handle.grad
        return grad is None or self._seen() is not grad or grad._version != self._version

    def drop_dropped(self, *, unscaled: bool) -> None:
        """Forget gradients that are not in the handle any more: set to None, zeroed or, once unscaled, not finite.

        Waits for a GPU where the gradient was written since backward. unscaled: whether a GradScaler may have written
        it, which shows in no version.
        """
        handle = self._handle()
        grad = None if handle is None else handle.grad
        may_be = self.is_changed or (unscaled and self._scale is not None)
        if self._count and (grad is None or (may_be and not _is_kept(float(grad)))):
            self.drop()

    def drop(self) -> None:
        """Forget the gradients so far."""
        self._count, self._factor, self._backward, self._left = 0, 1.0, None, ""
        self.reached.clear()
        self.drops += 1

    def leave(self, where: str) -> None:
        """Note that rows of the gradients so far are gone as ``where`` has ended: a loop has to drop them."""
        if self._count:
            self._left = where

    def check_left(self) -> None:
        """Raise StateError where gradients of rows that are gone were not dropped."""
        if self._left:
            raise StateError(
                f"gradients of {self.tables} from {self._left} were neither stepped nor dropped when it ended: "
                "call zero_grad() of their optimizer before its next backward"
            )

    def clear(self) -> None:
        """Forget the gradients so far, and empty the handle's."""
        self.drop()
        handle = self._handle()
        if handle is not None:
            handle.grad = None

    def scale_by(self, factor: float) -> None:
        """Multiply the gradient, as dense ones are."""
        self._factor *= factor
        handle = self._handle()
        if handle is not None and handle.grad is not None:
            scaled = self.is_changed
            handle.grad.mul_(factor)
            if not scaled:
                self._settle(handle)

    @property
    def scale(self) -> torch.Tensor | None:
        """What losses were multiplied by, 0-dim."""
        return self._scale

    def factor(self, value: float, scale: float | None) -> float:
        """Return what the rows' gradients are to be multiplied by; 0 where there is no step.

        value: of the handle's gradient. scale: of the losses. Raises StateError where the gradient was changed by
        something that rows cannot follow.
        """
        found, asked = value / _TRACER / max(1, self._count), self._factor / (scale or 1.0)
        if not _is_kept(found):
            return 0.0
        if scale not in {None, 1.0} and math.isclose(found, self._factor, rel_tol=_TOLERANCE):
            raise StateError(
                f"the gradients of {self.tables} are scaled by a GradScaler and were not unscaled: step with "
                "scaler.step(optimizer), and give that optimizer the parameters of the embedding modules"
            )
        if not math.isclose(found, asked, rel_tol=_TOLERANCE) or scale is None:
            raise StateError(
                f"gradients were changed between backward and step (those of {self.tables} by a factor of "
                f"{found / asked:.6g}), as torch.nn.utils.clip_grad_norm_ does, whose norm leaves out the rows of "
                "tables: clip with cache.clip_grad_norm_(max_norm), and scale the loss in place of gradients"
            )
        return asked

    @property
    def own_factor(self) -> float:
        """What rows' gradients are to be multiplied by where the handle's gradient is as backward left it."""
        return self._factor

    def remove(self) -> None:
        """Follow it no more."""
        self._hook.remove()


class Tracers:
    """The tracers of a cache, and who steps which module's rows."""

    def __init__(self) -> None:
        self._tracers: MutableMapping[nn.Parameter, Tracer] = WeakIdKeyDictionary()
        self.is_stepped = False
        """Whether the cache has an optimizer, or a step was taken: else nobody may ever step rows."""
        self.ledger: PassLedger | None = None
        """That of the pass whose rows are trained."""
        self.readers: weakref.WeakSet[TableModule] = weakref.WeakSet()
        """The registered modules that look rows up."""
        self.is_closed_to_others = False
        """Whether other modules must not train rows: their model is in no commit."""
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    def check_reader(self, module: TableModule) -> bool:
        """Return whether a module may train rows. Raises StateError if it is neither registered nor a copy of one.

        A copy, as an average of a model has it, may look rows up, and is refused when gradients arrive.
        """
        is_known = not self.is_closed_to_others or module in self.readers
        if not is_known and all(module.copied_from != one.number for one in self.readers):
            self.refuse_reader(module.tables)
        return is_known

    @staticmethod
    def refuse_reader(tables: Sequence[str]) -> NoReturn:
        """Raise StateError for a module that is not registered and would train rows."""
        raise StateError(
            f"a module that looks up {', '.join(map(repr, tables))} belongs to no model of this cache, so its model "
            "would be trained and not committed: give the cache the model (model=..., or register()), or freeze "
            "the module with requires_grad_(False)"
        )

    def note_step(self, *, applied: bool) -> None:
        """Note a step of one of the cache's optimizers. applied: whether it finds gradients of rows."""
        self.is_stepped = True
        if self.ledger is not None:
            self.ledger.step(applied=applied)

    def note_attempt(self) -> None:
        """Note a step that a GradScaler takes or skips after unscaling."""
        if self.ledger is not None:
            self.ledger.attempt()

    def note_drop(self) -> None:
        """Note that one of the cache's optimizers drops its gradients."""
        if self.ledger is not None:
            self.ledger.drop()

    def of(self, handle: nn.Parameter, tables: Sequence[str]) -> Tracer | None:
        """Return that of the handle of a module that looks up ``tables``; None where the module is frozen."""
        if not handle.requires_grad:
            return None
        found = self._tracers.get(handle)
        if found is None:
            found = self._tracers[handle] = Tracer(handle, tables)
        return found

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the rows of modules whose handles ``optimizer`` owns wait for it."""
        self._optimizers.append(weakref.ref(optimizer))
        self.is_stepped = True

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are followed."""
        return [one for found in self._optimizers if (one := found()) is not None]

    def factors(self, marks: Iterable[Mark], optimizer: torch.optim.Optimizer | None) -> dict[Tracer, float]:
        """Return what a step of ``optimizer`` multiplies gradients by, of each module: 0 where it takes none.

        optimizer: None steps everything. What waits for another is left out. On a GPU it waits for gradients
        that were unscaled or clipped, and for no others.
        """
        live = list({mark.tracer: None for mark in marks if mark.drops == mark.tracer.drops})
        mine = live if optimizer is None else self._owned(live, optimizer)
        found = {tracer: 0.0 for tracer in mine if tracer.handle is None or tracer.handle.grad is None}
        here = [tracer for tracer in mine if tracer not in found]
        for tracer in here:
            tracer.check_left()
        read = [tracer for tracer in here if tracer.is_changed or tracer.scale is not None]
        values = _values([tracer.handle.grad for tracer in read if tracer.handle is not None])
        scales = _values([tracer.scale for tracer in read])
        found |= {tracer: tracer.own_factor for tracer in here}
        found |= {tracer: tracer.factor(value or 0.0, scale)
                  for tracer, value, scale in zip(read, values, scales, strict=True)}  # fmt: skip
        return found

    def _owned(self, tracers: Sequence[Tracer], optimizer: torch.optim.Optimizer) -> list[Tracer]:
        owned = [(one, parameter_ids(one)) for one in self.optimizers]
        found: list[Tracer] = []
        for tracer in tracers:
            owners = [one for one, parameters in owned if id(tracer.handle) in parameters]
            if optimizer in owners:
                found.append(tracer)
            if not owners:
                self._check_only(tracer, owned)
                found.append(tracer)
        return found

    def _check_only(self, tracer: Tracer, owned: Sequence[tuple[torch.optim.Optimizer, set[int]]]) -> None:
        """Raise StateError for a handle that no optimizer owns, unless there is one, which owns no handle at all."""
        handles = {id(handle) for handle in self._tracers}
        if len(owned) > 1 or any(parameters & handles for _, parameters in owned):
            raise StateError(
                f"a module that looks up {tracer.tables} is in none of the cache's optimizers, so nobody would "
                "train its rows: give an optimizer the module's parameters, or freeze it with requires_grad_(False)"
            )

    def drop_overflowed(self, optimizer: torch.optim.Optimizer, overflow: torch.Tensor) -> None:
        """Drop the gradients that wait for ``optimizer`` where ``overflow``, 0-dim, is not 0; waits for no GPU."""
        owned = parameter_ids(optimizer)
        for handle in self._tracers:
            if id(handle) in owned and handle.grad is not None:
                handle.grad.masked_fill_(overflow.to(handle.grad.device).reshape(()) != 0, math.inf)

    def close(self) -> None:
        """Follow nothing any more."""
        for tracer in self._tracers.values():
            tracer.remove()
        self._optimizers.clear()


def tracer_gradient(handle: nn.Parameter, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the gradient of a handle in a backward: a tracer, infinite where scaled ``gradients`` are not finite."""
    tracer = torch.full((), _TRACER, dtype=torch.float32, device=handle.device)
    if scale_of_backward() is not None:
        for gradient in gradients:
            if gradient is not None:
                tracer = tracer.where(gradient.isfinite().all().to(handle.device), math.inf)
    return tracer


def _is_kept(value: float) -> bool:
    return value != 0.0 and math.isfinite(value)


def _values(scalars: Sequence[torch.Tensor | None]) -> list[float | None]:
    """Return the values of 0-dim tensors, waiting for each device once."""
    by_device: dict[torch.device, list[int]] = {}
    for index, one in enumerate(scalars):
        if one is not None:
            by_device.setdefault(one.device, []).append(index)
    found: list[float | None] = [None] * len(scalars)
    for some in by_device.values():
        values = torch.stack([one.double() for index in some if (one := scalars[index]) is not None]).tolist()
        for index, value in zip(some, values, strict=True):
            found[index] = value
    return found


def parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of its parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
