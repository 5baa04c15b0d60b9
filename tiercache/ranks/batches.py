"""This rank's batches: its samples of each global batch, with the rows that they look up."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.ranks.bags import cut_bags
from tiercache.ranks.batch_ids import BatchIds
from tiercache.tiers.rows import RowView
from tiercache.training.batch import make_batch
from tiercache.training.row_optimizer import RowGradients
from tiercache.training.threads import share_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from tiercache.passes.passset import Pass
    from tiercache.passes.samples import FeatureIds, Samples
    from tiercache.processors.processor import Processor
    from tiercache.ranks.exchange import Exchanged, RowExchange
    from tiercache.ranks.group import Ranks
    from tiercache.ranks.pooling import PooledBatch, Pooling
    from tiercache.schema import Schema
    from tiercache.training.batch import Batch
    from tiercache.training.uses import Uses

SCHEDULES = ("interleaved", "simple")


def parts_of(places: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Divide places into ``count`` neighbouring parts, as equal as can be: part i is [i * n // count, ...)."""
    n = places.size
    return [places[i * n // count : (i + 1) * n // count] for i in range(count)]


@dataclass(frozen=True, slots=True)
class Due:
    """A batch that waits for its step."""

    exchanged: Exchanged
    pooled: PooledBatch | None
    gradients: RowGradients
    view: RowView

    @property
    def pending(self) -> bool:
        """Whether a backward left something."""
        found = self.pooled.features.values() if self.pooled else ()
        return any(self.gradients.pending) or any(one.gradients for one in found)


def exchange_thread() -> ThreadPoolExecutor:
    """Return the one thread on which all batches of a cache are made, one after the other."""
    # with as many threads of the kernels as training has: else they would use all cores there
    return ThreadPoolExecutor(1, thread_name_prefix="tiercache-exchange", initializer=share_threads)


class BatchMaker:
    """Makes batches whose rows were brought from their owners. All ranks make the same batches in the same order.

    They are made on a thread of their own, the same for all makers of a cache, so that no two exchanges meet on one
    process group; everything here is called on the thread that trains.
    """

    def __init__(
        self,
        ranks: Ranks,
        exchange: RowExchange,
        pooling: Pooling,
        schema: Schema,
        uses: Uses,
        processor: Processor,
        thread: ThreadPoolExecutor,
    ) -> None:
        """uses: features that no module looks up are not brought."""
        self._ranks, self._exchange, self._pooling, self._processor = ranks, exchange, pooling, processor
        self._uses = uses
        self._tables = {feature.name: feature.table for feature in schema.features}
        self._thread = thread
        self.due: list[Due] = []
        """Batches made since the last step, in order."""

    def begin(self, source: Pass, places: NDArray[np.int64], name: str, **options: Any) -> Future[Batch]:
        """Begin to make a batch, as ``_make`` describes it."""
        return self._thread.submit(self._make, source, places, name, **options)

    def _make(
        self,
        source: Pass,
        places: NDArray[np.int64],
        name: str,
        *,
        of: int | None = None,
        trained: bool = True,
        by_model: bool = False,
        error: Exception | None = None,
    ) -> Batch:
        """Bring this rank's part of the samples at ``places`` and their rows. Collective.

        Rank r of W has samples [r * N // W, (r + 1) * N // W) of the N; its mean loss counts W * n / ``of`` (N where
        not said). A rank without samples gets the first of all with weight 0, so that it takes part in everything.
        by_model: features that owners of tables pool are read there, for all ranks. An ``error`` of this rank so far,
        or of the reading of samples, is raised on all.
        """
        parts_W = parts_of(places, self._ranks.size)
        read_W = [part if part.size else places[:1] for part in parts_W]
        mine, modes = parts_W[self._ranks.rank], self._uses.modes(self._tables)
        samples: Samples | None = None
        own: list[dict[str, FeatureIds]] | None = [{} for _ in read_W] if by_model else None
        if error is None:
            try:
                samples, own = self._read(source, read_W, modes, by_model=by_model)
            except Exception as caught:  # told to all ranks
                error = caught
        ids = samples.ids if samples else {}
        token = zlib.crc32(places.tobytes())  # of ranks that ask for different batches none trains
        pooled, error = self._pooling.pool(
            ids, modes, max(mine.size, 1), name, own=own, trained=trained, error=error, token=token
        )
        elsewhere = pooled.features if pooled else {}
        ids = {name: some for name, some in ids.items() if name in modes and name not in elsewhere}
        groups, brought, exchanged = self._exchange.rows_of(ids, self._tables, name, error, token=token)
        assert samples is not None, "rows_of raises the error"
        view = RowView(groups, RowGradients(len(groups)) if trained else None, name, self._processor)
        if view.gradients is not None:
            self.due.append(Due(exchanged, pooled, view.gradients, view))
        here = BatchIds(brought, {feature: one.mode for feature, one in elsewhere.items()}, self._tables)
        share = mine.size / (places.size if of is None else of)
        return make_batch(samples, view, ids=here, weight=self._ranks.size * share, pooled=elsewhere)

    def _read(
        self, source: Pass, read_W: Sequence[NDArray[np.int64]], modes: Mapping[str, str | None], *, by_model: bool
    ) -> tuple[Samples, list[dict[str, FeatureIds]] | None]:
        """Return this rank's samples; by model also, by rank, the ids of features whose tables this rank owns."""
        rank = self._ranks.rank
        if not by_model:
            mine, every = read_W[rank], len(modes) == len(self._tables)
            return (source.read(mine) if every else source.read(mine, features=modes)), None
        elsewhere = self._pooling.by_model(modes)
        own = [one.name for one in elsewhere if any(owner.rank == rank for owner in one.owners)]
        left = modes.keys() - {one.name for one in elsewhere}
        found = source.read(np.concatenate(read_W), features=own).ids if own else {}
        return source.read(read_W[rank], features=left), cut_bags(found, [some.size for some in read_W])

    def ahead(self, begins: Iterable[Callable[[], Future[Batch]]], schedule: str) -> Iterator[Batch]:
        """Yield the batches that ``begins`` begin; "interleaved": each is made while the one before is used."""
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r} is unknown: it must be one of {', '.join(SCHEDULES)}")
        coming: Future[Batch] | None = None
        for begin in begins:
            if schedule == "simple":
                yield begin().result()
                continue
            made = None if coming is None else coming.result()  # where it failed, no rank begins another
            coming = begin()
            if made is not None:
                yield made
        if coming is not None:
            yield coming.result()

    def rest(self) -> None:
        """Wait until no batch is being made."""
        self._thread.submit(lambda: None).result()

    @property
    def pending(self) -> bool:
        """Whether a backward was not stepped yet."""
        return any(due.pending for due in self.due)

    def take_due(self) -> list[Due]:
        """Return the batches that wait for a step; their rows are of before it and can be looked up no more."""
        self.rest()
        taken, self.due = self.due, []
        for due in taken:
            due.view.ended = True
        return taken
