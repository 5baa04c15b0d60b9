"""The optimizers that update the rows of a table: ``tc.Table(..., optimizer=tc.optim.Adagrad(learning_rate=0.05))``."""

from tiercache.store import optimizer
from tiercache.store.optimizer import *  # noqa: F403 - the list of them is in their module alone

__all__ = optimizer.__all__
