"""One optimizer step of the rows of a batch on a CUDA device: as `kernels.cpu.update`.

Each row's gradients are summed in batch order; above 64 entries the sum is that of the sums of stretches of 64, in
order, so that many blocks share a hot row. The bits depend on the batch alone, and up to 64 entries a row they are
those of the CPU's kernels.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from tiercache.kernels.cuda.launch import Device, Part, has_elements, launch_parts, struct, view
from tiercache.kernels.cuda.sorting import STRETCH
from tiercache.kernels.cuda.vectors import RowsAt, rows_at
from tiercache.kernels.step import Gradients, Step, check_step

_PART, _SOURCE = struct("UpdatePart", "update"), struct("Source", "update")
_RUNS_OF_TASK = 8
_TEAM = 4  # lanes at least of a team that looks its entries up together


class _Sources(NamedTuple):
    """The gradients of a group."""

    rows: list[Part]
    """A `Source` each."""
    per_source: int
    """Entries of each; 0 where they differ."""
    is_plain: bool
    has_max: bool
    is_aligned: bool
    """True if every gradient is known to begin at a multiple of 16 bytes."""


class _Group(NamedTuple):
    """One group's rows and entries."""

    step: Step
    rows: RowsAt
    sources: _Sources
    padded: int
    """Elements of a row of sums."""

    @property
    def size(self) -> int:
        """Entries."""
        return int(self.step.pairs.size)

    @property
    def num_stretches(self) -> int:
        """Rows of sums."""
        return 2 * -(-self.size // STRETCH)


def _sources_of(device: Device, lookups: Sequence[Gradients]) -> _Sources:
    rows, counts, is_plain, has_max, is_aligned = list[Part](), set[int](), True, False, True
    begin = 0
    for one in lookups:
        flat = view(device, "gradient", one.flat, np.float32, ndim=len(one.flat.shape)).address
        cols = one.cols.tolist()
        is_aligned &= flat % 16 == 0 and one.width % 4 == 0 and bool(cols) and not any(col % 4 for col in cols)
        if has_elements(one.offsets):
            places, scales, argmax = (
                view(device, name, array, dtype).address if has_elements(array) else 0
                for name, array, dtype in (
                    ("entry_offset", one.offsets, np.int64), ("entry_scale", one.scales, np.float32),
                    ("argmax", one.argmax, np.int32),
                )
            )  # fmt: skip
            rows.append((flat, 0, places, scales, argmax, begin))
            is_plain, has_max, size = False, has_max or bool(argmax), one.num_entries
            counts.add(size)
            begin += size
            continue
        for col in cols:
            rows.append((flat + 4 * col, one.width, 0, 0, 0, begin))
            begin += one.num_samples
        counts.add(one.num_samples)
    return _Sources(rows, counts.pop() if len(counts) == 1 else 0, is_plain, has_max, is_aligned)


def _part(device: Device, group: _Group, sums: int, sources: int) -> tuple[Part, int, str]:
    """Return a group's part of a launch, the lanes of a row, and the suffix of the kernels that take it.

    sums, sources: the addresses of its sums and sources.
    """
    step, rows, source = group.step, group.rows, group.sources

    def address(name: str, array: Any, *dtypes: DTypeLike, ndim: int = 1, written: bool = False) -> int:
        return view(device, name, array, *dtypes, ndim=ndim, written=written).address if has_elements(array) else 0

    states = [address("a state", state, np.float32, ndim=2, written=True) for state in step.states]
    wide = [state for state, width in zip(states, step.rule.widths, strict=True) if width > 1]
    vec, team = rows.access(*wide, sums)
    first, second = (*states, 0, 0)[:2]
    is_quick = vec == 4 and team >= _TEAM and source.is_aligned and not source.has_max
    part = (
        rows.address, first, second, step.pairs.entries, step.pairs.address, step.pairs.run_at,
        address("slot_of", step.pairs.slot_of, np.int32), sums, address("means", step.means, np.float32),
        sources, len(source.rows), source.per_source, source.is_plain, source.has_max,
        address("streams", step.rounding.streams, np.uint64), step.rounding.key, group.size, rows.num_slots,
        group.padded, rows.dim, vec, team, rows.is_half, *step.rule[1:-1],
    )  # fmt: skip
    return part, team, "" if is_quick else "_any"


def update_many(device: Device, steps: Sequence[Step]) -> None:
    """Step the rows of several groups, which may have different dims. Slots that no row has are left out.

    `Step.pairs` are `Runs`, and `Step.gradients` those of one lookup or of several, one after another. One launch for
    each optimizer, and one before it that sums the stretches of hot rows; more where vectors have 16 bits, or rows and
    gradients do not lie so that four elements are one access. Raises ValueError where something does not fit, before
    anything is launched.
    """
    groups = list[_Group]()
    for step in steps:
        check_step(step)
        rows = rows_at(device, step.vectors, written=True)
        if step.pairs.size:
            groups.append(_Group(step, rows, _sources_of(device, step.lookups), (rows.dim + 3) // 4 * 4))
    if not groups:
        return
    *firsts, num_sums = accumulate((group.num_stretches * group.padded for group in groups), initial=0)
    sums = device.empty(num_sums, np.float32)
    table = device.table(np.array([row for group in groups for row in group.sources.rows], _SOURCE))
    at = view(device, "sources", table, np.uint8).address
    begin = view(device, "sums", sums, np.float32, written=True).address
    launches: dict[str, list[tuple[Part, int]]] = defaultdict(list)
    stretches: dict[str, list[tuple[Part, int]]] = defaultdict(list)
    for group, first in zip(groups, firsts, strict=True):
        part, team, suffix = _part(device, group, begin + 4 * first, at)
        at += _SOURCE.itemsize * len(group.sources.rows)
        stretches[f"update.sum_stretches{suffix}"].append((part, -(-group.num_stretches // 2 * team // 32)))
        kernel = f"update.update_{group.step.rule.kind}{group.rows.suffix}{suffix}"
        launches[kernel].append((part, -(-group.size * team // (32 * _RUNS_OF_TASK))))
    for kernel, parts in (*stretches.items(), *launches.items()):
        launch_parts(device, kernel, _PART, [part for part, _ in parts], [tasks for _, tasks in parts])
