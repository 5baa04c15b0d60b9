"""The training loop: caches, visits, batches, embedding modules, row optimizers, evaluation."""
