"""Batches of a user's dataset or iterable, with seeded random numbers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, get_worker_info

from tiercache.train.random_numbers import OwnNumbers, kept_numbers, mixed, seed_generators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_SAMPLES, _COLLATE, _ITERABLE = 1, 2, 6  # purposes of random numbers


class Sampling(NamedTuple):
    """The sampler of a DataLoader, and the size of its batches."""

    sampler: Any
    batch_size: int | None
    drop_last: bool
    is_plain: bool  # True without a batch sampler of another class than torch's

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Sampling:
        """Return the sampling of a loader; with ``batch_sampler=`` torch sets its own attributes to other values."""
        found: Any = loader.batch_sampler
        if type(found) is BatchSampler:
            return cls(found.sampler, found.batch_size, found.drop_last, True)
        return cls(loader.sampler, loader.batch_size, loader.drop_last, found is None)


class BatchIndices(list[int]):
    """The indices of a batch's samples, and the seed of its random numbers."""

    def __init__(self, indices: Iterable[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


class SeededDataset:
    """Makes whole batches of a dataset, in a worker of a DataLoader or in the training process.

    The random generators are seeded for each batch, or with ``sample_seed`` for each sample and for the collation by
    the first sample. In the training process their states are restored afterwards.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], *, is_batched: bool, sample_seed: int | None
    ) -> None:
        """is_batched: False for a dataset whose samples are batches, which ``collate`` converts one at a time."""
        self.dataset, self._collate, self._is_batched, self._sample_seed = dataset, collate, is_batched, sample_seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__setstate__") or name.startswith("__"):  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)  # attributes that a user's worker_init_fn reads

    def __getitems__(self, indices: BatchIndices) -> Any:
        with kept_numbers() if get_worker_info() is None else nullcontext():
            if self._sample_seed is None:
                seed_generators(indices.seed)
                many = getattr(self.dataset, "__getitems__", None)
                samples = [self.dataset[index] for index in indices] if many is None else many(list(indices))
            else:
                samples = []
                for index in indices:
                    seed_generators(mixed(self._sample_seed, _SAMPLES, index))
                    samples.append(self.dataset[index])
                seed_generators(mixed(self._sample_seed, _COLLATE, indices[0]))
            return self._collate(samples if self._is_batched else samples[0])


def as_is(batch: Any) -> Any:
    """Return a batch that is already collated."""
    return batch


def made_batches(make: Callable[[], Iterable[Any]], seed: int) -> Iterator[Any]:
    """Yield the batches of a made iterable, seeded. Raises TypeError if ``make`` returns the same iterator twice."""
    own = OwnNumbers(mixed(seed, _ITERABLE))
    with own.used():
        made = make()
        items = iter(made)
        if hasattr(made, "__next__") and make() is made:
            raise TypeError(
                f"the function returns the same {type(made).__name__} each time, which yields its batches once: let it "
                "create a new one, such as lambda: batches()"
            )
    end = object()
    while True:
        with own.used():
            batch = next(items, end)
        if batch is end:
            return
        yield batch


def own_generator(seed: int) -> torch.Generator:
    """Return a generator for a DataLoader, which would otherwise seed its workers from the global one."""
    return torch.Generator().manual_seed(mixed(seed) >> 1)
