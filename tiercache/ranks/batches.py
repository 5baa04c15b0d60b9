"""This rank's batches: its samples of each global batch, with the rows that they look up."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tiercache.errors import StateError
from tiercache.ranks.bags import cut_bags
from tiercache.ranks.batch_ids import BatchIds
from tiercache.tiers.rows import RowView
from tiercache.training.batch import make_batch
from tiercache.training.embedding import poolings
from tiercache.training.row_optimizer import NOBODY_STEPS, RowGradients
from tiercache.training.threads import share_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from tiercache.backends.base import Backend
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.passes.passset import Pass
    from tiercache.passes.samples import FeatureIds, Samples
    from tiercache.ranks.exchange import Asked, Exchanged, RowExchange
    from tiercache.ranks.pooling import AskedBags, PooledBatch, Pooling
    from tiercache.schema import Schema
    from tiercache.training.batch import Batch, Pooled

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


class Coming:
    """A batch on its way: asked for, then brought, then received. Asked for where this is made."""

    def __init__(self, bring: Callable[[], tuple[Batch, Due]], backend: Backend) -> None:
        self._bring, self._backend = bring, backend
        self._brought: tuple[Batch, Due] | None = None
        self._exchanged: Any = None

    @property
    def is_brought(self) -> bool:
        """Whether ``bring`` was called."""
        return self._brought is not None

    def bring(self) -> Due:
        """Have its rows brought; beside the training that comes behind this, where the backend queues its work."""
        with self._backend.streams.exchanging():
            self._brought = self._bring()
        self._exchanged = self._backend.streams.exchanged()
        return self._brought[1]

    def receive(self) -> Batch:
        """Return it; what is done with it comes behind its being brought. On the training thread."""
        assert self._brought is not None, "a batch is received that was not brought"
        batch, due = self._brought
        made = tensors_of((batch.label, batch.dense, batch.rows.groups, due)) if self._backend.queues else []
        self._backend.streams.receive(self._exchanged, made)
        return batch


def tensors_of(found: object) -> list[torch.Tensor]:
    """Return the tensors that tuples, lists, dictionaries and dataclasses hold, however deep."""
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, dict):
        return tensors_of(list(found.values()))
    if isinstance(found, tuple | list):
        return [tensor for one in found for tensor in tensors_of(one)]
    if is_dataclass(found):
        return tensors_of([getattr(found, one.name) for one in fields(found)])
    return []


def exchange_thread(backend: Backend) -> ThreadPoolExecutor:
    """Return the one thread on which batches of a cache are made, or asked for, one after the other."""

    def enter() -> None:
        backend.streams.enter_thread()
        share_threads()  # as many threads of the kernels as training has: else they would use all cores here

    return ThreadPoolExecutor(1, thread_name_prefix="tiercache-exchange", initializer=enter)


class BatchMaker:
    """Makes batches whose rows were brought from their owners. All ranks make the same batches in the same order.

    On a thread of their own, the same for all makers of a cache, so that no two exchanges meet on one process group,
    they are asked for, which is work of the host. On a CPU they are brought there too. On a GPU the training thread
    queues that, on a stream beside its own: so all ranks queue what travels in one order, their own collectives and
    those of the user's model, without which each might wait for another one of the others. Everything here is called on
    the thread that trains.
    """

    def __init__(
        self,
        ranks: AnyCommunicator,
        exchange: RowExchange,
        pooling: Pooling,
        schema: Schema,
        modules: Sequence[nn.Module],
        backend: Backend,
        thread: ThreadPoolExecutor,
    ) -> None:
        """modules: features that none of these looks up are not brought."""
        self._ranks, self._exchange, self._pooling, self._backend = ranks, exchange, pooling, backend
        self._modules = modules
        self._tables = {feature.name: feature.table for feature in schema.features}
        self._weighted = {feature.name for feature in schema.features if feature.weights is not None}
        self._thread = thread
        self.due: list[Due] = []
        """Batches made since the last step, in order."""
        self.is_stepped = False
        """Whether an optimizer is tracked, or a step was taken."""

    def make(self, source: Pass, places: NDArray[np.int64], name: str, **options: Any) -> Batch:
        """Make a batch, as ``_ask`` describes it."""
        return self._received(self.begin(source, places, name, **options).result())

    def begin(self, source: Pass, places: NDArray[np.int64], name: str, **options: Any) -> Future[Coming]:
        """Begin to make a batch, as ``_ask`` describes it."""
        return self._thread.submit(self._begin, source, places, name, options)

    def _begin(self, source: Pass, places: NDArray[np.int64], name: str, options: dict[str, Any]) -> Coming:
        return self._coming(self._ask(source, places, name, **options))

    def _coming(self, bring: Callable[[], tuple[Batch, Due]]) -> Coming:
        coming = Coming(bring, self._backend)
        return coming if self._backend.queues else self._brought(coming)

    def _ask(
        self,
        source: Pass,
        places: NDArray[np.int64],
        name: str,
        *,
        of: int | None = None,
        trained: bool = True,
        by_model: bool = False,
        error: Exception | None = None,
    ) -> Callable[[], tuple[Batch, Due]]:
        """Read this rank's part of the samples at ``places`` and ask for their rows; return what brings these.

        Both are collective. Rank r of W has samples [r * N // W, (r + 1) * N // W) of the N; its mean loss counts
        W * n / ``of`` (N where not said). A rank without samples gets the first of all with weight 0, so that it takes
        part in everything. by_model: features that owners of tables pool are read there, for all ranks. An ``error`` of
        this rank so far, or of the reading of samples, is raised on all.
        """
        parts_W = parts_of(places, self._ranks.size)
        read_W = [part if part.size else places[:1] for part in parts_W]
        mine, modes = parts_W[self._ranks.rank], poolings(self._modules, self._tables)
        samples: Samples | None = None
        own: list[dict[str, FeatureIds]] | None = [{} for _ in read_W] if by_model else None
        if error is None:
            try:
                samples, own = self._read(source, read_W, modes, by_model=by_model)
            except Exception as caught:  # told to all ranks
                error = caught
        token = zlib.crc32(places.tobytes())  # of ranks that ask for different batches none trains
        bags, rows = self._ask_rows(
            samples.ids if samples else {}, max(mine.size, 1), name, modes, modes, own=own, trained=trained,
            error=error, token=token,
        )  # fmt: skip
        assert samples is not None, "ask raises the error"
        weight = self._ranks.size * (mine.size / (places.size if of is None else of))
        return partial(self._bring, bags, rows, partial(make_batch, samples, weight=weight), trained=trained)

    def make_raw(
        self, ids: Mapping[str, FeatureIds], num_samples: int, name: str, finish: Callable[..., Batch], *,
        lacking: Collection[str],
    ) -> Batch:  # fmt: skip
        """Make the batch of samples that a loader gave this rank. Collective.

        ids: local ids of the pass, by feature; those of ``lacking`` features are not all that their samples have, so
        their owners do not pool them; nor those whose weights are not as the schema says. finish: makes the batch of
        its rows, ``ids`` of them and what is ``pooled``.
        """
        return self._received(self._thread.submit(self._begin_raw, ids, num_samples, name, finish, lacking).result())

    def _begin_raw(
        self, ids: Mapping[str, FeatureIds], num_samples: int, name: str, finish: Callable[..., Batch],
        lacking: Collection[str],
    ) -> Coming:  # fmt: skip
        modes = poolings(self._modules, self._tables)
        whole = {
            feature: mode
            for feature, mode in modes.items()
            if feature not in lacking and (ids[feature].weights is not None) == (feature in self._weighted)
        }
        return self._coming(partial(self._bring, *self._ask_rows(ids, num_samples, name, modes, whole), finish))

    def _ask_rows(
        self,
        ids: Mapping[str, FeatureIds],
        num_samples: int,
        name: str,
        modes: Mapping[str, str | None],
        whole: Mapping[str, str | None],
        *,
        own: list[dict[str, FeatureIds]] | None = None,
        trained: bool = True,
        error: Exception | None = None,
        token: int = 0,
    ) -> tuple[AskedBags | None, Asked]:
        """Ask for features to be pooled, of those that ``whole`` has, and for the rows of all others in ``modes``."""
        bags, error = self._pooling.ask(
            ids, whole, num_samples, name, own=own, trained=trained, error=error, token=token
        )
        elsewhere = bags.modes if bags else {}
        ids = {name: some for name, some in ids.items() if name in modes and name not in elsewhere}
        return bags, self._exchange.ask(ids, self._tables, name, error, token=token)

    def _bring(
        self, bags: AskedBags | None, asked: Asked, finish: Callable[..., Batch], *, trained: bool = True
    ) -> tuple[Batch, Due]:
        """Have rows brought and bags pooled."""
        groups, exchanged = self._exchange.answer(asked)  # first: it knows whether the pass is still open
        pooled = self._pooling.answer(bags) if bags else None
        gradients = RowGradients(len(groups))
        gradients.is_stepped = self.is_stepped
        view = RowView(groups, gradients if trained else None, asked.where, self._backend)
        elsewhere = pooled.features if pooled else {}
        batch = finish(view, ids=self.named(asked.ids, elsewhere), pooled=elsewhere)
        return batch, Due(exchanged, pooled, gradients, view)

    def named(self, ids: Mapping[str, FeatureIds], pooled: Mapping[str, Pooled]) -> BatchIds:
        """Return ids of a batch that say of every other feature why they lack it."""
        return BatchIds(ids, {feature: one.mode for feature, one in pooled.items()}, self._tables)

    def used(self) -> Collection[str]:
        """Return the features that some module looks up; all where there is no module."""
        return poolings(self._modules, self._tables)

    def _brought(self, coming: Coming) -> Coming:
        """Return it when it was brought, as it may have been before."""
        if not coming.is_brought:
            due = coming.bring()
            if due.view.gradients is not None:
                self.due.append(due)
        return coming

    def _received(self, coming: Coming) -> Batch:
        if not self.is_stepped and self.pending:
            raise StateError(NOBODY_STEPS)
        return self._brought(coming).receive()

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

    def ahead(self, begins: Iterable[Callable[[], Future[Coming]]], schedule: str) -> Iterator[Batch]:
        """Yield the batches that ``begins`` begin; "interleaved": each is brought while the one before is used.

        Where the training thread queues that, the one behind it is asked for in the meantime.
        """
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r} is unknown: it must be one of {', '.join(SCHEDULES)}")
        asked: Future[Coming] | None = None
        brought: Coming | None = None
        for begin in begins:
            if schedule == "simple":
                yield self._received(begin().result())
                continue
            coming = None if asked is None else asked.result()  # where it failed, no rank begins another
            if coming is not None and self._backend.queues:
                behind, coming = self._brought(coming), brought
                brought = behind
            asked = begin()  # behind what was queued: no two threads of a rank tell others something at a time
            if coming is not None:
                yield self._received(coming)
        if asked is not None:
            last = self._brought(asked.result())
            if brought is not None:
                yield self._received(brought)
            yield self._received(last)

    def rest(self) -> None:
        """Wait until no batch is being made; what comes behind this comes behind those that were brought."""
        self._thread.submit(lambda: None).result()
        self._backend.streams.receive(self._backend.streams.exchanged(), ())

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
