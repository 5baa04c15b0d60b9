"""RateWatch: warns of a learning-rate schedule of dense parameters that rows do not follow."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tiercache.training.row_optimizer import RowOptimizer


class RateWatch:
    """Compares the learning rates of a cache's dense optimizers and of its rows. Warns once."""

    def __init__(self, rows: RowOptimizer) -> None:
        self._rows = rows
        self._dense_rates: list[list[float]] = []
        self._row_rates: list[list[float]] = []
        self._is_warned = False

    def begin(self) -> None:
        """Note the rates that a loop begins with, and warn if a scheduler changes some of them."""
        self._dense_rates = [_rates(one) for one in self._rows.tracers.optimizers]
        self._row_rates = [_rates(self._rows)]
        self.check()

    def check(self) -> None:
        """Warn if dense rates have a scheduler, or changed since the loop began, and those of rows did not."""
        if self._is_warned or _is_scheduled(self._rows) or [_rates(self._rows)] != self._row_rates:
            return
        dense = self._rows.tracers.optimizers
        if any(map(_is_scheduled, dense)) or [_rates(one) for one in dense] != self._dense_rates:
            self._is_warned = True
            warnings.warn(
                "the learning rate of an optimizer of this cache follows a schedule, and rows keep theirs: rows have "
                "an optimizer of their own, so make a scheduler for cache.optimizer too",
                stacklevel=4,
            )


def _is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
