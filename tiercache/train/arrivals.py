"""Arrivals: the gradients of lookups' outputs, from their backward to the step."""

from __future__ import annotations

import math
import sys
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch

from tiercache.errors import StateError
from tiercache.values.torch_internals import storage_uses, unscale, without_subclasses

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from tiercache.train.anchors import Anchor


_ONE = [object()]
_LISTED = sys.getrefcount(_ONE[0])  # Python's count of references to an object that only a list has


class State(Enum):
    """The state of a lookup's gradients."""

    PENDING = auto()
    STEPPING = auto()  # the running step applies it
    ENDED = auto()  # stepped or dropped


class Arrival:
    """The gradients of the outputs of one lookup, from their backward to the step."""

    __slots__ = ("_gradients", "_is_private", "_placeholders", "_sums", "_tables", "_versions", "anchor",
                 "is_accumulated", "is_passed_over", "state", "task")  # fmt: skip

    def __init__(
        self, anchor: Anchor, gradients: Sequence[torch.Tensor | None], tables: Sequence[Collection[str]], task: int
    ) -> None:
        """tables: by output. None: the backward did not reach the output."""
        self.anchor, self.task = anchor, task
        self._gradients, self._tables = [*gradients], tables
        self._versions = [-1 if one is None else one._version for one in gradients]
        self.state = State.PENDING
        self._placeholders: list[torch.Tensor | None] | None = None
        self._is_private = False  # True once nothing else uses the memory of the gradients
        self._sums: list[float | None] = [None] * len(gradients)
        """Sums of the gradients on a CPU once the loop may write them, also in ways that torch does not count."""
        self.is_accumulated = False  # True once its backward has ended and added to the anchor's gradient
        self.is_passed_over = False  # True once another optimizer has stepped

    @property
    def placeholders(self) -> list[torch.Tensor]:
        """Leaves that hold the undropped gradients; created on demand, because most steps need none."""
        if self._placeholders is None:
            self.make_private()
            self._placeholders = [None if one is None else _placeholder(one) for one in self._gradients]
            self._sums = [_sum_of(one) for one in self._gradients]
        return [one for one in self._placeholders if one is not None and one.grad is not None]

    @property
    def is_exposed(self) -> bool:
        """True once the loop may have changed the gradients."""
        return self._placeholders is not None

    @property
    def gradients(self) -> Sequence[torch.Tensor | None]:
        """The current gradient of each output; None if it was dropped or never came."""
        if self._placeholders is None:
            return self._gradients
        return [None if one is None else one.grad for one in self._placeholders]

    @property
    def present(self) -> list[torch.Tensor]:
        """The current gradients."""
        return [one for one in self.gradients if one is not None]

    @property
    def tables(self) -> set[str]:
        """The tables of the outputs that have gradients."""
        return {table for one, some in zip(self.gradients, self._tables, strict=True) if one is not None
                for table in some}  # fmt: skip

    @property
    def is_pending(self) -> bool:
        """True until all are stepped or dropped."""
        return self.state is State.PENDING and (self._placeholders is None or bool(self.placeholders))

    @property
    def is_untouched(self) -> bool:
        """True if one of them is the gradient that arrived, unchanged; on a GPU, by writes that torch counts.

        Zeros and infinities that the loop may have written are not: scaling leaves no trace in them.
        """
        arrived = zip(self.gradients, self._gradients, self._versions, self._sums, strict=True)
        return any(
            now is not None
            and now is one
            and now._version == version
            and (total is None or (_sum_of(now) == total != 0 and math.isfinite(total)))
            for now, one, version, total in arrived
        )

    def end_backward(self) -> None:
        """Copy gradients that the caller of ``out.backward(gradient)``, or a hook, has too and may write again."""
        for i, version in enumerate(self._versions):
            if version >= 0 and sys.getrefcount(self._gradients[i]) > _LISTED:
                self._gradients[i] = self._gradients[i].clone()  # type: ignore[union-attr]
                self._versions[i] = 0

    def make_private(self) -> None:
        """Copy gradients whose memory something else uses too, before they are written; not during their backward."""
        if self._is_private:
            return
        self.check_unchanged()
        self._is_private = True
        self._gradients = [None if one is None else one.detach() for one in self._gradients]  # releases the originals
        uses = [0 if one is None else storage_uses(one) for one in self._gradients]
        for i, one in enumerate(self._gradients):
            if one is not None and uses[i] > 1 and uses[i] > self.anchor.anchors.uses_of(one):
                self._gradients[i] = one.clone()
        self._versions = [-1 if one is None else one._version for one in self._gradients]

    def check_unchanged(self) -> None:
        """Raise StateError if others have written the gradients since the backward, in a way that torch counts."""
        for one, version in zip(self._gradients, self._versions, strict=True):
            if one is not None and one._version != version and not self._is_private:
                raise StateError(
                    f"a gradient of the rows of {self.anchor.tables} was changed in place after backward() and before "
                    "the step, which applies it: pass backward() a copy, as in out.backward(gradient.clone())"
                )

    def shared_with(self, gradient: torch.Tensor) -> int:
        """Return the number of gradients in the storage of ``gradient``."""
        place = gradient.untyped_storage().data_ptr()
        return sum(one is not None and one.untyped_storage().data_ptr() == place for one in self._gradients)

    def flats(self, array_of: Callable[[torch.Tensor], Any]) -> list[Any]:
        """Return the current gradients as float32 arrays, as ``array_of`` makes them."""
        self.check_unchanged()
        return [
            None if one is None else array_of(one if one.dtype == torch.float32 else one.float())
            for one in self.gradients
        ]

    def end(self) -> None:
        """Free their memory after they were stepped or dropped."""
        self.state, self._gradients = State.ENDED, [None] * len(self._gradients)
        for one in self._placeholders or ():
            if one is not None:
                one.grad = None


class SplitGradient(torch.Tensor):
    """An empty gradient in whose presence DTensors, as in FSDP, and other gradients are unscaled in separate calls.

    A GradScaler unscales all gradients of a dtype in one call, and torch refuses both kinds in one.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` once, or for unscaling once for each kind."""
        with without_subclasses():
            if func is not unscale:
                return func(*args, **(kwargs or {}))
            gradients, *others = args
            for is_sharded in (False, True):
                if some := [one for one in gradients if hasattr(one, "to_local") == is_sharded]:
                    func(some, *others)
            return None


def splitting(leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return a leaf with a `SplitGradient` for each device and dtype of ``leaves``."""
    made = []
    for device, dtype in {(one.device, one.dtype) for one in leaves}:
        leaf = torch.zeros(0, device=device, dtype=dtype, requires_grad=True)
        leaf.grad = torch.zeros(0, device=device, dtype=dtype).as_subclass(SplitGradient)
        made.append(leaf)
    return made


def _sum_of(gradient: torch.Tensor | None) -> float | None:
    """Return a number that changes with a gradient on a CPU."""
    return gradient.abs().sum(dtype=torch.float64).item() if gradient is not None and gradient.is_cpu else None


def _placeholder(gradient: torch.Tensor) -> torch.Tensor:
    """Return a leaf of the gradient's shape that holds it and takes no memory."""
    zero = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
    made = zero.expand(gradient.shape).requires_grad_()
    made.grad = gradient
    return made
