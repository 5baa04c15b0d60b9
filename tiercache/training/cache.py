"""TierCache: trains the passes of a dataset over the tiers, on one rank or several, and commits."""

from __future__ import annotations

import sys
import weakref
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiercache.backends.opening import open_backend
from tiercache.dist.communicator import communicator_of
from tiercache.dist.consistency import check_same
from tiercache.errors import StateError
from tiercache.ranks.budgets import Budgets
from tiercache.ranks.opening import closed_on_error
from tiercache.ranks.rank_exchange import RankExchange
from tiercache.ranks.shares import Share
from tiercache.ranks.training_store import StoreOptions, TrainingStore
from tiercache.store.table import group_tables
from tiercache.training.batch_pipeline import BatchPipeline
from tiercache.training.evaluation import Evaluation
from tiercache.training.exchange import LocalExchange
from tiercache.training.matching import check_features, check_tables
from tiercache.training.pass_loop import CLOSED, PassLoop
from tiercache.training.progress import prepare_kernels
from tiercache.training.rank_rows import RankRows
from tiercache.training.raw_batch import RawKeys
from tiercache.training.step_hooks import StepHooks, named_objects, unwrapped
from tiercache.training.stepped_cache import SteppedCache
from tiercache.training.table_module import table_modules
from tiercache.training.threads import share_threads

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup

    from tiercache.backends.base import Backend
    from tiercache.passes.dataset import PassDataset
    from tiercache.planning.pass_plan import PassPlan
    from tiercache.planning.store_plan import StorePlan
    from tiercache.ranks.sharding_plan import ShardingPlan
    from tiercache.ranks.sharding_rules import ShardingRules
    from tiercache.store import Store
    from tiercache.tiers.report import PassReport
    from tiercache.training.batch import Batch
    from tiercache.training.exchange import Exchange
    from tiercache.training.live_rows import LiveRows
    from tiercache.training.passes import Pass

