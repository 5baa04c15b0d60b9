"""Pooled features: which features of a batch their owners pool, and the messages that ask for it. On the host.

Legend: W ranks, P features that may be pooled, n samples of a rank's batch, E ids of one feature of it.

A *block* is the set of features that one rank asks one owner to pool, by the group of the owner's part that their table
is in. Its vectors are (n, width), the features' columns side by side. Its *message* has, for each feature, the lengths
of the bags if these vary, the ids, and their weights if the data has weights: int32 words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from tiercache.dist.shard_layout import out_of_bounds
from tiercache.errors import RankError
from tiercache.kernels.arrays import NONE_F4
from tiercache.kernels.cpu.gathering import check_ids
from tiercache.kernels.cpu.pooling import MEAN, SUM
from tiercache.kernels.cpu.sorting import SortBuffers, sort_slots
from tiercache.kernels.cpu.unique import unique_slots
from tiercache.values.ids import FeatureIds
from tiercache.values.lookups import LookupIds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.dist.shard_layout import Destination, Owners
    from tiercache.rows.backends.base import Backend
    from tiercache.schema import Feature


MODES = {"sum": SUM, "mean": MEAN}
"""Pooling modes that owners support. For max they would also have to send the winning entry of each number."""


@dataclass(frozen=True, slots=True)
class PoolableFeature:
    """A feature that can be pooled on its owners: one rank has all rows, or several have slices of columns."""

    name: str
    table: str
    length: int | None
    """Ids per sample; None: any number."""
    weighted: bool
    """True if the data has weights for it."""
    dim: int
    rows: int
    """Rows of the table in the pass."""
    owners: tuple[Destination, ...]
    """The owners, in column order."""

    def words(self, num_samples: int, num_ids: int) -> int:
        """Return the number of words of its part of a message."""
        return (num_samples if self.length is None else 0) + num_ids * (2 if self.weighted else 1)


def poolable_features(owners: Owners, features: Sequence[Feature]) -> tuple[PoolableFeature, ...]:
    """Return the features whose tables are whole on one rank or split by column over several; in schema order."""
    found = []
    for feature in features:
        t = owners.index(feature.table)
        if owners.kinds[t] in ("table_wise", "column_wise"):
            length = 1 if feature.hotness == "one_hot" else feature.length
            found.append(
                PoolableFeature(
                    feature.name, feature.table, length, feature.weights is not None, owners.tables[t].dim,
                    int(owners.rows_T[t]), owners.destinations[t],
                )
            )  # fmt: skip
    return tuple(found)


def pooled_by_owner(poolable: Sequence[PoolableFeature], modes: Mapping[str, str | None]) -> list[PoolableFeature]:
    """Return the features that are read on the ranks that own their tables, if those read by owner."""
    return [one for one in poolable if modes.get(one.name) in MODES]


@dataclass(frozen=True, slots=True)
class PooledBlock:
    """The features that one rank asks one owner to pool."""

    features: tuple[int, ...]
    """Indices in P, ascending."""
    owners: tuple[Destination, ...]
    """By feature: the owner's part of its table."""
    cols: tuple[int, ...]
    """By feature: its first column in the block."""
    width: int
    """Number of columns."""

    @classmethod
    def of(cls, poolable: Sequence[PoolableFeature], requested_P: NDArray[np.int64], rank: int) -> PooledBlock:
        """Return the block of ``rank``: the features whose ``requested_P`` is not 0."""
        found = [
            (d.group, p, d) for p in np.nonzero(requested_P)[0].tolist() for d in poolable[p].owners if d.rank == rank
        ]
        found.sort(key=lambda one: one[:2])
        cols = [0]
        for _, _, d in found:
            cols.append(cols[-1] + d.last_column - d.first_column)
        return cls(tuple(p for _, p, _ in found), tuple(d for _, _, d in found), tuple(cols[:-1]), cols[-1])


@dataclass(frozen=True, slots=True)
class PooledPart:
    """The bags that one rank asks this rank to pool, for some features of one group. In host memory."""

    group: int
    features: tuple[int, ...]
    entries: LookupIds
    offsets: NDArray[np.int64]
    """Offsets of the bags."""
    weights: list[tuple[int, int, NDArray[np.float32]]]
    """(first entry, end entry, weights)."""

    def on(self, backend: Backend) -> LookupIds:
        """Return the entries on the device."""
        e, size = self.entries, int(self.entries.starts[-1])
        weights = backend.weights(size, self.weights) if self.weights else NONE_F4
        return replace(e, ids=backend.to_device(e.ids), offsets=backend.to_device(self.offsets), weights=weights)


@dataclass(frozen=True, slots=True, eq=False)
class PooledInput:
    """The pooling requests of one batch between all ranks, in host memory; nothing is pooled yet."""

    poolable: tuple[PoolableFeature, ...]
    modes: dict[str, str]
    """By name: features of this rank's batch that other ranks pool."""
    num_samples_W: NDArray[np.int64]
    outgoing_W: tuple[PooledBlock, ...]
    """The requests of this rank, by owner."""
    incoming_W: tuple[PooledBlock, ...]
    """The requests to this rank, by rank."""
    parts_W: list[list[PooledPart]]
    """The same, decoded into bags."""


