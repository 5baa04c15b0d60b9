"""Loaders of a pass: exactly the samples of its sub-dataset, from the user's own dataset; lookups of their batches."""

from __future__ import annotations

import weakref
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, Sampler, default_collate, default_convert

from tiercache.data.sub_dataset import lookup_digest
from tiercache.errors import DatasetError, StateError
from tiercache.train.batches import check_size, cut_batches
from tiercache.train.loader_batches import BatchIndices, SeededDataset, as_is, made_batches, own_generator
from tiercache.train.random_numbers import mixed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from tiercache.data.sub_dataset import RecordedBatches
    from tiercache.store.table import Table
    from tiercache.train.passes import Pass

_OURS = {
    "sampler": "the pass decides which samples it has: use p.sampler() with your own DataLoader",
    "batch_sampler": "the pass decides which samples it has: use p.sampler() with your own DataLoader",
    "generator": "the order and all random numbers follow from the seed of the cache",
}


class LoaderPlan:
    """The batches of a pass in order: the batch sampler of its DataLoader."""

    def __init__(self, taken: Pass, batch_size: int | None, *, shuffle: bool) -> None:
        """batch_size: None: batches as they were recorded."""
        self._pass, self._shuffle = taken, shuffle
        self._recorded: RecordedBatches = taken.source.whole.recorded
        self._size = self._recorded.recording.batch_size if batch_size is None else check_size(batch_size)
        self.is_as_recorded = self._size is None  # True if it yields whole recorded batches
        self.pending: deque[LoadedBatch] = deque()  # batches that are being made

    def __iter__(self) -> Iterator[BatchIndices]:
        taken = self._pass
        self.pending.clear()
        for batch in self.batches():
            self.pending.append(batch)
            assert batch.places is not None
            rank, ranks, n = taken.ranks.rank, taken.ranks.size, batch.places.size
            begin, end = n * rank // ranks, n * (rank + 1) // ranks
            indices = self._recorded.indices(batch.places[begin:end]).tolist()
            yield BatchIndices(indices, mixed(taken.seed, taken.epoch, taken.sub_dataset, batch.first + begin))

    def batches(self) -> Iterator[LoadedBatch]:
        """Yield the batches from the pass's position."""
        taken, ends = self._pass, self._recorded.ends
        others = {"batches": "as recorded"} if self.is_as_recorded else {}
        taken.check_order(shuffle=self._shuffle, **others)
        if self._size is None:
            yield from self._as_recorded()
            return
        order = taken.shuffled(taken.num_samples, shuffle=self._shuffle)
        first = taken.samples_done
        for last, places in cut_batches(order, self._size, first=first, last=taken.num_samples):
            block = int(np.searchsorted(ends, last))
            is_block = not self._shuffle and ends[block] == last and first == (ends[block - 1] if block else 0)
            yield LoadedBatch(first, last, places, block if is_block else None)
            first = last

    def __len__(self) -> int:
        """Return the number of batches from the pass's position."""
        if self._size is not None:
            remaining = self._pass.num_samples - self._pass.samples_done
            return max(0, remaining + self._size - 1) // self._size
        lasts, _ = self._sizes()
        return int(lasts.size - np.searchsorted(lasts, self._pass.samples_done, side="right"))

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ValueError unless each of several ranks gets a sample of each batch."""
        remaining = self._pass.num_samples - self._pass.samples_done
        size = self._size
        smallest = min(np.diff(self._recorded.ends, prepend=0), default=1) if size is None else size
        if size is not None and remaining % size:
            smallest = min(size, remaining % size)
        if smallest < num_ranks:
            raise ValueError(
                f"pass {self._pass.index} has a batch of {smallest} samples, which leaves some of {num_ranks} ranks "
                "without samples: choose a batch_size that leaves a larger last batch"
            )

    def _as_recorded(self) -> Iterator[LoadedBatch]:
        lasts, blocks = self._sizes()
        has_indices, ends = self._recorded.recording.dataset_length is not None, self._recorded.ends
        begun = int(np.searchsorted(lasts, self._pass.samples_done, side="right"))
        for number in range(begun, lasts.size):
            block, last = int(blocks[number]), int(lasts[number])
            end = int(ends[block])
            begin = int(ends[block - 1]) if block else 0
            places = np.arange(begin, end) if has_indices else None
            yield LoadedBatch(last - (end - begin), last, places, block)

    def _sizes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the end of each batch in training order, in samples, and the batches in this order."""
        ends = self._recorded.ends
        blocks = self._pass.shuffled(ends.size, shuffle=self._shuffle)(0, ends.size)
        return np.cumsum(np.diff(ends, prepend=0)[blocks]), blocks


