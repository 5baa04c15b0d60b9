"""Lookup with pooling on a CUDA device, with the bits of `kernels.cpu.pooling`: sums are in the order of entries.

Legend: S slots, L local positions, E entries of a group, F features, N samples, T width of the output, D dim. A plan
has what the batches of a module share; each batch adds the addresses of its arrays.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tiercache.kernels.arrays import I1, I8, View, expect, same_length
from tiercache.kernels.cpu.gathering import check_columns
from tiercache.kernels.cpu.pooling import MAX, MEAN
from tiercache.kernels.cuda.gathering import check_bases
from tiercache.kernels.cuda.launch import Device, address_of, argument_of, blocks_for, most_parts, struct, view
from tiercache.kernels.cuda.vectors import rows_at
from tiercache.kernels.step import Vectors

_FEATURE, _BATCH = struct("PoolFeature", "pooling"), struct("PoolBatch", "pooling")
_SAMPLES_OF_TASK = 32
_MOST_GROUPS = most_parts(_BATCH)


class Features(NamedTuple):
    """The features of a group that a module looks up. Arrays with one element per feature are NumPy arrays.

    slot_of_local: (L,) int32, on the device like vectors.
    """

    vectors: Vectors
    slot_of_local: Any
    bases: I8
    cols: I8
    modes: I1


class Ids(NamedTuple):
    """The ids of a group in one batch, on the device, and the outputs of the lookup. A bad id reads as zeros.

    ids (E,) int32 or int64; slots (E,) int32, written. offsets (F * N + 1,) int64, the start of each bag, are not
    checked; None: each sample has one id of each feature, and nothing else is written. weights (E,); argmax (N, T)
    int32 for MAX; entry_offset (E,) int64; entry_scale (E,), needed for weights and MEAN.
    """

    ids: Any
    slots: Any
    offsets: Any = None
    weights: Any = None
    argmax: Any = None
    entry_offset: Any = None
    entry_scale: Any = None


class _Group(NamedTuple):
    num_features: int
    has_max: bool
    has_mean: bool


class PoolPlan:
    """Pools groups, which may have different dims, into their columns of an output (N, T): one launch per batch.

    One for each width of vectors. A plan holds addresses, not arrays: it is valid only for the memory it was made for.
    """

    def __init__(self, device: Device, groups: Sequence[Features], width: int) -> None:
        """width: T."""
        self._device, self._width, self._groups = device, width, list[_Group]()
        features: dict[tuple[str, int], list[tuple[Any, ...]]] = defaultdict(list)
        for g, group in enumerate(groups):
            rows = rows_at(device, group.vectors)
            local = view(device, "slot_of_local", group.slot_of_local, np.int32)
            bases, cols, modes = group.bases, group.cols, group.modes
            expect("bases", bases, np.int64)
            check_bases(bases.tolist(), local.size)
            expect("cols", cols, np.int64)
            expect("modes", modes, np.int8)
            check_columns(cols, rows.dim, width)
            num_features = same_length(bases=bases, cols=cols, modes=modes)
            columns = (array.tolist() for array in (bases, local.size - bases, cols, modes))
            for f, (base, limit, col, mode) in enumerate(zip(*columns, strict=True)):
                vec, team = rows.access()
                number = g % _MOST_GROUPS
                row = rows.address, local.address, base, limit, col, number, f, rows.dim, vec, team, mode, rows.is_half
                features[rows.suffix, g - number].append(row)
            self._groups.append(_Group(num_features, MAX in modes, MEAN in modes))
        self._features = [
            (suffix, first, len(some), device.put(np.array(some, _FEATURE)))
            for (suffix, first), some in features.items()
        ]

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(int(features.nbytes) for *_, features in self._features)

    def pool(self, batch: Sequence[Ids], out: Any) -> None:
        """Pool the ids of each group of one batch into `out` (N, T)."""
        to = view(self._device, "out", out, np.float32, ndim=2, written=True)
        self._launch("pooling.pool", [self._ids(*one, to) for one in zip(self._groups, batch, strict=True)], to)

    def weight_gradient(self, slots: Any, offsets: Any, gradient: Any, out: Any) -> None:
        """Write the gradient of each entry's weight to `out` (E,), for a plan of one group: row times gradient.

        Over the ids of the bag for MEAN. Call it before the step. The output for MAX is meaningless.
        """
        (group,), device = self._groups, self._device
        taken, to = view(device, "slots", slots, np.int32), view(device, "out", out, np.float32, written=True)
        grad = view(device, "gradient", gradient, np.float32, ndim=2)
        if taken.size != to.size:
            raise ValueError(f"{taken.size} slots and {to.size} gradients of weights: pass one each.")
        bags = address_of(device, "offsets", offsets, np.int64, (group.num_features * grad.shape[0] + 1,))
        self._launch("pooling.weight_gradient", [(0, taken.address, bags, 0, 0, 0, to.address, 0)], grad)

    def _ids(self, group: _Group, batch: Ids, out: View) -> tuple[int, ...]:
        device, num_samples = self._device, out.shape[0]
        ids = view(device, "ids", batch.ids, np.int32, np.int64)
        slots = view(device, "slots", batch.slots, np.int32, written=True)
        size, is_wide = ids.size, int(ids.dtype == np.int64)
        if slots.size != size:
            raise ValueError(f"slots has {slots.size} elements for {size} ids.")
        if batch.offsets is None:
            if size != group.num_features * num_samples:
                raise ValueError(
                    f"{size} ids do not make one id for each of {num_samples} samples and {group.num_features} "
                    "features."
                )
            return ids.address, slots.address, 0, 0, 0, 0, 0, is_wide
        offsets = address_of(device, "offsets", batch.offsets, np.int64, (group.num_features * num_samples + 1,))
        weights = address_of(device, "weights", batch.weights, np.float32, (size,))
        argmax = address_of(device, "argmax", batch.argmax, np.int32, out.shape, written=True)
        entry_offset = address_of(device, "entry_offset", batch.entry_offset, np.int64, (size,), written=True)
        entry_scale = address_of(device, "entry_scale", batch.entry_scale, np.float32, (size,), written=True)
        needs_scale = size > 0 and (weights != 0 or group.has_mean)
        if (group.has_max and not argmax and num_samples) or (needs_scale and not entry_scale):
            raise ValueError("max pooling needs argmax like out; weights and means need an entry_scale for each id.")
        if size and not entry_offset:
            raise ValueError(f"entry_offset has 0 elements for {size} ids.")
        return ids.address, slots.address, offsets, weights, argmax, entry_offset, entry_scale, is_wide

    def _launch(self, kernel: str, batch: list[tuple[int, ...]], out: View) -> None:
        """out: the output, or its gradient."""
        num_samples, width = out.shape
        if width != self._width:
            raise ValueError(f"the output has {width} columns, but the plan was made for {self._width}.")
        chunks = -(-num_samples // _SAMPLES_OF_TASK)
        if not chunks:
            return
        for suffix, first, count, features in self._features:
            some = argument_of(_BATCH, batch[first : first + _MOST_GROUPS], 0)
            arguments = features, count, chunks, some, out.address, num_samples, width
            self._device.launch(kernel + suffix, blocks_for(self._device, count * chunks), arguments)