def pooled_by_bytes(
    poolable: Sequence[PoolableFeature],
    ids: Mapping[str, FeatureIds],
    modes: Mapping[str, str | None],
    num_samples: int,
    *,
    item_bytes: int,
    trained: bool,
    where: str,
    sorting: SortBuffers,
) -> list[int]:
    """Return the features of a batch that owners pool because that sends fewer bytes, by index.

    Unpooled: an address and a row for each unique row of the feature. Pooled: its bags, and a vector for each sample.
    Training adds the gradient of each row or vector. Rows shared with other features of the table, and rows that stay
    on this rank, are not considered: so the answer does not depend on where the table is.

    item_bytes: bytes per number on the wire. sorting: scratch of the calling thread. Raises IndexError, which names
    ``where``, for a local id that its table does not have in the pass.
    """
    found, times = [], 2 if trained else 1
    for p, one in enumerate(poolable):
        if modes.get(one.name) not in MODES or one.length == 1:
            continue
        some, pieces, number = ids[one.name], len(one.owners), times * one.dim * item_bytes
        check_pooled_ids(one, some.ids, where)
        pooled = 4 * pieces * one.words(num_samples, some.num_ids) + num_samples * number
        row = 4 * pieces + number
        if pooled < min(some.num_ids, one.rows) * row and pooled < _num_unique(some.ids, one.rows, sorting) * row:
            found.append(p)
    return found


def _num_unique(ids: NDArray[np.int32], rows: int, sorting: SortBuffers) -> int:
    unique, inverse = np.empty_like(ids), np.empty_like(ids)
    return unique_slots(sort_slots(ids, rows, sorting), unique, inverse)


def check_pooled_ids(one: PoolableFeature, ids: NDArray[np.int32], where: str) -> None:
    """Raise IndexError for a local id that is not in the table, as a lookup does."""
    bad = check_ids(ids, np.array([0, ids.size]), np.array([one.rows]))
    if bad >= 0:
        raise wrong_id(one.name, int(ids[bad]), bad, one.table, one.rows, where)


def wrong_id(feature: str, local_id: int, entry: int, table: str, rows: int, where: str) -> IndexError:
    """Return the error for a local id that is not in its table."""
    return IndexError(
        f"feature {feature!r} has local id {local_id} at entry {entry} of the batch, but table {table!r} has local ids "
        f"0 to {rows - 1} in {where}: use batches of the pass that is being trained"
    )


def split_by_rank(ids: Mapping[str, FeatureIds], num_samples_W: Sequence[int]) -> list[dict[str, FeatureIds]]:
    """Divide the ids of all ranks' samples, which are in rank order, by rank."""
    found, first = [], 0
    for last in np.cumsum(num_samples_W).tolist():
        mine = {}
        for name, some in ids.items():
            bounds = None if some.offsets is None else some.offsets[first : last + 1]
            cut = slice(first, last) if bounds is None else slice(int(bounds[0]), int(bounds[-1]))
            mine[name] = FeatureIds(
                some.ids[cut],
                None if bounds is None else bounds - bounds[0],
                None if some.weights is None else some.weights[cut],
            )
        found.append(mine)
        first = last
    return found


def encode_block(
    block: PooledBlock, poolable: Sequence[PoolableFeature], ids: Mapping[str, FeatureIds]
) -> list[NDArray[np.int32]]:
    """Return the pieces of the message that requests a block."""
    pieces: list[NDArray[np.int32]] = []
    for p in block.features:
        one = poolable[p]
        some = ids[one.name]
        if one.length is None:
            assert some.offsets is not None
            pieces.append(np.diff(some.offsets).astype(np.int32))
        pieces.append(some.ids)
        if one.weighted:
            assert some.weights is not None
            pieces.append(some.weights.view(np.int32))
    return pieces


def decode_block(
    rank: int,
    poolable: Sequence[PoolableFeature],
    block: PooledBlock,
    message: NDArray[np.int32],
    counts_P: NDArray[np.int64],
    modes_P: NDArray[np.int8],
    n: int,
) -> list[PooledPart]:
    """Return the bags of a message received by ``rank``, in feature order, by group.

    Raises RankError if another rank asks for features or ids that this one does not have.
    """
    at, parts = 0, []
    every = zip(block.features, block.owners, block.cols, strict=True)
    for group, members in groupby(every, key=lambda one: one[1].group):
        some = list(members)
        ids, lengths, weights, starts = [], [], [], [0]
        for f, _, _ in some:
            one, count = poolable[f], int(counts_P[f])
            if one.length is None:
                lengths.append(message[at : at + n])
                at += n
            else:
                lengths.append(np.full(n, one.length, np.int32))
            ids.append(message[at : at + count])
            at += count
            what = f"of table {one.table!r}, of which the pass has {one.rows:,}"
            if error := out_of_bounds(rank, ids[-1], one.rows, what):
                raise error
            if int(lengths[-1].sum(dtype=np.int64)) != count or (n and int(lengths[-1].min()) < 0):
                raise RankError(f"rank {rank} was asked to pool {count} ids of {one.name!r} in bags "
                                "of another size: start all ranks again with one dataset")  # fmt: skip
            if one.weighted:
                weights.append((starts[-1], starts[-1] + count, message[at : at + count].view(np.float32)))
                at += count
            starts.append(starts[-1] + count)
        features = [f for f, _, _ in some]
        offsets = np.concatenate([[0], *lengths]).cumsum(dtype=np.int64)
        entries = LookupIds(
            ids=np.concatenate(ids),
            starts=np.array(starts, dtype=np.int64),
            bases=np.array([owner.first for _, owner, _ in some], dtype=np.int64),
            modes=modes_P[features],
            cols=np.array([col for _, _, col in some], dtype=np.int64),
            weights=NONE_F4,
        )
        parts.append(PooledPart(group, tuple(features), entries, offsets, weights))
    return parts
