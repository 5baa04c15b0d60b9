"""Current rows of any keys, read by the ranks that own them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tiercache.data.raw_batch import OOV_KEY
from tiercache.errors import BudgetError
from tiercache.kernels.cpu.hashing import key_owners
from tiercache.sizes import distinct_sizes
from tiercache.values.lookups import RowReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.dist.shard_view import ShardView
    from tiercache.store.table import Group, Table
    from tiercache.values.lookups import Unseen


class LocalRows(RowReader, Protocol):
    """Reads this rank's current rows."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of their tables."""
        ...

    def fields(self, table_name: str, keys: NDArray[np.int64]) -> tuple[NDArray[np.float32], ...]:
        """Return the vector and every optimizer state of ``keys``: arrays (n, width)."""
        ...

    def shares_unknown(self, table_name: str) -> bool:
        """Return True if this rank has an out-of-vocabulary row of a table."""
        ...


class LoadedRows:
    """Vectors of some keys, in memory."""

    unseen: Unseen = "initial"
    """The rows that owners return for keys that were never trained."""

    def __init__(self, rows: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
        """rows: by table, keys (n,) ascending and their vectors (n, dim)."""
        self._rows = dict(rows)

    def fill(self, table_name: str, keys: NDArray[np.int64], out: tuple[NDArray[np.float32], ...]) -> None:
        """Write the vectors of ``keys``, all of which must be loaded, to the first array of ``out``."""
        known, vectors = self._rows[table_name]
        np.take(vectors, np.searchsorted(known, keys), axis=0, out=out[0])


class RowLoader:
    """Requests rows from their owners. On the training thread, between batches."""

    def __init__(self, view: ShardView, live_rows: Callable[..., LocalRows], ranks: AnyCommunicator) -> None:
        """live_rows: returns a reader of this rank's current rows."""
        self._view, self._live_rows, self._ranks = view, live_rows, ranks
        self._has_unknown: bool | None = None  # True if there is such a row that only one rank owns

    def live_rows(self) -> LocalRows:
        """Return a reader of this rank's current rows that has the out-of-vocabulary rows of all ranks. Collective."""
        with self._ranks.raise_on_all("opening current rows"):
            found = self._live_rows()
        if self._has_unknown is False:
            return found
        unknown = _unknown_rows(self._view, found, self._ranks)
        self._has_unknown = bool(unknown)
        return self._live_rows(unknown) if unknown else found

    def load(
        self, keys: Mapping[str, NDArray[np.int64]], budget: int | None = None, unseen: Unseen = "initial"
    ) -> LoadedRows:
        """Return the rows of ``keys``: by table, unique, ascending; they differ between ranks. Collective.

        unseen: the same on all ranks.
        Counts, keys (int64) and float32 vectors travel once each way. Raises BudgetError if this rank would read more
        than ``budget`` bytes of vectors for other ranks.
        """
        ranks, what = self._ranks, "reading rows of raw keys"
        live_rows, tables = self.live_rows(), self._view.whole.tables
        live_rows.unseen = unseen
        keys_WT = self._keys_by_owner(tables, keys)
        to = np.array([[found.size for found in own] for own in keys_WT], np.int64)
        counts = ranks.exchange_splits(to, what)
        sent = torch.from_numpy(np.concatenate([one for own in keys_WT for one in own]))
        keys_in = ranks.all_to_all(sent, to.sum(axis=1).tolist(), counts.sum(axis=1).tolist(), what=what).numpy()
        widths_W = np.array([[self._width(table, rank) for table in tables] for rank in range(ranks.size)], np.int64)
        widths_T = widths_W[ranks.rank]
        with ranks.raise_on_all(what):
            num_bytes = int((counts.sum(axis=0) * widths_T).sum()) * 4
            if budget is not None and num_bytes > budget:
                need, allowed = distinct_sizes(num_bytes, budget)
                raise BudgetError(
                    f"the ranks ask rank {ranks.rank} for rows of {need} at once, but eval_budget is {allowed}: use "
                    f"smaller batches, or raise eval_budget to {num_bytes} bytes (and host_budget, which contains it)"
                )
            vectors_out = self._read(live_rows, counts, keys_in, widths_T)
        sizes = (to * widths_W).sum(axis=1).tolist()
        back = ranks.all_to_all(torch.from_numpy(vectors_out), (counts @ widths_T).tolist(), sizes, what=what).numpy()
        return self._put_together(tables, keys, to, widths_W, back)

    def _width(self, table: Table, rank: int) -> int:
        """Return the number of columns of a table that a rank owns."""
        table_sharding = self._view.sharding.tables[table.name]
        if table_sharding.by_hash:
            return table.dim
        part = table_sharding.slice_of(rank)
        return 0 if part is None else part.last - part.first

    def _keys_by_owner(
        self, tables: Sequence[Table], keys: Mapping[str, NDArray[np.int64]]
    ) -> list[list[NDArray[np.int64]]]:
        """Return by rank and table the keys requested from the rank, ascending."""
        keys_W: list[list[NDArray[np.int64]]] = [[] for _ in range(self._ranks.size)]
        for table in tables:
            some = keys.get(table.name, np.empty(0, np.int64))
            owners = self._owners(table, some)
            for rank, own in enumerate(keys_W):
                own.append(some if owners is None and self._width(table, rank) else some[:0] if owners is None
                            else some[owners == rank])  # fmt: skip
        return keys_W

    def _owners(self, table: Table, keys: NDArray[np.int64]) -> NDArray[np.int16] | None:
        """Return the rank that owns each key; None if ranks own columns of all keys, or replicas."""
        if not self._view.sharding.tables[table.name].by_hash:
            return None
        owners = np.empty(keys.size, np.int16)
        key_owners(keys, table.table_id, self._ranks.size, owners)
        return owners

    def _read(
        self,
        live_rows: LocalRows,
        counts_WT: NDArray[np.int64],
        keys_in: NDArray[np.int64],
        widths_T: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Return the vectors of the received keys, which are ordered by rank and table, in the same order."""
        vectors_out = np.empty(int((counts_WT * widths_T).sum()), np.float32)
        ends, ends_out = (np.cumsum(each).reshape(counts_WT.shape) for each in (counts_WT, counts_WT * widths_T))
        for t, table in enumerate(self._view.tables):
            parts = [keys_in[end - count : end] for end, count in zip(ends[:, t], counts_WT[:, t], strict=True)]
            keys, inverse = np.unique(np.concatenate(parts), return_inverse=True)
            if not keys.size:
                continue
            vectors, first = np.empty((keys.size, int(widths_T[t])), np.float32), 0
            live_rows.fill(table.name, keys, (vectors,))
            for end, count in zip(ends_out[:, t].tolist(), counts_WT[:, t].tolist(), strict=True):
                out = vectors_out[end - count * vectors.shape[1] : end].reshape(count, vectors.shape[1])
                np.take(vectors, inverse[first : first + count], axis=0, out=out)
                first += count
        return vectors_out

    def _put_together(
        self, tables: Sequence[Table], keys: Mapping[str, NDArray[np.int64]], to_WT: NDArray[np.int64],
        widths_WT: NDArray[np.int64], back: NDArray[np.float32],
    ) -> LoadedRows:  # fmt: skip
        """Put the received vectors in the order of their keys, and join columns from several ranks."""
        found, ends = {}, np.cumsum(to_WT * widths_WT).reshape(to_WT.shape)
        for t, table in enumerate(tables):
            if table.name not in keys:
                continue
            some = keys[table.name]
            vectors, owners = np.empty((some.size, table.dim), np.float32), self._owners(table, some)
            for rank in np.nonzero(to_WT[:, t])[0].tolist():
                width, end = int(widths_WT[rank, t]), int(ends[rank, t])
                piece = back[end - int(to_WT[rank, t]) * width : end].reshape(-1, width)
                if owners is not None:
                    vectors[owners == rank] = piece
                else:
                    part = self._view.sharding.tables[table.name].slice_of(rank)
                    assert part is not None
                    vectors[:, part.first : part.last] = piece
            found[table.name] = some, vectors
        return LoadedRows(found)


def _unknown_rows(
    view: ShardView, live_rows: LocalRows, ranks: AnyCommunicator
) -> dict[str, list[NDArray[np.float32]]]:
    """Return the out-of-vocabulary rows of row-wise tables: one rank owns each row, but all ranks read it."""
    own: dict[str, list[list[float]]] = {}
    unknown = np.array([OOV_KEY], dtype=np.int64)
    with ranks.raise_on_all("reading out-of-vocabulary rows"):
        for table in view.tables:
            if view.sharding.tables[table.name].by_hash and live_rows.shares_unknown(table.name):
                own[table.name] = [field[0].tolist() for field in live_rows.fields(table.name, unknown)]
    gathered = {name: fields for values in ranks.all_gather_object(own) for name, fields in values.items()}
    return {name: [np.array([field], dtype=np.float32) for field in fields] for name, fields in gathered.items()}