_COMM_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TierCache(SteppedCache):
    """Device tier and host tier over a store, for the passes of one dataset.

    Rows are trained on the device; at each switch of passes they move as planned. Host and device bytes are
    planned before the first batch and held. Use it from one thread; it owns a reader and a writer thread until
    ``close``. Not for tables that fit: ``InMemoryCache`` trains those without a store.

    Where torch.distributed is initialized it trains on all ranks, one process for each device. A pass holds what all
    devices together hold; each rank loads, trains and dumps its own rows, from its own shard of the store, and looks up
    the rows of others by an exchange for each batch. Every method is collective then, unless it says otherwise: all
    ranks call it, in the same order. An error on one rank is raised on all; but one in the user's own code, or amid an
    exchange, ends the others when the process ends, as torchrun does too.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        data: PassDataset,
        *,
        group: ProcessGroup | None = None,
        model: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        device: str | Backend = "cpu",
        device_budget: int | str,
        host_budget: int | str,
        eval_budget: int | str | None = None,
        store_budget: int | str | None = None,
        sharding: ShardingPlan | ShardingRules | str | Mapping[str, str] = "auto",
        comm_dtype: str = "float32",
        shard_dirs: Sequence[str | os.PathLike[str]] | None = None,
        engine: str | None = None,
        retention: int | None = None,
        reorganize: bool = False,
        commit_every: int = 1,
        seed: int = 0,
        order_seed: int | None = None,
        progress: bool | None = None,
    ) -> None:
        """Plan the budgets.

        store: a path, where the cache makes a store if there is none, or a Store, which stays open. With one rank it is
        a plain store, unless a sharded one is there or ``shard_dirs`` asks for one; with several it is sharded. engine,
        retention: of a store that the cache opens, as in ``Store.open``; retention counts commits of all ranks.
        reorganize: whether a store that was trained with other sub-datasets is put into the order of these first, as
        `tiercache.reorganize` does; else that is refused.

        model, optimizer: one or several, registered as "model" and "optimizer", or "model0", "model1" and so on; see
        ``register``. device: where rows are trained: "cpu", "cuda" or "cuda:1"; the model goes there too. With several
        ranks "cuda" is the GPU of LOCAL_RANK, or the only one that this process sees.
        device_budget: bytes ("64MiB") there for rows and slot maps, and for an index of raw keys where they leave room.
        host_budget: bytes of anonymous memory for dump, staging, cached rows, one write transaction and evaluation.
        eval_budget: bytes of it reserved for rows of evaluation sub-datasets; a sixteenth where not given.
        store_budget: bytes that the store may come to take, checked here and, with the dense state, before training; it
        stops no write, as Store.open's max_bytes does. Budgets are those of each rank.
        commit_every: passes between commits. seed: of the shuffling of batches. order_seed: None trains the
        sub-datasets of every epoch in their order, a number in a seeded one. progress: whether a bar shows; None: on a
        terminal.

        group: a process group of torch.distributed; where not given the default one, and where there is none, this
        process is one rank. The ranks talk over process groups of their own, made like it. sharding: how tables are
        divided over ranks: a strategy ("auto", "basic", "memory_balanced", "memory_optimized", "cost"), a kind for each
        table ("row", "table", "column", "replicate"; tables not named are sharded by cost), ShardingRules, or a
        ShardingPlan. "auto" keeps that of the store, others are found anew for these sub-datasets; another than the
        store's, or another number of ranks, writes its shards anew first. comm_dtype: of rows and gradients on their
        way between
        ranks: "float32", "bfloat16" or "float16". shard_dirs: a folder for each rank's shard, on disks of their own
        perhaps; inside ``store`` where not given.

        Raises BudgetError where the plan exceeds a budget or the device, DatasetError where sub-datasets and store do
        not belong together, CudaError where the GPU cannot be used, ValueError for a commit_every below 1, RankError
        where ranks disagree or one fails, and what Store.open raises.
        """
        self.dataset, self._closed = data, False
        self.communicator = ranks = communicator_of(group, device if isinstance(device, str) else device.device)
        options = StoreOptions(
            sharding=sharding, shard_dirs=shard_dirs, engine=engine, retention=retention, reorganize=reorganize,
            order_seed=order_seed,
        )  # fmt: skip
        with closed_on_error(self, "_exchange", "_rows", "_asking", "_beside", "_opened", "communicator"):
            with ranks.raise_on_all("reading the budgets"):
                facts = options.facts
                budgets = Budgets.parse(device_budget, host_budget, eval_budget, store_budget, commit_every)
                if comm_dtype not in _COMM_DTYPES:
                    raise ValueError(f"comm_dtype {comm_dtype!r} is unknown: it must be one of {[*_COMM_DTYPES]}")
            if ranks.size > 1:
                check_same(ranks, self._facts(data, budgets) | facts | {"comm_dtype": comm_dtype, "seed": int(seed)})
            self._opened = TrainingStore(store, data, ranks, options)
            source = self._opened.choose(number_bytes=_COMM_DTYPES[comm_dtype].itemsize)
            with ranks.raise_on_all("opening the device"):
                where = str(ranks.device) if isinstance(device, str) else device
                self._backend = backend = open_backend(where, source.tables)
                prepare_kernels(source.tables)
                share_threads()
            with ranks.raise_on_all("planning the budgets"):  # before the store is made, or written anew for them
                device_bytes = budgets.check_device(source, backend)
            self.store = self._opened.open(source, budgets, progress=progress)
            self._beside = ranks.clone()  # NCCL takes memory of the device for it: before the rows do
            self._asking = ranks.clone(device="cpu")
            with ranks.raise_on_all("planning the budgets"):
                self._rows = RankRows(
                    self.store, source, backend, budgets, device_bytes=device_bytes, order_seed=order_seed
                )
            self.dense, self.optimizer = self._rows.state.dense, self._rows.state.optimizer
            self._opened.drop_older()  # nothing is refused any more
            self._groups = group_tables(data.tables)
            self._modules: list[nn.Module] = []
            """What looks rows up."""
            self._exchange = self._new_exchange(_COMM_DTYPES[comm_dtype])
            room = device_bytes - self._rows.device.num_bytes
            self._raw = RawKeys(data.schema, self._groups, self._exchange, self.optimizer, backend, room)
            self._pipeline, self._hooks = BatchPipeline(backend), StepHooks(self)
            shown = ranks.rank == 0 and (sys.stderr.isatty() if progress is None else progress)
            self._loop = PassLoop(
                self._opened, self._rows, self._exchange, self._raw, self._pipeline, seed=seed, shown=shown
            )
            self.reports: list[PassReport] = self._loop.reports
            """What this rank moved, a report for each pass trained by this object; the last one while it runs."""
            self.register(**named_objects(model=model, optimizer=optimizer))

    @staticmethod
    def _facts(data: PassDataset, budgets: Budgets) -> dict[str, Any]:
        """Return what has to be the same on all ranks of what is trained."""
        tables = [str(table) for table in data.tables]
        return {"the schema": data.schema.digest, "the tables": tables, "the dataset": data.digest, **budgets.facts}

    def _new_exchange(self, comm_dtype: torch.dtype) -> Exchange:
        ranks, backend, optimizer = self.communicator, self._backend, self.optimizer
        if ranks.size == 1:
            return LocalExchange(ranks, backend, optimizer, self.live_rows)
        share = self._rows.source
        assert isinstance(share, Share)
        return RankExchange(
            ranks, self._beside, self._asking, share, backend, optimizer, self.live_rows, self._modules,
            comm_dtype=comm_dtype,
        )  # fmt: skip

    # -- before training ----------------------------------------------------------------------------------

    def register(self, **objects: Any) -> None:
        """Commit the state of these objects with the rows, and step rows when an optimizer among them steps.

        Objects have ``state_dict`` and ``load_state_dict``: modules, optimizers, schedulers. A registered torch
        optimizer's ``step()`` applies the pending row gradients after its own work; without one call ``step``
        yourself. Random generators of torch, numpy and random are part of every commit. Of a model in a
        DistributedDataParallel, or that was compiled, the model itself is kept, so that a training without, or with
        another number of ranks, goes on from the commit. Not collective: every rank's shard keeps the state; what
        modules look up is brought with each batch, and nothing else. Raises StateError for state that cannot be stored.
        """
        self._check_open()
        objects = {name: unwrapped(value) for name, value in objects.items()}
        self.dense.register(objects)
        self._modules += [value for value in objects.values() if isinstance(value, nn.Module)]
        self._hooks.follow(objects.values())
        for value in (*objects.values(), self.optimizer):
            if isinstance(value, torch.optim.Optimizer):
                self._exchange.follow(value)
        for module in table_modules(objects.values()):
            module.bind(weakref.WeakMethod(self._opened.named_commit))

    def plan(self, *, passes: int | None = None) -> list[PassPlan]:
        """Plan the next passes of this rank (one epoch and one pass more where not said) without training them.

        Not collective.
        """
        return self._rows.plans.passes(passes)

    # -- training -----------------------------------------------------------------------------------------

    def passes(self, epochs: int) -> Iterator[Pass]:
        """Yield the passes up to the end of epoch ``epochs``, from the last commit on.

        First restores rows and tracked state from the last commit; a store without one gets a commit of the
        state as it is now. A pass ends, and every ``commit_every``-th and the last commits, when the next one is
        asked for, so what the loop's body does after its batches belongs to it. The commit of pass t is durable by
        the end of pass t + 1; exhausting the iterator waits for the last. Leaving the loop early commits nothing.
        On several ranks that is a commit of all: every shard is durable then, and a record names them.

        A loop may fetch batches ahead of its training, up to those of the next pass, of several ranks all alike: where
        a batch that it took was not trained yet when the next pass is asked for, the pass ends at the first lookup that
        trains the next one, and the last one with ``close``, ``commit`` or another loop. A batch is trained once a
        module has looked it up with gradients enabled.
        """
        self._check_open()
        yield from self._loop.passes(epochs)  # and not its iterator: the loop keeps the cache

    def restore(self) -> None:
        """Go back to the last commit: rows, and the state of all that was registered. Ends a loop over ``passes``.

        ``passes`` does so by itself; call it to evaluate before. A store without a commit gets one of the state as it
        is now. Raises StateError where other objects are registered than the commit has.
        """
        self._check_open()
        self._loop.restore()

    def commit(self) -> None:
        """Commit now, inside the pass, after the batches trained so far; returns when it is durable on all ranks.

        Those are the batches that modules have looked up. Behind a loop over ``passes`` it commits the last pass, where
        that waits for it. Raises StateError between a backward and its step, and outside a pass.
        """
        self._check_open()
        self._loop.commit()

    def drain(self, *, staged: bool = True) -> None:
        """Wait until every dump is durable and, with ``staged``, the next pass's rows are staged.

        Training needs no such wait; measurements do. Raises what went wrong on either thread. Not collective.
        """
        self._rows.transfer.drain()
        if staged:
            self._rows.transfer.await_staging()

    # -- evaluation ---------------------------------------------------------------------------------------

    def evaluation(self, passes: PassDataset) -> Iterator[Evaluation]:
        """Yield read-only slices of another dataset, at any moment between batches.

        Rows are as of now: from the device, the host or the store; keys never trained have the out-of-vocabulary
        row where their table was trained with one, else their initial row. Nothing is written. A slice is as
        many samples as ``eval_budget`` holds rows for, on every rank; each rank gets its part of every batch. Lookups
        in it leave no gradients.
        """
        self._check_open()
        self._exchange.rest()
        with self.communicator.raise_on_all("beginning an evaluation"):
            check_features(self.dataset, passes)
            view = self._opened.view(passes)
            check_tables(self.store, view)
        exchange = self._exchange.evaluating(view)
        try:
            yield from Evaluation.slices(
                view, self._exchange.live_rows(), self.eval_bytes, exchange, self._pipeline, self._backend
            )
        finally:
            exchange.rest()

    def evaluation_batch(self, keys: Mapping[str, Any] | None, **others: Any) -> Batch | None:
        """Return a read-only batch of raw keys, as ``Pass.batch`` takes them, at any moment between batches.

        Rows are as of now, as in ``evaluation``, read for this batch alone, by the ranks that own them. None in place
        of keys as of ``Pass.batch``. Raises BudgetError where its unique keys have more rows than ``eval_budget``
        holds, or a rank is to read more for the others.
        """
        self._check_open()
        return self._raw.evaluate(keys, self.eval_bytes, **others)

    def live_rows(self, unknown: Mapping[str, Sequence[NDArray[np.float32]]] | None = None) -> LiveRows:
        """Return a reader of any rows of this rank as of now; used between batches, before the next one is trained.

        Waits until every dump is durable: a row that is on its way to the store is nowhere else. ``unknown``: fields
        of out-of-vocabulary rows that stand elsewhere. Not collective.
        """
        self._check_open()
        return self._rows.now(self._loop.current, unknown)

    # -- ending -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads and let go of all memory. What is not committed is not kept; a Store given stays open.

        Whatever asks the cache for rows from then on raises StateError; reports can be read. Not collective.
        """
        self._close(failed=False)

    def __enter__(self) -> TierCache:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(failed=error is not None)

    def _close(self, *, failed: bool) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last:
            for close in (
                self._opened.close, self._backend.drop_scratch, self._rows.close, self._raw.close,
                partial(self.communicator.close, failed=failed), partial(self._beside.close, failed=failed),
                partial(self._asking.close, failed=failed), self._exchange.close, self._hooks.remove,
            ):  # fmt: skip
                last.callback(close)  # the last one first
            if failed:  # before anything waits: a rank that waits for this one at an agreement raises
                self.communicator.close(failed=True)
            last.callback(self._loop.close)
            if not failed:
                last.callback(self._loop.finish)

    # -- parts --------------------------------------------------------------------------------------------

    @property
    def tables(self) -> tuple[Any, ...]:
        """The tables trained, whole, in the store's order."""
        return tuple(table for group in self._groups for table in group.tables)

    @property
    def groups(self) -> tuple[Any, ...]:
        """The groups of tables with the same row layout."""
        return self._groups

    @property
    def schema(self) -> Any:
        """The schema of the dataset."""
        return self.dataset.schema

    @property
    def sharding(self) -> ShardingPlan | None:
        """Where tables stand in the shards of the store; None of a plain store."""
        return self._opened.sharding

    @property
    def device(self) -> torch.device:
        """Where this rank's rows are trained."""
        return self._backend.device

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of rows, slot maps, mirrors and, once raw keys were looked up, of the index of keys."""
        return self._rows.device.num_bytes + self._exchange.device_bytes + self._raw.index_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept on the device from batch to batch, beside ``device_bytes``: batches made ahead included."""
        return self._backend.scratch_bytes + self._pipeline.device_bytes

    @property
    def pinned_batch_bytes(self) -> int:
        """Bytes of pinned memory that batches made ahead take now, beside ``host_budget``; 0 on a CPU."""
        return self._pipeline.host_bytes

    @property
    def bytes_sent(self) -> int:
        """Bytes that left this rank for others so far, for batches of trainings and their steps."""
        return self._exchange.bytes_sent

    @property
    def eval_bytes(self) -> int:
        """Bytes of host memory for the rows of an evaluation."""
        return self._rows.budget.evaluation

    @property
    def host_bytes_peak(self) -> int:
        """The most bytes of rows the host held so far."""
        return self._rows.memory.peak_bytes

    def store_plan(self, state_bytes: int = 0) -> StorePlan:
        """Return what the store takes at its fullest, with so many bytes of dense state in a commit."""
        return self._rows.plans.store_plan(state_bytes)

    # -- inside -------------------------------------------------------------------------------------------

    def _current(self) -> Pass | None:
        return self._loop.current

    def _step(self, optimizer: torch.optim.Optimizer | None) -> None:
        super()._step(optimizer)
        self._loop.note_step()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(CLOSED)
