"""A visit of several ranks: each trains its part of every batch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from tiercache.ranks.batches import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from tiercache.ranks.batches import BatchMaker
    from tiercache.ranks.raw_batches import RawBatches
    from tiercache.training.batch import Batch
    from tiercache.training.missing_rows import Missing
    from tiercache.training.visit import Visit


class ShardedVisit:
    """What ``ShardedCache.passes`` yields. It ends when the loop asks for the next one."""

    def __init__(self, visit: Visit, maker: BatchMaker, raw: RawBatches) -> None:
        self._visit, self._maker, self._raw = visit, maker, raw
        self.index = visit.index
        """The visit's number, counted from 0 over all epochs."""
        self.epoch = visit.epoch
        """The epoch it belongs to, counted from 0."""
        self.pass_index = visit.pass_index
        """The pass it trains."""
        self.num_samples = visit.num_samples
        """Samples of the pass, those of all ranks."""
        self.start_sample = visit.start_sample
        """Samples of all ranks that a commit inside this visit has behind it: 0 but where training goes on from one.
        Loaders of one's own begin after so many; ``batches`` does by itself."""
        self.start_batch = visit.start_batch
        """Batches of raw keys that such a commit has behind it: the same number on every rank."""

    @property
    def samples_done(self) -> int:
        """Samples of all ranks whose batches were yielded, those before the last commit inside the visit included."""
        return self._visit.samples_done

    @property
    def batches_done(self) -> int:
        """Batches that ``batch`` made, those before such a commit included."""
        return self._visit.batches_done

    def batches(
        self,
        size: int,
        *,
        shuffle: bool = False,
        input: str = "data",  # noqa: A002 - what is said of each rank's input
    ) -> Iterator[Batch]:
        """Yield this rank's part of every global batch of ``size`` samples, as `Visit.batches` cuts them.

        Multiply the mean loss by ``batch.weight``: with DistributedDataParallel's averaging the step is then that of
        one process on the global batch, on ranks with more and with fewer samples. A rank without samples of a batch
        gets one of another rank's with weight 0. A batch's rows are as of when it was yielded: it can be looked up
        until the next step. What embedding modules look up is brought: make them before.

        input: what each rank reads. "data": its own samples, with all features. "model": of features that are pooled
        by sum or mean, those whose tables it owns, whole or in columns, for the samples of all ranks, so that their ids
        do not travel; all other features, dense and label of its own samples. The result is the same, but for the order
        of additions. All ranks have the same embedding modules then.

        Collective: all ranks take the same batches. Raises as `Visit.batches` does, on all ranks where one of them
        fails; ValueError for an unknown input.
        """
        by_model = _by_model(input)
        for places, error in self._places(size, shuffle):
            yield self._maker.make(self._visit.source, places, self._name, by_model=by_model, error=error)

    def steps(
        self,
        size: int,
        *,
        micro_batches: int,
        shuffle: bool = False,
        schedule: str = "interleaved",
        input: str = "data",  # noqa: A002 - as above
    ) -> Iterator[Iterator[Batch]]:
        """Yield each global batch as an iterator over its micro-batches; step once behind all of them.

        All see rows as before the step, and their weights add up to those of one batch: the result is one batch's,
        but for the order of additions. "interleaved": the rows of the next micro-batch are exchanged while the one
        yielded is trained, on another thread or, on a GPU, on another stream; "simple": one thing after the other. A
        batch with fewer samples than ``micro_batches`` has fewer of them. input: as of ``batches``. Raises as
        ``batches`` does; ValueError for less than 1 micro-batch.
        """
        by_model = _by_model(input)
        if micro_batches < 1:
            raise ValueError(f"{micro_batches} micro-batches were asked for: a batch has at least 1")
        for places, error in self._places(size, shuffle):
            parts = [part for part in parts_of(places, micro_batches) if part.size] or [places]
            begin = partial(self._maker.begin, self._visit.source, name=self._name, of=places.size, by_model=by_model)
            begins = [partial(begin, part, error=error if i == 0 else None) for i, part in enumerate(parts)]
            yield self._maker.ahead(begins, schedule)

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
        """Return this rank's part of a global batch of raw int64 keys, of which each rank brings its own samples.

        Arguments and errors as of `Visit.batch`, of this rank's samples; ranks may bring different numbers of them, and
        none. Multiply the mean loss by ``batch.weight``, as of ``batches``: what is trained is one process's batch of
        the samples of all ranks, in their order. A rank without samples gets the first one of another rank with weight
        0. Where no rank has any, the batch is empty on all.

        Collective: all ranks make equally many batches in a visit. Loaders that end at different batches: a rank whose
        loader has ended gives None in place of keys, and takes part as one without samples; where all give None the
        batch is None, on all ranks at once, and the visit is over:
        ``while (batch := visit.batch(next(loader, None))) is not None``. If a rank leaves the loop before the others,
        these raise RankError after torch's time-out.

        missing: as of `Visit.batch`; "load" has the row read by the ranks that own the key. What goes wrong on a rank
        is raised on all, RankError on the others; with KeyNotInPassError the batch does not count, and all may go on
        with another one. The index of keys is one of the whole pass on every rank, in what rows and mirrors leave of
        ``device_budget``.

        The batch counts when it is made, with the samples of all ranks: after a commit inside the visit training goes
        on behind ``start_batch`` batches, which are ``start_sample`` samples of all ranks.
        """
        return self._raw.batch(self._visit, keys, missing=missing, weights=weights, label=label, dense=dense)

    def note_loss(self, loss: float) -> None:
        """Add a loss of this rank to the visit's report."""
        self._visit.note_loss(loss)

    def _places(self, size: int, shuffle: bool) -> Iterator[tuple[NDArray[np.int64], Exception | None]]:
        """Yield the places of each global batch, or none with what went wrong on this rank: all ranks get to know."""
        found = self._visit.places(size, shuffle=shuffle)
        while True:
            try:
                yield next(found), None
            except StopIteration:
                return
            except Exception as error:  # told to all ranks
                yield np.empty(0, dtype=np.int64), error

    @property
    def _name(self) -> str:
        return f"a step of visit {self.index}"

    def __repr__(self) -> str:
        return f"ShardedVisit({self.index}, epoch={self.epoch}, pass={self.pass_index}, samples={self.num_samples:,})"


def _by_model(given: str) -> bool:
    if given not in ("data", "model"):
        raise ValueError(f"input {given!r} is unknown: it must be 'data' or 'model'")
    return given == "model"
