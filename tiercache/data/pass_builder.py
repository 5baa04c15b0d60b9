"""From a stream of samples to closed passes, in bounded memory."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

from tiercache.data.open_pass import OpenPass
from tiercache.data.raw_batch import RawBatch
from tiercache.errors import BudgetError
from tiercache.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.data.closing import PassCloser
    from tiercache.data.cuts import Cut
    from tiercache.data.memory import MemoryShares
    from tiercache.data.resume import WorkFolder
    from tiercache.data.row_budget import RowBudget
    from tiercache.data.sample_layout import SampleLayout
    from tiercache.data.source import SourceBatch
    from tiercache.data.workers import Workers

    _Numbers = dict[str, NDArray[np.int32]]


class PassBuilder:
    """Takes samples in their order and hands passes over to be closed.

    Where the row budget cuts, samples are numbered in stretches of whole units, each as long as is likely to fit. One
    that does not is taken back and halved, until a single unit does not fit: where a pass ends depends on units and
    budget only, not on how samples were cut into stretches.
    """

    def __init__(
        self,
        layout: SampleLayout,
        work: WorkFolder,
        closer: PassCloser,
        workers: Workers,
        *,
        cut: Cut,
        unit: int,
        rows: RowBudget,
        memory: MemoryShares,
        with_samples: bool,
        on_close: Callable[[int], None],
        first_pass: int = 0,
    ) -> None:
        """unit: samples that a pass has or has not together. with_samples: not key sets alone.

        ``on_close`` is called with the number of passes when one was handed over. first_pass: passes that others write.
        """
        self._layout, self._work, self._closer, self._workers = layout, work, closer, workers
        self._cut, self._unit, self._rows, self._memory = cut, unit, rows, memory
        self._with_samples, self._on_close = with_samples, on_close
        for record in closer.state.passes:
            rows.close([record.rows[table.name] for table in layout.schema.ordered_tables])
        self._num_passes = first_pass + len(closer.state.passes)
        self._last_units = 0  # of the last pass
        self._last_rows = [0] * len(layout.schema.tables)
        self._pending: list[RawBatch] = []
        self._pending_bytes = self._pending_samples = 0
        self._taken = 0  # samples given by note() since this object was made
        self._closed = 0  # samples of these in closed passes
        self._trail: deque[tuple[int, int, int]] = deque()  # (samples before, file, row) of batches not closed yet
        self._open: OpenPass | None = None

    def note(self, batch: SourceBatch) -> None:
        """Remember where the samples that come next stand in the files."""
        self._trail.append((self._taken, batch.file_index, batch.first_row))
        self._taken += batch.columns.num_rows

    def add(self, samples: RawBatch) -> None:
        """Take samples. Raises BudgetError where they cannot be part of any pass."""
        self._pending.append(samples)
        self._pending_bytes += samples.num_bytes
        self._pending_samples += samples.num_samples
        if self._pending_bytes < self._memory.chunk:
            return
        whole = self._pending_samples
        if self._cut.kind == "budget":
            whole -= whole % self._unit
        if whole:
            self._absorb(whole)
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
        """Let go of the open pass: it will be started over."""
        self._closer.abandon()
        if self._open is not None:
            self._open.discard()

    def _absorb(self, count: int) -> None:
        """Put the first ``count`` pending samples into passes."""
        if not count:
            return
        batches, rest = self._pending, _stretch(self._pending, count, self._pending_samples)
        self._pending = [batch.copy() for batch in rest]  # a view would keep the whole batch alive
        self._pending_bytes = sum(batch.num_bytes for batch in self._pending)
        self._pending_samples -= count
        low, failing = 0, 0  # units from `low` on that are known not to fit, 0: none
        while low < count:
            step = self._step(count - low, failing)
            high = min(count, low + step * self._unit) if self._cut.kind == "budget" else count
            samples = _stretch(batches, low, high)
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
        """Return how many units are to be numbered next."""
        most = -(-samples // self._unit)
        if failing:
            return max(1, failing // 2)
        units, rows = self._last_units, sum(self._last_rows)
        if not units or self._open is None:
            return min(most, max(1, units * 7 // 8)) if units else most
        done = self._open.samples / self._unit
        left = units * (1 - sum(self._open.rows()) / rows) if done < units else done / 8
        return min(most, max(1, int(left * 7 / 8)))

    def _opened(self) -> OpenPass:
        if self._open is None:
            path = self._work.path / f"pass-{self._num_passes:05d}.scratch"
            self._open = OpenPass(
                self._layout, path, self._workers, expected=self._last_rows, with_samples=self._with_samples
            )
        return self._open

    def _try(self, samples: list[RawBatch]) -> Literal["device", "host"] | None:
        """Add samples to the open pass, or do nothing and return which budget they would exceed."""
        target = self._opened()
        counts, parts = target.counts(), list[RawBatch]()
        numbers = self._number(target, samples, parts)
        if numbers is not None and self._rows.fits(target.rows()):
            for part, mine in zip(parts, numbers, strict=True):
                target.append(part, mine)
            return None
        failure: Literal["device", "host"] = "device" if not self._rows.fits(target.rows()) else "host"
        target.take_back(parts, counts)
        return failure

    def _number(self, target: OpenPass, samples: list[RawBatch], parts: list[RawBatch]) -> list[_Numbers] | None:
        """Number samples in ``parts`` as far as the host memory for keys goes; None where that is not all the way."""
        keys = self._memory.keys
        if target.numbering_bytes(samples) + self._closer.held_bytes > keys:
            self._closer.wait()
        if target.numbering_bytes(samples) > keys:
            # That counted every key as new: smaller parts are nearer to the truth.
            size = sum(batch.num_samples for batch in samples)
            first = self._number(target, _stretch(samples, 0, size // 2), parts) if size > 1 else None
            second = first and self._number(target, _stretch(samples, size // 2, size), parts)
            return first + second if first and second else None
        parts += samples
        numbers = target.number(samples)
        if target.closing_bytes() + self._closer.held_bytes > keys:
            self._closer.wait()
        return numbers if target.closing_bytes() <= keys else None

    def _explain(self, failure: str, samples: list[RawBatch], count: int) -> str:
        """Say which budget ``samples``, the next ``count`` of the open pass, exceed."""
        target = self._opened()
        index, before = self._num_passes, target.samples
        if failure == "host":
            total, share = format_bytes(self._memory.total), format_bytes(self._memory.keys)
            return (
                f"sub-dataset {index} has {sum(target.rows()):,} rows after {before:,} samples, and their keys "
                f"fill the {share} that the memory limit of {total} has for keys: raise memory_limit, or make passes "
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


def _stretch(batches: Sequence[RawBatch], low: int, high: int) -> list[RawBatch]:
    """Return samples [low, high) of batches that follow one another, as views."""
    found, first = [], 0
    for batch in batches:
        begin, end = max(low, first) - first, min(high, first + batch.num_samples) - first
        if begin < end:
            found.append(batch.slice(begin, end))
        first += batch.num_samples
    return found
