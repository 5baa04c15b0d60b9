"""RankExchange: the batches of one of several ranks, each with its samples and the rows that they look up."""

from __future__ import annotations

import weakref
import zlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.dist.exchange import RowExchange
from tiercache.dist.pooled import pooled_by_owner, split_by_rank
from tiercache.dist.pooled_output import PooledOutputDist
from tiercache.dist.requests import InputDist, LocalInput
from tiercache.dist.row_loader import LocalRows, RowLoader
from tiercache.dist.shard_view import ShardView
from tiercache.errors import StateError
from tiercache.rows.threads import share_threads
from tiercache.store.table import group_tables
from tiercache.train.batch_rows import BatchIds, BatchRows, ExchangedBatch, tensors_of
from tiercache.train.row_gradients import NOBODY_STEPS, ended_unstepped
from tiercache.train.row_view import make_batch
from tiercache.train.table_module import poolings
from tiercache.values.batch import Batch
from tiercache.values.ids import FeatureIds
from tiercache.values.torch_internals import overflow_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from numpy.typing import NDArray
    from torch import nn

    from tiercache.data.dataset import DatasetView
    from tiercache.data.sub_dataset import EncodedBatch
    from tiercache.dist.communicator import Communicators
    from tiercache.dist.requests import InputLayout
    from tiercache.rows.backends.base import Backend
    from tiercache.train.raw_samples import RawSamples
    from tiercache.train.row_optimizer import RowOptimizer
    from tiercache.train.row_view import Pooled, RowView
    from tiercache.values.batch import BatchRequest
    from tiercache.values.lookups import GroupGradients, GroupRows, Unseen


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """This rank's part of a batch, before the ranks exchange it."""

    samples: EncodedBatch | None
    local: LocalInput
    weight: float = 1.0
    end: int = 0  # end of the batch in samples of the pass, over all ranks