class PassLoader(DataLoader[Any]):
    """A DataLoader of the samples of one pass; `Pass.loader` makes it. Its length counts the remaining batches."""

    def __init__(self, taken: Pass, dataset: Any, plan: LoaderPlan, arguments: dict[str, Any]) -> None:
        self._pass, recorded = taken, taken.source.whole.recorded
        recording = recorded.recording
        for name, instead in _OURS.items():
            if arguments.pop(name, None) is not None:
                raise ValueError(f"p.loader takes no {name}: {instead}")
        if arguments.pop("drop_last", False) or not arguments.pop("in_order", True):
            raise ValueError(
                "p.loader takes no drop_last and no in_order=False: a pass trains all its samples in order"
            )
        if not hasattr(dataset, "__len__") or len(dataset) != recording.dataset_length:
            length = f"{len(dataset):,} samples" if hasattr(dataset, "__len__") else "no len()"
            raise DatasetError(
                f"the dataset has {length}, but had {recording.dataset_length:,} when its key sets were recorded: pass "
                "the same dataset, or record key sets of this one"
            )
        collate = arguments.pop("collate_fn", None)
        single = plan.is_as_recorded and recording.unbatched
        if single is None:  # an older version did not keep this, and the collation of batches is the only hint
            single = recorded.ends.size == taken.num_samples and collate is not default_collate
        collate = collate or (default_convert if single else default_collate)
        seeded: Any = SeededDataset(
            dataset, collate, is_batched=not single, sample_seed=recording.seed if recording.same_draws else None
        )
        self._plan = plan
        super().__init__(
            seeded, batch_sampler=plan, collate_fn=as_is, **arguments,
            generator=own_generator(mixed(taken.seed, taken.epoch, taken.sub_dataset)),
        )  # fmt: skip

    def __iter__(self) -> Any:
        """Yield the batches from the pass's position; the pass counts each when it is handed out."""
        loaded = self._pass.loaded
        assert loaded is not None
        for batch in super().__iter__():
            if self._pass.is_closed:
                return
            loaded.take(self._plan.pending.popleft())
            yield batch
        loaded.exhaust()


class MadeLoader:
    """Batches of one pass of an iterable, made again: those of earlier passes are dropped. See `Pass.loader`."""

    def __init__(self, taken: Pass, make: Callable[[], Iterable[Any]], plan: LoaderPlan) -> None:
        self._pass, self._make, self._plan = taken, make, plan

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Any]:
        recording, planned = self._pass.source.whole.recorded.recording, [*self._plan.batches()]
        loaded = self._pass.loaded
        assert loaded is not None
        if not planned:
            loaded.exhaust()
            return
        first = recording.first_batch + (planned[0].block or 0)
        made = islice(made_batches(self._make, recording.seed), first, None)
        for one in planned:
            batch = next(made, self)
            if self._pass.is_closed:
                return
            if batch is self:
                raise DatasetError(
                    f"the function made {recording.first_batch + (one.block or 0):,} batches, but more when key sets "
                    "were recorded: make the same batches each time, or record key sets again"
                )
            loaded.take(one)
            yield batch
        loaded.exhaust()


