"""Anchors: gradients of rows as gradients that torch knows.

A module that looks up rows has a parameter of one element, its *anchor*: the differentiable input of its lookups. When
backward delivers the gradient of an output, it becomes the ``.grad`` of a *placeholder*: a leaf tensor of the output's
shape that takes no memory. Until the step it is a parameter of the row optimizer, so unscaling, clipping and dropping
apply to it as to the gradient of any parameter. The anchor's own gradient is 2^-60 for each backward. If it is None or
0, the loop dropped the gradients of the module's parameters. If it is far larger, the parameter itself is in the loss,
for example in a penalty on all parameters; the anchor's value is not 0, so its square has a gradient.
"""

from __future__ import annotations

import math
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tiercache.errors import StateError
from tiercache.train.arrivals import Arrival, State
from tiercache.train.parameter_writes import (
    ParameterWrites,
    SeenGradient,
    SteppedGradient,
    check_hooks,
    num_ranks,
    watch_hooks,
)
from tiercache.values.compiled import not_compiled
from tiercache.values.torch_internals import after_backward, current_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import nn

    from tiercache.train.pass_ledger import PassLedger
    from tiercache.train.table_module import TableModule

_UNIT = 2.0**-60  # too small to change a gradient norm; the sum of up to 2^24 units is exact, also after unscaling
_HALF_UNIT = 2.0**-14  # the same for 16-bit dtypes with 5 exponent bits
_LARGEST = 2.0**-40  # above every finite anchor gradient from lookups; the gradient of a penalty is larger
_CHECKED_EVERY = 1024  # steps between two checks of a gradient on a GPU, because a check waits for the GPU
_ROUNDING = 1e-3  # the tolerance for an average over ranks to be a whole number of units


