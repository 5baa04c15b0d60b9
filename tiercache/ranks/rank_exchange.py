"""RankExchange: the batches of one of several ranks, each with its samples and the rows that they look up."""

from __future__ import annotations

import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tiercache.errors import StateError
from tiercache.passes.samples import FeatureIds
from tiercache.ranks.bags import cut_bags
from tiercache.ranks.batch_ids import BatchIds
from tiercache.ranks.exchange import RowExchange
from tiercache.ranks.loaded_rows import RowLoader
from tiercache.ranks.pending_batches import Coming, PendingBatch, PendingBatches
from tiercache.ranks.pooling import Pooling
from tiercache.ranks.shares import Share
from tiercache.store.table import group_tables
from tiercache.tiers.rows import RowView
from tiercache.training.batch import Batch, make_batch
from tiercache.training.row_gradients import NOBODY_STEPS, RowGradients, ended_unstepped
from tiercache.training.scaled_loss import agree_on_overflow
from tiercache.training.table_module import poolings
from tiercache.training.threads import share_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    import torch
    from numpy.typing import NDArray
    from torch import nn

    from tiercache.backends.base import Backend
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.passes.samples import Samples
    from tiercache.passes.view import DatasetView
    from tiercache.ranks.exchange import Asked
    from tiercache.ranks.pooling import AskedBags
    from tiercache.tiers.rows import GroupRows
    from tiercache.training.batch import Pooled
    from tiercache.training.exchange import BatchRequest
    from tiercache.training.live_rows import LiveRows
    from tiercache.training.raw_samples import RawSamples
    from tiercache.training.row_optimizer import RowOptimizer

__all__ = ["RankExchange"]


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """This rank's part of a batch, before its rows are asked for."""

    samples: Samples | None = None
    own: list[dict[str, FeatureIds]] | None = None
    """By rank, of its samples: ids of the features that this rank pools, where owners read them."""
    modes: Mapping[str, str | None] = field(default_factory=dict)
    """How each feature is looked up."""
    weight: float = 1.0
    token: int = 0
    """Says which of the global batches it is of: of ranks that ask for different ones none trains."""
    upload: ClassVar[None] = None
    """Nothing was brought yet."""