class PassSampler(Sampler[int]):
    """The indices of the samples of one pass, for your own DataLoader; `Pass.sampler` makes it."""

    def __init__(self, taken: Pass, *, shuffle: bool) -> None:
        self._pass, self._shuffle = taken, shuffle
        self._recorded = taken.source.whole.recorded

    def __len__(self) -> int:
        return self._pass.num_samples

    def __iter__(self) -> Iterator[int]:
        taken = self._pass
        taken.rows.check_open()
        order = taken.shuffled(taken.num_samples, shuffle=self._shuffle)
        taken.ledger.open_loader()
        for _, places in cut_batches(order, 1 << 12, first=0, last=taken.num_samples):
            yield from self._recorded.indices(places).tolist()
        taken.ledger.close_loader()


def loader_of(
    taken: Pass, dataset: Any, batch_size: int | None, *, shuffle: bool, check_keys: bool, arguments: dict[str, Any]
) -> PassLoader | MadeLoader:
    """Return a loader; see `Pass.loader`."""
    taken.rows.check_open()
    if taken.is_sampled:
        raise StateError(f"pass {taken.index} already uses p.sampler(): use one of the two in a pass")
    recorded = taken.source.whole.recorded
    made = _loader_of(taken, dataset, batch_size, recorded, shuffle=shuffle, arguments=arguments)
    taken.loaded = taken.loaded or LoadedBatches(taken, recorded, taken.loaded_before)
    taken.loaded.checked = check_keys and taken.ranks.size == 1
    return made


def _loader_of(
    taken: Pass, dataset: Any, batch_size: int | None, recorded: RecordedBatches, *, shuffle: bool,
    arguments: dict[str, Any],
) -> PassLoader | MadeLoader:  # fmt: skip
    ranks, plan = taken.ranks, LoaderPlan(taken, batch_size, shuffle=shuffle)
    if recorded.recording.dataset_length is not None:
        if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
            raise TypeError(
                f"p.loader got a {type(dataset).__name__}: pass the dataset of the loader whose key sets were recorded"
            )
        if ranks.size > 1:
            plan.check_ranks(ranks.size)
        return PassLoader(taken, dataset, plan, arguments)
    if not callable(dataset) or batch_size is not None or shuffle or arguments:
        raise TypeError(
            "key sets were recorded from a function that makes batches: pass only that function to p.loader, whose "
            "batches are trained as they are, in their order"
        )
    if ranks.size > 1:
        raise ValueError("batches of a function cannot be divided over ranks: record a DataLoader of a dataset")
    return MadeLoader(taken, dataset, plan)


def sampler_of(taken: Pass, *, shuffle: bool) -> PassSampler:
    """Return a sampler; see `Pass.sampler`."""
    taken.rows.check_open()
    if taken.ranks.size > 1:
        raise ValueError("p.sampler() does not divide samples over ranks: use p.loader(dataset, batch_size)")
    if taken.source.whole.recorded.recording.dataset_length is None:
        raise ValueError("the samples of a function that makes batches have no indices: use p.loader(function)")
    if taken.samples_done or taken.loaded is not None:
        raise StateError(
            f"pass {taken.index} has begun with p.loader(): continue with it, because p.sampler() counts nothing"
        )
    taken.is_sampled = True
    return PassSampler(taken, shuffle=shuffle)


_MOST_TAKEN = 2  # the number of batches that a loop may take before it trains the first


class LoadedBatch(NamedTuple):
    """A batch of a pass."""

    first: int  # samples of the pass before it
    last: int  # end of the batch, in samples of the pass
    places: NDArray[np.int64] | None  # its samples in the sub-dataset; None: of an iterable
    block: int | None  # its number among the recorded batches, if it is one


