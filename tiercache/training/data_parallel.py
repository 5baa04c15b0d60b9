"""DistributedDataParallel leaves handles alone: ranks average rows by themselves, and a lookup may have no loss."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_hidden: list[Callable[[nn.Module], list[str]]] = []


def hide_handles(names_of: Callable[[nn.Module], list[str]]) -> None:
    """Have every DistributedDataParallel that is made from now on ignore the parameters that ``names_of`` names."""
    if names_of in _hidden:
        return
    _hidden.append(names_of)
    init: Any = DistributedDataParallel.__init__

    @wraps(init)
    def ignoring(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if names := names_of(module):
            ignored = [*getattr(module, "_ddp_params_and_buffers_to_ignore", ()), *names]
            hide: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            hide(module, ignored)
        init(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = ignoring  # type: ignore[method-assign]
