"""The random bits of stochastic rounding on a CUDA device: as `kernels.cpu.rounding`."""

from typing import Any, NamedTuple

import numpy as np

from tiercache.kernels.cpu.hashing import mix
from tiercache.kernels.cuda.launch import Device, View, blocks_for, view

__all__ = ["NO_ROUNDING", "Rounding", "make_rounding", "set_streams"]


class Rounding(NamedTuple):
    """What decides the random bits of a step. Make it with `make_rounding`."""

    streams: View
    """(S,): of the row in each slot."""
    key: int
    """The generator's: `mix(step)`."""


NO_ROUNDING = Rounding(View(0, (0,), np.dtype(np.uint64)), 0)


def make_rounding(device: Device, streams: Any, step: int) -> Rounding:
    """Return what rounds the rows with `streams` (S,) of uint64 in a step, counted over the whole training."""
    return Rounding(view(device, "streams", streams, np.uint64), mix(step))


def set_streams(device: Device, streams: Any, slots: Any, keys: Any, table_id: int, seed: int) -> None:
    """Write the streams of rows of one table to their slots: slots (n,) int32, -1 is passed over; keys (n,) int64.

    Slots None: that of key i goes to place i of `streams` (n,).
    """
    to = view(device, "streams", streams, np.uint64, written=True)
    given = view(device, "keys", keys, np.int64)
    places = None if slots is None else view(device, "slots", slots, np.int32)
    room = to.size if places is None else places.size
    if room != given.size:
        raise ValueError(f"{given.size} keys have {room} slots: give one each.")
    if given.size == 0:
        return
    table = int(np.array(mix((seed ^ table_id) & ((1 << 64) - 1)), np.uint64).view(np.int64))
    blocks = blocks_for(device, -(-given.size // 32))
    address = 0 if places is None else places.address
    device.launch("rounding.set_streams", blocks, (to.address, address, given.address, given.size, table))
