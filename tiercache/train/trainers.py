"""Checks of trainers: refuse settings under which rows would be trained differently than plain torch does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_clipping(objects: Iterable[object]) -> None:
    """Raise StateError if Lightning's trainer clips gradients of a registered module by its own rule.

    It would take the norm of the gradients of outputs, in which a row that is looked up twice counts twice.
    """
    for one in objects:
        hook = getattr(type(one), "configure_gradient_clipping", None)
        max_norm = getattr(getattr(one, "_trainer", None), "gradient_clip_val", None)
        owner = str(getattr(hook, "__module__", "")).split(".")[0]
        if max_norm and owner in {"lightning", "pytorch_lightning"}:
            raise StateError(
                f"the trainer of {type(one).__name__} has gradient_clip_val={max_norm}, which does not add up the "
                "gradients of a row: define configure_gradient_clipping(self, optimizer, gradient_clip_val, "
                "gradient_clip_algorithm) in the module and call cache.clip_grad_norm_(gradient_clip_val) there"
            )
