"""Batches: samples of one pass with local ids, and the rows these mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.kernels.cpu.shuffle import shuffled
from tiercache.store.hashing import mix
from tiercache.values.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

    from tiercache.data.encoded_batch import EncodedBatch
    from tiercache.training.arrival import Arrival
    from tiercache.training.joining import Bringer, Joins
    from tiercache.training.row_view import RowView
    from tiercache.values.ids import FeatureIds

Order = Callable[[int, int], "NDArray[np.int64]"]
"""Gives the samples at the places from the first up to the last, the latter left out; makes no others."""

SHUFFLED_BY = "feistel"
"""The permutation of shuffled samples: a commit inside a pass that was shuffled by another cannot be gone on from."""


@dataclass(slots=True)
class Pooled:
    """A feature of one batch that is pooled where its table's rows are: its module finds vectors, and no ids."""

    mode: str
    """"sum" or "mean"."""
    vectors: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.float32, device="cpu"))
    """(N, dim) float32, once the batch is looked up; zeros for an empty bag."""
    waiting: list[tuple[Arrival, slice]] = field(default_factory=list)
    """What backward left: the gradient of each lookup, and which of its columns are this feature's."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """What the step applies, to be added up."""

    def settle(self) -> None:
        """Move to ``gradients`` what the step applies, as `RowGradients.settle` does."""
        self.take([arrival for arrival, _ in self.waiting if arrival.is_due])
        self.waiting[:] = [(arrival, columns) for arrival, columns in self.waiting if arrival.is_waiting]

    def take(self, due: Collection[Arrival]) -> None:
        """Put those of ``due`` into ``gradients``, and let them wait on."""
        found = [(one.gradient, columns) for one, columns in self.waiting if one in due]
        self.gradients[:] = [gradient[:, columns] for gradient, columns in found if gradient is not None]


def in_order(first: int, last: int) -> NDArray[np.int64]:
    """Return the places themselves: the order of samples that are not shuffled."""
    return np.arange(first, last, dtype=np.int64)


def sample_order(num_samples: int, *, seed: int, epoch: int, sub_dataset: int, shuffle: bool) -> Order:
    """Return the order of a pass's samples: as they are, or permuted as (seed, epoch, sub-dataset) alone decide."""
    if not shuffle:
        return in_order
    words = np.array([seed, epoch, sub_dataset], dtype=np.int64).view(np.uint64)
    salt = mix(words[:1])
    for word in words[1:]:
        salt = mix(salt ^ word)
    return partial(shuffled, int(salt[0]), num_samples)


def cut_batches(order: Order, size: int, *, first: int, last: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield (place behind a batch, its samples) for the places from ``first`` to ``last``; the last may be short.

    Raises ValueError for a size below 1.
    """
    if size < 1:
        raise ValueError(f"a batch of {size} samples was asked for: the size must be at least 1")
    for begin in range(first, last, size):
        end = min(begin + size, last)
        yield end, order(begin, end)


def make_batch(
    samples: EncodedBatch,
    rows: RowView,
    *,
    ids: Mapping[str, FeatureIds] | None = None,
    weight: float = 1.0,
    end: int = 0,
    pooled: Mapping[str, Pooled] | None = None,
    joins: Joins | None = None,
    bringer: Bringer | None = None,
) -> Batch:
    """Put samples on the device of ``rows``. ``ids``: what means rows there in place of the samples' local ids.

    bringer: what brings label and dense, in place of the backend.
    """
    label = np.empty(0, dtype=np.float32) if samples.label is None else samples.label
    bring = rows.backend.to_device if bringer is None else bringer.to_device
    return Batch(
        label=rows.backend.tensor(bring(label)),
        dense=rows.backend.tensor(bring(samples.dense)),
        ids=samples.ids if ids is None else ids,
        rows=rows,
        num_samples=samples.num_samples,
        weight=weight,
        end=end,
        pooled=pooled or {},
        joins=joins,
    )
