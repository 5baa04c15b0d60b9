"""SteppedCache: what a cache in memory and one over tiers have in common: how their rows are stepped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.errors import StateError

if TYPE_CHECKING:
    import torch

    from tiercache.training.exchange import Exchange
    from tiercache.training.joint_optimizer import JointOptimizer
    from tiercache.training.passes import Pass


class SteppedCache:
    """A cache whose rows step with the optimizers that it was given."""

    optimizer: JointOptimizer
    """What the loop steps: dense parameters and rows."""
    _exchange: Exchange

    def clip_grad_norm_(
        self, max_norm: float, *, optimizer: torch.optim.Optimizer | None = None, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of rows and dense parameters by their common 2-norm, and return the norm.

        Use this in place of `torch.nn.utils.clip_grad_norm_`, which does not add up the gradients of a row. It clips
        the parameters of ``optimizer``, or of all registered optimizers, and the rows that step with them. Call it
        between backward and step; with a GradScaler, after ``unscale_``. Raises RuntimeError if the norm is not finite
        and ``error_if_nonfinite``. With several ranks all call it. The norm is then that of one process on the whole
        batch, provided that dense gradients are already averaged, as DistributedDataParallel does.
        """
        return self._exchange.clip(max_norm, optimizer, error_if_nonfinite=error_if_nonfinite)

    def _current(self) -> Pass | None:
        """Return the pass whose rows are trained."""
        raise NotImplementedError

    def _newest(self) -> Pass | None:
        """Return the pass that the loop was given last, whose rows may not be there yet."""
        raise NotImplementedError

    @property
    def eval_bytes(self) -> int:
        """Bytes that rows of an evaluation may take."""
        raise NotImplementedError

    def _check_restored(self) -> None:
        """Raise StateError where rows would be read under a model that was not restored with them."""

    def _check_open(self) -> None:
        """Raise StateError if the cache is closed."""
        raise NotImplementedError

    def _step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Apply the pending gradients of the tables that step with ``optimizer``: each row is updated once.

        Of several ranks duplicates are added in the order of batches, in each by rank. Outside a pass, where no rows
        are trained, it does nothing.
        """
        current = self._current()
        if current is None and not self._exchange.pending:
            self._check_open()
            return
        if current is None:
            raise StateError("rows were stepped outside a pass: step inside the loop over passes()")
        self._exchange.step(current.rows.groups, optimizer)
        current.note_step()
