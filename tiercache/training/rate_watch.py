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
        self._first: dict[int, list[float]] = {}
        """By the id of an optimizer, the rates that it began with."""
        self._is_warned = False

    def begin(self) -> None:
        """Note the rates that a loop begins with, and warn if a scheduler changes some of them."""
        self._first.clear()
        self.check()

    def check(self) -> None:
        """Warn if dense rates have a scheduler, or changed since the loop began, and those of rows did not."""
        rows, *dense = [self._follows_schedule(one) for one in (self._rows, *self._rows.dense)]
        rows |= self._rows.joint.has_scheduler
        if any(dense) and not rows and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                "the learning rate of an optimizer of this cache follows a schedule, and rows keep theirs: make the "
                "scheduler of cache.optimizer, whose groups are those of that optimizer and of the tables",
                stacklevel=4,
            )

    def _follows_schedule(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer has a scheduler, or other rates than it began with."""
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        first = self._first.setdefault(id(optimizer), rates)
        changed = any(now != then for now, then in zip(rates, first, strict=False))  # groups may come later
        return changed or hasattr(optimizer.step, "_wrapped_by_lr_sched")
