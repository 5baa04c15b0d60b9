"""The parts of a cache, opened in order: all checks that may fail come before the first write."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from tiercache.data.dataset import PassDataset
from tiercache.dist.budget_checks import check_device
from tiercache.dist.communicator import Communicators, communicator_of, only_rank
from tiercache.dist.consistency import check_same
from tiercache.dist.shard_view import ShardView
from tiercache.dist.training_store import StoreOptions, TrainingStore
from tiercache.errors import BudgetError, DatasetError
from tiercache.planning.budgets import Budgets
from tiercache.planning.plan_file import TrainingPlan
from tiercache.planning.schedule import order_rule
from tiercache.reporting.progress import prepare_kernels
from tiercache.rows.backends.open_backend import device_name, open_backend
from tiercache.rows.threads import share_threads
from tiercache.store.checkpoint import tensor_sizes
from tiercache.store.records import checked_retention, integer
from tiercache.store.table import group_tables
from tiercache.train.batches import BatchPipeline, checked_seed
from tiercache.train.converted_weights import (
    bounds_of,
    check_keys_within,
    drop_weights,
    refuse_weights,
    weight_rows,
    weights_of,
)
from tiercache.train.joint_optimizer import named_objects
from tiercache.train.local_exchange import LocalExchange
from tiercache.train.options import COMM_DTYPES
from tiercache.train.pass_loop import PassLoop
from tiercache.train.rank_exchange import RankExchange
from tiercache.train.rank_rows import RankRows
from tiercache.train.raw_keys import IndexPlan, RawKeys
from tiercache.train.resident_rows import ResidentRows
from tiercache.train.table_module import check_modules

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from torch import nn

    from tiercache.data.dataset import DatasetView
    from tiercache.dist.row_loader import LocalRows
    from tiercache.planning.schedule import OrderRule
    from tiercache.planning.sharding_rules import ShardingRules
    from tiercache.rows.backends.base import Backend
    from tiercache.store import Store
    from tiercache.store.sharding import ShardingPlan
    from tiercache.train.local_exchange import Exchange
    from tiercache.train.options import TierCacheOptions


class CacheParts:
    """The parts of a cache, closed in the reverse of their opening order."""

    store: Store | None = None  # the store, or this rank's shard of it

    def __init__(
        self,
        store: str | os.PathLike[str] | Store | None,
        data: PassDataset | str | os.PathLike[str],
        device: str | torch.device | Backend,
        limits: Mapping[str, int | str | None],
        live_rows: Callable[..., LocalRows],
        *,
        model: nn.Module | Sequence[nn.Module] | None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        plan: str | os.PathLike[str] | None,
        sharding: ShardingPlan | ShardingRules | str | Mapping[str, str],
        retention: int | None,
        seed: int,
        order: Sequence[int] | str | None,
        order_seed: int | None,
        at: int | str | None,
        progress: bool | None,
        options: TierCacheOptions,
    ) -> None:
        """Open them. ``limits``: the arguments of ``Budgets.parse``. ``live_rows``: the cache's method, held weakly."""
        comm_dtype, device = COMM_DTYPES[options.comm_dtype], device_name(device)
        where = device if isinstance(device, str) else device.device
        self.ranks = ranks = (only_rank if store is None else communicator_of)(options.group, where)
        with self.closed_on_error():
            with ranks.raise_on_all("reading the budgets"):
                self.dataset = data = PassDataset.of(data)
                planned = None if plan is None else TrainingPlan.read(plan, data)
                if order is None and order_seed is None and planned is not None:
                    order = planned.order
                rule, seed = order_rule(data, order, order_seed), checked_seed(seed)
                retention = None if retention is None else checked_retention(retention)
                at = at if at is None or isinstance(at, str) else integer(at, "at")
                store_options = StoreOptions(
                    sharding=sharding, shard_dirs=options.shard_dirs, engine=options.engine, retention=retention,
                    reorganize=options.reorganize, order=rule, at=at,
                )  # fmt: skip
                self.training_store = TrainingStore(store, data, ranks, store_options)
                self.dataset = data = self.training_store.passes
                self.objects = named_objects(model=model, optimizer=optimizer)
                tables = [str(table) for table in data.tables]
                facts = {"the schema": data.schema.digest, "the tables": tables, "the dataset": data.digest}
                facts |= self.training_store.facts | {
                    "the model and the optimizer": [*self.objects],
                    "tables with weights": sorted(weights_of(self.objects.values())),
                }
                budgets = None
                if store is None:
                    refuse_weights(self.objects.values(), has_store=False)
                    _refuse_unused({
                        **limits, "plan": plan, "shard_dirs": options.shard_dirs, "engine": options.engine,
                        "retention": retention, "at": at, "sharding": None if sharding == "auto" else sharding,
                    })  # fmt: skip
                else:
                    budgets = Budgets.parse(None if planned is None else planned.budgets.to_budgets(), **limits)
                    facts |= asdict(budgets)
            if ranks.size > 1:
                check_same(ranks, facts | {
                    "comm_dtype": options.comm_dtype, "seed": seed, "on_nonfinite": options.on_nonfinite,
                })  # fmt: skip
            source = self.training_store.choose(number_bytes=comm_dtype.itemsize)
            with ranks.raise_on_all("opening the checkpoints of tables"):
                begun = tensor_sizes(source.tables)
                if begun and data.manifest.rare is not None:
                    raise DatasetError(
                        f"the rare keys of {data.path} share a row (min_count), and table {min(begun)!r} starts from a "
                        "checkpoint, which has no such row: create the dataset without min_count"
                    )
            with ranks.raise_on_all("opening the device"):
                self.backend = open_backend(str(ranks.device) if isinstance(device, str) else device, source.tables)
                share_threads()
            with ranks.raise_on_all("checking the model"):
                check_modules(self.objects, data)
                if ranks.rank == 0:
                    check_keys_within(bounds_of(self.objects.values()), data)
            self.rows: RankRows | ResidentRows
            free_bytes = None
            if budgets is None:
                with ranks.raise_on_all("compiling the kernels"):
                    prepare_kernels(source.tables)
                self._clone_ranks()
                self.rows = ResidentRows(source, self.backend, rule)
            else:
                self.rows, free_bytes = self._open_rows(source, budgets, order=rule, progress=progress)
            row_optimizer = self.rows.state.optimizer
            row_optimizer.anchors.is_closed_to_others = store is not None
            row_optimizer.anchors.flags_overflow, row_optimizer.num_ranks = ranks.size > 1, ranks.size
            row_optimizer.anchors.is_queued = self.backend.queues
            self.modules: list[nn.Module] = []  # the registered modules
            self.exchange = self._open_exchange(live_rows, comm_dtype)
            index = IndexPlan.of(data, self.backend, free_bytes)
            self.index_bytes = index.num_bytes
            groups = group_tables(data.tables)
            self.raw = RawKeys(
                data.schema, groups, self.exchange, row_optimizer, self.backend, index, data.rare_keys()
            )  # fmt: skip
            self.pipeline = BatchPipeline(self.backend)
            self.loop = PassLoop(
                self.training_store, self.rows, self.raw, self.pipeline, seed=seed,
                shown=ranks.rank == 0 and (sys.stderr.isatty() if progress is None else progress),
                on_nonfinite=options.on_nonfinite, rates=None if planned is None else planned.machine,
            )  # fmt: skip

    def _open_rows(
        self, source: DatasetView, budgets: Budgets, *, order: OrderRule, progress: bool | None
    ) -> tuple[RankRows, int]:
        """Open the store and allocate memory for its rows. Returns them and the bytes left of the device budget."""
        ranks, objects = self.ranks, self.objects.values()
        weights = weights_of(objects)
        if weights and self.dataset.manifest.rare is not None:
            raise DatasetError(
                f"the rare keys of {self.dataset.path} share a row (min_count), but the converted module of table "
                f'{next(iter(weights))!r} has a weight for each key: create the module on "meta", or the dataset '
                "without min_count"
            )
        with ranks.raise_on_all("planning the budgets"):  # before the store is created or rewritten
            budgets = check_device(budgets, source, self.backend)
        with ranks.raise_on_all("compiling the kernels"):  # for a minute; the checks of other budgets call them
            prepare_kernels(source.tables)
        first = partial(weight_rows, weights=weights) if weights else None
        try:
            self.store = self.training_store.open(source, budgets, first=first, progress=progress)
            with ranks.raise_on_all("comparing the checkpoints of tables"):
                self.store.check_checkpoints()
            drop_weights(objects)
            self._clone_ranks()
            with ranks.raise_on_all("planning the budgets"):
                index = IndexPlan.of(self.dataset, self.backend).num_bytes
                rows = RankRows(self.store, source, self.backend, budgets, order=order, index_bytes=index)
        except BudgetError:
            self.training_store.discard_new()
            raise
        return rows, budgets.device_budget - rows.device_bytes

    def _clone_ranks(self) -> None:
        """Connect the ranks for other threads. NCCL takes device memory for it: do it before rows are allocated."""
        self.communicators = Communicators.connect(self.ranks)

    def _open_exchange(self, live_rows: Callable[..., LocalRows], comm_dtype: torch.dtype) -> Exchange:
        optimizer = self.rows.state.optimizer
        if self.ranks.size == 1:
            return LocalExchange(self.ranks, self.backend, optimizer, live_rows)
        assert isinstance(self.rows.source, ShardView)
        return RankExchange(
            self.communicators, self.rows.source, self.backend, optimizer, live_rows, self.modules,
            comm_dtype=comm_dtype,
        )  # fmt: skip

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the parts that are open if the body fails, so that this process can open them again."""
        try:
            yield
        except BaseException:
            for name in ("exchange", "rows", "communicators", "training_store", "ranks"):
                if hasattr(self, name):
                    getattr(self, name).close()
            raise

    def close(self, *, failed: bool) -> None:
        """End the loop, unless the training failed, and close all parts."""
        with ExitStack() as last:
            for close in (
                self.training_store.close, self.backend.drop_scratch, self.rows.close, self.raw.close,
                partial(self.communicators.close, failed=failed), self.exchange.close, self.rows.state.joint.close,
                self.pipeline.close,
            ):  # fmt: skip
                last.callback(close)  # the last one first
            if failed:  # before anything waits: a rank that waits for this one at an agreement raises
                self.ranks.close(failed=True)
            last.callback(self.loop.close)
            if not failed:
                last.callback(self.loop.finish)


def _refuse_unused(arguments: Mapping[str, object]) -> None:
    if found := [name for name, value in arguments.items() if value is not None]:
        raise ValueError(
            f"a cache without a store does not use {found[0]}, because all rows stay on the device and nothing is "
            "committed: omit it, or pass the path of a store"
        )
