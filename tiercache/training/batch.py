"""Batches: samples of one pass with local ids, and the rows these mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.cpu.shuffle import shuffled
from tiercache.store.hashing import mix

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from numpy.typing import NDArray

    from tiercache.backends.jagged import FoundIds
    from tiercache.passes.samples import FeatureIds, Samples
    from tiercache.tiers.rows import RowView
    from tiercache.training.joining import Bringer, Joins

Order = Callable[[int, int], "NDArray[np.int64]"]
"""Gives the samples at the places from the first up to the last, the latter left out; makes no others."""

SHUFFLED_BY = "feistel"
"""The permutation of shuffled samples: a commit inside a visit that was shuffled by another cannot be gone on from."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """A feature of one batch that was pooled where its table's rows are: its module finds vectors, and no ids."""

    mode: str
    """"sum" or "mean"."""
    vectors: torch.Tensor
    """(N, dim) float32; zeros for an empty bag."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """What backward left: (N, dim) for each lookup, to be added up at the step."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Some samples: ``label`` (N,), ``dense`` (N, dense features), both float32, and ids for the embedding modules.

    Label and dense are on the device of the training; ids are in host memory until a module looks them up, and those of
    raw keys, found on a GPU, are copied there when somebody reads them.
    """

    label: torch.Tensor
    dense: torch.Tensor
    ids: Mapping[str, FeatureIds | FoundIds]
    """Local ids by feature. They mean rows only together with ``rows``, and only inside their visit."""
    rows: RowView
    num_samples: int
    weight: float = 1.0
    """What the mean loss of this batch counts for: 1 with one rank; W * n / N for n of the N samples of W ranks."""
    pooled: Mapping[str, Pooled] = field(default_factory=dict)
    """By name, features that another rank pooled; ``ids`` has all others that some module looks up."""
    joins: Joins | None = field(default=None, repr=False)
    """Where it was made ahead: ids that are on the device already. To change ``ids`` give others by
    ``dataclasses.replace``; writes into their arrays may come too late."""

    def __len__(self) -> int:
        return self.num_samples


def in_order(first: int, last: int) -> NDArray[np.int64]:
    """Return the places themselves: the order of samples that are not shuffled."""
    return np.arange(first, last, dtype=np.int64)


def sample_order(num_samples: int, *, seed: int, epoch: int, pass_index: int, shuffle: bool) -> Order:
    """Return the order of a visit's samples: as they are, or a permutation that (seed, epoch, pass) alone decide."""
    if not shuffle:
        return in_order
    words = np.array([seed, epoch, pass_index], dtype=np.int64).view(np.uint64)
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
    samples: Samples,
    rows: RowView,
    *,
    ids: Mapping[str, FeatureIds] | None = None,
    weight: float = 1.0,
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
        pooled=pooled or {},
        joins=joins,
    )
