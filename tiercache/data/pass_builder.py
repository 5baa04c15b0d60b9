"""From a stream of samples to closed passes, in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from tiercache.data.column_types import kind_of
from tiercache.data.open_pass import OpenPass, PassCloser
from tiercache.data.raw_batch import RawBatch
from tiercache.data.sample_layout import SampleLayout
from tiercache.errors import BudgetError, ExtractionError
from tiercache.sizes import distinct_sizes, format_bytes
from tiercache.store.table import Group, Table, group_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.data.extraction_resources import MemoryShares
    from tiercache.data.manifest import SubDatasetRecord
    from tiercache.data.source import SourceBatch
    from tiercache.schema import Schema

    _Numbers = dict[str, NDArray[np.int32]]


SLOT_MAP_BYTES = 28
"""Bytes on the device for each row, besides the row itself: int32 maps from local ids to slots of this pass and the
next, the order of loading, the orders of the last dump, this one and the next, and spare slots."""
STREAM_BYTES = 8
"""More bytes on the device for each row of a 16-bit dtype: its key, the source of random bits for stochastic
rounding."""
_UNLIKELY = 21.0
"""The natural logarithm of one in 10^9."""


def device_bytes(group: Group) -> int:
    """Return the bytes on the device for a row of ``group``, slot maps included."""
    return group.row_bytes + SLOT_MAP_BYTES + (0 if group.dtype == "float32" else STREAM_BYTES)


def group_bytes(tables: Sequence[Table]) -> list[list[Any]]:
    """Return the names of each group's tables and the bytes on the device for a row: an option of datasets."""
    return [[[table.name for table in group.tables], device_bytes(group)] for group in group_tables(tables)]


def max_device_rows(rows: int, devices: int) -> int:
    """Return the maximum of ``rows`` that one of ``devices`` devices gets if the hashes of keys divide them.

    Each of n keys falls to one of W devices with the chance 1/W: a device gets a binomial number of them, n/W in the
    mean with the variance v = n/W (1 - 1/W), and, by Bernstein's inequality, more than
    ``n/W + L/3 + sqrt((L/3)^2 + 2 L v)`` with the chance exp(-L) at most, for any n and W. L = 21 makes that 10^-9 for
    each device, group of tables and pass: 6.5 standard deviations, 2 percent more than an 8th of a million rows.
    """
    mean = rows / devices
    margin = _UNLIKELY / 3 + math.sqrt((_UNLIKELY / 3) ** 2 + 2 * _UNLIKELY * mean * (1 - 1 / devices))
    return min(rows, math.ceil(mean + margin))


class RowBudget:
    """The device budget of passes, in bytes of each device.

    Each group of tables has memory for the maximum rows of any pass, so a pass counts with the high-water marks of
    earlier passes. ``rows`` are always by table, in the order of table ids, of all devices together; a device has
    ``max_device_rows`` of them.
    """

    def __init__(
        self, tables: Sequence[Table], num_bytes: int, devices: int = 1, passes: Iterable[SubDatasetRecord] = ()
    ) -> None:
        """passes: closed ones."""
        groups, ordered = group_tables(tables), sorted(tables, key=lambda table: table.table_id)
        indices = {t.name: g.index for g in groups for t in g.tables}
        self.num_bytes, self.devices = num_bytes, devices
        self._group_of = [indices[t.name] for t in ordered]
        self._row_bytes = [device_bytes(group) for group in groups]
        self._high_water = [0] * len(groups)
        for record in passes:
            self.close([record.rows[table.name] for table in ordered])

    def needed(self, rows: Sequence[int]) -> int:
        """Return the bytes on each device of all passes closed and of one more with ``rows``."""
        return sum(high * size for high, size in zip(self._grown(rows), self._row_bytes, strict=True))

    def fits(self, rows: Sequence[int]) -> bool:
        """Return True if a pass with ``rows`` fits."""
        return self.needed(rows) <= self.num_bytes

    def close(self, rows: Sequence[int]) -> None:
        """Count a closed pass."""
        self._high_water = self._grown(rows)

    def excess(self, rows: Sequence[int]) -> str:
        """Return the part of an error message that compares the need of ``rows`` with the budget."""
        need, budget = distinct_sizes(self.needed(rows), self.num_bytes)
        device = "the device" if self.devices == 1 else f"each of {self.devices} devices"
        return (
            f"needs {sum(rows):,} rows, {need} on {device} with what earlier passes need, "
            f"but the device budget is {budget}"
        )

    def _grown(self, rows: Sequence[int]) -> list[int]:
        """Return the high-water marks after one more pass."""
        totals = [0] * len(self._row_bytes)
        for group, count in zip(self._group_of, rows, strict=True):
            totals[group] += count
        new = (max_device_rows(total, self.devices) for total in totals)
        return [max(pair) for pair in zip(self._high_water, new, strict=True)]


