"""One optimizer step of the rows of a batch on a CUDA device: as `kernels.cpu.update`.

Each row's gradients are summed in batch order; above 64 entries the sum is the sum, in order, of the sums of stretches
of 64, so that many blocks share a hot row. The bits depend on the batch alone, and up to 64 entries per row they equal
the bits of the CPU's kernels.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tiercache.kernels.cuda.launch import Device, Part, address_of, has_elements, launch_parts, struct, table_of, view
from tiercache.kernels.cuda.sorting import STRETCH
from tiercache.kernels.cuda.vectors import RowsAt, rows_at
from tiercache.kernels.step import Gradients, Step, check_entries, check_rows

_PART, _SOURCE = struct("UpdatePart", "update"), struct("Source", "update")
_RUNS_OF_TASK = 8
_TEAM = 4  # minimum lanes of a team that looks its entries up together


class _Sources(NamedTuple):
    """The gradients of a group."""

    rows: list[Part]
    """A `Source` each."""
    per_source: int
    """Number of entries of each; 0 if they differ."""
    is_plain: bool
    has_max: bool
    is_aligned: bool
    """True if every gradient is known to begin at a multiple of 16 bytes."""


class RowsPlan(NamedTuple):
    """The rows of a group in the form of launches, checked once for all steps. It holds addresses, not arrays."""

    rows: RowsAt
    states: tuple[int, int]
    wide: tuple[int, ...]
    """The addresses of states that have as many elements as a row."""
    streams: int


def plan_rows(device: Device, step: Step) -> RowsPlan:
    """Plan steps of the rows of one group. Raises ValueError if its arrays do not fit together."""
    check_rows(step)
    states = [address_of(device, "a state", state, np.float32, written=True) for state in step.states]
    return RowsPlan(
        rows_at(device, step.vectors, written=True),
        (*states, 0, 0)[:2],  # type: ignore[arg-type]
        tuple(state for state, width in zip(states, step.rule.widths, strict=True) if width > 1),
        address_of(device, "streams", step.rounding.streams, np.uint64),
    )


class _Group(NamedTuple):
    """One group's rows and entries."""

    step: Step
    plan: RowsPlan
    sources: _Sources
    padded: int
    """Elements of a row of sums."""
    num_stretches: int
    """Rows of sums."""


def _sources_of(device: Device, lookups: Sequence[Gradients]) -> _Sources:
    rows, counts, is_plain, has_max, is_aligned = list[Part](), set[int](), True, False, True
    begin = 0
    for one in lookups:
        flat, stride = _samples_of(device, one)
        cols, bits = one.cols.tolist(), flat | 4 * stride
        for col in cols:
            bits |= 4 * col
        is_aligned &= bits % 16 == 0 and bool(cols)
        if has_elements(one.offsets):
            places = address_of(device, "entry_offset", one.offsets, np.int64)
            scales = address_of(device, "entry_scale", one.scales, np.float32)
            argmax = address_of(device, "argmax", one.argmax, np.int32)
            rows.append((flat, stride, one.width * (stride != one.width), places, scales, argmax, begin))
            is_plain, has_max, size = False, has_max or bool(argmax), int(one.offsets.shape[0])
            counts.add(size)
            begin += size
            continue
        for col in cols:
            rows.append((flat + 4 * col, stride, 0, 0, 0, 0, begin))
            begin += one.num_samples
        counts.add(one.num_samples)
    return _Sources(rows, counts.pop() if len(counts) == 1 else 0, is_plain, has_max, is_aligned)


def _samples_of(device: Device, gradients: Gradients) -> tuple[int, int]:
    """Return the address of a gradient, and the elements from one sample to the next."""
    flat, width = gradients.flat, gradients.width
    found, ndim = device.describe(flat), len(flat.shape)
    if found is not None and not found.contiguous and ndim == 2 and hasattr(flat, "stride"):
        stride, step = flat.stride()
        if step == 1 and stride >= width == flat.shape[1] and not has_elements(gradients.argmax):
            found._replace(contiguous=True).check("gradient", (np.float32,), 2, written=False)
            return found.address, stride
    return view(device, "gradient", flat, np.float32, ndim=ndim).address, width


def _part(device: Device, group: _Group, sums: int, sources: int) -> tuple[Part, int, str]:
    """Return a group's part of a launch, the lanes of a row, and the suffix of the kernels that take it."""
    step, (rows, states, wide, streams), (entries, per_source, is_plain, has_max, is_aligned) = group[:3]
    runs, (vec, team) = step.pairs, rows.access(*wide, sums)
    part = (
        rows.address, *states, runs.entries, runs.address, runs.run_at,
        address_of(device, "slot_of", runs.slot_of, np.int32), sums,
        address_of(device, "means", step.means, np.float32), sources, len(entries), per_source, is_plain, has_max,
        is_aligned, streams, step.rounding.key, runs.size, rows.num_slots, group.padded, rows.dim, vec, team,
        rows.is_half, *step.rule[1:-1],
    )  # fmt: skip
    return part, team, "" if vec == 4 and team >= _TEAM and not has_max else "_any"


def update_many(device: Device, steps: Sequence[Step], plans: Sequence[RowsPlan] | None = None) -> None:
    """Step the rows of several groups, which may have different dims. Slots without a row are skipped.

    `Step.pairs` are `Runs`, and `Step.gradients` those of one or several lookups, one after another. One launch for
    each optimizer, and one before it that sums the stretches of hot rows; more if vectors have 16 bits, or if rows and
    gradients are not aligned for access to four elements at once. Raises ValueError if something does not fit, before
    anything is launched. plans: of the rows of each step, by `plan_rows`.
    """
    groups = list[_Group]()
    for step, plan in zip(steps, plans or [plan_rows(device, step) for step in steps], strict=True):
        lookups, size = step.lookups, step.pairs.size
        check_entries(step, lookups)
        if size:
            padded, num_stretches = -(-plan.rows.dim // 4) * 4, 2 * -(-size // STRETCH)
            groups.append(_Group(step, plan, _sources_of(device, lookups), padded, num_stretches))
    if not groups:
        return
    *firsts, num_sums = accumulate((group.num_stretches * group.padded for group in groups), initial=0)
    sums = device.empty(num_sums, np.float32)
    table = device.table(table_of(_SOURCE, [row for group in groups for row in group.sources.rows]))
    at = view(device, "sources", table, np.uint8).address
    begin = view(device, "sums", sums, np.float32, written=True).address
    launches: dict[str, list[tuple[Part, int]]] = defaultdict(list)
    stretches: dict[str, list[tuple[Part, int]]] = defaultdict(list)
    for group, first in zip(groups, firsts, strict=True):
        part, team, suffix = _part(device, group, begin + 4 * first, at)
        at += _SOURCE.itemsize * len(group.sources.rows)
        stretches[f"update.sum_stretches{suffix}"].append((part, -(-group.num_stretches // 2 * team // 32)))
        kernel = f"update.update_{group.step.rule.kind}{group.plan.rows.suffix}{suffix}"
        launches[kernel].append((part, -(-group.step.pairs.size * team // (32 * _RUNS_OF_TASK))))
    for kernel, parts in (*stretches.items(), *launches.items()):
        launch_parts(device, kernel, _PART, [part for part, _ in parts], [tasks for _, tasks in parts])
