"""Budgets: what each rank may take, and whether a training fits, worked out before a store is written anew for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiercache.dist.shard_view import ShardView
from tiercache.errors import BudgetError
from tiercache.planning.budgets import HostBudget, distance_bytes
from tiercache.planning.matching import check_commit_every
from tiercache.planning.next_use import find_next_uses
from tiercache.planning.pass_plan import Planner, Plans, waiting_streams
from tiercache.planning.reuse import ReuseCounts
from tiercache.planning.row_offsets import RowOffsets
from tiercache.planning.schedule import Schedule
from tiercache.reporting.progress import prepare_kernels
from tiercache.rows.device import DeviceMemoryPlan
from tiercache.rows.next_use_files import NextUseFiles
from tiercache.sizes import format_bytes, parse_bytes
from tiercache.store.commit import History
from tiercache.store.files import ScratchFile, scratch_in
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.data.dataset import DatasetView
    from tiercache.planning.next_use import NextUses
    from tiercache.planning.schedule import OrderRule
    from tiercache.rows.backends.base import Backend
    from tiercache.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """Bytes that each rank may take, the same on all."""

    device_budget: int
    host_budget: int
    eval_budget: int | None
    store_budget: int | None
    commit_every: int = 1
    """Passes between commits."""

    @classmethod
    def parse(
        cls,
        device: int | str,
        host: int | str,
        evaluation: int | str | None,
        store: int | str | None,
        commit_every: int = 1,
    ) -> Self:
        """Read sizes as people write them. Raises BudgetError, and ValueError for a commit_every below 1."""
        check_commit_every(commit_every)
        return cls(
            device_budget=parse_bytes(device),
            host_budget=parse_bytes(host),
            eval_budget=None if evaluation is None else parse_bytes(evaluation),
            store_budget=None if store is None else parse_bytes(store),
            commit_every=commit_every,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Return them by the names that users give them."""
        return asdict(self)

    def check_device(self, source: DatasetView, backend: Backend) -> int:
        """Return the bytes of the device that are left beside replicas. Raises BudgetError where rows need more."""
        if not isinstance(source, ShardView):
            DeviceMemoryPlan.of(_positions(source), backend).check(self.device_budget)
            return self.device_budget
        share, replicas = source, replica_bytes(source)
        if replicas > self.device_budget:
            raise BudgetError(
                f"the replicated tables need {format_bytes(replicas)} on every device and device_budget is "
                f"{format_bytes(self.device_budget)}: raise it, or shard them by row"
            )
        num_ranks = share.sharding.num_ranks
        divided = num_ranks == 1 or all(one.kind == "row" for one in share.sharding.tables.values())
        DeviceMemoryPlan.of(_positions(share), backend).check(
            self.device_budget,
            num_ranks=num_ranks,
            replicas=replicas,
            advice="" if divided else "; that counts with tables that are all sharded by row",
        )
        return self.device_budget - replicas

    def check_plan(
        self,
        source: DatasetView,
        *,
        order: OrderRule,
        folder: Path,
        commits: int,
        state_bytes: int = 0,
        start: int | None = None,
    ) -> None:
        """Raise BudgetError where host or store would be too small for a store that stands in the order of ``source``.

        The store is one that keeps so many commits of such a state and has the rows of ``source`` alone: what else it
        has counts in ``check_store``. Finds the uses of all keys, 8 bytes each, in a temporary file in ``folder``. In a
        seeded order the store's bytes are those of the epoch of pass ``start``, and not looked at where that is None.
        """
        positions, num_passes = _positions(source), len(source.passes)
        schedule = _schedule(source, order)
        budget = HostBudget.of(positions, self.host_budget, self.eval_budget, seeded=not schedule.repeats)
        prepare_kernels(source.tables)
        with ScratchFile(scratch_in(folder), "planning the host budget") as scratch:

            @cache
            def next_uses_of(epoch: int) -> NextUses:
                total = sum(positions.num_rows(p) for p in range(num_passes))
                distances = scratch.map(distance_bytes(total)[0]) if total else np.empty(0, np.uint8)
                keys_of = positions.keys_of(source)
                return find_next_uses(
                    schedule, epoch, positions, keys_of, distances.view(np.int32).reshape(2, total),
                    keys_per_range=budget.keys_per_sweep,
                )  # fmt: skip

            planner = Planner(
                schedule, positions, ReuseCounts(schedule, positions, next_uses_of), budget,
                start=0 if schedule.repeats else start or 0, within=False, commit_every=self.commit_every, stored={},
            )  # fmt: skip
            if self.store_budget is not None and (schedule.repeats or start is not None):
                plan = planner.store_plan(History(), commits=commits, state_bytes=state_bytes)
                plan.check(self.store_budget)

    def check_store(self, share: ShardView, store: Store, *, order: OrderRule) -> None:
        """Raise BudgetError where a part that stands in the order of ``share`` would outgrow its budget."""
        if self.store_budget is None:
            return
        positions, schedule = _positions(share), _schedule(share, order)
        budget = HostBudget.of(
            positions, self.host_budget, self.eval_budget, waiting_streams(store), seeded=not schedule.repeats
        )
        uses = NextUseFiles(
            schedule, positions, positions.keys_of(share), store.path, keys_per_range=budget.keys_per_sweep
        )
        plans = Plans(
            store, schedule, positions, uses.of, budget, commit_every=self.commit_every, store_budget=self.store_budget
        )
        plans.check_store(lambda: 0 if store.commit is None else store.commit.state_bytes)


def replica_bytes(share: ShardView) -> int:
    """Return the bytes that the vectors of replicated tables take on every device; one rank has no copies."""
    if share.sharding.num_ranks == 1:
        return 0
    copied = [table for table in share.whole.tables if share.sharding.tables[table.name].kind == "replicate"]
    return max((sum(4 * table.dim * p.rows(table.name) for table in copied) for p in share.whole.passes), default=0)


def _schedule(source: DatasetView, order: OrderRule) -> Schedule:
    return Schedule(num_passes=len(source.passes), dataset_digest=source.digest, order=order)


def _positions(source: DatasetView) -> RowOffsets:
    return RowOffsets.of(source, group_tables(source.tables))
