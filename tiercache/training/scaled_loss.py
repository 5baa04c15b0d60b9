"""Refuses row gradients that a GradScaler scaled, because rows do not unscale theirs.

`GradScaler.scale` is wrapped once for the whole process. Each tensor that it returns notes, when a backward pass begins
at it, which pass that is; a lookup that this pass reaches finds its own pass among those noted. So it does not matter
what the loop does with the scaler, and a scaled loss that no row is part of disturbs nobody.
"""

from __future__ import annotations

from collections import deque
from functools import wraps
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from tiercache.errors import StateError

__all__ = ["check_unscaled", "watch_scalers"]

_scaled_passes: deque[int] = deque(maxlen=64)
"""Numbers of the newest backward passes that began at a scaled loss; no more of them run at a time."""
_watched: set[type[GradScaler]] = set()


def watch_scalers() -> None:
    """Wrap ``scale`` of GradScaler and of every subclass that has its own; those wrapped before stay as they are."""
    classes: list[type[GradScaler]] = [GradScaler]
    for scaler in classes:
        classes += scaler.__subclasses__()
        if scaler not in _watched:
            _watched.add(scaler)
            if "scale" in vars(scaler):
                _watch(scaler)


def check_unscaled() -> None:
    """Raise StateError in a backward pass that began at a scaled loss."""
    if _scaled_passes and torch._C._current_graph_task_id() in _scaled_passes:
        raise StateError(
            "row gradients are scaled by a GradScaler, which tiercache does not unscale yet: disable it, or train in "
            "bfloat16"
        )


def _watch(scaler: type[GradScaler]) -> None:
    scale: Any = scaler.scale

    @wraps(scale)
    def watched(self: GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        return _noting(scaled) if self.is_enabled() else scaled

    scaler.scale = watched  # type: ignore[method-assign]


def _noting(scaled: Any) -> Any:
    """Return ``scaled``, a tensor or an iterable of them, whose backward passes are noted."""
    if isinstance(scaled, list | tuple):
        for one in scaled:
            _noting(one)
    elif not isinstance(scaled, torch.Tensor):
        return map(_noting, scaled)
    elif scaled.grad_fn is not None:
        scaled.grad_fn.register_prehook(_note)
    return scaled


def _note(_gradients: object) -> None:
    _scaled_passes.append(torch._C._current_graph_task_id())
