"""SteppedCache: what a cache in memory and one over tiers have in common: how their rows are stepped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.errors import StateError

if TYPE_CHECKING:
    import torch

    from tiercache.training.exchange import Exchange
    from tiercache.training.passes import Pass
    from tiercache.training.row_optimizer import RowOptimizer


class SteppedCache:
    """A cache whose rows step behind the optimizers that it was given."""

    optimizer: RowOptimizer
    """The optimizer of rows; its ``param_groups`` are the tables."""
    _exchange: Exchange

    def clip_grad_norm_(
        self, max_norm: float, *, optimizer: torch.optim.Optimizer | None = None, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of rows and of dense parameters by their common 2-norm, which is returned.

        In place of `torch.nn.utils.clip_grad_norm_`, which sees no rows: dense parameters are those of ``optimizer``,
        or of all that the cache was given, and the rows those that step with it. Call it between backward and step,
        and with a GradScaler behind ``unscale_``. Raises RuntimeError for a norm that is not finite, where that is
        asked for. With several ranks all call it, and the norm is that of one process on the whole batch, if
        dense gradients were averaged before, as DistributedDataParallel does.
        """
        return self._exchange.clip(max_norm, optimizer, error_if_nonfinite=error_if_nonfinite)

    def _current(self) -> Pass | None:
        """Return the pass whose rows are trained."""
        raise NotImplementedError

    def _step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Apply the pending gradients of the tables that step with ``optimizer``: each row is updated once.

        Of several ranks duplicates are added in the order of batches, in each by rank.
        """
        current = self._current()
        if current is None:
            raise StateError("rows were stepped outside a pass: step inside the loop over passes()")
        self._exchange.step(current.rows.groups, optimizer)

    def _discard(self) -> None:
        """Drop the pending row gradients."""
        self._exchange.discard()
