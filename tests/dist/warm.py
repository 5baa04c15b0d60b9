"""The imports of a test's rank before its first run, so that ranks start at once; it opens nothing."""

import torch.nn.parallel

import tests.dist.trainings
import tiercache.store.reads
import tiercache.train.cache

__all__ = ["tests", "tiercache", "torch"]