@dataclass(frozen=True, slots=True)
class Cut:
    """The rule for cutting passes."""

    kind: Literal["budget", "rows", "file", "column"]
    rows: int = 0
    """Samples of a pass, for "rows"."""
    column: str | None = None
    """The column whose changes of value begin passes, for "column"."""

    @classmethod
    def parse(cls, text: str, batch_multiple: int) -> Cut:
        """Read ``budget``, ``rows=N``, ``file`` or ``column=NAME``. Raises ExtractionError."""
        name, _, value = text.partition("=") if isinstance(text, str) else ("", "", "")
        if text in ("budget", "file"):
            return cls("budget" if text == "budget" else "file")
        if name == "rows" and value.replace("_", "").isdigit() and int(value) > 0:
            rows = int(value)
            if rows % batch_multiple:
                better = -(-rows // batch_multiple) * batch_multiple
                raise ExtractionError(
                    f"split_by rows={rows} is not a multiple of batch_multiple={batch_multiple}: use rows={better} or "
                    "another batch_multiple"
                )
            return cls("rows", rows=rows)
        if name == "column" and value:
            return cls("column", column=value)
        raise ExtractionError(f"invalid split_by {text!r}: expected one of budget, rows=N, file, column=NAME")


class Cutter:
    """Cuts batches where the data starts a new pass. The first batch starts a pass."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._samples = 0
        self._file: int | None = None
        self._last: list[Any] = []

    def pieces(self, batch: SourceBatch, keys: RawBatch) -> Iterator[tuple[bool, RawBatch]]:
        """Yield (True if a pass begins before the piece, piece) for each piece of a batch."""
        cuts = set(self._cut_rows(batch))
        for low, high in pairwise(sorted({0, *cuts, keys.num_samples})):
            yield low in cuts, keys.slice(low, high)

    def _cut_rows(self, batch: SourceBatch) -> list[int]:
        rows = batch.columns.num_rows
        if self._cut.kind == "rows":
            # A cut comes before the next sample, so no pass begins at the end of the data.
            first = -(-max(1, self._samples) // self._cut.rows) * self._cut.rows
            cuts = list(range(first - self._samples, rows, self._cut.rows))
            self._samples += rows
            return cuts
        if self._cut.kind == "file":
            begins = self._file is not None and self._file != batch.file_index
            self._file = batch.file_index
            return [0] if begins else []
        if self._cut.column is not None:
            array, cuts = cut_values(batch, self._cut.column), []
            if not pa.types.is_null(array.type):
                changed = pc.fill_null(pc.not_equal(array.slice(1), array.slice(0, rows - 1)), True)
                both_null = pc.and_(array.slice(1).is_null(), array.slice(0, rows - 1).is_null())
                cuts = [int(i) + 1 for i in pc.indices_nonzero(pc.and_not(changed, both_null)).to_pylist()]
            first_value, last_value = array[0].as_py(), array[rows - 1].as_py()
            if self._last and self._last[0] != first_value:
                cuts.insert(0, 0)
            self._last = [last_value]
            return cuts
        return []


def cut_values(batch: SourceBatch, column: str) -> Any:
    """Return the values whose changes begin passes, in types that Python has; NaN is null: it does not equal itself."""
    array = batch.columns.column(column)
    if hasattr(array, "dictionary_decode"):
        array = array.dictionary_decode()
    if kind_of(array.type) == "string":  # which may not be UTF-8
        return array.cast(pa.large_binary())
    if pa.types.is_temporal(array.type):  # Python's have microseconds, and years up to 9999
        is_duration, is_time = pa.types.is_duration(array.type), pa.types.is_time(array.type)
        point = pa.timestamp("ns", getattr(array.type, "tz", None))
        target = pa.duration("ns") if is_duration else pa.time64("ns") if is_time else point
        return array.cast(target, safe=False).cast(pa.int64())
    if not pa.types.is_floating(array.type):
        return array
    numbers = array.cast(pa.float64())  # Arrow does not compare float16
    return pc.if_else(pc.is_nan(numbers), None, numbers)


class PassBuilder:
    """Takes samples in order and hands passes over to be closed.

    If the row budget cuts, samples are numbered in chunks of whole units, each as long as is likely to fit. A chunk
    that does not fit is undone and halved, until a single unit does not fit: the end of a pass depends on units and
    budget only, not on the chunks.
    """

    def __init__(
        self, schema: Schema, closer: PassCloser, *, cut: Cut, unit: int, rows: RowBudget, memory: MemoryShares,
        with_samples: bool, on_close: Callable[[int], None], first_pass: int = 0,
    ) -> None:  # fmt: skip
        """unit: samples that stay together. on_close: gets the number of passes. first_pass: passes of others."""
        self._layout, self._closer = SampleLayout(schema), closer
        self._cut, self._unit, self._rows, self._memory = cut, unit, rows, memory
        self._with_samples, self._on_close = with_samples, on_close
        self._num_passes = first_pass + len(closer.state.passes)
        self._last_units = 0  # of the last pass
        self._last_rows = [0] * len(schema.tables)
        self._pending: list[RawBatch] = []
        self._pending_bytes = self._pending_samples = 0
        self._noted = 0  # samples passed to note()
        self._closed = 0  # samples of these in closed passes
        self._trail: deque[tuple[int, int, int]] = deque()  # (samples before, file, row) of batches not closed yet
        self._open: OpenPass | None = None

    def note(self, batch: SourceBatch) -> None:
        """Record the position in the files of the next samples."""
        self._trail.append((self._noted, batch.file_index, batch.first_row))
        self._noted += batch.columns.num_rows

    def add(self, samples: RawBatch) -> None:
        """Add samples. Raises BudgetError if they fit in no pass."""
        self._pending.append(samples)
        self._pending_bytes += samples.num_bytes
        self._pending_samples += samples.num_samples
        if self._pending_bytes < self._memory.chunk:
            return
        count = self._pending_samples
        if self._cut.kind == "budget":
            count -= count % self._unit
        if count:
            self._absorb(count)
        elif self._pending_bytes > self._memory.unit:
            raise BudgetError(
                f"one batch multiple of {self._unit:,} samples takes more than {format_bytes(self._memory.unit)} of "
                f"host memory, its share of the memory limit of {format_bytes(self._memory.total)}: lower "
                "batch_multiple or raise memory_limit"
            )

    def cut(self) -> None:
        """End the pass here."""
        self._absorb(self._pending_samples)
        self._close()

    def finish(self) -> None:
        """End the last pass and wait until all are closed and on disk."""
        self.cut()
        self._closer.finish()

    def abandon(self) -> None:
        """Discard the open pass: it will be started over."""
        self._closer.abandon()
        if self._open is not None:
            self._open.discard()

    def _absorb(self, count: int) -> None:
        """Put the first ``count`` pending samples into passes."""
        if not count:
            return
        batches, rest = self._pending, _slice_batches(self._pending, count, self._pending_samples)
        self._pending = [batch.copy() for batch in rest]  # a view would keep the whole batch alive
        self._pending_bytes = sum(batch.num_bytes for batch in self._pending)
        self._pending_samples -= count
        low, failing = 0, 0  # the range of units from `low` on known not to fit; 0: none
        while low < count:
            step = self._step(count - low, failing)
            high = min(count, low + step * self._unit) if self._cut.kind == "budget" else count
            samples = _slice_batches(batches, low, high)
            failure = self._try(samples)
            if failure is None:
                low, failing = high, max(0, failing - step)
            elif self._cut.kind == "budget" and step > 1:
                failing = step
            elif failure == "host" or self._cut.kind != "budget" or not self._opened().samples:
                raise BudgetError(self._explain(failure, samples, high - low))
            else:
                self._close()
                failing = 0

    def _step(self, samples: int, failing: int) -> int:
        """Return the number of units to number next."""
        limit = -(-samples // self._unit)
        if failing:
            return max(1, failing // 2)
        units, rows = self._last_units, sum(self._last_rows)
        if not units or self._open is None:
            return min(limit, max(1, units * 7 // 8)) if units else limit
        done = self._open.samples / self._unit
        remaining = units * (1 - sum(self._open.rows()) / rows) if done < units else done / 8
        return min(limit, max(1, int(remaining * 7 / 8)))

    def _opened(self) -> OpenPass:
        if self._open is None:
            path = self._closer.work.path / f"pass-{self._num_passes:05d}.scratch"
            self._open = OpenPass(
                self._layout, path, self._closer.workers, expected=self._last_rows, with_samples=self._with_samples
            )
        return self._open

    def _try(self, samples: list[RawBatch]) -> Literal["device", "host"] | None:
        """Add samples to the open pass; if they do not fit, change nothing and return the exceeded budget."""
        target = self._opened()
        counts, parts = target.counts(), list[RawBatch]()
        numbers = self._number(target, samples, parts)
        if numbers is not None and self._rows.fits(target.rows()):
            for part, part_numbers in zip(parts, numbers, strict=True):
                target.append(part, part_numbers)
            return None
        failure: Literal["device", "host"] = "device" if not self._rows.fits(target.rows()) else "host"
        target.undo(parts, counts)
        return failure

    def _number(self, target: OpenPass, samples: list[RawBatch], parts: list[RawBatch]) -> list[_Numbers] | None:
        """Number samples and add them to ``parts``; None if the host memory for keys is too small for all."""
        keys = self._memory.keys
        if target.numbering_bytes(samples) + self._closer.closing_bytes > keys:
            self._closer.wait()
        if target.numbering_bytes(samples) > keys:
            # That estimate counted every key as new: smaller parts have better ones.
            size = sum(batch.num_samples for batch in samples)
            first = self._number(target, _slice_batches(samples, 0, size // 2), parts) if size > 1 else None
            second = first and self._number(target, _slice_batches(samples, size // 2, size), parts)
            return first + second if first and second else None
        parts += samples
        numbers = target.number(samples)
        if target.closing_bytes() + self._closer.closing_bytes > keys:
            self._closer.wait()
        return numbers if target.closing_bytes() <= keys else None

    def _explain(self, failure: str, samples: list[RawBatch], count: int) -> str:
        """Return the error message for ``samples``, the next ``count`` of the open pass, that exceed a budget."""
        target = self._opened()
        index, before = self._num_passes, target.samples
        if failure == "host":
            total, keys = format_bytes(self._memory.total), format_bytes(self._memory.keys)
            return (
                f"sub-dataset {index} has {sum(target.rows()):,} rows after {before:,} samples, and their keys "
                f"fill the {keys} that the memory limit of {total} has for keys: raise memory_limit, or make passes "
                "smaller"
            )
        self._number(target, samples, [])
        excess = self._rows.excess(target.rows())
        if self._cut.kind == "budget":
            what = f"one batch multiple of {count:,} samples {excess}"
            return f"{what}: raise device_budget or lower batch_multiple (now {self._unit:,})"
        what = f"sub-dataset {index}, of at least {before + count:,} samples, {excess}"
        return f"{what}: raise device_budget or cut smaller passes"

    def _close(self) -> None:
        if self._open is None or not self._open.samples:
            return
        rows = self._open.rows()
        self._rows.close(rows)
        self._last_units, self._last_rows = -(-self._open.samples // self._unit), rows
        self._closed += self._open.samples
        while len(self._trail) > 1 and self._trail[1][0] <= self._closed:
            self._trail.popleft()
        before, file_index, row = self._trail[0]
        self._closer.close(self._open, file_index, row + self._closed - before)
        self._open = None
        self._num_passes += 1
        self._on_close(self._num_passes)


def _slice_batches(batches: Sequence[RawBatch], low: int, high: int) -> list[RawBatch]:
    """Return samples [low, high) of consecutive batches, as views."""
    sliced, first = [], 0
    for batch in batches:
        begin, end = max(low, first) - first, min(high, first + batch.num_samples) - first
        if begin < end:
            sliced.append(batch.slice(begin, end))
        first += batch.num_samples
    return sliced
