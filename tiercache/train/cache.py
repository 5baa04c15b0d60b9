"""TierCache: trains the passes of a dataset over the tiers, on one rank or several, and commits."""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import nn

from tiercache.errors import StateError
from tiercache.planning.matching import check_features
from tiercache.reporting.report import write_json_lines, write_scalars
from tiercache.store.files import local_path
from tiercache.store.locks import warn_unclosed
from tiercache.train.batches import SizedIterator
from tiercache.train.cache_facts import CacheFacts
from tiercache.train.cache_parts import CacheParts
from tiercache.train.converted_weights import bounds_of, check_keys_within, refuse_weights
from tiercache.train.evaluation import Evaluation, EvaluationBatches
from tiercache.train.joint_optimizer import unwrapped_objects
from tiercache.train.missing_rows import CommittedRows
from tiercache.train.options import TierCacheOptions, refuse_moved
from tiercache.train.plain_keys import PlainKeys
from tiercache.train.rank_rows import RankRows
from tiercache.train.table_module import check_modules, table_modules
from tiercache.train.training_batches import EpochLoader, TrainingBatches
from tiercache.values.compiled import not_compiled

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.tensorboard import SummaryWriter

    from tiercache.data.dataset import PassDataset
    from tiercache.planning.pass_plan import PassPlan
    from tiercache.planning.sharding_rules import ShardingRules
    from tiercache.planning.store_plan import StorePlan
    from tiercache.reporting.report import PassReport
    from tiercache.rows.backends.base import Backend
    from tiercache.store import Store
    from tiercache.store.sharding import ShardingPlan
    from tiercache.train.joint_optimizer import JointOptimizer
    from tiercache.train.passes import Pass
    from tiercache.train.rank_rows import CurrentRows
    from tiercache.values.batch import Batch
    from tiercache.values.lookups import Unseen


