"""What a rank of the tests imports before its first run, so that ranks begin at once; it opens nothing."""

import torch.nn.parallel

import tests.ranks.trainings
import tiercache.store.shards.opening
import tiercache.training.cache

__all__ = ["tests", "tiercache", "torch"]