class Anchor:
    """The gradients of the rows of a module, or of several with one parameter, since the last step."""

    def __init__(self, module: TableModule, anchors: Anchors) -> None:
        self.anchors, self.modules = anchors, list["weakref.ref[TableModule]"]()
        self.tables = ", ".join(map(repr, module.tables))  # names of the tables, as shown in messages
        self.table_names = tuple(module.tables)
        self.first_table = module.tables[0] if module.tables else ""
        self.arrived: list[Arrival] = []  # the gradients since the last step, by backward; some may be dropped already
        self.expired = ""  # the pass that ended with these gradients pending: the loop has to drop them
        self._task = -1
        self._lookups = 0  # lookups that arrived since the anchor's gradient was None or 0; each added a unit to it
        self._in_task: dict[int, int] = {}  # the same for each backward pass that is running, by its number
        self._ends: dict[int, weakref.ref[Any]] = {}
        """The callbacks of the running backward passes; torch drops those of a pass that raises."""
        self._accumulated: set[int] = set()  # the running backward passes that have added to the anchor's gradient
        self._is_lent = False
        """True under FSDP: it gives lookups another parameter, and takes its gradient when backward ends."""
        self._is_hooked = False  # True if a hook of the loop returned another gradient in one of these backward passes
        self._seen: SeenGradient | None = None  # the anchor's gradient at the end of the last backward
        self._exposed: SeenGradient | None = None  # the anchor's, changed before the loop got those of rows
        self.writes, self.stepped = ParameterWrites(module, self._value_of), SteppedGradient(self._value_of)
        self._hooked: nn.Parameter | None = None
        self._hook: Any = None
        self._unchecked = 0  # steps until the next check of a gradient on a GPU

    def _module(self) -> TableModule | None:
        return next((one for each in self.modules if (one := each()) is not None), None)

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter; None if its modules are gone."""
        module = self._module()
        return None if module is None else module._parameters.get("anchor")

    @property
    def has_gradient(self) -> bool:
        """True if the parameter has a gradient, or rows have."""
        return bool(self.arrived) or ((parameter := self.parameter) is not None and parameter.grad is not None)

    @property
    def pending(self) -> list[Arrival]:
        """The gradients that the loop has neither stepped nor dropped."""
        return [one for one in self.arrived if one.is_pending]

    def arrive(self, parameter: nn.Parameter, gradients: Sequence[torch.Tensor | None],
               tables: Sequence[Collection[str]]) -> Arrival:  # fmt: skip
        """Record the gradients of a lookup's outputs, of which one is not None; tables: by output.

        parameter: the anchor as the lookup had it: FSDP replaces modules' parameters.
        """
        task = current_backward()
        if parameter is not self._hooked:
            self._follow(parameter)
        if task != self._task:
            if self.arrived and not self._is_lent:
                written = self.drop_dropped()
                self.arrived = self.pending  # without gradients that were only returned
                if not self._in_task:  # in a nested backward, the anchor's is not recorded yet
                    self._check_rescaled(written, self.arrived)
            if self.expired:
                self._check_expired()
            self._check_hooks(parameter)
            self.stepped.begin_backward(parameter.grad)
            if parameter.grad is None or (self._has_hooks and float(parameter.grad) == 0.0):
                self._lookups = 0
            self._task = task
            used = weakref.ref(parameter)
            end, settle = partial(self._end, task, used), partial(self._settle, task, used)
            self._ends[task] = weakref.ref(end, lambda _: settle())
            after_backward(end)
        found = Arrival(self, [None if one is None else self.anchors.own(one) for one in gradients], tables, task)
        self.arrived.append(found)
        self._in_task[task] = self._in_task.get(task, 0) + 1
        return found

    def _follow(self, parameter: nn.Parameter) -> None:
        """Record the backward passes that add to this parameter's gradient, instead of another one's."""
        self.remove()
        anchor = weakref.ref(self)  # must not keep the parameter alive

        def note(_: torch.Tensor) -> None:
            if (found := anchor()) is not None:
                found._accumulated.add(current_backward())

        self._hooked = parameter
        self._hook = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def _check_hooks(self, parameter: nn.Parameter) -> None:
        if len(parameter._post_accumulate_grad_hooks) > 1:
            check_hooks(parameter, __name__, self.tables)
        if parameter._backward_hooks:
            anchor = weakref.ref(self)

            def note() -> None:
                if (found := anchor()) is not None:
                    found._is_hooked = True

            watch_hooks(parameter, note)

    @not_compiled
    def _end(self, task: int, used: weakref.ref[nn.Parameter]) -> None:
        self._settle(task, used)
        after_backward(partial(self._note, used))  # DistributedDataParallel queues its own before this one

    def _settle(self, task: int, used: weakref.ref[nn.Parameter]) -> None:
        """Drop gradients of a backward that did not add to the anchor's, or raised, as ``torch.autograd.grad`` does."""
        if self._ends.pop(task, None) is None:
            return
        is_kept, parameter = task in self._accumulated, used()
        self._is_lent |= is_kept and parameter is not None and parameter.grad is None
        self._accumulated.discard(task)
        count = self._in_task.pop(task, 0)
        if is_kept:
            self._lookups += count
            if (module := self._module()) is not None:
                self.writes.end_backward(None if self._is_lent else parameter, module.num_resets)
        self._task = -1 if self._task == task else self._task
        for one in self.arrived:
            if one.task == task and not one.is_accumulated:
                one.is_accumulated = is_kept
                if is_kept:
                    one.end_backward()
                else:
                    one.end()
        self._note(used)

    @not_compiled
    def _note(self, used: weakref.ref[nn.Parameter]) -> None:
        parameter = used()
        grad = None if parameter is None else parameter.grad
        if grad is not None:
            self._seen = SeenGradient.of(grad, self._value_of(grad))

    def check_parameter(self, *, steps: bool = False) -> None:
        """Raise StateError if the loop changed the parameter by hand since a backward, or since the last step."""
        if (module := self._module()) is not None and not self._is_lent:
            self.writes.check(module.anchor, module.num_resets, steps=steps)

    def end_step(self) -> None:
        """Record the parameter after a step of any optimizer."""
        if (module := self._module()) is not None:
            used = None if self._is_lent else module.anchor
            self.writes.end_step(used, module.num_resets, has_stepped=bool(self.arrived))
            if any(one.state is State.STEPPING for one in self.arrived):
                self.stepped.end_step(None if used is None or _is_sharded(used) else used.grad)

    @property
    def is_skipped(self) -> bool:
        """True if the anchor's gradient is not finite, so that a GradScaler skips the step; waits for a GPU."""
        grad = None if self.parameter is None else self.parameter.grad
        return grad is not None and not _is_sharded(grad) and not math.isfinite(float(grad))

    def drop_dropped(self) -> torch.Tensor | None:
        """Forget gradients if the anchor's was set to None or zeroed. Return the anchor's if it may have changed.

        That is, if it was written or replaced since the last backward, or if it has hooks. Only then wait for a GPU.
        """
        parameter = self.parameter
        grad = None if parameter is None else parameter.grad
        written = None
        if grad is not None and not _is_sharded(grad) and (self._is_changed(grad) or self._has_hooks):
            written = grad
        if self.arrived and (grad is None or (written is not None and float(written) == 0.0)):
            self._drop([one for one in self.arrived if one.is_accumulated])
            self.stepped.end_step(None)
            self._lookups = 0
        return written

    def flag_overflow(self, found: torch.Tensor) -> None:
        """Make the anchor's gradient infinite if ``found``, of one element, is not 0. Does not count as a change."""
        grad = None if self.parameter is None else self.parameter.grad
        if grad is not None and not _is_sharded(grad):
            is_changed = self._is_changed(grad)
            grad.masked_fill_(found.to(grad.device).reshape(()) != 0, math.inf)
            if not is_changed:
                self._seen = SeenGradient.of(grad, self._value_of(grad))

    def _is_changed(self, grad: torch.Tensor) -> bool:
        """Return True if it was written or replaced since the last backward; on a GPU, by writes that torch counts."""
        return self._seen is None or self._seen.differs(grad, self._value_of(grad))

    def _value_of(self, tensor: torch.Tensor) -> float | None:
        """Return the element of a tensor, None if reading it would wait for a GPU."""
        return None if self.anchors.is_queued or _is_sharded(tensor) or not tensor.is_cpu else tensor.item()

    @property
    def _has_hooks(self) -> bool:
        return self._hooked is not None and bool(self._hooked._backward_hooks)

    def _is_rescaled(self, grad: torch.Tensor) -> bool:
        """Return True if the anchor's gradient, if written or seen by hooks, is not the sum that lookups added.

        Several ranks may average gradients by hand, which leaves a number of units divided by the number of ranks.
        """
        units = float(grad) / unit_of(grad)
        if (ranks := num_ranks()) == 1:
            return self._is_changed(grad) or self._is_hooked or units != self._lookups
        return math.isfinite(units) and abs(units * ranks - round(units * ranks)) > _ROUNDING

    def ready(self) -> list[Arrival]:
        """Return the gradients that a step applies. Raises StateError if only the anchor's gradient was changed."""
        written = self.drop_dropped()
        found = self.pending if self.arrived else []
        if not found:
            self.check_by_hand(written)
            return []
        if self.expired:
            self._check_expired()
        self._check_rescaled(written, found)
        self._check_penalty()
        return found

    def check_by_hand(self, written: torch.Tensor | None) -> None:
        """Raise StateError if no gradient of rows is pending, but the anchor's was set."""
        if written is not None and self._is_changed(written) and num_ranks() == 1 and float(written) != 0.0:
            self._check_penalty()
            raise StateError(
                f"gradients of parameters were set by hand, as from torch.autograd.grad, but not the gradients of "
                f"rows of {self.tables}: call backward() on the loss, or on a sum of losses, instead"
            )

    def expose(self) -> list[torch.Tensor]:
        """Return the leaves that hold the pending gradients, and note if the anchor's was changed before them."""
        written = self.drop_dropped() if any(not one.is_exposed for one in self.arrived) else None
        if written is not None and any(one.is_untouched for one in self.arrived) and self._is_rescaled(written):
            self._exposed = SeenGradient.of(written, self._value_of(written))
        return [leaf for one in self.pending for leaf in one.placeholders]

    def _check_rescaled(self, written: torch.Tensor | None, found: Sequence[Arrival]) -> None:
        if written is not None and any(one.is_untouched for one in found) and self._is_rescaled(written):
            raise StateError(
                f"gradients were changed between backward and step, but not for the rows of {self.tables}, as by "
                "torch.nn.utils.clip_grad_norm_(model.parameters()), whose norm leaves out the rows of tables, or by "
                "scaler.unscale_ of your own optimizer: clip with cache.clip_grad_norm_(max_norm), pass "
                "cache.optimizer to the scaler, and scale the loss instead of gradients"
            )
        if (
            self._exposed is not None
            and written is not None
            and self._exposed.differs(written, self._value_of(written))
        ):
            raise StateError(
                f"gradients of parameters were changed twice, but those of the rows of {self.tables} once, as by "
                "scaler.unscale_ of your own optimizer and scaler.step(cache.optimizer): pass cache.optimizer to both"
            )

    def _check_penalty(self) -> None:
        """Raise StateError if the loss contains the anchor itself. Waits for a GPU if a check is due."""
        grad = None if self.parameter is None else self.parameter.grad
        if grad is None or _is_sharded(grad) or grad.dtype == torch.float16:
            return
        self._unchecked -= 1
        if self.anchors.is_queued and self._unchecked > 0:
            return
        self._unchecked = _CHECKED_EVERY
        if _LARGEST < abs(float(grad)) < math.inf:
            raise StateError(
                f"the loss contains the parameters of the module that looks up {self.tables}, as with a penalty on "
                "model.parameters(), but its rows are not parameters and would not be penalized: put the penalty on "
                "the outputs of lookups, or set a decay in the table's optimizer (L2 on the rows of a step)"
            )

    def expire(self, where: str) -> None:
        """Record that the rows of pending gradients are gone, since ``where`` has ended: the loop has to drop them."""
        if self.pending:
            self.expired = where

    def _check_expired(self) -> None:
        if self.pending:
            raise StateError(
                f"gradients of {self.tables} from {self.expired} were neither stepped nor dropped when it ended: "
                "call zero_grad() of their optimizer before its next backward"
            )
        self.expired = ""

    def clear(self) -> None:
        """Forget the gradients so far."""
        if (module := self._module()) is not None:
            self.writes.drop(module.anchor, module.num_resets, pending=bool(self.arrived))
        self._drop(self.arrived)
        self.stepped.end_step(None)
        self.expired, self._lookups = "", 0

    def end_stepped(self) -> None:
        """Forget the gradients that were stepped."""
        self._drop([one for one in self.arrived if one.state is State.STEPPING])

    def _drop(self, arrivals: Sequence[Arrival]) -> None:
        if not arrivals:
            return
        for one in arrivals:
            one.end()
        self._is_hooked, self._exposed = False, None
        self.arrived = [] if len(arrivals) == len(self.arrived) else self.pending
        self.anchors.forget()

    def remove(self) -> None:
        """Remove the hook of the parameter."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._hooked = None


class Anchors:
    """The anchors of the modules that look up rows of one cache."""

    def __init__(self) -> None:
        self._anchors: dict[int, Anchor] = {}  # by id of the module; plain, because every step iterates over it often
        self._addresses: set[int] = set()  # the addresses of pending gradients
        self.flags_overflow = False
        """True to make an anchor's gradient infinite if a gradient of its rows is not finite. Ranks that average it
        then all see it, and each GradScaler skips the step."""
        self.is_queued = False  # True if the backend queues its work: reading a gradient would wait for it
        self.is_stepped = False  # True once the cache took a step, or has an optimizer or a model of rows alone
        self.ledger: PassLedger | None = None  # the ledger of the pass whose rows are trained
        self.readers: weakref.WeakSet[TableModule] = weakref.WeakSet()  # the registered modules that look up rows
        self.is_closed_to_others = False  # True if only registered modules may train rows: no commit has others

    def __iter__(self) -> Iterator[Anchor]:
        return iter(dict.fromkeys(self._anchors.values()))

    def of(self, module: TableModule) -> Anchor:
        """Return the anchor of a module: one for all modules with its parameter."""
        found = self._anchors.get(id(module))
        if found is None:
            found = next((one for one in self if one.parameter is module.anchor), None) or Anchor(module, self)
            self._anchors[id(module)] = found
            found.modules.append(weakref.ref(module, _forget(weakref.ref(self), id(module))))
        return found

    def check_reader(self, module: TableModule) -> bool:
        """Return True if a module may train rows. Raises StateError if it is neither registered nor a copy of one.

        A copy, such as an average of a model, may look up rows, and is refused when gradients arrive.
        """
        is_known = not self.is_closed_to_others or module in self.readers
        if not is_known and all(module.copied_from != one.number for one in self.readers):
            self.refuse_reader(module.tables)
        return is_known

    def check_written(self, module: TableModule) -> None:
        """Raise StateError if the parameters of a module were written since a backward, or since the last step."""
        if (found := self._anchors.get(id(module))) is not None:
            found.check_parameter()

    @staticmethod
    def refuse_reader(tables: Sequence[str]) -> NoReturn:
        """Raise StateError for a module that is not registered and would train rows."""
        raise StateError(
            f"a module that looks up {', '.join(map(repr, tables))} belongs to no model of this cache, so its model "
            "would be trained and not committed: pass the model to the cache (model=..., or register()), or freeze "
            "the module with requires_grad_(False)"
        )

    def own(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient, copied if it overlaps itself or another pending one.

        ``out.sum()`` has a gradient of one number, and ``a + b`` one tensor for both.
        """
        if gradient.is_inference():  # which has no version
            gradient = gradient.clone()
        elif gradient.requires_grad:
            gradient = gradient.detach()
        overlaps = not gradient.is_contiguous() and 0 in gradient.stride()
        place = gradient.data_ptr()
        if overlaps or place in self._addresses:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            place = gradient.data_ptr()
        if place:  # an empty tensor has address 0
            self._addresses.add(place)
        return gradient

    def uses_of(self, gradient: torch.Tensor) -> int:
        """Return the number of pending gradients in the storage of ``gradient``, itself among them."""
        return sum(one.shared_with(gradient) for anchor in self for one in anchor.arrived)

    def forget(self) -> None:
        """Forget the addresses of gradients once none is left."""
        if not any(one.arrived for one in self._anchors.values()):
            self._addresses.clear()

    def gradient_of(self, parameter: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the gradient of an anchor in a backward that delivers the outputs' ``gradients``."""
        found = torch.full_like(parameter, unit_of(parameter))
        if self.flags_overflow:
            for one in gradients:
                if one is not None:
                    found = found.where(one.isfinite().all().to(found.device), math.inf)
        return found

    def note_step(self, *, applied: bool) -> None:
        """Record a step of the cache's optimizer. applied: True if it finds gradients of rows."""
        self.is_stepped = True
        for anchor in self:
            anchor.end_step()
        if self.ledger is not None:
            self.ledger.step(applied=applied)

    def close(self) -> None:
        """Remove all hooks."""
        for anchor in self:
            anchor.remove()


def unit_of(anchor: torch.Tensor) -> float:
    """Return the gradient that one lookup adds to an anchor."""
    return _HALF_UNIT if anchor.dtype == torch.float16 else _UNIT


def _forget(anchors: weakref.ref[Anchors], number: int) -> Callable[[object], None]:
    """Return a callback that removes the anchor of a module that was deleted."""

    def forget(_: object) -> None:
        if (found := anchors()) is not None:
            found._anchors.pop(number, None)

    return forget


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor, of which this process may have no element."""
    return hasattr(tensor, "to_local")
