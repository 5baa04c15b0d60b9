"""Pipeline parallelism (torch.distributed.pipelining) for the dense part, with the embeddings outside the pipeline."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from tiercache.data.dataset import PassDataset
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.values.batch import Batch


def check_micro_batches(passes: PassDataset, *, batch_size: int, micro_batches: int, stages: int) -> None:
    """Raise ValueError if a pipeline could not train these passes: call it before training.

    A pipeline schedule needs at least as many micro-batches as stages, all of one size. A short batch, such as the last
    of a pass, would end the run.
    """
    if micro_batches < stages:
        raise ValueError(f"{micro_batches} micro-batches cannot fill {stages} stages: use at least {stages}")
    if batch_size % micro_batches:
        raise ValueError(
            f"batches of {batch_size} samples do not divide into {micro_batches} equal micro-batches: use a batch "
            f"size that is a multiple of {micro_batches}"
        )
    for source in passes.passes:
        if short := source.samples % batch_size:
            raise ValueError(
                f"sub-dataset {source.index} of {passes.path} has {source.samples:,} samples, so its last batch has "
                f"{short} and not {batch_size}: extract passes of a multiple of {batch_size} samples (--batch-multiple "
                f"{batch_size}), or choose another batch size"
            )


class StageInput:
    """Sends embedding outputs of all ranks to the rank of the first stage, and their gradients back.

    For each batch: ``collect`` the outputs of the embedding modules, run the pipeline's step on the first stage with
    the result, then ``give_back``. All ranks of the cache take part, including those of later stages.
    """

    def __init__(self, ranks: AnyCommunicator, *, first_stage: int = 0) -> None:
        self._ranks, self._first = ranks, first_stage
        self._own: torch.Tensor | None = None
        self._sizes: list[int] = []

    def collect(self, looked_up: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """Return the vectors of all ranks' samples (N, T), in rank order, on the first stage; else None.

        The result takes gradients; ``give_back`` returns them to the ranks.
        """
        self._own = looked_up[: len(batch) if batch.weight else 0]  # a sample with weight 0 belongs to another rank
        self._sizes = self._sizes_of(self._own)
        found = self.bring(self._own.detach(), to=self._first)
        return None if found is None else found.requires_grad_()

    def bring(self, own: torch.Tensor, *, to: int) -> torch.Tensor | None:
        """Return the rows of ``own`` (n, ...) of all ranks on rank ``to``, else None: labels for the last stage."""
        sizes, own = self._sizes_of(own), own.contiguous()
        width = own[0].numel() if own.shape[0] else math.prod(own.shape[1:])
        is_target = self._ranks.rank == to
        found = self._ranks.all_to_all(
            own.reshape(-1),
            [own.numel() if rank == to else 0 for rank in range(self._ranks.size)],
            [size * width if is_target else 0 for size in sizes],
        )
        return found.reshape(-1, *own.shape[1:]) if is_target else None

    def _sizes_of(self, own: torch.Tensor) -> list[int]:
        """Return the number of rows on each rank."""
        to = np.full((self._ranks.size, 1), own.shape[0], np.int64)
        return [int(size) for size in self._ranks.exchange_splits(to, "counting rows of a pipeline")[:, 0]]

    def give_back(self, collected: torch.Tensor | None) -> None:
        """Send the gradient of ``collected`` back to the ranks that did the lookups; their rows then await a step.

        For a loss that is the mean over the whole batch, as on the last stage. Raises ValueError, and RankError on the
        other ranks, if ``collected`` has no gradient yet.
        """
        assert self._own is not None, "collect comes first"
        ranks, own = self._ranks, self._own
        width = own.shape[1]
        is_target, gradient = collected is not None, own.new_empty(0)
        with ranks.raise_on_all("returning gradients of collected vectors"):
            if collected is not None and collected.grad is not None:
                gradient = collected.grad.reshape(-1)
            elif collected is not None and collected.numel():
                raise ValueError(
                    "collected vectors have no gradient: run the pipeline's step with them before give_back"
                )
        found = ranks.all_to_all(
            gradient,
            [size * width if is_target else 0 for size in self._sizes],
            [own.numel() if rank == self._first else 0 for rank in range(ranks.size)],
        )
        if own.shape[0]:
            averaged = found.reshape(own.shape) * ranks.size  # a step divides rows' gradients by the ranks
            torch.autograd.backward(own, averaged)
        self._own = None
