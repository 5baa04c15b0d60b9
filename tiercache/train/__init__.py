"""The training loop: caches, passes, batches, embedding modules, row optimizers, evaluation."""
