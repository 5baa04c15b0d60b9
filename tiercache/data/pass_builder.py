"""From a stream of samples to closed passes, in bounded memory."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

from tiercache.data.closing import close_pass
from tiercache.data.manifest import samples_name
from tiercache.data.numbering import OpenPass
from tiercache.data.raw_batch import RawBatch, join
from tiercache.errors import BudgetError
from tiercache.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiercache.data.cuts import Cut
    from tiercache.data.encoded_batch import Samples
    from tiercache.data.memory import MemoryShares
    from tiercache.data.resume import ExtractionState, WorkFolder
    from tiercache.data.row_budget import RowBudget
    from tiercache.data.sample_layout import SampleLayout
    from tiercache.data.source import SourceBatch

__all__ = ["PassBuilder"]


class PassBuilder:
    """Takes samples in their order and closes passes; each closed pass is part of the state on disk.

    Samples are numbered in chunks of many aligned units, hoping that all fit. Where they do not, the chunk is undone
    and halved until the last unit that fits is found: where a pass ends depends on units and budget only, not on how
    samples were cut into chunks.
    """

    def __init__(
        self,
        layout: SampleLayout,
        work: WorkFolder,
        state: ExtractionState,
        *,
        cut: Cut,
        batch_multiple: int,
        rows: RowBudget,
        host: MemoryShares,
        on_close: Callable[[bool], None],
    ) -> None:
        self.state = state
        self._layout, self._work, self._cut, self._align = layout, work, cut, batch_multiple
        self._rows, self._host, self._on_close = rows, host, on_close
        for record in state.passes:
            rows.close([record.rows[table.name] for table in layout.schema.ordered_tables])
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
        if self._pending_bytes < self._host.chunk:
            return
        whole = self._pending_samples
        if self._cut.kind == "budget":
            whole -= whole % self._align
        if whole:
            self._absorb(whole)
        elif self._pending_bytes > self._host.unit:
            raise BudgetError(
                f"one aligned unit of {self._align:,} samples takes more than {format_bytes(self._host.unit)} of host "
                f"memory, its share of the memory limit of {format_bytes(self._host.total)}: lower batch_multiple or "
                "raise memory_limit"
            )

    def cut(self) -> None:
        """End the pass here."""
        self._absorb(self._pending_samples)
        self._close()

    def finish(self) -> None:
        """End the last pass."""
        self.cut()

    def abandon(self) -> None:
        """Let go of the open pass: it will be started over."""
        if self._open is not None:
            self._open.abandon()

    def _absorb(self, count: int) -> None:
        """Put the first ``count`` pending samples into passes."""
        if not count:
            return
        samples = join(self._pending)
        rest = samples.slice(count, samples.num_samples)
        self._pending = [rest.copy()] if rest.num_samples else []  # a view would keep the whole chunk alive
        self._pending_bytes, self._pending_samples = sum(p.num_bytes for p in self._pending), rest.num_samples
        low = 0
        while low < count:
            failure = self._try(samples.slice(low, count))
            if failure is None:
                return
            if self._cut.kind != "budget":
                raise BudgetError(self._explain(failure, samples.slice(low, count)))
            fitting, failing = 0, -(-(count - low) // self._align)
            while failing - fitting > 1:
                middle = (fitting + failing) // 2
                outcome = self._try(samples.slice(low + fitting * self._align, low + middle * self._align))
                fitting, failing = (middle, failing) if outcome is None else (fitting, middle)
                failure = outcome or failure
            low += fitting * self._align
            if failure == "host" or self._open is None or not self._open.samples:
                raise BudgetError(self._explain(failure, samples.slice(low, min(count, low + self._align))))
            self._close()

    def _try(self, samples: RawBatch) -> Literal["device", "host"] | None:
        """Add samples to the open pass, or do nothing and return which budget they would exceed."""
        if self._open is None:
            self._open = OpenPass(self._layout, self._work.path / samples_name(len(self.state.passes)))
        before = self._open.rows()
        numbered: list[Samples] = []
        is_whole = self._number(self._open, samples, numbered)
        if is_whole and self._rows.fits(self._open.rows()):
            for part in numbered:
                self._open.append(part)
            return None
        failure: Literal["device", "host"] = "device" if not self._rows.fits(self._open.rows()) else "host"
        self._open.undo(before, numbered)
        return failure

    def _number(self, target: OpenPass, samples: RawBatch, numbered: list[Samples]) -> bool:
        """Number samples as far as the host memory for keys goes; say whether it went all the way."""
        if target.numbering_bytes(samples) > self._host.keys:
            # That counted every key as new: smaller parts are nearer to the truth.
            half = samples.num_samples // 2
            return half > 0 and all(
                self._number(target, part, numbered)
                for part in (samples.slice(0, half), samples.slice(half, samples.num_samples))
            )
        numbered.append(target.number(samples))
        return target.closing_bytes() <= self._host.keys

    def _explain(self, failure: str, samples: RawBatch) -> str:
        """Say which budget ``samples``, the next ones of the open pass, exceed."""
        assert self._open is not None
        index, before = len(self.state.passes), self._open.samples
        if failure == "host":
            total, share = format_bytes(self._host.total), format_bytes(self._host.keys)
            return (
                f"sub-dataset {index} has {sum(self._open.rows()):,} rows after {before:,} samples, and their keys "
                f"fill the {share} that the memory limit of {total} has for keys: raise memory_limit, or make passes "
                "smaller"
            )
        self._number(self._open, samples, [])
        excess = self._rows.excess(self._open.rows())
        if self._cut.kind == "budget":
            what = f"one aligned unit of {samples.num_samples:,} samples {excess}"
            return f"{what}: raise device_budget or lower batch_multiple (now {self._align:,})"
        what = f"sub-dataset {index}, of at least {before + samples.num_samples:,} samples, {excess}"
        return f"{what}: raise device_budget or cut smaller passes"

    def _close(self) -> None:
        if self._open is None or not self._open.samples:
            return
        self._on_close(True)
        self._closed += self._open.samples
        record = close_pass(self._open, self._work.out, len(self.state.passes))
        self._open = None
        while len(self._trail) > 1 and self._trail[1][0] <= self._closed:
            self._trail.popleft()
        before, file_index, row = self._trail[0]
        self.state = self.state.closed(record, file_index, row + self._closed - before)
        self._rows.close([record.rows[table.name] for table in self._layout.schema.ordered_tables])
        self.state.write(self._work.path)
        self._on_close(False)
