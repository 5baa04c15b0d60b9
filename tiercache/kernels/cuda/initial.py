"""Initial rows on a CUDA device, optionally straight into slots: as `kernels.cpu.initial`.

Zeros, constants and uniform rows have the CPU's bits. Normal ones, which take logarithms, are made only on the CPU.
"""

from typing import Any

import numpy as np

from tiercache.kernels.cpu.hashing import mix
from tiercache.kernels.cpu.initial import CONSTANT, UNIFORM, ZEROS
from tiercache.kernels.cuda.launch import Device, blocks_for, launch_parts, struct, view
from tiercache.kernels.cuda.vectors import rows_at
from tiercache.kernels.step import Vectors

_PART = struct("NewRows", "initial")
_TASK = 32  # rows


def initial_rows(
    device: Device, keys: Any, table_id: int, seed: int, kind: int, a: float, b: float, out: Vectors, slots: Any = None
) -> None:
    """Write the initial vector of each key (n,) to `out`; 16-bit dtypes are rounded to the nearest.

    Without `slots`, `out` has n rows; with them it has S, and the vector of key i is written to `out[slots[i]]`: slots
    (n,) int32, no two the same; -1 is skipped. `kind` is ZEROS, CONSTANT (a) or UNIFORM (low a, high b).
    """
    if kind not in (ZEROS, CONSTANT, UNIFORM):
        raise ValueError(f"unsupported initializer kind {kind} on a device: expected 0 zeros, 1 constant or 2 uniform.")
    seen, first, second = view(device, "keys", keys, np.int64), np.float32(a), np.float32(b)
    if kind == UNIFORM:
        second = np.float32(second - first)  # the span, as the CPU rounds it
    stream = mix((seed ^ table_id) & ((1 << 64) - 1))
    _launch(device, seen.address, seen.size, stream, kind, first, second, out, slots)


def fill_rows(device: Device, value: float, field: Any, slots: Any) -> None:
    """Write `value` to every element of the rows of `field` (S, width) in `slots` (n,): a new row's optimizer state."""
    size, out = view(device, "slots", slots, np.int32).size, Vectors(field, field.shape[1])
    _launch(device, 0, size, 0, CONSTANT, np.float32(value), np.float32(0), out, slots)


def set_streams(device: Device, streams: Any, slots: Any, keys: Any, table_id: int, seed: int) -> None:
    """Write the streams of rows of one table to their slots: slots (n,) int32, -1 is skipped; keys (n,) int64.

    Slots None: the stream of key i is written to place i of `streams` (n,). As `kernels.cpu.rounding.set_streams`.
    """
    to = view(device, "streams", streams, np.uint64, written=True)
    seen = view(device, "keys", keys, np.int64)
    places = None if slots is None else view(device, "slots", slots, np.int32)
    num_slots = to.size if places is None else places.size
    if num_slots != seen.size:
        raise ValueError(f"{seen.size} keys have {num_slots} slots: pass one each.")
    if seen.size == 0:
        return
    table = int(np.array(mix((seed ^ table_id) & ((1 << 64) - 1)), np.uint64).view(np.int64))
    blocks = blocks_for(device, -(-seen.size // 32))
    address = 0 if places is None else places.address
    device.launch("initial.set_streams", blocks, (to.address, address, seen.address, seen.size, table))


def _launch(
    device: Device, keys: int, size: int, stream: int, kind: int, a: np.float32, b: np.float32, out: Vectors, slots: Any
) -> None:
    to, address = rows_at(device, out, "out", written=True), 0
    if slots is not None:
        seen = view(device, "slots", slots, np.int32)
        address = seen.address
        if seen.size != size:
            raise ValueError(f"{size} keys have {seen.size} slots: pass one each.")
    elif to.num_slots != size:
        raise ValueError(f"out has {to.num_slots} rows for {size} keys: pass one each.")
    rows = size if to.dim else 0
    vec = to.access()[0]
    part = keys, address, to.address, rows, stream, to.dim, vec, kind, a, b, to.is_half
    launch_parts(device, f"initial.initial_rows{to.suffix}", _PART, [part], [-(-rows // _TASK)])
