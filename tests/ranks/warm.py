"""What the fork server of killed trainings imports, so that ranks begin at once; it opens nothing."""

import torch.nn.parallel

import tests.ranks.trainings
import tiercache.ranks.cache
import tiercache.ranks.sharded_store

__all__ = ["tests", "tiercache", "torch"]
