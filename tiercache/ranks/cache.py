"""ShardedCache: one training on several ranks, each with its own device, host memory and part of the store."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tiercache.backends.opening import open_backend
from tiercache.dist.communicator import communicator_of
from tiercache.dist.consistency import check_same
from tiercache.errors import StateError
from tiercache.ranks.alone import RowsHere, rows_are_here
from tiercache.ranks.batches import BatchMaker, exchange_thread
from tiercache.ranks.budgets import Budgets
from tiercache.ranks.evaluation import evaluation_slices
from tiercache.ranks.exchange import RowExchange
from tiercache.ranks.loaded_rows import RowLoader
from tiercache.ranks.opening import choose_placement, closed_on_error, open_parts
from tiercache.ranks.placement_rules import asked_words
from tiercache.ranks.pooling import Pooling
from tiercache.ranks.raw_batches import RawBatches
from tiercache.ranks.shares import Share
from tiercache.ranks.visit import ShardedVisit
from tiercache.store.table import group_tables
from tiercache.training.cache import TierCache
from tiercache.training.matching import check_features, check_tables
from tiercache.training.row_optimizer import changed_rates
from tiercache.training.step_hooks import StepHooks, named_objects

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from tiercache.backends.base import Backend
    from tiercache.passes.passset import PassSet
    from tiercache.ranks.evaluation import ShardedEvaluation
    from tiercache.ranks.placement import Placement
    from tiercache.ranks.placement_rules import PlacementRules
    from tiercache.schema import Schema
    from tiercache.store import Store
    from tiercache.tiers.report import VisitReport
    from tiercache.training.batch import Batch
    from tiercache.training.visit import Visit


_WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ShardedCache:
    """A TierCache over the devices of all ranks, one process each.

    Every method is collective unless it says otherwise: all ranks call it, in the same order. A pass holds what all
    devices together hold; each rank loads, trains and dumps its own rows with its own threads, from its own part of
    the store, and looks up the rows of others by an exchange for each batch. An error on one rank is raised on all; but
    one in the user's own code, or amid an exchange, ends the others when the process ends, as torchrun does too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        passes: PassSet,
        *,
        group: ProcessGroup | None = None,
        model: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        device: str | Backend = "cpu",
        device_budget: int | str,
        host_budget: int | str,
        placement: Placement | PlacementRules | str | Mapping[str, str] = "auto",
        wire_dtype: str = "float32",
        engine: str | None = None,
        parts: Sequence[str | os.PathLike[str]] | None = None,
        retention: int | None = None,
        reorganised: bool = False,
        eval_budget: int | str | None = None,
        store_budget: int | str | None = None,
        commit_every: int = 1,
        seed: int = 0,
        order_seed: int | None = None,
        progress: bool | None = None,
    ) -> None:
        """Open or make the sharded store at ``path`` and plan every rank's budgets.

        group: a process group of torch.distributed; where not given the default one, and where there is none, this
        process is one rank. The ranks talk over process groups of their own, made like it. device: "cuda" is the GPU
        of LOCAL_RANK, or the only one that this process sees.
        device_budget, host_budget, eval_budget, store_budget: of each rank. placement: where the rows of each table
        stand: a strategy ("auto", "basic", "memory_balanced", "memory_optimized", "cost"), a kind for each table
        ("row", "table", "column", "replicate"; tables not named are placed by cost), PlacementRules, or a Placement.
        "auto" keeps that of the store, others are found anew for these passes; another than the store's, or another
        number of ranks, writes its parts anew first. wire_dtype: of rows and gradients on their way: "float32",
        "bfloat16" or "float16". parts: a folder for each rank's part, on disks of their own perhaps; inside ``path``
        where not given. retention: how many of the newest commits of all
        ranks are kept from now on; as many as before where not given, or 1. reorganised: whether a store that was
        trained with other passes is put into the order of these first, as `tiercache.reorganise` does; else that is
        refused. Everything else as in TierCache.

        Raises RankError where ranks disagree or one fails, and what TierCache and Store.open raise.
        """
        self.pass_set, self._closed = passes, False
        self.communicator = ranks = communicator_of(group, device if isinstance(device, str) else device.device)
        with closed_on_error(self, "_inner", "_beside", "_parts", "communicator"):
            with ranks.raise_on_all("reading the budgets"):
                asked = asked_words(placement)
                budgets = Budgets.parse(device_budget, host_budget, eval_budget, store_budget, commit_every)
                if wire_dtype not in _WIRE_DTYPES:
                    raise ValueError(f"wire_dtype {wire_dtype!r} is unknown: it must be one of {[*_WIRE_DTYPES]}")
            check_same(
                ranks,
                {
                    "the schema": passes.schema.digest,
                    "the tables": [str(table) for table in passes.tables],
                    "the pass set": passes.digest,
                    "placement": asked,
                    **budgets.facts,
                    "engine": engine,
                    "parts": None if parts is None else [str(part) for part in parts],
                    "retention": retention,
                    "reorganised": reorganised,
                    "wire_dtype": wire_dtype,
                    "seed": int(seed),
                    "order_seed": None if order_seed is None else int(order_seed),
                },
            )
            number_bytes = _WIRE_DTYPES[wire_dtype].itemsize
            self.placement = choose_placement(path, passes, ranks, placement, number_bytes=number_bytes)
            self._share = Share(passes, self.placement, ranks.rank)
            with ranks.raise_on_all("opening the device"):
                where = str(ranks.device) if isinstance(device, str) else device
                self._backend = open_backend(where, self._share.tables)
            with ranks.raise_on_all("planning the budgets"):  # before the store is written anew for them
                device_bytes = budgets.check_device(self._share, self._backend)
            self._parts = open_parts(
                path, self._share, ranks, engine=engine, parts=parts, retention=retention, reorganised=reorganised,
                order_seed=order_seed, budgets=budgets,
            )  # fmt: skip
            self._beside = ranks.clone()  # NCCL takes memory of the device for it: before the rows do
            with ranks.raise_on_all("planning the budgets"):
                self._inner = TierCache(
                    self._parts.store,
                    self._share,  # type: ignore[arg-type]
                    device=self._backend, device_budget=device_bytes, host_budget=budgets.host_budget,
                    eval_budget=budgets.eval_budget, store_budget=budgets.store_budget, commit_every=commit_every,
                    seed=seed, order_seed=order_seed, progress=progress if ranks.rank == 0 else False,
                )  # fmt: skip
            self._parts.drop_older()  # nothing is refused any more
        self._groups = group_tables(passes.tables)
        self._wire_dtype = _WIRE_DTYPES[wire_dtype]
        self._modules: list[nn.Module] = []
        """What looks rows up."""
        self._thread = exchange_thread(self._backend)
        self._exchange, self._pooling, self._maker = self._new_maker(passes.schema)
        self._loader = RowLoader(self._share, self._inner.rows_now, ranks)
        self._raw = RawBatches(
            passes, self._groups, ranks, self._beside, self._maker, self._loader, self._inner.optimizer,
            self._backend, device_bytes - self._inner.device_bytes,
        )  # fmt: skip
        self._hooks = StepHooks(self.step)
        self._visit: Visit | None = None
        self._run: Iterator[Visit] | None = None
        with closed_on_error(self, "_inner", "_beside", "_parts"):
            self.register(**named_objects(model=model, optimizer=optimizer))

    # -- training -----------------------------------------------------------------------------------------

    def register(self, **objects: Any) -> None:
        """Commit the state of these objects with the rows, and step rows when an optimizer among them steps.

        As `TierCache.register`; every part keeps the state. Of modules it takes note of what they look up: that is
        brought with each batch, and nothing else. Of a DistributedDataParallel the model in it is kept, so that
        another number of ranks, or one without it, goes on from the commit. Not collective.
        """
        objects = {
            name: value.module if isinstance(value, DistributedDataParallel) else value
            for name, value in objects.items()
        }
        self._hooks.check(objects)
        self._inner.dense.register(objects)
        self._modules += [value for value in objects.values() if isinstance(value, nn.Module)]
        self._maker.is_stepped |= self._hooks.follow(objects)

    def passes(self, epochs: int) -> Iterator[ShardedVisit]:
        """Yield the visits up to the end of epoch ``epochs``, from the last commit of all ranks on.

        As `TierCache.passes`, but the commit of visit t is one of all ranks when visit t + 1 has ended, or the iterator
        is exhausted: every part is durable then, and a record names them all.
        """
        self._end_visit()
        if self._run is not None:
            self._run.close()  # type: ignore[attr-defined]
        self._maker.rest()
        self._parts.meet()
        run = self._run = self._inner.passes(epochs)
        begun = False
        try:
            while True:
                with self.communicator.raise_on_all("changing the rows of the visit"):
                    visit = next(run, None)
                if visit is None or not begun:  # else the writers may be at work: some parts have the next commit
                    self._record()
                if visit is None:
                    return
                begun = True
                self._begin_visit(visit)
                yield ShardedVisit(visit, self._maker, self._raw)
                if self._run is not run:
                    raise StateError("this loop over passes() was replaced by a newer one: use one loop at a time")
                self._maker.rest()
                with self.communicator.raise_on_all("writing the rows of the visit before"):
                    if self._maker.pending:
                        raise StateError(
                            f"visit {visit.index} ended between a backward and its step: step the optimizer, or call "
                            "discard(), before the visit ends"
                        )
                    self._end_visit()
                    self._inner.drain(staged=False)
                self._record()
        finally:
            if self._run is run:
                self._end_visit()
                run.close()  # type: ignore[attr-defined]

    def step(self) -> None:
        """Apply the pending row gradients of all ranks: each row of the batches since the last step is updated once.

        Duplicates are added in the order of batches, in each by rank. Called by a tracked optimizer's ``step()``.
        """
        if self._visit is None:
            raise StateError("step() was called outside a visit: step inside the loop over passes()")
        self._maker.is_stepped = True
        optimizer = self._inner.optimizer
        for due in self._maker.take_due():
            self._exchange.gradients_of(due.exchanged, due.gradients, optimizer.gradients)
            if due.pooled is not None:
                self._pooling.gradients_of(due.pooled, optimizer.gradients)
        self._exchange.step(optimizer, self._visit.rows.groups)

    def discard(self) -> None:
        """Drop the pending row gradients: for a skipped step, as ``zero_grad()`` does for dense ones."""
        self._maker.take_due()
        self._inner.discard()
        if self._visit is not None:
            self._exchange.discard()

    def set_learning_rate(self, learning_rate: float, *, tables: Sequence[str] | None = None) -> None:
        """Change the row optimizers' learning rate from the next step on; part of the next commit.

        tables: names, all tables where not given. Raises ValueError where only a part of a group is named, of whole
        tables or of a rank's: nothing has changed then.
        """
        optimizer = self._inner.optimizer
        with self.communicator.raise_on_all("setting the learning rate"):
            changed_rates(self._groups, [0.0] * len(self._groups), learning_rate, tables)
            rates = changed_rates(self._inner.groups, optimizer.learning_rates, learning_rate, tables)
        optimizer.learning_rates = rates

    def commit(self) -> None:
        """Commit now, inside the visit, after the batches yielded so far; returns when it is durable on all ranks."""
        self._maker.rest()
        with self.communicator.raise_on_all("committing inside a visit"):
            if self._maker.pending:
                raise StateError("commit() was called between backward and step: call step() or discard() first")
            self._inner.drain(staged=False)
        self._record()
        with self.communicator.raise_on_all("committing inside a visit"):
            self._inner.commit()
        self._record()

    # -- evaluation ---------------------------------------------------------------------------------------

    def evaluation(self, passes: PassSet) -> Iterator[ShardedEvaluation]:
        """Yield read-only slices of another pass set, at any moment between batches, as `TierCache.evaluation` does.

        A slice is as many samples as no rank needs more than ``eval_budget`` of its rows for; each rank gets its part
        of every batch.
        """
        self._maker.rest()
        with self.communicator.raise_on_all("beginning an evaluation"):
            check_features(self.pass_set, passes)
            share = Share(passes, self.placement, self.communicator.rank)
            check_tables(self._parts.store, share)  # type: ignore[arg-type]
        rows_now = self._loader.rows_now()
        exchange, pooling, maker = self._new_maker(passes.schema)
        try:
            yield from evaluation_slices(
                share, rows_now, self._inner.eval_bytes, self._backend, exchange, pooling, maker, self.communicator
            )
        finally:
            maker.rest()

    def evaluation_batch(self, keys: Mapping[str, Any] | None, **others: Any) -> Batch | None:
        """Return this rank's part of a read-only batch of raw keys, at any moment between batches.

        As `TierCache.evaluation_batch`; rows are read by the ranks that own them, of which none reads more than
        ``eval_budget`` at once. Ranks may have different numbers of samples; one without any has an empty batch. None
        in place of keys as of `ShardedVisit.batch`.
        """
        return self._raw.evaluation_batch(keys, self._inner.eval_bytes, **others)

    # -- ending -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads and give up the store. What is not committed is not kept. Not collective."""
        self._close(failed=False)

    def __enter__(self) -> ShardedCache:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(failed=error is not None)

    def _close(self, *, failed: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._run = None  # a loop that was left open finds nothing to end when it is collected
        with ExitStack() as last:
            for close in (
                self._parts.close, self._inner.close, self._raw.close, partial(self.communicator.close, failed=failed),
                partial(self._beside.close, failed=failed), self._pooling.close, self._exchange.close,
                self._thread.shutdown, self._hooks.remove,
            ):  # fmt: skip
                last.callback(close)  # the last one first
            if failed:  # before anything waits: a rank that waits for this one at an agreement raises
                self.communicator.close(failed=True)
            self._end_visit()

    # -- parts --------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """This rank's part of the store."""
        return self._parts.store

    @property
    def reports(self) -> list[VisitReport]:
        """What this rank moved, a report for each visit."""
        return self._inner.reports

    @property
    def tables(self) -> tuple[Any, ...]:
        """The tables trained, whole."""
        return self.pass_set.tables

    @property
    def groups(self) -> tuple[Any, ...]:
        """The groups of tables with the same row layout."""
        return self._groups

    @property
    def schema(self) -> Any:
        """The schema of the pass set."""
        return self.pass_set.schema

    @property
    def bytes_sent(self) -> int:
        """Bytes that left this rank for others so far, for batches of trainings and their steps."""
        return self._exchange.bytes_sent

    @property
    def device_bytes(self) -> int:
        """Bytes on this rank's device of rows, slot maps and mirrors, and of an index of raw keys once there is one."""
        return self._inner.device_bytes + self._exchange.mirror_bytes + self._raw.index_bytes

    @property
    def device(self) -> torch.device:
        """Where this rank's rows are trained."""
        return self._inner.device

    # -- inside -------------------------------------------------------------------------------------------

    def _new_maker(self, schema: Schema) -> tuple[RowExchange, Pooling, BatchMaker]:
        ranks, backend = self._beside, self._backend
        exchange_of = RowsHere if rows_are_here(ranks, self._groups, self._inner.groups) else RowExchange
        exchange = exchange_of(ranks, backend, self._groups, self._inner.groups, wire_dtype=self._wire_dtype)
        pooling = Pooling(exchange, backend, schema.features)
        maker = BatchMaker(self.communicator, exchange, pooling, schema, self._modules, backend, self._thread)
        return exchange, pooling, maker

    def _record(self) -> None:
        """Make the newest commit of the parts that of all ranks; called where all parts have made the same ones."""
        commit = self._parts.store.commit
        if commit is not None and self._parts.ahead:
            self._parts.publish(commit.cursor)

    def _begin_visit(self, visit: Visit) -> None:
        self._visit = visit
        owners = self._share.owners(visit.pass_index)
        self._exchange.open_pass(owners, visit.rows.groups)
        self._pooling.open(owners, visit.rows.groups)

    def _end_visit(self) -> None:
        self._maker.take_due()
        self._visit = None
