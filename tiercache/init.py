"""The initial rows of a table: ``tc.Table(..., initializer=tc.init.Uniform(low=-0.05, high=0.05))``."""

from tiercache.store.initializer import Checkpoint, Constant, Normal, Uniform, Zeros

__all__ = ["Checkpoint", "Constant", "Normal", "Uniform", "Zeros"]
