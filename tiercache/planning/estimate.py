"""An estimate of training before any data is read: device, host, disk and hours, by the planner's own formulas.

All passes are alike, so one planned pass represents all of them. Its keys come from a `KeyModel`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.data.pass_builder import device_bytes
from tiercache.errors import BudgetError
from tiercache.planning.budgets import MOST_SLOTS, HostBudget, distance_bytes
from tiercache.planning.key_model import KeyModel, root, whole_rows
from tiercache.planning.pass_plan import PassPlan, Planner, least_host_budget
from tiercache.planning.reuse import PassCounts, ReuseCounts
from tiercache.planning.row_offsets import RowOffsets
from tiercache.planning.schedule import Schedule
from tiercache.sizes import format_bytes, option_bytes
from tiercache.store.layout import KEY_BYTES
from tiercache.store.snapshot import History
from tiercache.store.table import Group, Table, group_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from tiercache.planning.plan_file import Rates, Seconds
    from tiercache.planning.store_plan import StorePlan

_MOST_PASSES = 100_000
_MOST_EXPONENT = 4.0
_ROUNDING = 1e-9
_FITTED = 0.01
"""Maximum difference between the distinct keys of a pass and the given number."""
_KEY_SET_BYTES = 16
"""Bytes of a key of a sub-dataset on disk: the key and its count."""
_NUMBER_BYTES = 4
"""Bytes of a label, a dense feature or a local id of a sample."""


class Workload(NamedTuple):
    """The data, in numbers."""

    tables: tuple[Table, ...]
    rows: Mapping[str, int]
    """By table, the distinct keys of the data."""
    keys_per_sample: Mapping[str, float]
    """By table, the keys of a sample."""
    samples: int
    """Samples of an epoch."""
    dense: int


class Cut(NamedTuple):
    """The passes of an epoch."""

    passes: int
    samples: float
    """Samples of each pass."""
    exponent: float
    """The exponent of Zipf's law."""
    models: dict[str, KeyModel]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number of an estimate."""

    name: str
    value: float
    unit: str
    """"bytes", "seconds", or what is counted."""
    formula: str

    @property
    def text(self) -> str:
        """The number for people."""
        if self.unit == "bytes":
            return format_bytes(self.value)
        if self.unit == "seconds":
            if self.value >= 100:
                return f"{self.value / 3600:,.3g} h" if self.value >= 3600 else f"{self.value:,.0f} s"
            return f"{self.value:.3g} s"
        return f"{self.value:,.0f}"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The answer of `estimate`; the figures show how each number is derived."""

    passes: int
    """Passes of an epoch."""
    samples_per_pass: float
    zipf: float
    """The exponent of the keys' frequencies."""
    rows_per_pass: int
    """Rows of a pass, of all tables."""
    stored_rows: int
    """Distinct keys of all data: the rows of the store."""
    device_bytes: int
    """Rows and slot maps of a pass, on the device."""
    host_bytes: int
    """The host budget that bytes and seconds are predicted for."""
    least_host_bytes: int
    """The smallest host budget that trains."""
    store_bytes: int
    """Maximum bytes of the store, without dense state."""
    dataset_bytes: int
    """Key sets and samples."""
    bytes_read: int
    """Rows read from the store in a later epoch."""
    bytes_written: int
    """Rows and keys written to the store in an epoch."""
    seconds: float
    """Predicted for all epochs; without a compute rate, only the time for moving rows."""
    seconds_per_epoch: float
    """Predicted for a later epoch."""
    bound: str
    """The longest part of a pass of a later epoch: "compute", "read", "write" or "copy"."""
    rates: Rates
    """The speed of the machine that the seconds are for."""
    figures: tuple[Figure, ...]
    """All of the numbers above, with their formulas."""
    assumptions: tuple[str, ...]
    """The assumptions of the estimate."""
    warnings: tuple[str, ...] = ()
    """The limits of this machine that the training exceeds."""

    @property
    def disk_bytes(self) -> int:
        """Bytes of store and dataset."""
        return self.store_bytes + self.dataset_bytes

    @property
    def hours(self) -> float:
        """Hours of all epochs."""
        return self.seconds / 3600

    def to_record(self) -> dict[str, Any]:
        """Return the estimate as plain JSON values."""
        record = {name: value for name, value in vars(self).items() if name not in {"rates", "figures"}}
        record |= {"disk_bytes": self.disk_bytes, "hours": self.hours, "rates": self.rates.model_dump(by_alias=True)}
        return record | {"figures": [asdict(one) for one in self.figures]}


