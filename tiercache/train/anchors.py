"""Anchors make gradients of rows gradients that torch knows.

A module that looks rows up has a parameter of one element, its *anchor*: the differentiable input of its lookups. When
backward brings the gradient of an output, a *placeholder* is made: a leaf tensor of the output's shape that takes no
memory, and whose ``.grad`` is that gradient, as it came. It is a parameter of the optimizer of rows until the step, so
unscaling, clipping and dropping reach it as they reach any gradient of a parameter. The anchor's own gradient is 2^-60
for each backward. If it is None or 0, the loop dropped the gradients of the module's parameters.
"""

from __future__ import annotations

import math
import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tiercache.errors import StateError
from tiercache.train.arrival import Arrival, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from tiercache.train.pass_ledger import PassLedger
    from tiercache.train.table_module import TableModule

_UNIT = 2.0**-60
"""Small enough to change no norm of gradients; a sum of up to 2^24 of them is exact, and so is one unscaled."""
_HALF_UNIT = 2.0**-14
"""The same in 16 bits with 5 of exponent."""


_ROUNDING = 1e-3
"""How far the average of several ranks may be from a whole number of units."""


class Anchor:
    """The gradients of one module's rows since the last step."""

    def __init__(self, module: TableModule, anchors: Anchors) -> None:
        self._module, self._anchors = weakref.ref(module, _forget(weakref.ref(anchors), id(module))), anchors
        self.tables = ", ".join(map(repr, module.tables))
        """Names of the tables, as messages have them."""
        self.table_names = tuple(module.tables)
        self.first_table = module.tables[0] if module.tables else ""
        self._arrived: list[Arrival] = []
        self._left = ""
        self._task = -1
        self._lookups = 0
        """Lookups whose gradients arrived since the anchor's was None or 0. Each has added a unit to it."""
        self._in_task: dict[int, int] = {}
        """The same for each backward pass that is running, by its number."""
        self._accumulated: set[int] = set()
        """The backward passes that run and have added to the anchor's gradient."""
        self._is_lent = False
        """True if FSDP has the parameter: it lends lookups another one, and takes its gradient when backward ends."""
        self._seen: Any = lambda: None
        self._version = -1
        self._value: int | None = None
        """The version of the anchor after a backward that has not been stepped yet."""
        self._is_climbed = False
        """True once the loop changed parameters while gradients waited, and then dropped the gradients."""
        self._hooked: nn.Parameter | None = None
        self._hooks: list[Any] = []

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter; None where its module is gone."""
        module = self._module()
        return None if module is None else module._parameters["anchor"]

    @property
    def waiting(self) -> list[Arrival]:
        """The gradients that wait for a step, in the order in which they came."""
        return [one for one in self._arrived if one.state is State.WAITING and one.gradient is not None]

    @property
    def has_arrived(self) -> bool:
        """True if gradients came since the last step; some of them may be dropped."""
        return bool(self._arrived)

    @property
    def is_left(self) -> bool:
        """True if gradients are of rows that are gone, and the loop has to drop them."""
        return bool(self._left)

    # -- in backward ----------------------------------------------------------------------------------------

    def arrive(self, parameter: nn.Parameter, gradients: Sequence[torch.Tensor | None],
               tables: Sequence[frozenset[str]]) -> list[Arrival | None]:  # fmt: skip
        """Note the gradients of a lookup's outputs; tables: those that each output is of.

        parameter: the anchor as the lookup had it: FSDP lends modules other parameters than their own.
        """
        task = int(torch._C._current_graph_task_id())
        if parameter is not self._hooked:
            self._hook(parameter)
        if task != self._task:
            if self._arrived and not self._is_lent:
                self.drop_dropped()
                self._arrived = self.waiting  # without those that were only asked for
            if self._left:
                self.check_left()
            if parameter.grad is None or (self._has_hooks and float(parameter.grad) == 0.0):
                self._lookups = 0
            self._task = task
            _behind_backward(partial(self._end, task, weakref.ref(parameter)))
        found = [
            None if one is None else Arrival(self, self._anchors.own(one), some, task)
            for one, some in zip(gradients, tables, strict=True)
        ]
        self._arrived += [one for one in found if one is not None]
        self._in_task[task] = self._in_task.get(task, 0) + any(one is not None for one in found)
        return found

    def _hook(self, parameter: nn.Parameter) -> None:
        """Be told when a backward pass adds to the gradient of a parameter, in place of another one's."""
        self.remove()
        note = weakref.WeakMethod(self._accumulate)

        def tell(_: torch.Tensor) -> None:
            if (found := note()) is not None:
                found()

        self._hooked = parameter
        self._hooks.append(parameter.register_post_accumulate_grad_hook(tell))  # type: ignore[no-untyped-call]

    def _accumulate(self) -> None:
        """Note that a backward pass has added to the anchor's gradient."""
        self._accumulated.add(int(torch._C._current_graph_task_id()))

    def _end(self, task: int, used: weakref.ref[nn.Parameter]) -> None:
        """Forget gradients of a backward pass that were only asked for, as by ``torch.autograd.grad``."""
        is_kept, parameter = task in self._accumulated, used()
        self._is_lent |= is_kept and parameter is not None and parameter.grad is None
        self._accumulated.discard(task)
        count = self._in_task.pop(task, 0)
        if is_kept:
            self._lookups += count
            self._value = None if parameter is None or self._is_lent else parameter._version
        self._task = -1 if self._task == task else self._task
        for one in self._arrived:
            if one.task == task and not one.is_accumulated:
                one.is_accumulated = is_kept
                if not is_kept:
                    one.end()
        self._note(used)
        _behind_backward(partial(self._note, used))  # after DistributedDataParallel, which asks later than we do

    def _note(self, used: weakref.ref[nn.Parameter]) -> None:
        """Note the anchor's gradient as backward left it."""
        parameter = used()
        grad = None if parameter is None else parameter.grad
        if grad is not None:
            self._seen, self._version = weakref.ref(grad), grad._version

    def check_value(self, parameter: torch.Tensor) -> None:
        """Raise StateError if the loop changed parameters, dropped the gradients, and now looks rows up again.

        Only warn if it may have dropped them first, as after a skipped batch.
        """
        if self._is_climbed:
            raise StateError(
                f"parameters were changed between a backward and the next forward, as sharpness-aware minimization "
                f"does, but the rows of {self.tables} cannot be: change parameters only after optimizer.step()"
            )
        if self._value is not None and parameter.grad is None and parameter._version != self._value:
            self._value = None
            warnings.warn(
                f"parameters were changed after a backward that was never stepped: if that was sharpness-aware "
                f"minimization, the rows of {self.tables} did not move with them",
                stacklevel=4,
            )

    def end_step(self) -> None:
        """Note that parameters may change from now on."""
        self._value, self._is_climbed = None, False

    # -- at the step ----------------------------------------------------------------------------------------

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
        if self._arrived and (grad is None or (written is not None and float(written) == 0.0)):
            self._drop([one for one in self._arrived if one.is_accumulated])
            self._lookups = 0
        return written

    def write(self, grad: torch.Tensor, overflows: torch.Tensor) -> None:
        """Make the anchor's gradient infinite if a gradient of rows overflows. The loop did not change it."""
        is_changed = self._is_changed(grad)
        grad.masked_fill_(overflows, math.inf)
        if not is_changed:
            self._version = grad._version

    def _is_changed(self, grad: torch.Tensor) -> bool:
        """Return True if the anchor's gradient was written or replaced since the last backward."""
        return self._seen() is not grad or grad._version != self._version

    @property
    def _has_hooks(self) -> bool:
        """True if the anchor has hooks of the loop's, which may change its gradient."""
        return self._hooked is not None and bool(self._hooked._backward_hooks)

    def _is_another(self, grad: torch.Tensor) -> bool:
        """Return True if the anchor's gradient, written or seen by hooks, is not what the lookups added up to.

        Several ranks may average gradients by hand, which leaves a number of units divided by the number of ranks.
        """
        units = float(grad) / unit_of(grad)
        if (ranks := _num_ranks()) == 1:
            return self._is_changed(grad) or units != self._lookups
        return math.isfinite(units) and abs(units * ranks - round(units * ranks)) > _ROUNDING

    def due(self) -> list[Arrival]:
        """Return the gradients that a step applies. Raises StateError if only the anchor's gradient was changed.

        Waits for a GPU only if it may have been changed.
        """
        written = self.drop_dropped()
        found = self.waiting if self._arrived else []
        if not found:
            if written is not None and self._is_changed(written) and _num_ranks() == 1 and float(written) != 0.0:
                raise StateError(
                    f"gradients of parameters were set by hand, as from torch.autograd.grad, and those of the rows of "
                    f"{self.tables} were not: call backward() on the loss, or on a sum of losses, instead"
                )
            return []
        if self._left:
            self.check_left()
        if written is not None and any(one.is_untouched for one in found) and self._is_another(written):
            raise StateError(
                f"gradients were changed between backward and step, and those of the rows of {self.tables} were not, "
                "as by torch.nn.utils.clip_grad_norm_(model.parameters()), whose norm leaves out the rows of tables: "
                "clip with cache.clip_grad_norm_(max_norm), and scale the loss in place of gradients"
            )
        return found

    def leave(self, where: str) -> None:
        """Note that rows of the gradients so far are gone as ``where`` has ended: a loop has to drop them."""
        if self.waiting:
            self._left = where

    def check_left(self) -> None:
        """Raise StateError where gradients of rows that are gone were not dropped."""
        if self._left and self.waiting:
            raise StateError(
                f"gradients of {self.tables} from {self._left} were neither stepped nor dropped when it ended: "
                "call zero_grad() of their optimizer before its next backward"
            )
        self._left = ""

    def clear(self) -> None:
        """Forget the gradients so far."""
        if self._value is not None and self._arrived and (parameter := self.parameter) is not None:
            self._is_climbed = parameter._version != self._value
        self._value = None
        self._drop(self._arrived)
        self._left, self._lookups = "", 0

    def end_due(self) -> None:
        """Forget the gradients that were stepped."""
        self._drop([one for one in self._arrived if one.state is State.DUE])

    def _drop(self, arrivals: Sequence[Arrival]) -> None:
        if not arrivals:
            return
        for one in arrivals:
            one.end()
        self._arrived = [] if len(arrivals) == len(self._arrived) else self.waiting
        self._anchors.forget()

    def remove(self) -> None:
        """Follow the anchor no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._hooked = None


class Anchors:
    """The anchors of the modules that look up rows of one cache."""

    def __init__(self) -> None:
        self._anchors: dict[int, Anchor] = {}
        """By id of the module. A plain dictionary, because every step iterates over it several times."""
        self._held: set[int] = set()
        """Addresses at which gradients that wait begin."""
        self.flags_overflow = False
        """True to make an anchor's gradient infinite if a gradient of its rows is not finite. Ranks that average it all
        see it then, and the GradScaler of each one skips the step."""
        self.is_stepped = False
        """True once the cache has an optimizer or took a step. Without either, rows may never be stepped."""
        self.ledger: PassLedger | None = None
        """The ledger of the pass whose rows are trained."""
        self.readers: weakref.WeakSet[TableModule] = weakref.WeakSet()
        """The registered modules that look rows up."""
        self.is_closed_to_others = False
        """True if other modules must not train rows, because their model is in no commit."""

    def __iter__(self) -> Iterator[Anchor]:
        return iter(list(self._anchors.values()))

    def of(self, module: TableModule) -> Anchor:
        """Return the anchor of a module."""
        found = self._anchors.get(id(module))
        if found is None:
            found = self._anchors[id(module)] = Anchor(module, self)
        return found

    def check_reader(self, module: TableModule) -> bool:
        """Return whether a module may train rows. Raises StateError if it is neither registered nor a copy of one, or
        if its parameters were written since a backward.

        A copy, as an average of a model has it, may look rows up, and is refused when gradients arrive.
        """
        if (found := self._anchors.get(id(module))) is not None:
            found.check_value(module.anchor)
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

    def own(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient that may be written in place: a copy where it overlaps itself, or another that waits.

        As of ``out.sum()``, whose gradient is one number, and of ``a + b``, whose gradients are one tensor.
        """
        gradient = gradient.detach() if gradient.requires_grad else gradient
        steps = gradient.stride()
        overlaps = 0 in steps and any(n > 1 for step, n in zip(steps, gradient.shape, strict=True) if step == 0)
        place = gradient.data_ptr()
        if overlaps or place in self._held:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            place = gradient.data_ptr()
        if place:  # 0 of no numbers
            self._held.add(place)
        return gradient

    def forget(self) -> None:
        """Forget where gradients are, once none waits."""
        if not any(one.has_arrived for one in self._anchors.values()):
            self._held.clear()

    def gradient_of(self, parameter: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the gradient of an anchor in a backward that brought ``gradients`` of outputs."""
        found = torch.full_like(parameter, unit_of(parameter))
        if self.flags_overflow:
            for one in gradients:
                if one is not None:
                    found = found.where(one.isfinite().all().to(found.device), math.inf)
        return found

    def note_overflow(self, found: torch.Tensor) -> None:
        """Have anchors say that a step is skipped where ``found``, of one element, is not 0; waits for no GPU."""
        for anchor in self:
            grad = None if anchor.parameter is None else anchor.parameter.grad
            if grad is not None and not _is_sharded(grad):
                anchor.write(grad, found.to(grad.device).reshape(()) != 0)

    # -- what a loop does -----------------------------------------------------------------------------------

    def note_step(self, *, applied: bool) -> None:
        """Note a step of the cache's optimizer. applied: whether it finds gradients of rows."""
        self.is_stepped = True
        for anchor in self:
            anchor.end_step()
        if self.ledger is not None:
            self.ledger.step(applied=applied)

    def note_drop(self) -> None:
        """Note that the cache's optimizer drops its gradients."""
        if self.ledger is not None:
            self.ledger.drop()

    def close(self) -> None:
        """Follow nothing any more."""
        for anchor in self:
            anchor.remove()


def unit_of(anchor: torch.Tensor) -> float:
    """Return what the gradient of an anchor is for one lookup."""
    return _HALF_UNIT if anchor.dtype == torch.float16 else _UNIT


def _behind_backward(call: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs has ended, after what was asked for before."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _forget(anchors: weakref.ref[Anchors], number: int) -> Callable[[object], None]:
    """Return a callback that removes the anchor of a module that was deleted."""

    def forget(_: object) -> None:
        if (found := anchors()) is not None:
            found._anchors.pop(number, None)

    return forget


def _num_ranks() -> int:
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if has_ranks else 1


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor, of which this process may have no element."""
    return hasattr(tensor, "to_local")
