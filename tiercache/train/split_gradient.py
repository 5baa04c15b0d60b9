"""SplitGradient: lets a GradScaler unscale gradients of FSDP, which are DTensors, along with those of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tiercache.values.torch_internals import unscale, without_subclasses

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class SplitGradient(torch.Tensor):
    """An empty gradient in whose presence DTensors and other gradients are unscaled in separate calls.

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
    """Return a leaf with an empty gradient for each device and dtype of ``leaves``."""
    made = []
    for device, dtype in {(one.device, one.dtype) for one in leaves}:
        leaf = torch.zeros(0, device=device, dtype=dtype, requires_grad=True)
        leaf.grad = torch.zeros(0, device=device, dtype=dtype).as_subclass(SplitGradient)
        made.append(leaf)
    return made
