"""A pass: one training of one sub-dataset, as the training loop sees it."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn, overload

from tiercache.errors import StateError
from tiercache.training.batch import SHUFFLED_BY, cut_batches, sample_order
from tiercache.training.evaluation import check_exchange_schedule
from tiercache.training.exchange import BatchRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.passes.view import SubDatasetView
    from tiercache.tiers.rows import RowView
    from tiercache.training.batch import Batch
    from tiercache.training.batch_pipeline import BatchPipeline
    from tiercache.training.exchange import Exchange
    from tiercache.training.missing_rows import Missing
    from tiercache.training.raw_batch import RawKeys


class Pass:
    """What ``passes()`` yields. It ends when the loop asks for the next one."""

    def __init__(
        self,
        *,
        index: int,
        epoch: int,
        source: SubDatasetView,
        rows: RowView,
        seed: int,
        raw: RawKeys,
        exchange: Exchange,
        pipeline: BatchPipeline,
        first_sample: int = 0,
        order: Mapping[str, object] | None = None,
        before_batch: Callable[[Pass], None] | None = None,
    ) -> None:
        self.index = index
        """The pass's number, counted from 0 over all epochs."""
        self.epoch = epoch
        """The epoch it belongs to, counted from 0."""
        self.sub_dataset = source.index
        """The number of the sub-dataset that it trains."""
        self.num_samples = source.samples
        """Samples of the sub-dataset, those of all ranks."""
        self.samples_done = first_sample
        """Samples of all ranks whose batches were yielded, those before the last commit inside the pass included."""
        self.start_sample = first_sample
        """Samples of all ranks that a commit inside this pass has behind it: 0 but where training goes on from one.
        Loaders of one's own begin after so many; ``batches`` does by itself."""
        self.start_batch = int(str((order or {}).get("raw_batches", 0)))
        """Batches of raw keys that such a commit has behind it: the same number on every rank."""
        self.batches_done = self.start_batch
        """Batches that ``batch`` made, those included."""
        self.rows = rows
        rows.samples_trained = first_sample
        self.order = order
        """Seed and shuffling of the batches yielded so far, or how many were of raw keys; None before the first."""
        self.source = source
        """The sub-dataset, with its samples and the keys that this rank trains."""
        self._seed, self._raw, self._exchange, self._pipeline = seed, raw, exchange, pipeline
        self._before_batch = before_batch or _nothing
        self.losses: list[float] = []
        """What ``note_loss`` was given; the pass's report has it too."""

    def batches(
        self,
        size: int,
        *,
        shuffle: bool = False,
        prefetch: int | None = None,
        input: str = "data",  # noqa: A002 - what is said of each rank's input
    ) -> Iterator[Batch]:
        """Yield this rank's part of batches of ``size`` samples, from where the pass stands; the last may be short.

        Shuffling is seeded by (seed, epoch, sub-dataset). After a commit inside the pass the rest follows in the same
        order, in batches of any size.

        On W ranks the size is that of all their parts, and all take the same batches. Multiply the mean loss by
        ``batch.weight``: with DistributedDataParallel's averaging the step is then that of one process on the whole
        batch, on ranks with more and with fewer samples. A rank without samples of a batch gets one of another rank's
        with weight 0. A batch's rows are brought when it is first looked up, so all ranks look the same batches up in
        one order. What embedding modules look up is brought: give them to the cache before.

        prefetch: how many batches are read, on as many threads, before they are asked for; W ranks tell each other
        meanwhile which rows they are to send, and the rows wait for their step. None: 0 where rows are trained on a
        CPU, and 1 on W ranks; 2 on a GPU, and 4 beside 8 or more cores. They are the same batches, and count when they
        are yielded; what goes wrong in making one is raised in its place. Threads end with the iterator or the pass.

        input: what each rank reads. "data": its own samples, with all features. "model": of features that are pooled
        by sum or mean, those whose tables it owns, whole or in columns, for the samples of all ranks, so that their ids
        do not travel; all other features, dense and label of its own samples. The result is the same, but for the order
        of additions. All ranks have the same embedding modules then.

        Raises, on all ranks, with its cause, what went wrong on a reader or a writer thread; RuntimeError where the
        pass has ended; StateError where a commit inside it stands in another order, and in a fork of this process;
        DatasetError where the sub-dataset has a key set alone; ValueError for a size below 1, a ``prefetch`` below 0 or
        an unknown ``input``.
        """

        def counted(made: tuple[int, Batch]) -> Batch:
            self.samples_done, batch = made
            return batch

        by_owner = _read_by_owner(input)
        requests = (
            BatchRequest(self.source, places, places.size, done) for done, places in self._cuts(size, shuffle)
        )  # no name here is a batch's: while the next is made, it is the caller's alone
        made = self._pipeline.batches(
            self._exchange, requests, self.rows, prefetch=prefetch, before=self._before, by_owner=by_owner
        )
        yield from map(counted, made)

    def steps(
        self,
        size: int,
        *,
        micro_batches: int,
        shuffle: bool = False,
        schedule: str = "interleaved",
        input: str = "data",  # noqa: A002 - as above
    ) -> Iterator[Iterator[Batch]]:
        """Yield each batch as an iterator over its micro-batches; step once behind all of them.

        Multiply the mean loss of each by its ``weight``: they add up to those of one batch. All see rows as before the
        step, so the result is one batch's, but for the order of additions. "interleaved": on several ranks the rows of
        the next micro-batch are exchanged while the one yielded is trained, on another thread or, on a GPU, on another
        stream; "simple": one thing after the other. A batch with fewer samples than ``micro_batches`` has fewer of
        them. input: as of ``batches``. Raises as ``batches`` does; ValueError for less than 1 micro-batch.
        """
        by_owner = _read_by_owner(input)
        check_exchange_schedule(schedule)
        if micro_batches < 1:
            raise ValueError(f"{micro_batches} micro-batches were asked for: a batch has at least 1")
        cuts = self._cuts(size, shuffle)
        while True:
            try:
                if (cut := next(cuts, None)) is None:
                    return
                self.samples_done, places = cut
                n, count = places.size, min(micro_batches, places.size)
                requests = iter(
                    [
                        BatchRequest(self.source, places[i * n // count : (i + 1) * n // count], n, cut[0])
                        for i in range(count)
                    ]
                )
            except Exception as error:  # told to all ranks, by the first micro-batch
                requests = iter(partial(_fail, error), None)
            made = self._pipeline.batches(
                self._exchange, requests, self.rows, prefetch=0, before=self._before,
                overlap=schedule == "interleaved", by_owner=by_owner,
            )  # fmt: skip
            yield map(itemgetter(1), made)

    def _cuts(self, size: int, shuffle: bool) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the samples behind each batch and its places, from where the pass stands at the first."""
        self.source.check_samples()
        mine: dict[str, object] = {"seed": self._seed, "shuffle": shuffle}
        if shuffle:
            mine["by"] = SHUFFLED_BY
        if self.samples_done and self.order is not None and self.order != mine:
            raise StateError(
                f"pass {self.index} stands after {self.samples_done:,} samples in the order {dict(self.order)}, and "
                f"batches were asked for in {mine}: some samples would be trained twice and some never, so ask for "
                "the same order"
            )
        self.order = mine
        order = sample_order(
            self.num_samples, seed=self._seed, epoch=self.epoch, sub_dataset=self.sub_dataset, shuffle=shuffle
        )
        yield from cut_batches(order, size, first=self.samples_done, last=self.num_samples)

    @property
    def samples_trained(self) -> int:
        """Samples of all ranks that a commit made now has behind it.

        Those of the batches that modules have looked up; of raw keys those that were made.
        """
        return self.samples_done if "raw_batches" in (self.order or {}) else self.rows.samples_trained

    @property
    def is_trained(self) -> bool:
        """Whether all batches that were yielded or made were looked up, and their backward was done."""
        return self.rows.samples_trained >= self.samples_done and not self._exchange.is_awaited

    def end(self) -> None:
        """End it and its rows. Whoever still refers to it does not keep its cache."""
        self.rows.end()
        self._before_batch = _nothing

    def _before(self) -> None:
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
        keys: Mapping[str, Any] | None,
        *,
        weights: Mapping[str, Any] | None = None,
        label: Any = None,
        dense: Any = None,
        missing: Missing = "error",
    ) -> Batch | None:
        """Return the batch of raw int64 keys that a loader of one's own gave; modules look it up as any other.

        keys: of every feature, NumPy or torch: (N,), (N, L) for lists of one length, or a pair (values (E,), offsets
        (N + 1,)). weights: by feature, in the shape of its keys or values; without a gradient: the embedding module
        takes those with one. label (N,) and dense (N, columns) are handed through as float32. None in place of keys
        where the loader has ended: the batch is None where that of every rank has, so a loop of any number of ranks is
        ``while (batch := pass_index.batch(next(loader, None))) is not None``.

        Each rank gives its own samples, of which it may have any number, and none; one whose loader has ended takes
        part as one without. Multiply the mean loss by ``batch.weight``, as of ``batches``: what is trained is one
        process's batch of the samples of all ranks, in their order. A rank without samples gets the first one of
        another rank with weight 0. Where no rank has any, the batch is empty on all. If a rank leaves the loop before
        the others, these raise RankError after torch's time-out.

        missing: what a key is that the key set of the sub-dataset lacks. "error": KeyNotInPassError, which names table,
        key and batch; the batch does not count, and all ranks may go on with another one. The others read a row that is
        **not trained**: no gradient goes to it and nothing is stored for it, for only rows of the sub-dataset are on
        the device. "zero": zeros. "init": the key's initial row. "load": its row as of now, from host or store, read by
        the rank that owns the key, else what an evaluation would see; the first such batch of a pass waits until the
        last dump is durable. Such keys count in means, and their vectors in maxima. A batch with missing keys has in
        their group ids of its own in place of local ids, and a float32 copy of the vectors that it looks up there, made
        anew after each step.

        The batch counts when it is made, with the samples of all ranks: a commit inside the pass has them behind it,
        so make it right before it is trained. Training goes on after ``start_sample`` samples and ``start_batch``
        batches. On the training thread. What goes wrong on a rank is raised on all, RankError on the others: ValueError
        for keys, offsets or weights that do not fit each other or the schema, and for INT64_MIN and INT64_MIN + 1;
        RuntimeError where the pass has ended; StateError in a pass that takes its samples from ``batches``; and, with
        its cause, what went wrong on the reader or the writer thread.
        """
        return self._raw.batch(self, keys, missing=missing, weights=weights, label=label, dense=dense)

    def begin_raw(self) -> None:
        """Raise what ``batch`` raises of the pass, before a batch of raw keys is made: it needs the pass's rows."""
        self.rows.check_made()
        self.rows.bring()
        if self.order is not None and "raw_batches" not in self.order:
            raise StateError(
                f"pass {self.index} takes its samples from batches(), so batch() would count them twice: use one of "
                "them in a pass"
            )
        self._before_batch(self)

    def count_raw(self, num_samples: int) -> None:
        """Count a batch of raw keys that was made."""
        self.batches_done += 1
        self.samples_done += num_samples
        self.order = {"raw_batches": self.batches_done}

    def note_loss(self, loss: float) -> None:
        """Add a loss of this rank to the pass's report."""
        self.losses.append(loss)

    def __repr__(self) -> str:
        return f"Pass({self.index}, epoch={self.epoch}, sub_dataset={self.sub_dataset}, samples={self.num_samples:,})"


def _nothing(_: Pass) -> None:
    """Of a cache that wants to know nothing."""


def _fail(error: Exception) -> NoReturn:
    raise error


def _read_by_owner(given: str) -> bool:
    if given not in ("data", "model"):
        raise ValueError(f"input {given!r} is unknown: it must be 'data' or 'model'")
    return given == "model"