class Model:
    """A cut of a workload, planned as one pass that represents all of them."""

    def __init__(
        self, work: Workload, cut: Cut, *, commit_every: int, eval_budget: int | None, pinned: bool = False
    ) -> None:
        """``pinned``: as of ``HostBudget``."""
        self.work, self.cut, self.commit_every = work, cut, commit_every
        self._evaluation, self._pinned = eval_budget, pinned
        self.groups = group_tables(work.tables)
        tables = [table for group in self.groups for table in group.tables]
        self.rows_TN = np.stack([
            whole_rows(cut.models[t.name].rows_at(work.keys_per_sample[t.name] * cut.samples, cut.passes))
            for t in tables
        ])  # fmt: skip
        """(tables, passes): the rows of a pass by the passes to their next use."""
        starts = np.concatenate([[0], self.rows_TN.sum(axis=1).cumsum()])
        self.positions = RowOffsets(self.groups, np.broadcast_to(starts, (cut.passes, starts.size)))
        for g, group in enumerate(self.groups):
            if (rows := self.positions.num_rows(0, g)) > MOST_SLOTS:
                raise BudgetError(
                    f"a pass would have {rows:,} rows of tables such as {group.tables[0].name!r}, but a device holds "
                    f"{MOST_SLOTS:,}: use a smaller device_budget or unique_per_pass, or more passes"
                )
        self._counts = PassCounts.of(self.positions, *2 * (np.pad(self.rows_TN, ((0, 0), (1, 0))),))

    @property
    def pass_rows(self) -> int:
        """Rows of a pass."""
        return int(self.rows_TN.sum())

    @property
    def stored_rows(self) -> int:
        """Distinct keys of all passes."""
        draws = {name: keys * self.cut.samples for name, keys in self.work.keys_per_sample.items()}
        return round(sum(model.rows(self.cut.passes * draws[name]) for name, model in self.cut.models.items()))

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        names = [table.name for table in self.positions.tables]
        return device_need(self.groups, dict(zip(names, self.rows_TN.sum(axis=1).tolist(), strict=True)))

    def planner(self, host_budget: int) -> Planner:
        """Return the planner of the one pass. Raises BudgetError for too small a budget."""
        counts = ReuseCounts(Schedule(num_passes=1, dataset_digest=""), self.positions, None, [self._counts])
        return Planner(
            counts, self.divided(host_budget), start=0, within=False, commit_every=self.commit_every, end=1, stored={}
        )

    @cached_property
    def least_host(self) -> int:
        """The smallest host budget that trains."""
        return least_host_budget(self.planner)

    def divided(self, host_budget: int) -> HostBudget:
        """Return the division of a host budget."""
        return HostBudget.of(self.positions, host_budget, self._evaluation, pinned=self._pinned)

    def store_plan(self, host_budget: int, retention: int) -> StorePlan:
        """Return the bytes of the store. Every commit of an epoch has as many live rows."""
        plan = self.planner(host_budget).store_plan(History(), commits=retention, state_bytes=0)
        return replace(plan, schedule=sum(distance_bytes(self.cut.passes * self.pass_rows)))

    @cached_property
    def dataset_bytes(self) -> int:
        """Bytes of key sets and samples."""
        numbers = 1 + self.work.dense + sum(self.work.keys_per_sample.values())
        return round(_KEY_SET_BYTES * self.cut.passes * self.pass_rows + _NUMBER_BYTES * self.work.samples * numbers)

    def traffic(self, host_budget: int) -> Traffic:
        """Return the bytes that passes move at a host budget."""
        plan = self.planner(host_budget).plan_next()
        widths_T = np.array([table.row_bytes for table in self.positions.tables])
        return Traffic.of(plan, widths_T @ self.rows_TN, self.rows_TN.sum(axis=0), self.commit_every)


class Traffic(NamedTuple):
    """The bytes that passes move; entry d - 1 of an array is of rows whose last use was d passes ago."""

    read_N: NDArray[np.float64]
    """Bytes read from the store."""
    moved: int
    """Bytes loaded to the device and dumped, of each pass."""
    written: float
    """Bytes of rows and keys written by each pass, in the mean over its commits."""
    cached: float
    """Bytes of rows that the host caches."""

    @classmethod
    def of(cls, plan: PassPlan, bytes_N: NDArray[np.int64], rows_N: NDArray[np.int64], commit_every: int) -> Traffic:
        """Keep on the host what is needed soonest, as `HostCache` does, in the memory that the plan leaves for it.

        Rows used d passes ago wait d - 2 passes there after their dump, so they take d - 2 times their bytes. Those of
        d = 1 stay on the device, and those of d = 2 are in the dump itself.
        """
        waiting_N = bytes_N * np.maximum(0.0, np.arange(bytes_N.size) - 1)
        before_N = np.cumsum(waiting_N) - waiting_N
        kept_N = np.clip(plan.capacity - before_N, 0, waiting_N) / np.where(waiting_N > 0, waiting_N, 1)
        kept_N[:2] = 1
        moved = int(2 * bytes_N.sum() - bytes_N[0])
        # a pass without a commit does not write the rows that stay on the device
        stay = (1 - 1 / commit_every) * (bytes_N[0] + KEY_BYTES * rows_N[0])
        written = float(bytes_N.sum() + KEY_BYTES * rows_N.sum() - stay)
        return cls(bytes_N * (1 - kept_N), moved, written, float(np.minimum(waiting_N, kept_N * waiting_N).sum()))

    @property
    def read(self) -> float:
        """Bytes read for a pass of a later epoch."""
        return float(self.read_N.sum())

    def seconds(self, rates: Rates, samples: float, epochs: int) -> tuple[float, Seconds]:
        """Predict all epochs, and a pass of a later one. In the first, rows of first uses are not read."""
        later = rates.seconds_of(samples, read=self.read, written=self.written, moved=self.moved)
        busy = max(later.compute, later.write)
        first = np.maximum(busy, (np.cumsum(self.read_N) - self.read_N) / rates.read) + later.copy
        return float(first.sum()) + (epochs - 1) * self.read_N.size * later.total, later


