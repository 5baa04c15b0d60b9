"""One optimizer step of the rows of a batch on a CUDA device: as `kernels.cpu.update`.

Each row's gradients are summed in batch order; above 256 entries the sum is that of the sums of stretches of 256, in
order, so that many blocks share a hot row. The bits depend on the batch alone, and up to 256 entries a row they are
those of the CPU's kernels.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from tiercache.kernels.cuda.launch import Device, Part, given, launch_parts, struct, view
from tiercache.kernels.cuda.vectors import RowsAt, by_width, rows_at
from tiercache.kernels.step import ADAGRAD, ADAM, ROWWISE, SGD, Step, check_step

STRETCH = 256  # part of the definition of the bits

_PART = struct("UpdatePart", "update")
_PAIRS_OF_TASK = 32
_KERNELS = {
    SGD: "update_sgd", ADAGRAD: "update_adagrad", ROWWISE: "update_rowwise_adagrad", ADAM: "update_adam",
}  # fmt: skip


class _Group(NamedTuple):
    """One group's rows and entries."""

    step: Step
    rows: RowsAt
    size: int
    """Entries."""
    padded: int
    """Elements of a row of sums."""

    @property
    def num_stretches(self) -> int:
        """Rows of sums."""
        return 2 * -(-self.size // STRETCH)


def _cols(device: Device, group: _Group) -> Any:
    cols = group.step.gradients.cols
    return device.table(cols) if cols.size else None


def _part(device: Device, group: _Group, sums: int, cols: Any) -> tuple[Part, int]:
    """Return a group's part of a launch, and the lanes of a row; sums, cols: the address of its sums; on the device."""
    step, rows, source = group.step, group.rows, group.step.gradients

    def address(name: str, array: Any, *dtypes: DTypeLike, ndim: int = 1, written: bool = False) -> int:
        return view(device, name, array, *dtypes, ndim=ndim, written=written).address if given(array) else 0

    states = [address("a state", state, np.float32, ndim=2, written=True) for state in step.states]
    vec, team = rows.access(*(states if step.rule.kind != ROWWISE else ()), sums)
    first, second = (*states, 0, 0)[:2]
    part = (
        rows.address, first, second, address("pairs", step.pairs, np.uint64), sums,
        address("gradient", source.flat, np.float32), address("entry_offset", source.offsets, np.int64),
        address("entry_scale", source.scales, np.float32), address("argmax", source.argmax, np.int32),
        address("cols", cols, np.int64, np.uint8), source.num_samples, source.width,
        address("streams", step.rounding.streams, np.uint64), step.rounding.key, group.size, rows.num_slots,
        group.padded, rows.dim, vec, team, rows.is_half, *step.rule[1:],
    )  # fmt: skip
    return part, team


def update_many(device: Device, steps: Sequence[Step]) -> None:
    """Step the rows of several groups, which may have different dims. Slots that no row has are left out.

    One launch for each optimizer, two where some of its vectors have 16 bits, and one more. Raises ValueError where
    something does not fit, before anything is launched.
    """
    groups = list[_Group]()
    for step in steps:
        check_step(step)
        rows = rows_at(device, step.vectors, written=True)
        size = view(device, "pairs", step.pairs, np.uint64).size
        if size:
            groups.append(_Group(step, rows, size, (rows.dim + 3) // 4 * 4))
    *firsts, num_sums = accumulate((group.num_stretches * group.padded for group in groups), initial=0)
    sums, cols = device.empty(num_sums, np.float32), [_cols(device, group) for group in groups]
    begin = view(device, "sums", sums, np.float32, written=True).address
    parts, teams = [], []
    for group, first, there in zip(groups, firsts, cols, strict=True):
        part, team = _part(device, group, begin + 4 * first, there)
        parts.append(part)
        teams.append(team)
    tasks = [-(-group.num_stretches * team // 32) for group, team in zip(groups, teams, strict=True)]
    launch_parts(device, "update.sum_stretches", _PART, parts, tasks)
    for kind, kernel in _KERNELS.items():
        mine = [
            (group.rows, part, -(-group.size // _PAIRS_OF_TASK))
            for group, part in zip(groups, parts, strict=True)
            if group.step.rule.kind == kind
        ]
        for suffix, some, of_parts in by_width(mine):
            launch_parts(device, f"update.{kernel}{suffix}", _PART, some, of_parts)