class TierCache(CacheFacts):
    """Trains a dataset's passes with rows on the device, in host memory and in a store, and commits.

    Rows are trained on the device. At each switch of passes they move between the tiers as planned; host and device
    bytes are planned before the first batch and never exceeded. Use a cache from one thread. It runs a reader thread
    and a writer thread until ``close``. If your tables fit into memory, use ``InMemoryCache``: it needs no store.

    If torch.distributed is initialized, the cache trains on all ranks, one process for each device. A pass then holds
    what all devices together hold. Each rank loads, trains and dumps its own rows from its own shard of the store, and
    exchanges rows with the other ranks for each batch. Every method is collective unless its documentation says
    otherwise: all ranks call it, in the same order. An error on one rank is raised on all ranks. An error in your own
    code, or during an exchange, ends the other ranks when the process ends, as with torchrun.
    """

    store: Store
    """The store, or this rank's shard of it; None if the cache has none."""
    optimizer: JointOptimizer
    """The optimizer that the loop steps: dense parameters, then rows."""

    def __init__(
        self,
        store: str | os.PathLike[str] | Store | None,
        data: PassDataset | str | os.PathLike[str],
        *,
        model: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        device: str | torch.device | Backend = "cpu",
        device_budget: int | str | None = None,
        host_budget: int | str | None = None,
        eval_budget: int | str | None = None,
        store_budget: int | str | None = None,
        plan: str | os.PathLike[str] | None = None,
        sharding: ShardingPlan | ShardingRules | str | Mapping[str, str] = "auto",
        commit_every: int | None = None,
        retention: int | None = None,
        seed: int = 0,
        order: Sequence[int] | str | None = None,
        order_seed: int | None = None,
        at: int | str | None = None,
        progress: bool | None = None,
        options: TierCacheOptions | None = None,
        **unknown: Never,
    ) -> None:
        """Plan the budgets and open the store.

        Args:
            store: the path of a store, which is created if it does not exist, or a Store, which stays open. With
                several ranks, or with ``shard_dirs`` in ``options``, the store is sharded, and with one rank it is
                plain; a store of the other kind is rewritten first. A sharded Store that is passed open is only read,
                by as many ranks as it has shards. None: all rows stay on the device, and nothing is committed; the
                other arguments about stores, budgets and sharding are refused then.
            data: a dataset made by `extract` or `write_key_sets`, or its path.
            model: one or several, registered as "model", or "model0", "model1" and so on: see ``register``.
            optimizer: one or several, registered as "optimizer", or "optimizer0" and so on.
            device: where rows are trained: "cpu", "cuda", "cuda:1" or a torch.device. The model belongs there too. With
                several ranks, "cuda" is the GPU of LOCAL_RANK, or the only visible one.
            device_budget: bytes (or "64MiB") on the device for rows, slot maps and, if it fits, the index of raw keys.
            host_budget: bytes of anonymous memory for planning, batches, dump, prefetched and cached rows, one write
                transaction and evaluation.
            eval_budget: the part of ``host_budget`` reserved for evaluation, 0 for none; default: a sixteenth.
            store_budget: the maximum bytes that the store may ever need, checked here and, with the dense state, before
                training. It does not stop writes; the ``store_budget`` of ``Store.open`` does. All budgets count for
                each rank.
            plan: a file written by `tiercache plan`. It provides budgets, order and commit_every if they are not given
                here, and the reports show its predicted seconds next to the measured ones.
            sharding: how tables are divided over ranks: a strategy ("auto", "basic", "memory_balanced",
                "memory_optimized", "cost"), a kind for each table ("row_wise", "table_wise", "column_wise",
                "data_parallel"; other tables are sharded by cost), ShardingRules, or a ShardingPlan. "auto" keeps the
                sharding of the store. If the sharding or the number of ranks differs from the store's, its shards are
                rewritten first.
            commit_every: passes between commits; default: 1.
            retention: as in ``Store.open``, which the cache then calls; it counts the commits of all ranks together.
            seed: the seed of shuffled batches.
            order: the order of the sub-datasets in every epoch: a permutation of their numbers, or "overlap", which
                puts sub-datasets that share rows next to each other, so that fewer rows move. Default: their own order.
            order_seed: a number shuffles the sub-datasets in each epoch.
            at: the id of a commit or the name of a pin to resume from, by ``Store.rollback`` when the cache opens.
                Later commits are dropped unless they are pinned, and a warning names them. This happens at every start:
                leave it out to resume.
            progress: whether to show a progress bar; None: on a terminal.
            options: settings that are rarely changed.

        Raises:
            BudgetError: the passes exceed a budget or the device's memory. Nothing was written.
            PlanError: ``plan`` cannot be read, or is of another dataset.
            DatasetError: the store, or the model, does not belong to this dataset.
            CudaError: the GPU cannot be used.
            RankError: ranks were given different arguments, or one of them failed.
            ValueError: an argument is invalid.
            StoreError: see ``Store.open``.
        """
        refuse_moved(unknown)
        limits = {
            "device_budget": device_budget, "host_budget": host_budget, "eval_budget": eval_budget,
            "store_budget": store_budget, "commit_every": commit_every,
        }  # fmt: skip
        self._closed = False
        self._parts = parts = CacheParts(
            store, data, device, limits, self.live_rows, model=model, optimizer=optimizer, plan=plan,
            sharding=sharding, retention=retention, seed=seed, order=order, order_seed=order_seed, at=at,
            progress=progress, options=options or TierCacheOptions(),
        )  # fmt: skip
        self.communicator, self.dataset, self._opened = parts.ranks, parts.dataset, parts.training_store
        self.store = parts.store  # type: ignore[assignment]
        self._backend, self._rows, self._exchange, self._raw = parts.backend, parts.rows, parts.exchange, parts.raw
        self._pipeline, self._loop = parts.pipeline, parts.loop
        self.dense, self.optimizer = parts.rows.state.dense, parts.rows.state.joint
        self.optimizer.bind(parts.loop.step)
        self._plain = PlainKeys(parts.raw, self._lookup_source)
        self.index_bytes = parts.index_bytes
        """Bytes of ``device_budget`` for the index of raw and plain keys, built when a pass first looks up keys; 0 if
        they do not fit, so keys are searched on the CPU."""
        self.reports: list[PassReport] = parts.loop.reports
        """Rows and bytes that this rank moved: a report for each pass trained by this object, also while it runs."""
        self._scalars_written = 0
        with parts.closed_on_error():
            self.register(**parts.objects)
        self._pid = os.getpid()

    # -- before training ----------------------------------------------------------------------------------

    def register(self, **objects: Any) -> None:
        """Commit the state of these objects with the rows; ``cache.optimizer`` steps the optimizers among them.

        Objects need ``state_dict`` and ``load_state_dict``: modules, optimizers, schedulers, scalers. The loop steps
        ``cache.optimizer`` instead of its optimizers: it steps these and the rows. The random generators of torch,
        numpy and random are always committed. A model that is compiled or wrapped in DistributedDataParallel is stored
        under its own names, so you can resume without the wrapper or with another number of ranks. With several ranks,
        register a model before you request batches: they bring the rows that its modules look up. Modules, optimizers,
        schedulers and scalers that are the same on all ranks when training begins are stored once, by rank 0; other
        objects and random generators are stored by each rank. Not collective. Raises StateError for state that cannot
        be stored, DatasetError for a module that was made with features or tables that the dataset does not have.
        """
        self._check_open()
        refuse_weights(objects.values(), has_store=self.store is not None)
        objects = unwrapped_objects(objects, self.optimizer)
        check_modules(objects, self.dataset)
        self.dense.register(objects)
        self._parts.modules += [value for value in objects.values() if isinstance(value, nn.Module)]
        self._raw.bounds |= bounds_of(objects.values())
        self.optimizer.follow([*objects.values()])
        for value in objects.values():
            if isinstance(value, torch.amp.GradScaler):
                self._exchange.follow(value)
        self.optimizer.rows.anchors.readers.update(table_modules(objects.values()))
        self._bind_modules()
        self.optimizer.rows.settings_check.follow(self.optimizer.rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the store and of its newest commit, for a checkpoint.

        This makes the cache a Stateful of `torch.distributed.checkpoint`, like the model and the optimizer.
        """
        return self._opened.named_commit()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the newest commit of the store is the one that a state names. Raises StateError if not.

        To resume from an older checkpoint, roll the store back first (``store.rollback`` or `tiercache rollback`).
        """
        self._opened.check_named(state)

    def plan(self, *, passes: int | None = None) -> list[PassPlan]:
        """Return the plans of this rank's next passes, by default of one epoch and one pass. Not collective."""
        return self._check_stored("plan()").plans.passes(passes)

    def store_plan(self, state_bytes: int = 0) -> StorePlan:
        """Return the bytes that the store needs at its fullest, if each commit has ``state_bytes`` of dense state."""
        return self._check_stored("store_plan()").plans.store_plan(state_bytes)

    # -- training -----------------------------------------------------------------------------------------

    def passes(self, epochs: int) -> SizedIterator[Pass]:
        """Return an iterator over the passes from the last commit to the end of epoch ``epochs``, with a length.

        First restores rows and registered state from the last commit, unless this cache made or restored it last, and
        nothing was trained or registered since: then changes such as rates are kept. A store without a commit gets one
        of the current state. Without a store, training continues with the first pass that was not trained to its end. A
        pass ends when the next one is requested, so work after its last batch belongs to it. Every ``commit_every``-th
        pass and the last one are committed when they end. The commit of pass t is durable by the end of pass t + 1;
        exhausting the iterator waits for the last commit. If you leave the loop early, nothing more is committed. With
        several ranks a commit is made on all ranks or on none.

        Your loop may fetch batches ahead, also from the next pass; with several ranks, all in the same way. If a batch
        of a pass has not been trained yet when the next pass is requested, the pass ends at the first lookup that
        trains the next one; the last pass ends with ``close``, ``commit`` or another loop. A batch counts as trained
        when a module has looked it up with gradients enabled.

        A pass is committed only if it was trained: all its batches were taken and looked up with gradients enabled, and
        ``cache.optimizer`` has stepped. Otherwise StateError names the pass and how much of it was trained.
        ``Pass.skip`` counts a pass as trained as it is, ``Pass.stop`` ends the training. If nothing is left to train, a
        warning says so.
        """
        return SizedIterator(self._passes(epochs), lambda: self._loop.passes_left(epochs))

    def _passes(self, epochs: int) -> Generator[Pass, None, None]:
        self._check_open()
        self._bind_modules()
        yield from self._loop.passes(epochs)  # not its iterator: the loop keeps the cache

    def loader(self, loader: Any, epochs: int, **options: Any) -> EpochLoader:
        """Return a replacement of a recorded loader in a loop over ``epochs`` epochs, which stays as it is.

        Iteration e yields the batches of epoch e, pass by pass, as ``Pass.loader`` makes them; shuffled if ``loader``
        is. Committed batches are left out, so a script that runs again resumes. ``loader``: the loader that was passed
        to `record_key_sets`; ValueError if its batches differ. ``options``: arguments of ``Pass.loader`` to override.
        """
        return EpochLoader(self, self._loop, loader, epochs, **options)

    def batches(
        self, size: int, *, epochs: int, shuffle: bool = False, dataset: Any = None, batches_per_step: int = 1,
        **options: Any,
    ) -> TrainingBatches:  # fmt: skip
        """Return the batches of all passes up to the end of epoch ``epochs`` as one iterable with a length.

        This is a loop over ``passes`` and ``Pass.batches``, or ``Pass.loader`` if your ``dataset`` is given, for
        trainers that want a loader; ``options`` are their other arguments. The same rules hold: each iteration begins
        at the last commit, a pass counts only if its batches were trained, and passes are committed when they end. No
        batch mixes samples of two passes. ``len`` is the number of batches that are left, ``current_pass`` the pass of
        the newest batch, ``state_dict`` names the last commit. If your loop takes the last batch and then stops, the
        last pass is committed by ``close``, ``commit`` or another loop; if you leave the loop before that batch is
        trained, nothing more is committed. ``batches_per_step``: the batches whose gradients your trainer accumulates.

        Raises ValueError for a size below 1, a wrong number of epochs or a step of two passes, DatasetError if the
        dataset has neither samples nor, with ``dataset``, a recording; iterations raise the errors of these methods.
        """
        options |= {"shuffle": shuffle, "per_step": batches_per_step}
        return TrainingBatches(self, self._loop, size, epochs=epochs, dataset=dataset, **options)

    def restore(self) -> None:
        """Load the last commit: rows and the state of all registered objects. Ends a loop over ``passes``.

        ``passes`` does this automatically; call it to evaluate without training. A store without a commit gets one of
        the current state. Raises StateError if the registered objects are not the same as in the commit.
        """
        self._check_open()
        self._bind_modules()
        self._loop.restore()

    def commit(self) -> None:
        """Commit now, inside a pass, after the batches trained so far. Returns when it is durable on all ranks.

        A batch counts when a module has looked it up. After a loop over ``passes``, this commits the last pass if it
        still waits. Raises StateError between backward and step, and outside a pass. Keeps nothing without a store.
        """
        self._check_open()
        self._loop.commit()

    def keep(self, name: str) -> int:
        """Pin the current rows and dense state as ``name``, until it pins another commit or ``store.unpin``.

        Inside a pass, batches trained since the last commit are first committed as by ``commit``, even after the last
        batch of the pass. Returns the id of the pinned commit, when it is durable on all ranks. Raises StateError as
        ``commit`` does, without a store, and if no commit has the current state: before a batch of the pass is trained
        if ``commit_every`` left out the previous pass, and after the loop was left early.
        """
        self._check_open()
        return self._loop.keep(name, self._check_stored("keep()"))

    @not_compiled
    def clip_grad_norm_(
        self, max_norm: float, *, optimizer: torch.optim.Optimizer | None = None, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of rows and dense parameters by their common 2-norm, and return the norm.

        Use this instead of `torch.nn.utils.clip_grad_norm_`, which does not add up the gradients of a row. It clips the
        parameters of ``optimizer``, or of all registered optimizers, and the rows that step with them. Call it between
        backward and step; with a GradScaler, after ``unscale_``. Raises RuntimeError if the norm is not finite and
        ``error_if_nonfinite``. With several ranks all call it. The norm then equals the norm of one process on the
        whole batch, provided that dense gradients are already averaged, as DistributedDataParallel does.
        """
        return self._exchange.clip(max_norm, optimizer, error_if_nonfinite=error_if_nonfinite)

    def write_report(self, path: str | os.PathLike[str]) -> None:
        """Write ``reports`` to a file, one JSON object per pass. `tiercache report` makes a page of it.

        Waits until the passes are durable. If no pass was trained, as when a finished script runs again, the file is
        left unchanged. Not collective: each rank has its own reports.
        """
        place = local_path(path, "a report")
        self.drain(staged=False)
        if self.reports:
            write_json_lines(self.reports, place)

    def write_scalars(self, writer: SummaryWriter) -> None:
        """Write the numbers of ``reports`` to TensorBoard; each pass is written once, over all calls.

        ``writer``: a `torch.utils.tensorboard.SummaryWriter`, or an object with its ``add_scalar(tag, value, step)``.
        Waits until the passes are durable. Not collective: each rank has its own reports.
        """
        self.drain(staged=False)
        ended = [report for report in self.reports if report.durable.is_set()]
        write_scalars(ended[self._scalars_written :], writer)
        self._scalars_written = len(ended)

    @property
    def samples_of_pass(self) -> int:
        """Samples of the current pass that were trained by this object, of all ranks; 0 outside a pass."""
        current = self._loop.current
        return 0 if current is None else current.samples_trained - current.start_sample

    def drain(self, *, staged: bool = True) -> None:
        """Wait until every dump is durable and, with ``staged``, the rows of the next pass are prefetched.

        You need this only for measurements. Raises errors of the reader and writer threads. Not collective.
        """
        self._rows.drain(staged=staged)

    # -- evaluation ---------------------------------------------------------------------------------------

    def evaluate(self, passes: PassDataset, *, batch_size: int = 1) -> Iterator[Evaluation]:
        """Yield read-only slices of another dataset, at any moment between batches.

        Rows have their current values, wherever they are. A key that was never trained has its table's
        out-of-vocabulary row if there is one, else its initial row. Nothing is written. A slice has as many samples as
        ``eval_budget`` holds rows for, and a multiple of ``batch_size``. With several ranks each rank gets its part of
        every batch. Lookups make no gradients. Raises StateError if a registered model was not restored, by ``restore``
        or ``passes``, and for a lookup after a step, when the rows of the slice are not current.
        """
        self._check_open()
        self._exchange.tell([], "beginning an evaluation", None)
        with self.communicator.raise_on_all("checking an evaluation"):
            self._rows.check_restored()
            check_features(self.dataset, passes)
            check_keys_within(self._raw.bounds, passes)
            view = self._opened.view(passes)
            self._rows.check_evaluated(view)
        exchange = self._exchange.evaluating(view)
        try:
            yield from Evaluation.slices(
                view, self._exchange.live_rows, self._rows.state.optimizer, self.eval_bytes, exchange, self._pipeline,
                self._backend, batch_size,
            )  # fmt: skip
        finally:
            exchange.rest()

    def evaluation_batches(
        self, passes: PassDataset, size: int, *, prefetch: int | None = None, schedule: str = "interleaved"
    ) -> EvaluationBatches:
        """Return the batches of another dataset as one iterable with a length: a validation loader for trainers.

        Each iteration evaluates all slices of ``evaluate`` with the rows as they are then; a cache that was not
        restored is restored first, as by ``restore``. A slice ends at a multiple of ``size`` samples, so that ``len``
        is known. Other arguments are as for `Evaluation.batches`. Raises the errors of ``evaluate``, and BudgetError if
        the rows of ``size`` samples exceed ``eval_budget``.
        """
        return EvaluationBatches(self, passes, size, prefetch=prefetch, schedule=schedule)

    def evaluate_batch(
        self, keys: Mapping[str, Any] | None, *, unseen: Unseen = "initial", **others: Any
    ) -> Batch | None:
        """Return a read-only batch of raw keys, given as in ``Pass.batch``, at any moment between batches.

        Rows have their current values until the next step, as in ``evaluate``, and the ranks that own them read them
        for this batch alone. A key that was never trained has its table's out-of-vocabulary row if there is one; else
        ``unseen`` decides: "initial" its initial row, "zeros" zeros, "error" KeyMissingError, as in `to_torch`. Raises
        BudgetError if the rows of its unique keys exceed ``eval_budget`` on this rank or on one that reads them.
        """
        self._check_open()
        self._rows.check_restored()  # the same on all ranks
        return self._raw.evaluate(keys, self.eval_bytes, unseen=unseen, **others)

    @contextmanager
    def lookups(self, *, local: bool) -> Iterator[None]:
        """If ``local``, lookups of plain keys under ``no_grad`` read rows without the other ranks.

        Use it to validate on rank 0 only, while the other ranks continue. Lookups then read the newest commit of all
        ranks, without later updates. A cache with one rank always reads the current rows. Not collective if ``local``.
        """
        self._check_open()
        self._bind_modules()
        if not local or self.communicator.size == 1:
            yield
            return
        with self._opened.committed() as store:
            self._plain.committed = CommittedRows(store)
            try:
                yield
            finally:
                self._plain.committed = None

    def live_rows(self, unknown: Mapping[str, Sequence[NDArray[np.float32]]] | None = None) -> CurrentRows:
        """Return a reader of the current values of this rank's rows; valid until the next batch is trained.

        Waits until every dump is durable. ``unknown``: out-of-vocabulary rows that are kept elsewhere. Not collective.
        """
        self._check_open()
        current = self._loop.current
        return self._rows.current_rows(None if current is None else current.index, unknown)  # type: ignore[return-value] # or InMemoryRows, likewise

    # -- ending -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the threads and free all memory; commit the last pass if it is complete.

        A Store that you passed stays open. After this, any call that needs rows raises StateError; ``reports`` stays
        readable. In a fork of the process it does nothing: the cache belongs to its parent. Not collective.
        """
        self._close(failed=False)

    def __del__(self) -> None:
        # The threads end by themselves, and the store closes itself.
        if getattr(self, "_pid", None) == os.getpid() and not self._closed and self.store is not None:
            warn_unclosed(self, f"the cache of {self.store.label}")

    def __repr__(self) -> str:
        where = "rows in memory" if self.store is None else f"the store {self.store.path or 'in memory'}"
        state = "closed" if self._closed else f"next pass {self._loop.position[0]:,}"
        return f"<{type(self).__name__}: {where}, {state}>"

    def __enter__(self) -> TierCache:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(failed=error is not None)

    def _close(self, *, failed: bool) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._pid:
            self._parts.close(failed=failed)

    # -- private ------------------------------------------------------------------------------------------

    def _bind_modules(self) -> None:
        """Have modules look up plain keys here, and not in another cache that they were registered with."""
        named = None if self.store is None else weakref.WeakMethod(self._opened.named_commit)
        for module in self.optimizer.rows.anchors.readers:
            module.bind(weakref.WeakMethod(self._plain.batch), named, weakref.ref(self.optimizer.rows))

    def _lookup_source(self, trains: bool) -> tuple[Pass | None, int]:
        """Return the newest pass, for plain keys that are trained, and the byte budget for the rows of other keys."""
        self._check_open()
        if not trains:
            self._rows.check_restored()
        return self._loop.newest, self.eval_bytes

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(self._rows.closed)
        self._rows.check_process()

    def _check_stored(self, what: str) -> RankRows:
        if not isinstance(self._rows, RankRows):
            raise StateError(f"{what} needs a store, but this cache has none: pass the path of one to TierCache")
        return self._rows
