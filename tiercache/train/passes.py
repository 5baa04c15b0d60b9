"""A pass: one training of one sub-dataset, as the training loop sees it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from tiercache.errors import StateError
from tiercache.train.batches import (  # fmt: skip
    SCHEDULES,
    SizedIterator,
    check_word,
    checked_order,
    cut_batches,
    fail,
    is_read_by_owner,
    num_batches,
    sample_order,
)
from tiercache.train.negatives import NegativeSampler
from tiercache.train.pass_ledger import PassLedger
from tiercache.train.pass_loader import loader_of, sampler_of
from tiercache.train.raw_samples import samples_of
from tiercache.values.batch import BatchRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.data.dataset import SubDatasetView
    from tiercache.train.batches import BatchPipeline, BatchQueue, Order
    from tiercache.train.negatives import Negatives
    from tiercache.train.pass_loader import LoadedBatches, MadeLoader, PassLoader, PassSampler
    from tiercache.train.raw_keys import RawKeys
    from tiercache.train.raw_samples import Missing
    from tiercache.train.row_view import RowView
    from tiercache.values.batch import Batch


class Pass:
    """One training of one sub-dataset, yielded by ``passes()``. It ends when the loop requests the next pass."""

    def __init__(
        self,
        *,
        index: int,
        epoch: int,
        source: SubDatasetView,
        rows: RowView,
        seed: int,
        raw: RawKeys,
        pipeline: BatchPipeline,
        first_sample: int = 0,
        order: Mapping[str, object] | None = None,
        before_batch: Callable[[Pass], None] | None = None,
        next_pass: Callable[[Pass], Pass | None] | None = None,
    ) -> None:
        self.index = index
        """The pass's number, counted from 0 over all epochs."""
        self.epoch = epoch
        """The epoch it belongs to, counted from 0."""
        self.sub_dataset = source.index
        """The number of the sub-dataset that it trains."""
        self.num_samples = source.samples
        """Samples of the sub-dataset, over all ranks."""
        self.samples_done = first_sample
        """Samples of all ranks whose batches were yielded, including ``start_sample``."""
        self.start_sample = first_sample
        """Samples of all ranks that a commit inside this pass has: 0 unless training resumed from such a commit. Start
        your own loader after these samples; ``batches`` does so automatically."""
        self.start_batch = int(str((order or {}).get("raw_batches", 0)))
        """Batches of raw keys that such a commit has, the same number on every rank."""
        self.batches_done = self.start_batch
        """Batches made by ``batch``, including ``start_batch``."""
        self.rows = rows
        self.ledger = rows.ledger = PassLedger(f"pass {index}", source.samples, first_sample)
        rows.schema, rows.keys_of = source.whole.schema, source.whole.keys
        self.order = order
        """Seed and shuffling of the batches yielded so far, or their number for raw keys; None before the first."""
        self.source = source
        """The sub-dataset, with its samples and the keys that this rank trains."""
        self.seed = seed
        """The seed of the cache."""
        self.loaded: LoadedBatches | None = None  # the batches of ``loader``, if it was called
        self.loaded_before: LoadedBatches | None = None
        """Those of the previous pass, if it was not trained to its end when the loop requested this one."""
        self.is_sampled = False  # True if ``sampler`` was called
        self._negatives: NegativeSampler | None = None
        self._raw, self._exchange, self._pipeline = raw, raw.exchange, pipeline
        self.ranks = raw.exchange.ranks
        """The ranks that train it."""
        self._before_batch, self._next_pass = before_batch or _nothing, next_pass or _nothing
        self._begun: tuple[Any, BatchQueue] | None = None  # batches made while the previous pass trains, and arguments
        self._plain_samples = 0  # samples of the lookups of plain keys since the last step
        self.losses: list[float] = []
        """The losses given to ``log_loss``; the pass's report has them too."""

    def batches(
        self, size: int, *, shuffle: bool = False, prefetch: int | None = None, read_by: str = "rank"
    ) -> SizedIterator[Batch]:
        """Return an iterator over batches of ``size`` samples from the pass's position; the last may be smaller.

        Its ``len`` is the number of its batches.

        The shuffle is seeded by (seed, epoch, sub-dataset). After a commit inside the pass the remaining samples follow
        in the same order, in batches of any size.

        With W ranks ``size`` is the size of the global batch, of which each rank gets its part. Multiply the mean loss
        by ``batch.weight``: together with the averaging of DistributedDataParallel, the step then equals a step of one
        process on the global batch, however unevenly the samples are divided. If a batch has no sample for a rank, the
        rank gets a sample of another rank with weight 0. Register the model before you request batches: they bring the
        rows that its modules look up. The rows of a batch are exchanged when it is first looked up, so all ranks must
        look up the same batches in one order.

        Args:
            size: samples of a batch, of all ranks together.
            shuffle: whether samples are shuffled within the pass.
            prefetch: the number of batches that are read ahead, on as many threads of the cache; their rows wait for
                their step. Near the end of a pass they come from the next one, in case it has the same arguments. With
                several ranks, the ranks also exchange which rows these batches need. Default: 0 on a CPU, or 1 with
                several ranks; 2 on a GPU, or 4 with at least 8 cores. The batches are the same, and count when they are
                yielded; an error in reading one is raised in its place.
            read_by: "rank": each rank reads its own samples with all features. "owner": each rank reads the features
                that are pooled by sum or mean for the tables it owns, whole or in columns, of all samples, so that
                their ids do not travel, and everything else for its own samples. The result is the same, up to the
                order of additions. All ranks need the same embedding modules for this.

        Raises, on all ranks:
            StateError: a commit inside the pass has another order; or this is a fork of the process.
            DatasetError: the sub-dataset has a key set but no samples.
            RuntimeError: the pass has ended.
            ValueError: ``size`` is below 1, ``prefetch`` below 0, or ``read_by`` is unknown.
            Exception: errors of the reader and writer threads, with their cause.
        """
        made = self._batches(size, shuffle=shuffle, prefetch=prefetch, read_by=read_by)
        return SizedIterator(made, lambda: num_batches(self.num_samples - self.samples_done, size))

    def _batches(self, size: int, *, shuffle: bool, prefetch: int | None, read_by: str) -> Generator[Batch, None, None]:
        order = self._checked_order(shuffle=shuffle)

        def counted(batch: Batch) -> Batch:
            self.samples_done, self.order = batch.end, order
            self.ledger.make(batch.end)
            return batch

        queue, self._begun = self.begin(size, shuffle, prefetch, is_read_by_owner(read_by)), None
        yield from itertools.takewhile(
            lambda _: not self.is_closed, map(counted, queue.batches(self.before_batch))
        )  # do not bind the batch to a local: while the next is made, only the caller holds it
        self.ledger.exhaust()

    def begin(self, *how: Any) -> BatchQueue:
        """Return the queue of the rest of the pass for these arguments of ``batches``; drop any other queue."""
        key = self.samples_done, *how
        if self._begun is not None:
            before, queue = self._begun
            if before == key:
                return queue
            queue.close()
        size, shuffle, prefetch, by_owner = how

        def following() -> BatchQueue | None:
            after = self._next_pass(self)
            return None if after is None else after.begin(*how)

        requests = (BatchRequest(self.source, places, places.size, done) for done, places in self._cuts(size, shuffle))
        queue = self._pipeline.queue(
            self._exchange, requests, self.rows, prefetch=prefetch, by_owner=by_owner, following=following
        )
        self._begun = key, queue
        return queue

    def steps(
        self,
        size: int,
        *,
        micro_batches: int,
        shuffle: bool = False,
        schedule: str = "interleaved",
        read_by: str = "rank",
    ) -> Iterator[Iterator[Batch]]:
        """Yield each batch as an iterator over its micro-batches. Step once after all of them.

        Multiply the mean loss of each micro-batch by its ``weight``: the sum is the loss of the whole batch. All
        micro-batches see the rows before the step, so the result equals the whole batch's, up to the order of
        additions. A batch with fewer samples than ``micro_batches`` has fewer micro-batches.

        ``schedule``: with several ranks, "interleaved" exchanges the rows of the next micro-batch while you train the
        current one, on another thread or, on a GPU, on another stream; "simple" does not overlap them. ``read_by``: as
        in ``batches``. Raises the errors of ``batches``, and ValueError if ``micro_batches`` is below 1.
        """
        by_owner = is_read_by_owner(read_by)
        check_word("schedule", schedule, SCHEDULES)
        if micro_batches < 1:
            raise ValueError(f"invalid micro_batches {micro_batches}: expected at least 1")
        cuts = self._cuts(size, shuffle)
        while not self.is_closed:
            try:
                if (cut := next(cuts, None)) is None:
                    self.ledger.exhaust()
                    return
                self.check_order(shuffle=shuffle)
                first, (self.samples_done, places) = self.samples_done, cut
                n, count = places.size, min(micro_batches, places.size)
                ends = [i * n // count for i in range(count + 1)]
                parts = [
                    BatchRequest(self.source, places[begin:end], n, first + end)
                    for begin, end in itertools.pairwise(ends)
                ]
                requests = iter(parts)
                for part in parts:
                    self.ledger.make(part.done)
            except Exception as error:  # sent to all ranks by the first micro-batch
                requests = iter(partial(fail, error), None)
            overlap = schedule == "interleaved"
            queue = self._pipeline.queue(
                self._exchange, requests, self.rows, prefetch=0, overlap=overlap, by_owner=by_owner
            )
            yield queue.batches(self.before_batch, overlap=overlap)

    def check_order(self, *, shuffle: bool, **others: object) -> None:
        """Raise StateError if samples cannot be taken in this order after those taken before; else keep the order."""
        self.order = self._checked_order(shuffle=shuffle, **others)

    def _checked_order(self, *, shuffle: bool, **others: object) -> dict[str, object]:
        last = self.num_samples if self.ledger.is_exhausted else None
        known, others = self.order if self.samples_done else None, {"seed": self.seed, "shuffle": shuffle, **others}
        return checked_order(f"pass {self.index}", self.samples_done, known, last, others)

    def _cuts(self, size: int, shuffle: bool) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the end of each batch and its samples, after ``samples_done``."""
        self.source.check_samples()
        self._checked_order(shuffle=shuffle)  # saved later: the previous pass may begin the first batches
        order = self.shuffled(self.num_samples, shuffle=shuffle)
        yield from cut_batches(order, size, first=self.samples_done, last=self.num_samples)

    def shuffled(self, count: int, *, shuffle: bool) -> Order:
        """Return the order of ``count`` samples or batches of this pass, by its seed if ``shuffle``."""
        return sample_order(count, seed=self.seed, epoch=self.epoch, sub_dataset=self.sub_dataset, shuffle=shuffle)

    @property
    def samples_trained(self) -> int:
        """Samples of all ranks that a commit would count now.

        These are the samples of batches that modules have looked up; with raw keys, of batches that were made.
        """
        return self.samples_done if "raw_batches" in (self.order or {}) else self.ledger.samples_trained

    @property
    def is_trained(self) -> bool:
        """True if every batch that was yielded or made has been looked up, and its backward has run."""
        return self.ledger.is_looked_up and not self._exchange.awaits_backward

    @property
    def is_closed(self) -> bool:
        """True if ``skip`` or ``stop`` was called: no more batches are made."""
        return self.ledger.is_skipped or self.ledger.is_stopped

    def skip(self) -> None:
        """Count the pass as trained, although not all its batches were, so the loop continues with the next pass.

        The rows keep the updates so far, and the pass is committed when it ends, like any other. No more batches are
        made of it: iterators over its batches end. Without this a pass that was not trained to its end is an error.
        With several ranks all call it, after the same batch. Raises RuntimeError if the pass has ended.
        """
        self.rows.check()
        self.ledger.is_skipped = True

    def stop(self) -> None:
        """End the training in this pass: iterators over its batches end, and so does the loop over passes.

        Nothing more is committed, as after a ``break`` out of the loop over passes: the next training run resumes from
        the last commit, which is the end of an earlier pass or was made by ``TierCache.commit`` inside this one. With
        several ranks all call it, after the same batch. Raises RuntimeError if the pass has ended.
        """
        self.rows.check()
        self.ledger.is_stopped = True

    def end(self, *, is_dropped: bool = False) -> None:
        """End the pass and release its rows. A reference to the pass does not keep the cache alive.

        is_dropped: True if the loop was left.
        """
        self.rows.is_dropped = is_dropped
        if self._begun is not None:
            self._begun[1].close()
        self.rows.end()
        self._before_batch = self._next_pass = _nothing
        self._begun = None

    def before_batch(self) -> None:
        """Raise errors of threads, before a batch is handed out."""
        self._before_batch(self)

    @overload
    def batch(
        self, keys: Mapping[str, Any], *, weights: Mapping[str, Any] | None = ..., label: Any = ...,
        dense: Any = ..., missing: Missing = ...,
    ) -> Batch: ...  # fmt: skip

    @overload
    def batch(
        self, keys: Mapping[str, Any] | None, *, weights: Mapping[str, Any] | None = ..., label: Any = ...,
        dense: Any = ..., missing: Missing = ...,
    ) -> Batch | None: ...  # fmt: skip

    def batch(
        self,
        keys: Any,
        *,
        weights: Mapping[str, Any] | None = None,
        label: Any = None,
        dense: Any = None,
        missing: Missing = "error",
    ) -> Batch | None:
        """Return a batch of raw int64 keys from your own loader. Modules look it up like any other batch.

        Each rank passes its own samples: any number of them, or none. If your loader has ended on this rank, pass None:
        the rank takes part without samples, and when the loaders of all ranks have ended, the batch is None. So this
        loop works on any number of ranks: ``while (batch := p.batch(next(loader, None))) is not None``. Multiply the
        mean loss by ``batch.weight``, as for ``batches``. A rank without samples gets the first sample of another rank
        with weight 0. If a rank leaves the loop early, the others raise RankError after torch's timeout.

        A batch is counted when it is created, so create it just before you train it. After a commit inside the pass,
        training resumes after ``start_sample`` samples and ``start_batch`` batches. Call this on the training thread.

        Args:
            keys: by feature, NumPy or torch: (N,), (N, L) for lists of one length, a pair of values (E,) and offsets (N
                + 1,), or without the last (N,), a nested tensor, or a sparse one (N, keys), whose values are weights.
                Or for all features one tensor (N, features), a column each, or a torchrec KeyedJaggedTensor.
            weights: by feature, in the shape of its keys or values. They get no gradient; for that, pass them to the
                module.
            label: (N,), returned as float32.
            dense: (N, columns), returned as float32.
            missing: the treatment of a key that is not in the sub-dataset's key set. "error" raises KeyNotInPassError,
                which names table, key and batch; the batch does not count. The other choices read a row that is **not
                trained**: it gets no gradient and is not stored, because only rows of the sub-dataset are on the
                device. "zero" reads zeros, "init" the key's initial row, "load" its current row from host or store, as
                an evaluation would; the first such batch of a pass waits until the last dump is durable. Such keys
                count in means, and their vectors in maxima. Their batch has a float32 copy of the vectors of each group
                that they are in.

        Raises, on all ranks (RankError on ranks without the mistake):
            ValueError: keys, offsets or weights do not fit each other or the schema, or a key is INT64_MIN or INT64_MIN
                + 1.
            KeyNotInPassError: a key is missing and ``missing`` is "error".
            StateError: the pass takes its samples from ``batches``.
            RuntimeError: the pass has ended.
            Exception: errors of the reader and writer threads, with their cause.
        """
        made = self._raw.batch(
            self.source.whole, self.rows, self.batches_done, keys,
            begin=self._begin_raw, missing=missing, weights=weights, label=label, dense=dense,
        )  # fmt: skip
        if made is None:
            self.ledger.exhaust(raw=True)
            return None
        batch, num_samples = made
        self.batches_done += 1
        self.samples_done += num_samples
        self.order = {"raw_batches": self.batches_done}
        self.ledger.make(self.samples_done, raw=True)
        return replace(batch, end=self.samples_done)

    def wrap(
        self,
        loader: Iterable[Any],
        make: Callable[[Any], Mapping[str, Any]] | None = None,
        *,
        missing: Missing = "error",
    ) -> Iterator[Batch]:
        """Yield the batch of raw keys of each item of ``loader``: your own DataLoader, with any number of workers.

        An item is (keys, label), (keys, dense, label), or a mapping with "keys" and optionally "weights", "label" and
        "dense", each as ``batch`` takes it; ``make`` converts any other item to such a mapping. After a commit inside
        the pass the items of ``start_batch`` batches are left out; a loader with a ``state_dict`` resumes on its own:
        register it (``cache.register(loader=loader)``). With several ranks it continues until the loaders of all ranks
        have ended. Raises the errors of ``batch``, and TypeError for an item that is none of these.
        """
        items = samples_of(loader, self.start_batch, make)
        self.ledger.open_loader()
        while not self.is_closed:
            batch = self.batch(**next(items), missing=missing)
            if batch is None:
                self.ledger.close_loader()
                return
            yield batch

    def loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        check_keys: bool = True,
        **arguments: Any,
    ) -> PassLoader | MadeLoader:
        """Return a sized `torch.utils.data.DataLoader` of the samples of this pass, from your own dataset.

        For datasets of `record_key_sets`. It begins at the pass's position, even after a commit inside it. The order of
        samples, and the random numbers that ``dataset`` and ``collate_fn`` draw for a batch, in workers or not, follow
        from the seed of the cache, the epoch, the sub-dataset and the batch's position in it. They do not change the
        random generators of your process. A batch is trained once its keys were looked up with gradients enabled, in
        the order in which batches are taken; a loop may take one batch ahead. With several ranks ``batch_size`` is the
        global size, and each rank gets its part.

        Args:
            dataset: the dataset of the recorded loader; or only the recorded function.
            batch_size: default: the recorded loader's, or its recorded batches if it had a batch sampler.
            shuffle: whether samples (or such batches) are shuffled within the pass.
            check_keys: each key has to be in the pass, always. With this, a batch that is a recorded one (not shuffled,
                of the same size, on one rank) has to make at least the lookups that were recorded for it, from the
                model's forward.
            arguments: other arguments of DataLoader, except samplers, generator and ``drop_last``.

        Raises:
            DatasetError: no samples were recorded, the dataset has another length, or a batch did not make its recorded
                lookups (raised in the lookup after it, or when the pass ends).
            StateError: the pass has another order, or all its batches were taken.
            ValueError, TypeError: an argument is refused.
        """
        return loader_of(self, dataset, batch_size, shuffle=shuffle, check_keys=check_keys, arguments=arguments)

    def sampler(self, *, shuffle: bool = False) -> PassSampler:
        """Return a sampler of the samples of this pass for your own DataLoader.

        Its batches are not counted, so the pass cannot be committed before its end. Raises StateError in a pass that
        resumed inside or has a ``loader``, ValueError with several ranks.
        """
        return sampler_of(self, shuffle=shuffle)

    def sample(self, table: str, n: int, *, by: Literal["uniform", "count"] = "uniform") -> Negatives:
        """Draw ``n`` keys, with replacement, from the keys of a table in this pass: negatives that it trains.

        by: "uniform", or "count": in proportion to the occurrences of each key in the sub-dataset, which takes 8 bytes
        of host memory for each key of the table. Returns keys, counts and log-probabilities (n,) on the device of the
        rows. The draw follows from the seed of the cache, the pass, the samples taken so far and the draws since: the
        same on all ranks, and in a resumed run. Raises ValueError for an unknown table, or one without keys.
        """
        self.rows.check_open()
        self._negatives = self._negatives or NegativeSampler(self.source.whole, self.seed, self.index)
        return self._negatives.draw(table, n, by, self.samples_done, self.rows.backend.device)

    def _begin_raw(self) -> None:
        self.rows.check_open()
        if self.is_closed:
            raise StateError(f"pass {self.index} makes no more batches after p.skip() or p.stop()")
        self.rows.load()
        if self.order is not None and "raw_batches" not in self.order:
            raise StateError(
                f"pass {self.index} takes its samples from batches(), so batch() would count them twice: use only one "
                "of them in a pass"
            )
        self._before_batch(self)

    def begin_plain(self) -> None:
        """Check that plain keys can be looked up now, and load the rows of the pass."""
        (self.rows.check_open if self.loaded is None else self.rows.check)()
        self.rows.load()
        self._before_batch(self)

    def count_plain(self, num_samples: int) -> int:
        """Record a lookup of plain keys; return the end of its batch, which all lookups of a step share."""
        if self.loaded is not None and (batch := self.loaded.current) is not None:
            return batch.last
        if self.order is not None and "raw_batches" not in self.order:
            return self.samples_done  # in the same pass as batches()
        self._plain_samples = max(self._plain_samples, num_samples, 1)
        self.ledger.make(self.samples_done + 1, raw=True)
        return self.samples_done + 1

    def note_step(self) -> None:
        """Count the batch of the plain keys that were looked up since the last step."""
        if self._plain_samples:
            self.batches_done += 1
            self.samples_done += self._plain_samples
            self._plain_samples, self.order = 0, {"raw_batches": self.batches_done}

    def log_loss(self, loss: float) -> None:
        """Add a loss of this rank to the report of the pass."""
        self.losses.append(loss)

    def __repr__(self) -> str:
        return f"Pass({self.index}, epoch={self.epoch}, sub_dataset={self.sub_dataset}, samples={self.num_samples:,})"


def _nothing(_: Pass) -> None:
    """Do nothing before a batch."""
