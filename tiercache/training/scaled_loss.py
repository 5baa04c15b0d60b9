"""Whether a backward pass began at a scaled loss: known without being told, whatever the loop looks like.

A `GradScaler` scales gradients in backward and unscales the ``.grad`` of the parameters of its optimizer. So ``scale``
is wrapped once: the tensors that it returns note the backward pass that begins at them, and by how much it is scaled.
So is ``unscale_``: rows of one rank may overflow alone, and all ranks have to skip that step.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler

if TYPE_CHECKING:
    from collections.abc import Callable

    Agree = Callable[[torch.optim.Optimizer, torch.Tensor], None]

_MOST = 64
_scales: OrderedDict[int, torch.Tensor] = OrderedDict()
"""By the number of the backward pass, of the newest that began at a scaled loss; no more of them run at a time."""
_watched: set[type[GradScaler]] = set()
_notes: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakMethod[Callable[[], None]]]
_notes = weakref.WeakKeyDictionary()
_agreements: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakMethod[Agree]] = weakref.WeakKeyDictionary()


def watch_scalers() -> None:
    """Wrap GradScaler and every subclass that has its own methods; those wrapped before stay as they are."""
    classes: list[type[GradScaler]] = [GradScaler]
    for scaler in classes:
        classes += scaler.__subclasses__()
        if scaler not in _watched:
            _watched.add(scaler)
            if "scale" in vars(scaler):
                _watch(scaler)
            if "unscale_" in vars(scaler):
                _watch_unscale(scaler)


def agree_on_overflow(optimizer: torch.optim.Optimizer, agree: Agree) -> None:
    """Have all ranks know of an overflow that one of them finds in the gradients of ``optimizer``.

    agree: a method of an object that this does not keep alive; given the optimizer and a flag, 1 where a gradient is
    not finite, it raises the flag where any rank has it raised. Collective, as ``unscale_`` is from now on.
    """
    _agreements[optimizer] = weakref.WeakMethod(agree)


def note_unscaled(optimizer: torch.optim.Optimizer, note: Callable[[], None]) -> None:
    """Have ``note``, a method of an object that this does not keep alive, called when a scaler unscales gradients.

    A scaler does so before each step that it takes or skips.
    """
    _notes[optimizer] = weakref.WeakMethod(note)


def backward_number() -> int:
    """Return the number of the backward pass that runs in this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def scale_of_backward() -> torch.Tensor | None:
    """Return what the loss of the backward pass that runs was multiplied by, 0-dim; None where it was not."""
    return _scales.get(backward_number()) if _scales else None


def _watch(scaler: type[GradScaler]) -> None:
    scale: Any = scaler.scale

    @wraps(scale)
    def watched(self: GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        return _noting(scaled, partial(scale, self)) if self.is_enabled() else scaled

    scaler.scale = watched  # type: ignore[method-assign]


def _watch_unscale(scaler: type[GradScaler]) -> None:
    unscale: Any = scaler.unscale_

    @wraps(unscale)
    def agreed(self: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        unscale(self, optimizer)
        note = _notes[optimizer]() if optimizer in _notes and self.is_enabled() else None
        if note is not None:
            note()
        agree = _agreements[optimizer]() if optimizer in _agreements and self.is_enabled() else None
        if agree is not None:
            for found in self._found_inf_per_device(optimizer).values():
                agree(optimizer, found)

    scaler.unscale_ = agreed  # type: ignore[method-assign]


def _noting(scaled: Any, scale: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``scaled``, a tensor or an iterable of them, whose backward passes are noted."""
    if isinstance(scaled, list | tuple):
        for one in scaled:
            _noting(one, scale)
    elif not isinstance(scaled, torch.Tensor):
        return (_noting(one, scale) for one in scaled)
    elif scaled.grad_fn is not None:
        # one, scaled: the scale as of now, without waiting for a GPU as get_scale() does
        scaled.grad_fn.register_prehook(partial(_note, scale(torch.ones((), device=scaled.device))))
    return scaled


def _note(scale: torch.Tensor, _gradients: object) -> None:
    _scales[backward_number()] = scale
    while len(_scales) > _MOST:
        _scales.popitem(last=False)