class LoadedBatches:
    """Assigns lookups of plain keys to batches, which are trained in the order in which they are taken.

    A loop may take one batch ahead of its training. It does so from the first batch on, or never. Or it takes all
    batches of a step at once, of which it accumulates gradients: their lookups count for all of them.
    """

    def __init__(self, owner: Pass, recorded: RecordedBatches, previous: LoadedBatches | None) -> None:
        """previous: the batches of the previous pass, if some are not trained yet."""
        self._owner, self._recorded, self._previous = weakref.ref(owner), recorded, previous
        self.per_step = 1  # batches of a step
        self.checked = True  # True if recorded batches have to make their recorded lookups
        self._taken: deque[LoadedBatch] = deque()  # untrained batches; the first one is the batch of the last lookup
        self._due = 0  # batches taken, or the loader's end, since the last lookup
        self._has_begun = self._is_over = False
        self._seen: set[int] = set()  # digests of the lookups of the first batch

    @property
    def _pass(self) -> Pass:
        found = self._owner()
        assert found is not None, "the batches of a pass that is gone"
        return found

    def take(self, batch: LoadedBatch) -> None:
        """Count a batch that is handed out."""
        self._pass.rows.check_open()
        self._pass.before_batch()
        if 1 < self.per_step == len(self._taken):
            self.check()
            self._taken.clear()
            self._seen.clear()
        if self._previous is not None and self._taken:  # before the first one, the end of the other loader counted
            self._previous._due += 1
        self._taken.append(batch)
        self._due += 1
        self._pass.samples_done = batch.last
        self._pass.ledger.make(batch.last)

    def exhaust(self) -> None:
        """Record the end of the loader."""
        self._due += 1
        self._is_over = True
        self._pass.ledger.exhaust()

    @property
    def has_more(self) -> bool:
        """True if a lookup made now belongs to one of these batches, and not to the next pass."""
        if self.per_step > 1:
            return not self._is_over and bool(self._taken)
        return self._due < len(self._taken) if self._has_begun else bool(self._taken)

    @property
    def current(self) -> LoadedBatch | None:
        """The batch that a lookup made now belongs to, the last one of a step; None before the first batch."""
        if not self._taken:
            return None
        if self.per_step > 1:
            return self._taken[-1]
        return self._taken[min(self._due if self._has_begun else 0, len(self._taken) - 1)]

    def look_up(self, table: Table, keys: NDArray[np.int64], *, trains: bool) -> None:
        """Record a lookup with gradients enabled, before it is made. trains: False for a frozen module."""
        if self.per_step == 1:
            self._move_on()
        if self._is_checked:
            self._seen.add(lookup_digest(keys, table.table_id))
        if not trains or self.per_step > 1:
            for batch in self._looked_up:
                self._pass.ledger.look_up(batch.last, gradients=True, trains=trains)

    def _move_on(self) -> None:
        """Drop the batches that were trained before the one of this lookup."""
        if not self._has_begun and self._due > _MOST_TAKEN:
            raise StateError(
                f"{self._due:,} batches of pass {self._pass.index} were taken before one was trained: take at most one "
                "batch ahead, so that lookups are counted for the right batch, or pass cache.batches(batches_per_step="
                f"{self._due}) if your loop takes the batches of a step at once"
            )
        due, self._due = self._due if self._has_begun else 0, 0
        self._has_begun = True
        for _ in range(min(due, len(self._taken) - 1)):
            self.check()
            self._taken.popleft()
            self._seen.clear()

    @property
    def _looked_up(self) -> list[LoadedBatch]:
        return [*self._taken] if self.per_step > 1 else [*islice(self._taken, 1)]

    def check(self) -> None:
        """Raise DatasetError if the last batch that was looked up lacked any of its recorded lookups."""
        if not self._is_checked or not self._seen:
            return
        blocks = [one.block for one in self._looked_up if one.block is not None]
        recorded = {digest for block in blocks for digest in self._recorded.digests(block).tolist()}
        if missing := len(recorded - self._seen):
            raise DatasetError(
                f"{self.name_of(self._taken[0])} did not make {missing} of its {len(recorded)} recorded lookups: "
                "the data, the model's forward or their random numbers differ from the "
                "recording. Record key sets again, with same_draws=True if the dataset draws random numbers, or use "
                "p.loader(..., check_keys=False), which only checks that each key is in the pass"
            )

    def name_of(self, batch: LoadedBatch) -> str:
        """Return the name of a batch for errors."""
        number = "a batch" if batch.block is None else f"recorded batch {batch.block}"
        return f"{number} of pass {self._pass.index} (its samples {batch.first:,} to {batch.last - 1:,})"

    @property
    def _is_checked(self) -> bool:
        found = self._looked_up
        return self.checked and bool(found) and all(one.block is not None for one in found)