def parts_of(places: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Divide positions into ``count`` neighboring parts, as equal as possible: part i begins at i * n // count."""
    n = places.size
    return [places[i * n // count : (i + 1) * n // count] for i in range(count)]


def _thread(name: str, backend: Backend) -> ThreadPoolExecutor:
    """Return a thread for one task at a time, which starts with the first."""

    def enter() -> None:
        backend.streams.enter_thread()
        share_threads()  # as many kernel threads as training uses: else they would use all cores here

    return ThreadPoolExecutor(1, thread_name_prefix=f"tiercache-{name}", initializer=enter)


class RankExchange:
    """Makes batches with rows from their owners. All ranks make the same batches in the same order.

    Input dist: samples are read, and owners receive the requests for rows; on a thread and over separate process
    groups, so it runs ahead, also for the next pass. Output dist: rows are exchanged when a module first looks up the
    batch. Micro-batches and evaluations exchange rows while the previous batch is used: on a CPU on another thread, on
    a GPU on a second stream. So all ranks queue all collectives in one order; otherwise they could deadlock.
    """

    least_ahead = 1  # batches whose inputs are exchanged ahead by default

    def __init__(
        self,
        communicators: Communicators,
        shard_view: ShardView,
        backend: Backend,
        optimizer: RowOptimizer,
        live_rows: Callable[..., LocalRows],
        modules: Sequence[nn.Module],
        *,
        comm_dtype: torch.dtype,
        threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None,
    ) -> None:
        """live_rows: a method of the cache, held weakly; modules: only features that they look up are exchanged."""
        self._communicators, self._shard_view, self._backend = communicators, shard_view, backend
        self.ranks, self._exchange_ranks = communicators.control, communicators.exchange
        self._optimizer, self._modules, self._comm_dtype = optimizer, modules, comm_dtype
        self._live_rows = weakref.WeakMethod(live_rows)
        whole = shard_view.whole
        groups = group_tables(whole.tables)
        self.num_groups = len(groups)
        self.input_dist = InputDist(communicators.input, groups, whole.schema.features, comm_dtype)
        part_groups = shard_view.groups_W[shard_view.rank]
        self.rows = RowExchange(communicators.exchange, backend, groups, part_groups, wire_dtype=comm_dtype)
        self.pooling = PooledOutputDist(self.rows, backend)
        self._loader = RowLoader(shard_view, self._own_rows, self.ranks)
        self.live_rows = self._loader.live_rows  # of this rank, with the out-of-vocabulary rows of all ranks
        self._tables = {feature.name: feature.table for feature in whole.schema.features}
        self._weighted = {feature.name for feature in whole.schema.features if feature.weights is not None}
        self._owns_threads = threads is None
        self._input_thread, self._row_thread = threads or (_thread("input", backend), _thread("exchange", backend))
        """They exchange the inputs of batches, and on a CPU rows during training."""
        self._layouts: weakref.WeakKeyDictionary[RowView, InputLayout] = weakref.WeakKeyDictionary()
        self._pending: list[BatchRows] = []  # those since the last step, with gradients that backward left

    @property
    def pending(self) -> bool:
        """True if a backward was not stepped yet."""
        return any(one.pending for one in self._pending)

    @property
    def awaits_backward(self) -> bool:
        """True if rows were looked up for training, and neither a backward nor a step came since."""
        return any(one.gradients is not None and one.gradients.awaits_backward for one in self._pending)

    @property
    def ended_unstepped(self) -> str:
        """The error message if a pass ends between backward and step."""
        return ended_unstepped(sum(one.pending for one in self._pending))

    @property
    def bytes_sent(self) -> int:
        """Bytes sent from this rank to others so far, for training batches and their steps."""
        return self.rows.wire.bytes_sent + self.input_dist.wire.bytes_sent

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of replicas of replicated tables."""
        return self.rows.replica_bytes

    def prepare(self, sub_dataset: int, rows: RowView) -> None:
        """Find the owners of a pass; without gradients nothing is replicated. Not collective."""
        owners = self._shard_view.owners(sub_dataset)
        self._layouts[rows] = self.input_dist.lay_out(owners, replicated=rows.gradients is not None)

    def open(self, rows: RowView) -> None:
        """Begin a prepared pass; this rank owns ``rows``."""
        self.rows.open_pass(self._layouts[rows].shards, rows.groups)

    def read(self, request: BatchRequest, rows: RowView, *, ahead: bool, by_owner: bool = False) -> Callable[[], Any]:
        """Return a function that reads this rank's part of the samples of ``request``.

        Rank r of W has samples [r * N // W, (r + 1) * N // W) of the N; its mean loss counts W * n / the samples of the
        step. A rank without samples gets the first of all with weight 0, so that it joins every exchange. by_owner:
        owners read the features that they pool, for all ranks.
        """
        modes = poolings(self._modules, self._tables)  # here: at the same batch on all ranks
        poolable = self._layouts[rows].poolable

        def read() -> _Read:
            rank, size, source = self.ranks.rank, self.ranks.size, request.source
            parts_W = parts_of(request.places, size)
            read_W = [part if part.size else request.places[:1] for part in parts_W]
            weight = size * (parts_W[rank].size / request.step_samples)
            token = zlib.crc32(request.places.tobytes())
            if not by_owner:
                every = len(modes) == len(self._tables)
                samples = source.read(read_W[rank]) if every else source.read(read_W[rank], features=modes)
                bags = None
            else:
                elsewhere = pooled_by_owner(poolable, modes)
                own = [one.name for one in elsewhere if any(owner.rank == rank for owner in one.owners)]
                found = source.read(np.concatenate(read_W), features=own).ids if own else {}
                samples = source.read(read_W[rank], features=modes.keys() - {one.name for one in elsewhere})
                bags = split_by_rank(found, [some.size for some in read_W])
            local = LocalInput(ids=samples.ids, modes=modes, num_samples=samples.num_samples, own=bags, token=token)
            return _Read(samples, local, weight, request.done)

        return read

    def begin(
        self, read: Callable[[], Any] | Future[Any], rows: RowView, *, previous: Future[ExchangedBatch] | None = None
    ) -> Future[ExchangedBatch]:
        """Exchange the input of a batch; all ranks raise errors. previous: if it failed, none exchanges more."""
        layout, trained = self._layouts[rows], rows.gradients is not None
        name = f"a step of {rows.name}" if trained else rows.name

        def exchange() -> ExchangedBatch:
            if previous is not None and (failed := previous.exception()) is not None:
                raise failed
            own, error = _Read(None, LocalInput()), None
            try:
                own = read.result() if isinstance(read, Future) else read()
            except Exception as caught:  # sent to all ranks
                error = caught
            exchanged = self.input_dist.exchange(layout, own.local, name, trained=trained, error=error)
            return ExchangedBatch(own.samples, own.weight, own.end, exchanged)

        return self._input_thread.submit(exchange)

    @staticmethod
    def wait(begun: Iterable[Any]) -> None:
        """Wait for batches that are not used, because the other ranks exchange them too."""
        wait(begun)

    def finish(
        self, exchanged: Callable[[], ExchangedBatch], rows: RowView, before: Callable[[], None] | None
    ) -> Batch:
        """Return the batch. Its rows are exchanged at its first lookup; in an evaluation, which ranks may skip, now."""
        batch, view = self._make(exchanged(), rows, before)
        if rows.gradients is None:
            view.load()
        return batch

    def overlapped(
        self, begun: Iterator[Callable[[], ExchangedBatch]], rows: RowView, before: Callable[[], None] | None
    ) -> Iterator[Batch]:
        """Yield batches, exchanging the rows of each while the previous is used, except in a pass fetched ahead."""
        waiting: Any = None

        def exchange(exchanged: Callable[[], ExchangedBatch]) -> tuple[Batch, BatchRows, Any]:
            batch, view = self._make(exchanged(), rows, before)
            return batch, view, self._exchange_rows(view, before)

        for one in begun:
            if not rows.is_loaded:
                yield self.finish(one, rows, before)
                continue
            following = exchange(one) if self._backend.queues else self._row_thread.submit(exchange, one)
            del one  # free its memory with the batch
            if waiting is not None:
                yield self._received(waiting)
            waiting = following
        if waiting is not None:
            yield self._received(waiting)

    def _received(self, waiting: Any) -> Batch:
        batch, view, event = waiting.result() if isinstance(waiting, Future) else waiting
        self._receive(view, event)
        return batch  # type: ignore[no-any-return]

    def _make(
        self, exchanged: ExchangedBatch, rows: RowView, before: Callable[[], None] | None
    ) -> tuple[Batch, BatchRows]:
        view = self._view(exchanged, rows, before)
        assert exchanged.samples is not None
        ids = self._named(exchanged.input.ids, view.pooled)
        batch = make_batch(
            exchanged.samples, view, ids=ids, weight=exchanged.weight, end=exchanged.end, pooled=view.pooled
        )
        return batch, view

    def _view(self, exchanged: ExchangedBatch, rows: RowView, before: Callable[[], None] | None) -> BatchRows:
        def load(view: BatchRows) -> None:
            self.rest()
            self._receive(view, self._exchange_rows(view, before))

        return BatchRows(rows, exchanged, self._optimizer.anchors, self.num_groups, load)

    def _exchange_rows(self, view: BatchRows, before: Callable[[], None] | None) -> Any:
        """Exchange rows and pooled vectors; return the event that ends it, if the backend queues its work."""
        view.of_pass.check()
        if not self._optimizer.anchors.is_stepped and self.pending:
            raise StateError(NOBODY_STEPS)
        exchanged, error = view.exchanged.input, None
        try:
            if before is not None:
                before()
        except Exception as caught:  # sent to all ranks
            error = caught
        with self._backend.streams.exchanging():
            groups, slots = self.rows.serve(exchanged, error)
            bags = self.pooling.serve(exchanged.bags) if exchanged.bags else None
        view.set_rows(groups, slots, bags)
        if view.gradients is not None and not any(view is one for one in self._pending):
            self._pending.append(view)
        return self._backend.streams.exchanged()

    def _receive(self, view: BatchRows, event: Any) -> None:
        """Make queued training work wait for the exchange of a batch."""
        made = tensors_of((view.groups, view.slots, view.bags)) if self._backend.queues else []
        self._backend.streams.receive(event, made)

    def tell(self, own: Sequence[int], what: str, error: Exception | None) -> list[list[int]]:
        """Return the numbers of every rank; all ranks pass the same ``what``. If a rank has an error, all raise."""
        self.rest()
        to = np.array([[*own, error is not None]] * self.ranks.size, np.int64)
        received = self.ranks.meet(self._exchange_ranks, to, what)
        if received[:, -1].any():
            self._exchange_ranks.agree(what, error)
        return [[int(number) for number in row[:-1]] for row in received]

    def raw(
        self,
        samples: RawSamples,
        rows: RowView,
        name: str,
        weight: float,
        modes: Mapping[str, str | None] | None = None,
    ) -> tuple[Batch, dict[str, NDArray[np.int32]] | None]:
        """Return the batch of samples from a loader, and the ids of its keys if the pass lacks some.

        Features with keys that the pass lacks are not pooled by their owners, nor features whose weights differ from
        the schema. modes: how the features are pooled; None: as the modules of the cache do.
        """
        places = samples.places()
        lacking = {name for name, found in places.items() if found.size and int(found.min()) < 0}
        known = {name: found[found >= 0] if name in lacking else found for name, found in places.items()}
        ids = {name: FeatureIds(known[name], one.offsets, one.weights) for name, one in samples.features.items()}

        layout, modes = self._layouts[rows], poolings(self._modules, self._tables) if modes is None else dict(modes)
        whole = {
            feature: mode
            for feature, mode in modes.items()
            if feature not in lacking and (ids[feature].weights is not None) == (feature in self._weighted)
        }
        local = LocalInput(ids=ids, modes=modes, whole=whole, num_samples=samples.num_samples)
        exchanged = self._input_thread.submit(self.input_dist.exchange, layout, local, name).result()
        view = self._view(ExchangedBatch(None, weight, 0, exchanged), rows, None)
        view.raw = samples.features
        view.load()
        named = self._named(exchanged.ids, view.pooled)
        batch = Batch(samples.label, samples.dense, named, view, samples.num_samples, weight, view.pooled)
        if not lacking & batch.ids.keys():
            return batch, None
        return batch, {name: _found(places[name], some.ids) for name, some in batch.ids.items()}

    def used(self, samples: RawSamples) -> RawSamples:
        """Return samples with the features that some module looks up."""
        used = poolings(self._modules, self._tables)
        return replace(samples, features={name: one for name, one in samples.features.items() if name in used})

    def named(self, batch: Batch) -> Batch:
        """Return a batch whose ids raise an explanation for every missing feature."""
        return replace(batch, ids=self._named(batch.ids, batch.pooled))  # type: ignore[arg-type]  # all are FeatureIds

    def _named(self, ids: Mapping[str, FeatureIds], pooled: Mapping[str, Pooled]) -> BatchIds:
        return BatchIds(ids, {feature: one.mode for feature, one in pooled.items()}, self._tables)

    def load(
        self, keys: Callable[[], Mapping[str, NDArray[np.int64]]], budget: int | None = None,
        unseen: Unseen = "initial",
    ) -> Any:  # fmt: skip
        """Return a reader of the current rows of ``keys`` by table, which their owners read."""
        return self._loader.load(keys(), budget, unseen)

    def _own_rows(self, *unknown: Any) -> LocalRows:
        live_rows = self._live_rows()
        assert live_rows is not None, "the cache must be alive"
        return live_rows(*unknown)

    def evaluating(self, passes: DatasetView) -> RankExchange:
        """Return an exchange for batches of this rank's shard of other passes, on the same threads."""
        assert isinstance(passes, ShardView)
        return RankExchange(
            self._communicators, passes, self._backend, self._optimizer, self._own_rows, self._modules,
            comm_dtype=self._comm_dtype, threads=(self._input_thread, self._row_thread),
        )  # fmt: skip

    def step(self, rows: Sequence[GroupRows], optimizer: torch.optim.Optimizer | None) -> None:
        """Apply the pending row gradients of all ranks to this rank's rows, as `LocalExchange.step`.

        Duplicates are added in batch order, then rank order. A rank may skip a backward, so each batch carries flags:
        the tables for which another rank has gradients, and whether some wait for another optimizer's step.
        """
        self.rest()
        into, taken = self._optimizer.gradients, self._take()
        stepped, waiting = self._optimizer.begin_step(optimizer), list[BatchRows]()
        tables = [table.name for table in self._shard_view.whole.tables]
        steps_own = [table in stepped for table in tables]
        for one in taken:
            waits, *flags = self._send_gradients(one, one.collect(), into.collected, [one.waits, *steps_own])
            stepped.update(table for table, is_stepped in zip(tables, flags, strict=True) if is_stepped)
            if waits:
                waiting.append(one)
        into.collect(self._backend.gradient)
        self._pending[:0] = waiting
        self._optimizer.count_step(stepped)
        self.rows.step(self._optimizer.steps_of(rows), rows)
        self._optimizer.end_step()

    def _take(self) -> list[BatchRows]:
        """Return and remove the pending batches; their rows are from before the step."""
        taken, self._pending = self._pending, []
        for one in taken:
            one.release()
        return taken

    def _send_gradients(
        self, batch: BatchRows, gradients: GroupGradients, into: GroupGradients, flags: Sequence[bool] = ()
    ) -> list[bool]:
        """Send the gradients of a step to the owners of their rows; return for each flag if any rank has set it."""
        any_flags = self.rows.send_gradients(batch.exchanged.input, batch.slots, gradients, into, flags)
        if batch.bags is not None:
            self.pooling.send_gradients(batch.bags, {name: one.gradients for name, one in batch.pooled.items()}, into)
        for of_group in gradients:
            of_group.clear()
        return any_flags

    def clip(
        self, max_norm: float, optimizer: torch.optim.Optimizer | None, *, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Clip gradients; collective. The owners of rows get them to be measured, and again at the step."""
        self.rest()
        ready = self._optimizer.ready(optimizer)
        into: GroupGradients = [[] for _ in self._optimizer.gradients.collected]
        for one in self._pending:
            self._send_gradients(one, one.preview(ready), into)
        self.rows.discard()
        squares = self._gather(self._optimizer.squared_norm(into), "adding up the norms of gradients").sum()
        return self._optimizer.clip(max_norm, optimizer, ready, squares, error_if_nonfinite=error_if_nonfinite)

    def _gather(self, number: torch.Tensor, what: str) -> torch.Tensor:
        return self._exchange_ranks.all_gather(number.view(1), [1] * self.ranks.size, what)

    def follow(self, scaler: torch.amp.GradScaler) -> None:
        """Make all ranks skip a step if the gradients of any overflow: ``scaler.unscale_`` is collective then.

        DistributedDataParallel and FSDP average the infinite gradients of anchors; this is for loops without them.
        """
        unscale, agree = scaler.unscale_, weakref.WeakMethod(self._agree_on_overflow)

        def agreed(optimizer: torch.optim.Optimizer) -> None:
            unscale(optimizer)
            if (found := agree()) is not None and scaler.is_enabled():
                for flag in overflow_flags(scaler, optimizer):
                    found(flag)

        scaler.unscale_ = agreed  # type: ignore[method-assign]

    def _agree_on_overflow(self, found: torch.Tensor) -> None:
        self.rest()
        found.copy_(self._gather(found, "checking for gradient overflow").max())
        for anchor in self._optimizer.anchors:
            anchor.flag_overflow(found)  # does not wait for a GPU

    def expire(self, where: str) -> None:
        """Expire the gradients left by another optimizer's step, when ``where`` ends."""
        for one in self._pending:
            if one.gradients is not None:
                one.gradients.expire(where)

    def discard(self) -> None:
        """Drop the pending row gradients. Not collective."""
        self.rest()
        for one in self._take():
            if one.gradients is not None:
                one.gradients.clear()
        self._optimizer.discard()
        self.rows.discard()

    def rest(self) -> None:
        """Wait until no rows are being exchanged; work that is queued after this waits for them too."""
        self._row_thread.submit(lambda: None).result()
        self._backend.streams.receive(self._backend.streams.exchanged(), ())

    def close(self) -> None:
        """Stop the threads and release the rows."""
        if self._owns_threads:
            self._input_thread.shutdown()
            self._row_thread.shutdown()
        self.rows.close()


def _found(places: NDArray[np.int32], rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the rows of a batch for its keys, -1 if the pass lacks them."""
    found = np.full(places.size, -1, np.int32)
    found[places >= 0] = rows
    return found
