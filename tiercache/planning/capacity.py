"""The cost of training at different host budgets: exact rows and bytes, and predicted seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tiercache.planning.budgets import HostBudget
from tiercache.planning.pass_plan import PassPlan, Planner, least_host_budget
from tiercache.planning.plan_file import PassPrediction, Rates, Seconds, TrainingPlan
from tiercache.store.snapshot import History
from tiercache.store.tensor_file import CHUNK_BYTES, GAP_BYTES, READ_BYTES, Reads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiercache.planning.reuse import Reuse
    from tiercache.planning.row_offsets import RowOffsets
    from tiercache.planning.store_plan import StorePlan

COMMIT_INTERVALS = (2, 4, 8)
_ALIKE = 1.02
"""Seconds within this factor of the fewest count as equal."""


@dataclass(frozen=True, slots=True)
class Point:
    """Two epochs of training on a new store at one host budget, from one reuse analysis."""

    host_budget: int
    commit_every: int
    passes: tuple[PassPlan, ...]
    seconds: tuple[Seconds, ...]

    @property
    def later(self) -> range:
        """The passes of the second epoch; later epochs are the same."""
        return range(len(self.passes) // 2, len(self.passes))

    @property
    def epoch_seconds(self) -> float:
        """Predicted seconds of a later epoch."""
        return sum(self.seconds[v].total for v in self.later)

    def total(self, name: str) -> int:
        """Return the sum of a number of ``PassPlan``, such as ``bytes_read``, over a later epoch."""
        return sum(getattr(self.passes[v], name) for v in self.later)


class Capacity:
    """Plans training runs from one reuse analysis, without reading keys again."""

    def __init__(
        self, reuse: Reuse, samples_P: Sequence[int], rates: Rates, *, eval_budget: int | None = None,
        tensors: Mapping[str, tuple[int, int, int]] | None = None,
    ) -> None:  # fmt: skip
        """tensors: rows, bytes of a row and of the record, by table that starts from a checkpoint."""
        self._reuse, self._samples_P, self._rates, self._eval_budget = reuse, samples_P, rates, eval_budget
        sizes = {name: TensorSize(rows, width) for name, (rows, width, _) in (tensors or {}).items()}
        self._record_bytes = sum(num_bytes for *_, num_bytes in (tensors or {}).values())
        self.checkpoints = CheckpointReads(reuse.positions, sizes)

    def at(self, host_budget: int, *, commit_every: int = 1) -> Point:
        """Plan two epochs, as ``TierCache.plan`` does for a new store. Raises BudgetError for too small a budget."""
        planner = self._planner(host_budget, commit_every, end=2 * self._reuse.positions.num_passes)
        plans = tuple(planner.plan_next() for _ in range(2 * self._reuse.positions.num_passes))
        seconds = (
            self._rates.seconds(
                self._samples_P[plan.sub_dataset], plan, before, after,
                0 if after is None else self.checkpoints.of(after).num_bytes,
            )
            for before, plan, after in zip((None, *plans), plans, (*plans[1:], None), strict=False)
        )  # fmt: skip
        return Point(host_budget, commit_every, plans, tuple(seconds))

    def least(self) -> int:
        """Return the smallest host budget that trains."""
        return least_host_budget(lambda host_budget: self._planner(host_budget, 1))

    def curve(self, most: int) -> list[Point]:
        """Return points, each of 1.5 times the last, from the least budget to where later epochs read nothing, or to
        ``most``. Raises BudgetError if that is below the least.
        """
        points = [self.at(min(self.least(), most))]
        while points[-1].total("rows_read") and points[-1].host_budget < most:
            points.append(self.at(min(points[-1].host_budget * 3 // 2, most)))
        return points

    def choose(
        self, optimize: Literal["speed", "memory"], points: Sequence[Point], commit_every: int | None,
        store_budget: int | None = None,
    ) -> Point:  # fmt: skip
        """Return the point with the least host memory, or the fastest, with fewer commits if writes bound it.

        Of points that are about as fast: the one with more frequent commits, then the one with less memory.
        commit_every: None: choose it. Raises BudgetError if even a new store, of one commit without dense state, may
        need more bytes than ``store_budget``.
        """
        allowed = math.inf if store_budget is None else store_budget
        self._store_plan(points[0].host_budget, commit_every or 1).check(allowed)
        tried = list(points if optimize == "speed" else points[:1])
        if (commit_every or 1) > 1:
            tried = [self.at(point.host_budget, commit_every=commit_every or 1) for point in tried]
        fastest = min(tried, key=lambda point: point.epoch_seconds)
        is_write_bound = any(fastest.seconds[v].bound == "write" for v in fastest.later)
        if optimize == "speed" and commit_every is None and is_write_bound:
            fitting = [n for n in COMMIT_INTERVALS if self._store_plan(points[0].host_budget, n).needed <= allowed]
            tried += [self.at(p.host_budget, commit_every=n) for n in fitting for p in points]
        fewest = min(point.epoch_seconds for point in tried)
        return next(point for point in tried if point.epoch_seconds <= _ALIKE * fewest)

    def plan(
        self, point: Point, *, optimize: Literal["speed", "memory"], device_budget: int, store_budget: int | None = None
    ) -> TrainingPlan:
        """Return the plan of a point."""
        schedule = self._reuse.schedule
        return TrainingPlan.model_validate({
            "dataset": schedule.dataset_digest, "optimize": optimize,
            "order": schedule.order if isinstance(schedule.order, tuple) else None,
            "budgets": {
                "device": device_budget, "host": point.host_budget, "evaluation": self._eval_budget,
                "store": store_budget, "commit_every": point.commit_every,
            },
            "machine": self._rates.model_dump(by_alias=True),
            "passes": [
                PassPrediction(
                    index=plan.pass_index, sub_dataset=plan.sub_dataset, samples=self._samples_P[plan.sub_dataset],
                    rows=sum(plan.rows_G), rows_read=plan.rows_read, bytes_read=plan.bytes_read,
                    rows_written=plan.rows_written, bytes_written=plan.bytes_written,
                    seconds=seconds.total, bound=seconds.bound,
                )
                for plan, seconds in zip(point.passes, point.seconds, strict=True)
            ],
        })  # fmt: skip

    def _store_plan(self, host_budget: int, commit_every: int) -> StorePlan:
        return self._planner(host_budget, commit_every).store_plan(History(), commits=1, state_bytes=0)

    def _planner(self, host_budget: int, commit_every: int, end: int | None = None) -> Planner:
        reuse = self._reuse
        pinned = self._rates.device != "cpu"
        budget = HostBudget.of(
            reuse.positions, host_budget, self._eval_budget, pinned=pinned, records=self._record_bytes
        )
        return Planner(
            reuse.counts, budget, start=0, within=False, commit_every=commit_every, end=end, stored={},
        )  # fmt: skip


class TensorSize(NamedTuple):
    """The size of a tensor that rows start from."""

    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointReads:
    """The reads of a schedule of which some or all tables start from checkpoints."""

    positions: RowOffsets
    tensors: Mapping[str, TensorSize]
    """By table that starts from a checkpoint."""

    def of(self, plan: PassPlan) -> Reads:
        """Return the reads of a pass, at most: rows of one table are spread evenly over its tensor."""
        total = Reads()
        for group, spec in enumerate(self.positions.groups):
            rows_T = np.diff(self.positions.table_starts(plan.sub_dataset, group))
            for table, rows in zip(spec.tables, rows_T.tolist(), strict=True):
                if (tensor := self.tensors.get(table.name)) is not None and plan.generated_G[group]:
                    new = rows * plan.generated_G[group] // max(1, plan.rows_G[group])
                    total = total.plus(expected_reads(tensor, new))
        return total

    def rows(self, plan: PassPlan) -> int:
        """Return the new rows of a pass in groups with tables that start from checkpoints."""
        return sum(
            rows
            for rows, spec in zip(plan.generated_G, self.positions.groups, strict=True)
            if any(table.name in self.tensors for table in spec.tables)
        )

    def how(self, reads: Reads) -> Literal["nothing", "in order", "row by row"]:
        """Return how a pass reads: most of the tensors from end to end, or rows with gaps between them."""
        whole = sum(one.rows * one.row_bytes for one in self.tensors.values())
        if not reads.num_bytes:
            return "nothing"
        return "in order" if 2 * reads.num_bytes > whole else "row by row"


def expected_reads(tensor: TensorSize, rows: int) -> Reads:
    """Return the approximate cost of reading ``rows`` of a tensor that are spread evenly; close neighbors cost less.

    With a share s of the chunks in use, gaps between them have lengths of a geometric distribution. Those of up to
    GAP_BYTES are read along, so that from about a fifth of the chunks on the tensor is read from end to end.
    """
    if rows <= 0:
        return Reads()
    chunks, most = max(1, -(-tensor.rows * tensor.row_bytes // CHUNK_BYTES)), GAP_BYTES // CHUNK_BYTES
    in_chunk = CHUNK_BYTES / tensor.row_bytes + 1  # a row may be in two chunks
    s = float(-np.expm1(in_chunk * np.log1p(-min(rows / max(1, tensor.rows), 1 - 1e-12))))
    share = min(1.0, s + sum(length * s * s * (1 - s) ** length for length in range(1, most + 1)))
    num_bytes = int(share * chunks) * CHUNK_BYTES
    return Reads(num_bytes, int(chunks * s * (1 - s) ** (most + 1)) + -(-num_bytes // READ_BYTES))
