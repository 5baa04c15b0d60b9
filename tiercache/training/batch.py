"""Batches: samples of one pass with local ids, and the rows these mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.data.encoded_batch import NoTensor
from tiercache.kernels.cpu.shuffle import shuffled
from tiercache.store.hashing import mix
from tiercache.training.lookup_ops import not_compiled, number_batch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

    from tiercache.backends.jagged import FoundIds
    from tiercache.data.encoded_batch import EncodedBatch, FeatureIds
    from tiercache.tiers.rows import RowView
    from tiercache.training.anchors import Arrival
    from tiercache.training.joining import Bringer, Joins

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


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class Batch:
    """Samples of one pass, and the ids that modules look up.

    ``label`` (N,) and ``dense`` (N, dense features) are float32 on the training device. Ids stay in host memory until
    a module looks them up; ids of raw keys that were found on a GPU are copied to the host when you read them.
    """

    label: torch.Tensor
    dense: torch.Tensor
    ids: Mapping[str, FeatureIds | FoundIds]
    """Local ids by feature. They mean rows only together with ``rows``, and only inside their pass."""
    rows: RowView
    num_samples: int
    weight: float = 1.0
    """What the mean loss of this batch counts for: 1 with one rank; W * n / N for n of the N samples of W ranks."""
    pooled: Mapping[str, Pooled] = field(default_factory=dict)
    """By name, features that another rank pooled; ``ids`` has all others that some module looks up."""
    end: int = 0
    """Samples of the pass up to the end of the batch, of all ranks."""
    joins: Joins | None = field(default=None, repr=False)
    """Where it was made ahead: ids that are on the device already. To change ``ids`` give others by
    ``dataclasses.replace``; writes into their arrays may come too late."""

    number: torch.Tensor | None = None
    """(N,) int64, all the same: by it compiled models look the batch up."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", number_batch(self, self.number))

    def __len__(self) -> int:
        return self.num_samples

    @property
    def features(self) -> Mapping[str, JaggedIds]:
        """The features by name: what an `EmbeddingBag` or `Embedding` of one feature takes."""
        return _Features(self)

    def __repr__(self) -> str:
        return f"Batch({self.num_samples} samples of {self.rows.name}: {', '.join([*self.ids, *self.pooled])})"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch with ``label`` and ``dense`` on ``device``. Ids move by themselves."""
        label, dense = (one.to(device, non_blocking=non_blocking) for one in (self.label, self.dense))
        return self if label is self.label and dense is self.dense else replace(self, label=label, dense=dense)

    def pin_memory(self) -> Batch:
        """Return the batch with ``label`` and ``dense`` in pinned memory, if there is a GPU."""
        if self.label.device.type != "cpu" or not torch.cuda.is_available():
            return self
        return replace(self, label=self.label.pin_memory(), dense=self.dense.pin_memory())


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class JaggedIds(NoTensor):
    """The ids of one feature of a batch: local ids, which have a meaning only together with their batch.

    It stands where a plain model has a tensor of keys. ``ids == key`` and ``ids != key`` are what they are for that
    tensor: bool (N,), (N, length) for lists of fixed length, (ids,) for ragged ones, where rows are trained. Any other
    operation of a tensor raises TypeError.
    """

    batch: Batch
    feature: str

    @property
    def values(self) -> NDArray[np.int32]:
        """All ids, sample after sample: int32 (ids,), in host memory."""
        return self.batch.ids[self.feature].ids

    @property
    def offsets(self) -> NDArray[np.int64] | None:
        """Where the ids of each sample begin: int64 (N + 1,); None if each sample has one id."""
        return self.batch.ids[self.feature].offsets

    @property
    def weights(self) -> NDArray[np.float32] | None:
        """A weight for each id: float32 (ids,); None if all are 1."""
        return self.batch.ids[self.feature].weights

    def to(self, *_: object, **__: object) -> JaggedIds:
        """Return it unchanged: ids move by themselves."""
        return self

    __hash__ = NoTensor.__hash__

    @property
    def _label(self) -> str:
        return f"feature {self.feature!r} of a batch"

    def __eq__(self, other: object) -> Any:
        """Return where the key is ``other``, a whole number. Raises TypeError for anything else."""
        return self._equal(other)

    def __ne__(self, other: object) -> Any:
        """Return where the key is not ``other``, a whole number. Raises TypeError for anything else."""
        return ~self._equal(other)

    @not_compiled
    def _equal(self, key: object) -> torch.Tensor:
        if isinstance(key, bool | np.bool_) or not isinstance(key, int | np.integer):
            raise TypeError(self._refusal(f"comparison with {key!r:.80}"))
        rows = self.batch.rows
        found = torch.from_numpy(rows.is_key(self.feature, self.batch.ids[self.feature], int(key)))
        length = None if rows.schema is None else rows.schema.feature(self.feature).length
        return (found if length is None else found.view(-1, length)).to(rows.backend.device)

    def __repr__(self) -> str:
        return f"JaggedIds({self.feature!r} of {self.batch.num_samples} samples)"


class _Features(Mapping[str, JaggedIds]):
    """The features of a batch, by name."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._names: tuple[str, ...] = getattr(batch.ids, "features", None) or tuple(batch.ids)
        """Those of the schema, in its order, on any number of ranks."""

    def __getitem__(self, name: str) -> JaggedIds:
        if name not in self._names:
            raise KeyError(f"the batch has no feature {name!r}: it has {', '.join(self)}")
        return JaggedIds(self._batch, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