def parts_of(places: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Divide places into ``count`` neighboring parts, as equal as can be: part i is [i * n // count, ...)."""
    n = places.size
    return [places[i * n // count : (i + 1) * n // count] for i in range(count)]


def exchange_thread(backend: Backend) -> ThreadPoolExecutor:
    """Return the one thread on which batches of a cache are made, or asked for, one after the other."""

    def enter() -> None:
        backend.streams.enter_thread()
        share_threads()  # as many threads of the kernels as training has: else they would use all cores here

    return ThreadPoolExecutor(1, thread_name_prefix="tiercache-exchange", initializer=enter)


class RankExchange:
    """Makes batches whose rows were brought from their owners. All ranks make the same batches in the same order.

    On a thread of their own, the same for the batches of an evaluation, so that no two exchanges meet on one process
    group, they are asked for, which is work of the host. On a CPU they are brought there too. On a GPU the training
    thread queues that, on a stream beside its own: so all ranks queue what travels in one order, their own collectives
    and those of the user's model, without which each might wait for another one of the others.
    """

    def __init__(
        self,
        ranks: AnyCommunicator,
        beside: AnyCommunicator,
        share: Share,
        backend: Backend,
        optimizer: RowOptimizer,
        live_rows: Callable[..., LiveRows],
        modules: Sequence[nn.Module],
        *,
        comm_dtype: torch.dtype,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """beside: the same ranks, for batches alone. optimizer: of this rank's groups; its gradients are stepped.

        live_rows: a method of the cache that has this, which it does not keep alive: a reader of this rank's rows.
        modules: features that none of these looks up are not brought.
        """
        self.ranks, self._beside, self._share, self._backend = ranks, beside, share, backend
        self._optimizer, self._modules, self._comm_dtype = optimizer, modules, comm_dtype
        self._live_rows = weakref.WeakMethod(live_rows)
        whole = share.whole
        groups = group_tables(whole.tables)
        self.rows = RowExchange(beside, backend, groups, share.groups_W[share.rank], wire_dtype=comm_dtype)
        self.pooling = Pooling(self.rows, backend, whole.schema.features)
        self._loader = RowLoader(share, self._own_rows, ranks)
        self._tables = {feature.name: feature.table for feature in whole.schema.features}
        self._weighted = {feature.name for feature in whole.schema.features if feature.weights is not None}
        self._is_mine = thread is None
        self._thread = exchange_thread(backend) if thread is None else thread
        self._pending = PendingBatches()

    @property
    def pending(self) -> bool:
        """Whether a backward was not stepped yet."""
        return self._pending.pending

    @property
    def ended_unstepped(self) -> str:
        """What is said where a pass ends in between."""
        return ended_unstepped(sum(one.pending for one in self._pending.batches))

    @property
    def bytes_sent(self) -> int:
        """Bytes that left this rank for others so far, for batches of trainings and their steps."""
        return self.rows.bytes_sent

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of mirrors of replicated tables."""
        return self.rows.mirror_bytes

    def open(self, sub_dataset: int, rows: RowView) -> None:
        """Begin with a pass, of which this rank owns ``rows``; without gradients nothing of it is mirrored."""
        owners = self._share.owners(sub_dataset)
        self.rows.open_pass(owners, rows.groups, mirrored=rows.gradients is not None)
        self.pooling.open(owners, rows.groups)

    def end_pass(self) -> None:
        """Wait for what is on its way. Raises RankError where others asked for rows that this rank has not."""
        self.rest()
        self.rows.bounds.check()

    # -- batches ------------------------------------------------------------------------------------------

    def read(self, request: BatchRequest, rows: RowView, *, ahead: bool, by_owner: bool = False) -> Callable[[], Any]:
        """Return what reads this rank's part of the samples of ``request``.

        Rank r of W has samples [r * N // W, (r + 1) * N // W) of the N; its mean loss counts W * n / the samples of the
        step. A rank without samples gets the first of all with weight 0, so that it takes part in everything. by_owner:
        features that owners of tables pool are read there, for all ranks.
        """
        modes = poolings(self._modules, self._tables)  # here: at the same batch on all ranks

        def read() -> _Read:
            rank, size, source = self.ranks.rank, self.ranks.size, request.source
            parts_W = parts_of(request.places, size)
            read_W = [part if part.size else request.places[:1] for part in parts_W]
            weight = size * (parts_W[rank].size / request.step_samples)
            token = zlib.crc32(request.places.tobytes())
            if not by_owner:
                every = len(modes) == len(self._tables)
                samples = source.read(read_W[rank]) if every else source.read(read_W[rank], features=modes)
                return _Read(samples, None, modes, weight, token)
            elsewhere = self.pooling.by_model(modes)
            own = [one.name for one in elsewhere if any(owner.rank == rank for owner in one.owners)]
            found = source.read(np.concatenate(read_W), features=own).ids if own else {}
            samples = source.read(read_W[rank], features=modes.keys() - {one.name for one in elsewhere})
            return _Read(samples, cut_bags(found, [some.size for some in read_W]), modes, weight, token)

        return read

    def finish(self, read: Callable[[], Any], rows: RowView, *, by_owner: bool = False) -> Batch:
        """Return the batch with its rows. Whatever ``read`` raises is raised, on the others as RankError."""
        return self._received(self._begin(read, rows, by_owner).result())

    def overlapped(
        self, reads: Iterator[Callable[[], Any]], rows: RowView, *, by_owner: bool = False
    ) -> Iterator[Batch]:
        """Yield batches, each of which is brought while the one before is used.

        Where the training thread queues that, the one behind it is asked for in the meantime.
        """
        asked: Future[Coming] | None = None
        brought: Coming | None = None
        for read in reads:
            coming = None if asked is None else asked.result()  # where it failed, no rank begins another
            if coming is not None and self._backend.queues:
                behind, coming = self._brought(coming), brought
                brought = behind
            asked = self._begin(read, rows, by_owner)  # behind what was queued: one thread tells others at a time
            if coming is not None:
                yield self._received(coming)
        if asked is not None:
            last = self._brought(asked.result())
            if brought is not None:
                yield self._received(brought)
            yield self._received(last)

    def _begin(self, read: Callable[[], Any], rows: RowView, by_owner: bool) -> Future[Coming]:
        return self._thread.submit(lambda: self._coming(self._ask(read, rows, by_owner)))

    def _coming(self, bring: Callable[[], tuple[Batch, PendingBatch]]) -> Coming:
        coming = Coming(bring, self._backend)
        return coming if self._backend.queues else self._brought(coming)

    def _ask(self, read: Callable[[], Any], rows: RowView, by_owner: bool) -> Callable[[], tuple[Batch, PendingBatch]]:
        """Ask for the rows of this rank's samples, and return what brings them."""
        error: Exception | None = None
        mine = _Read(own=[{} for _ in range(self.ranks.size)] if by_owner else None)
        try:
            mine = read()  # of samples; rows are asked for below
        except Exception as caught:  # told to all ranks
            error = caught
        trained = rows.gradients is not None
        name = f"a step of {rows.name}" if trained else rows.name
        samples = mine.samples
        bags, asked = self._ask_rows(
            samples.ids if samples else {}, samples.num_samples if samples else 1, name, mine.modes, mine.modes,
            own=mine.own, trained=trained, error=error, token=mine.token,
        )  # fmt: skip
        assert samples is not None, "ask raises the error"
        return partial(self._bring, bags, asked, partial(make_batch, samples, weight=mine.weight), trained=trained)

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
        bags, error = self.pooling.ask(
            ids, whole, num_samples, name, own=own, trained=trained, error=error, token=token
        )
        elsewhere = bags.modes if bags else {}
        ids = {name: some for name, some in ids.items() if name in modes and name not in elsewhere}
        return bags, self.rows.ask(ids, self._tables, name, error, token=token)

    def _bring(
        self, bags: AskedBags | None, asked: Asked, finish: Callable[..., Batch], *, trained: bool = True
    ) -> tuple[Batch, PendingBatch]:
        """Have rows brought and bags pooled."""
        groups, exchanged = self.rows.answer(asked)  # first: it knows whether the pass is still open
        pooled = self.pooling.answer(bags) if bags else None
        gradients = RowGradients(len(groups), self._optimizer.tracers)
        view = RowView(groups, gradients if trained else None, asked.where, self._backend)
        elsewhere = pooled.features if pooled else {}
        batch = finish(view, ids=self._named(asked.ids, elsewhere), pooled=elsewhere)
        return batch, PendingBatch(exchanged, pooled, gradients, view)

    def _brought(self, coming: Coming) -> Coming:
        """Return it when it was brought, as it may have been before."""
        if not coming.is_brought:
            self._pending.add(coming.bring())
        return coming

    def _received(self, coming: Coming) -> Batch:
        if not self._optimizer.tracers.is_stepped and self.pending:
            raise StateError(NOBODY_STEPS)
        return self._brought(coming).receive()

    # -- raw keys -----------------------------------------------------------------------------------------

    def tell(self, mine: Sequence[int], what: str, error: Exception | None) -> list[list[int]]:
        """Return the numbers of every rank, which are all doing ``what``; where a rank has an error, all raise."""
        self.rest()
        told = self._beside.exchange_splits(np.array([[*mine, error is not None]] * self.ranks.size, np.int64), what)
        if told[:, -1].any():
            self._beside.agree(what, error)
        return [[int(number) for number in row[:-1]] for row in told]

    def raw(
        self, samples: RawSamples, rows: RowView, name: str, weight: float
    ) -> tuple[Batch, dict[str, NDArray[np.int32]] | None]:
        """Return the batch of samples that a loader gave, and ids of its keys where the pass lacks some.

        Features with keys that the pass lacks are not pooled by their owners; nor those whose weights are not as the
        schema says.
        """
        places = samples.places()
        lacking = {name for name, found in places.items() if found.size and int(found.min()) < 0}
        there = {name: found[found >= 0] if name in lacking else found for name, found in places.items()}
        ids = {name: FeatureIds(there[name], one.offsets, one.weights) for name, one in samples.features.items()}

        def made(rows: RowView, *, ids: Mapping[str, FeatureIds], pooled: Mapping[str, Pooled]) -> Batch:
            return Batch(samples.label, samples.dense, ids, rows, samples.num_samples, weight, pooled)

        def begin() -> Coming:
            modes = poolings(self._modules, self._tables)
            whole = {
                feature: mode
                for feature, mode in modes.items()
                if feature not in lacking and (ids[feature].weights is not None) == (feature in self._weighted)
            }
            return self._coming(
                partial(self._bring, *self._ask_rows(ids, samples.num_samples, name, modes, whole), made)
            )

        batch = self._received(self._thread.submit(begin).result())
        if not lacking & batch.ids.keys():
            return batch, None
        return batch, {name: _found(places[name], some.ids) for name, some in batch.ids.items()}

    def used(self, samples: RawSamples) -> RawSamples:
        """Return samples with the features that some module looks up."""
        used = poolings(self._modules, self._tables)
        return replace(samples, features={name: one for name, one in samples.features.items() if name in used})

    def named(self, batch: Batch) -> Batch:
        """Return a batch whose ids say of every other feature why they lack it."""
        return replace(batch, ids=self._named(batch.ids, batch.pooled))  # type: ignore[arg-type]  # all are FeatureIds

    def _named(self, ids: Mapping[str, FeatureIds], pooled: Mapping[str, Pooled]) -> BatchIds:
        return BatchIds(ids, {feature: one.mode for feature, one in pooled.items()}, self._tables)

    # -- rows as of now -----------------------------------------------------------------------------------

    def load(self, keys: Callable[[], Mapping[str, NDArray[np.int64]]], budget: int | None = None) -> Any:
        """Return a reader of rows as of now, of ``keys`` by table, which their owners read."""
        return self._loader.load(keys(), budget)

    def live_rows(self) -> LiveRows:
        """Return a reader of this rank's rows as of now, that knows the out-of-vocabulary rows of all."""
        return self._loader.live_rows()

    def _own_rows(self, *unknown: Any) -> LiveRows:
        live_rows = self._live_rows()
        assert live_rows is not None, "rows were asked for of a cache that is gone"
        return live_rows(*unknown)

    def evaluating(self, passes: DatasetView) -> RankExchange:
        """Return an exchange for batches of this rank's share of other passes, on the same thread."""
        assert isinstance(passes, Share)
        return RankExchange(
            self.ranks, self._beside, passes, self._backend, self._optimizer, self._own_rows, self._modules,
            comm_dtype=self._comm_dtype, thread=self._thread,
        )  # fmt: skip

    # -- the step -----------------------------------------------------------------------------------------

    def step(self, rows: Sequence[GroupRows], optimizer: torch.optim.Optimizer | None) -> None:
        """Apply the pending row gradients of all ranks to the rows that this one owns, as `LocalExchange.step`.

        Duplicates are added in the order of batches, in each by rank.
        """
        self.rest()
        into, taken = self._optimizer.gradients, self._pending.take()
        factors = self._optimizer.begin_step((mark for one in taken for mark in one.marks), optimizer)
        for one in taken:
            one.settle(factors)
            self.rows.gradients_of(one.exchanged, one.gradients, into)
            if one.pooled is not None:
                self.pooling.gradients_of(one.pooled, into)
            one.gradients.clear_settled()
        self._pending.put_back(taken)
        self.rows.step(self._optimizer, rows)
        for tracer in factors:
            tracer.clear()

    def clip(
        self, max_norm: float, optimizer: torch.optim.Optimizer | None, *, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Clip gradients, as `SteppedCache.clip_grad_norm_` says. Collective.

        The gradients of rows meet at their owners to be measured, and once more at the step.
        """
        self.rest()
        waiting = self._pending.batches
        factors = self._optimizer.tracers.factors((mark for one in waiting for mark in one.marks), optimizer)
        into = RowGradients(len(self._optimizer.gradients.pending))
        for one in waiting:
            self.rows.gradients_of(one.exchanged, one.applied(factors), into)
            if one.pooled is not None:
                self.pooling.gradients_of(one.pooled, into)
        self.rows.discard()
        mine = self._optimizer.squared_norm(into.pending)
        squares = self._beside.all_gather(mine.view(1), [1] * self.ranks.size, "adding up the norms of gradients").sum()
        return self._optimizer.clip(max_norm, optimizer, factors, squares, error_if_nonfinite=error_if_nonfinite)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Have all ranks skip a step in which the gradients of one overflow."""
        agree_on_overflow(optimizer, self._agree_on_overflow)

    def _agree_on_overflow(self, optimizer: torch.optim.Optimizer, found: torch.Tensor) -> None:
        self.rest()
        flags = self._beside.all_gather(found.view(1), [1] * self.ranks.size, "looking for gradients that overflow")
        found.copy_(flags.max())
        self._optimizer.tracers.drop_overflowed(optimizer, found)

    def leave(self, where: str) -> None:
        """Give up the gradients that the step of another optimizer left, as ``where`` ends."""
        self._pending.leave(where)

    def discard(self) -> None:
        """Drop the pending row gradients. Not collective."""
        self.rest()
        self._pending.discard()
        self._optimizer.discard()
        self.rows.discard()

    def rest(self) -> None:
        """Wait until no batch is being made; what comes behind this comes behind those that were brought."""
        self._thread.submit(lambda: None).result()
        self._backend.streams.receive(self._backend.streams.exchanged(), ())

    def close(self) -> None:
        """End the thread, and let go of the rows."""
        if self._is_mine:
            self._thread.shutdown()
        self.rows.close()
        self.pooling.close()


def _found(places: NDArray[np.int32], rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the rows of a batch that its keys are, -1 where the pass lacks them."""
    found = np.full(places.size, -1, np.int32)
    found[places >= 0] = rows
    return found