def cut_passes(
    work: Workload, *, device_budget: int | None, unique_per_pass: int | None, passes: int | None, zipf: float | None
) -> Cut:
    """Cut an epoch into passes, by the first that is given: ``passes``, ``unique_per_pass``, ``device_budget``.

    ``passes`` with ``unique_per_pass`` determines the exponent. Raises ValueError, and BudgetError for a device budget
    that does not hold a pass.
    """
    groups, rows = group_tables(work.tables), partial(_rows_of, work)
    if passes is not None and unique_per_pass is not None:
        exponent, models = _fitted(work, unique_per_pass, passes)
    else:
        exponent = 1.0 if zipf is None else float(zipf)
        models = key_models(work, exponent)
    size = _Size("device_budget", device_budget or 0, lambda found: device_need(groups, found))
    if unique_per_pass is not None:
        size = _Size("unique_per_pass", unique_per_pass, lambda found: sum(found.values()))
    if passes is None:
        if (least := size.of(rows(models, 1))) > size.most:
            raise BudgetError(f"{size.name} is {size.most:,}, but the rows of one sample take {least:,.0f}: raise it")
        samples = float(work.samples)
        if size.of(rows(models, samples)) > size.most:
            samples = root(lambda n: size.of(rows(models, n)) - size.most, 1.0, samples)
        passes = math.ceil(work.samples / samples * (1 - _ROUNDING))
    if passes > _MOST_PASSES:
        raise ValueError(
            f"an epoch would have {passes:,} passes, but an estimate supports at most {_MOST_PASSES:,}: use a larger "
            "device_budget or unique_per_pass, or fewer passes"
        )
    if passes > work.samples:
        raise ValueError(f"passes is {passes:,}, but there are {work.samples:,} samples: use fewer passes")
    each = work.samples / passes
    need = device_need(groups, rows(models, each))
    if device_budget is not None and need > device_budget * (1 + _ROUNDING):
        raise BudgetError(
            f"device_budget is {format_bytes(device_budget)}, and the rows of a pass take {format_bytes(need)}: raise "
            f"it to {option_bytes(math.ceil(need))}, or use more passes or a smaller unique_per_pass"
        )
    return Cut(passes, each, exponent, models)


def _rows_of(work: Workload, models: Mapping[str, KeyModel], samples: float) -> dict[str, float]:
    """Return the expected distinct keys in ``samples``, by table."""
    return {name: model.rows(work.keys_per_sample[name] * samples) for name, model in models.items()}


class _Size(NamedTuple):
    """The size of a pass, and its maximum."""

    name: str
    most: int
    of: Callable[[Mapping[str, float]], float]


def device_need(groups: tuple[Group, ...], rows: Mapping[str, float]) -> int:
    """Return the bytes on the device for these rows by table."""
    return math.ceil(sum(device_bytes(group) * rows[table.name] for group in groups for table in group.tables))


def key_models(work: Workload, exponent: float) -> dict[str, KeyModel]:
    """Return by table the model of its keys. Raises ValueError if the samples have too few keys for its rows."""
    found = {}
    for table in work.tables:
        rows, draws = work.rows[table.name], work.keys_per_sample[table.name] * work.samples
        model = KeyModel.of(rows, draws, exponent)
        if model is None:
            most = KeyModel.most_rows(draws, exponent)
            raise ValueError(
                f"rows of table {table.name!r} is {rows:,}, but its {draws:,.0f} keys in all samples, with the "
                f"exponent {exponent:.3g}, include at most {most:,.0f} distinct ones: pass the number of distinct "
                "keys of the data, or a smaller zipf"
            )
        found[table.name] = model
    return found


def _fitted(work: Workload, wanted: int, passes: int) -> tuple[float, dict[str, KeyModel]]:
    """Return the exponent with which a pass has the wanted rows, and its models. Raises ValueError if none does."""
    samples = work.samples / passes

    def excess(exponent: float) -> float:
        try:
            models = key_models(work, exponent)
        except ValueError:
            return 1.0  # too skewed for that many distinct keys
        return wanted - sum(_rows_of(work, models, samples).values())

    exponent = root(excess, 0.0, _MOST_EXPONENT)
    models = key_models(work, exponent)
    found = sum(_rows_of(work, models, samples).values())
    if abs(found - wanted) > 1 + _FITTED * wanted:
        raise ValueError(
            f"unique_per_pass is {wanted:,}, but each of {passes:,} passes of this data has at "
            f"{'most' if found < wanted else 'least'} {found:,.0f} distinct keys, with any zipf: use a number within "
            "that, another number of passes, or zipf instead"
        )
    return exponent, models
