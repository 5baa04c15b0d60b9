"""Budget checks made before a store is rewritten for training."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tiercache.data.dataset import PassDataset
from tiercache.dist.shard_view import ShardView
from tiercache.planning.budgets import HostBudget, distance_bytes
from tiercache.planning.next_use import find_next_uses
from tiercache.planning.pass_plan import Planner, Plans, live_layouts
from tiercache.planning.reuse import ReuseCounts
from tiercache.planning.row_offsets import RowOffsets
from tiercache.planning.schedule import Schedule
from tiercache.reporting.progress import prepare_kernels
from tiercache.rows.device import DeviceMemoryPlan
from tiercache.rows.next_use_files import NextUseFiles
from tiercache.store.checkpoint import tensor_sizes
from tiercache.store.files import ScratchFile, scratch_in
from tiercache.store.snapshot import History
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tiercache.data.dataset import DatasetView
    from tiercache.planning.budgets import Budgets
    from tiercache.planning.next_use import NextUses
    from tiercache.planning.schedule import OrderRule
    from tiercache.rows.backends.base import Backend
    from tiercache.store import Store, Table


def check_device(budgets: Budgets, source: DatasetView, backend: Backend) -> Budgets:
    """Return the budgets for rows on a device, without the bytes of replicated tables.

    Raises BudgetError if rows need more.
    """
    needs = DeviceMemoryPlan.of(_positions(source), backend)
    budgets = replace(budgets, pinned=backend.queues)
    if not isinstance(source, ShardView):
        needs.check(budgets.device_budget, cut=source.made_by if isinstance(source, PassDataset) else "")
        return budgets
    replicas = replica_bytes(source)
    num_ranks = source.sharding.num_ranks
    divided = num_ranks == 1 or all(one.kind == "row_wise" for one in source.sharding.tables.values())
    needs.check(
        budgets.device_budget,
        num_ranks=num_ranks,
        replicas=replicas,
        advice="" if divided else "; this assumes that all tables are sharded row_wise",
        cut=source.whole.made_by,
    )
    return replace(budgets, device_budget=budgets.device_budget - replicas)


def check_plan(
    budgets: Budgets,
    source: DatasetView,
    *,
    order: OrderRule,
    folder: Path,
    commits: int,
    state_bytes: int = 0,
    start: int | None = None,
) -> None:
    """Raise BudgetError if the host or the store is too small for a store ordered as ``source``.

    The store keeps ``commits`` commits with ``state_bytes`` of dense state, and only the rows of ``source``;
    ``check_store`` counts other rows. Finds the uses of all keys in a temporary file in ``folder``, 8 bytes each. In a
    seeded order, store bytes are checked for the epoch of pass ``start``, and not at all if it is None.
    """
    positions, schedule = _positions(source), Schedule.of(source, order)
    host = HostBudget.of(
        positions, budgets.host_budget, budgets.eval_budget, seeded=not schedule.repeats, pinned=budgets.pinned,
        records=_record_bytes(source.tables),
    )  # fmt: skip
    prepare_kernels(source.tables)
    with ScratchFile(scratch_in(folder), "planning the host budget") as scratch:

        @cache
        def next_uses_of(epoch: int) -> NextUses:
            total = positions.total_rows
            distances = scratch.map(distance_bytes(total)[0]) if total else np.empty(0, np.uint8)
            return find_next_uses(
                schedule, epoch, positions, positions.keys_of(source), distances.view(np.int32).reshape(2, total),
                keys_per_range=host.keys_per_sweep,
            )  # fmt: skip

        planner = Planner(
            ReuseCounts(schedule, positions, next_uses_of), host,
            start=0 if schedule.repeats else start or 0, within=False, commit_every=budgets.commit_every, stored={},
        )  # fmt: skip
        if budgets.store_budget is not None and (schedule.repeats or start is not None):
            planner.store_plan(History(), commits=commits, state_bytes=state_bytes).check(budgets.store_budget)


def check_store(budgets: Budgets, share: ShardView, store: Store, *, order: OrderRule) -> None:
    """Raise BudgetError if a shard whose rows are ordered as ``share`` would outgrow its budget."""
    if budgets.store_budget is not None:
        plans, _ = plans_of(budgets, share, store, order=order)
        plans.check_store(lambda: 0 if store.commit is None else store.commit.state_bytes)


def plans_of(budgets: Budgets, source: DatasetView, store: Store, *, order: OrderRule) -> tuple[Plans, NextUseFiles]:
    """Return the plans of a store's passes, and the files of next uses that they read."""
    positions, schedule = RowOffsets.of(source, store.groups), Schedule.of(source, order)
    host = HostBudget.of(
        positions, budgets.host_budget, budgets.eval_budget, live_layouts(store), seeded=not schedule.repeats,
        pinned=budgets.pinned, records=_record_bytes(store.tables),
    )  # fmt: skip
    uses = NextUseFiles(
        schedule, positions, positions.keys_of(source), store.path if store.mode == "a" else None,
        keys_per_range=host.keys_per_sweep, share=source.share if isinstance(source, ShardView) else "",
    )  # fmt: skip
    return Plans(store, ReuseCounts(schedule, positions, uses.of), host, budgets), uses


def _record_bytes(tables: Iterable[Table]) -> int:
    """Return the bytes of the records of checkpoints. Raises CheckpointError."""
    return sum(num_bytes for *_, num_bytes in tensor_sizes(tables).values())


def replica_bytes(share: ShardView) -> int:
    """Return the bytes of replicated vectors on each device; 0 for one rank, which has no replicas."""
    if share.sharding.num_ranks == 1:
        return 0
    copied = [table for table in share.whole.tables if share.sharding.tables[table.name].kind == "data_parallel"]
    return max((sum(4 * table.dim * p.rows(table.name) for table in copied) for p in share.whole.passes), default=0)


def _positions(source: DatasetView) -> RowOffsets:
    return RowOffsets.of(source, group_tables(source.tables))
