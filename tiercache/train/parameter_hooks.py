"""Hooks of the loop on an anchor: one that bounds gradients leaves the anchor's tiny one as it is, and misses rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class WatchedHook:
    """A hook on a parameter's gradient that reports if it returns another gradient, except zeros."""

    def __init__(self, hook: Callable[[torch.Tensor], Any], changed: Callable[[], None]) -> None:
        self.hook, self._changed = hook, changed

    def __call__(self, gradient: torch.Tensor) -> Any:
        """Call the hook; waits for a GPU if it returns another tensor."""
        found = self.hook(gradient)
        if found is not None and found is not gradient and bool((found != 0).any()):
            self._changed()
        return found


def watch_hooks(parameter: torch.Tensor, changed: Callable[[], None]) -> None:
    """Make hooks on a parameter's gradient call ``changed`` if they return another gradient, except zeros."""
    hooks: Any = parameter._backward_hooks
    for number, hook in (hooks or {}).items():
        hooks[number] = WatchedHook(hook.hook if isinstance(hook, WatchedHook) else hook, changed)


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
