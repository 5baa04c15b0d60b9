"""A dense part in stages on several devices (torch.distributed.pipelining), with the embeddings outside of it."""

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
    """Raise ValueError where a pipeline could not train these passes: call it before training.

    Its schedules need at least as many micro-batches as stages, and all of one size: a batch that is short, as the
    last of a pass may be, would end the run in its midst.
    """
    if micro_batches < stages:
        raise ValueError(
            f"{micro_batches} micro-batches cannot fill {stages} stages: give at least {stages} micro-batches"
        )
    if batch_size % micro_batches:
        raise ValueError(
            f"batches of {batch_size} samples do not divide into {micro_batches} equal micro-batches: give a batch "
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
    """Brings what the ranks looked up to the rank of the first stage, and its gradient back to them.

    For each batch: ``collect`` the outputs of the embedding modules, run the pipeline's step on the first stage with
    what it returns, then ``give_back``. All ranks of the cache take part, those of later stages too.
    """

    def __init__(self, ranks: AnyCommunicator, *, first_stage: int = 0) -> None:
        self._ranks, self._first = ranks, first_stage
        self._own: torch.Tensor | None = None
        self._sizes: list[int] = []

    def collect(self, looked_up: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """Return the vectors of all ranks' samples (N, T), in the order of ranks, on the first stage; else None.

        It takes gradients; ``give_back`` hands them on.
        """
        self._own = looked_up[: len(batch) if batch.weight else 0]  # a sample with weight 0 is another rank's
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
        """Return how many rows each rank has."""
        to = np.full((self._ranks.size, 1), own.shape[0], np.int64)
        return [int(size) for size in self._ranks.exchange_splits(to, "counting rows of a pipeline")[:, 0]]

    def give_back(self, collected: torch.Tensor | None) -> None:
        """Hand the gradient of ``collected`` to the ranks that looked the vectors up, whose rows then wait for a step.

        For a loss that is the mean over the whole batch, as the last stage's is. Raises ValueError, RankError on the
        other ranks, where no backward has come to ``collected`` yet.
        """
        assert self._own is not None, "collect comes first"
        ranks, own = self._ranks, self._own
        width = own.shape[1]
        is_target, gradient = collected is not None, own.new_empty(0)
        with ranks.raise_on_all("giving gradients of collected vectors back"):
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
