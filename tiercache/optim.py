"""The optimizers that update the rows of a table: ``tc.Table(..., optimizer=tc.optim.Adagrad(learning_rate=0.05))``."""

from tiercache.store.table import SGD, Adagrad, Adam, RowWiseAdagrad

__all__ = ["SGD", "Adagrad", "Adam", "RowWiseAdagrad"]
