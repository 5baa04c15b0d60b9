"""Replicas: each rank's copy of the rows of data-parallel tables in a pass, as of the last step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.dist.shard_layout import out_of_bounds
from tiercache.kernels.arrays import NONE_I4
from tiercache.values.lookups import RowRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.dist.shard_layout import Owners
    from tiercache.rows.backends.base import Backend
    from tiercache.values.lookups import GroupRows

PIECE_BYTES = 8 << 20
"""Bytes of rows that a rank sends at once while filling replicas."""


class Replicas:
    """Vectors of replicated tables on this rank, float32, by local id. Owners keep the rows.

    Replicas are rounded to the wire's dtype, on the owner's rank too.
    """

    def __init__(self, ranks: AnyCommunicator, backend: Backend, wire_dtype: torch.dtype) -> None:
        self._ranks, self._backend, self._wire_dtype = ranks, backend, wire_dtype
        self._replicas: dict[int, torch.Tensor] = {}
        self._owners: Owners | None = None
        self._changed: dict[int, list[NDArray[np.int32]]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all replicas."""
        return sum(replica.numel() * replica.element_size() for replica in self._replicas.values())

    def open(self, owners: Owners | None, rows: Sequence[GroupRows]) -> None:
        """Fill replicas with the rows of a pass; ``rows`` are this rank's; owners None: no replicas. Collective."""
        p, rank = self._backend, self._ranks.rank
        self._owners, self._replicas, self._changed = owners, {}, {}
        for t, kind in enumerate(() if owners is None else owners.kinds):
            assert owners is not None
            if kind != "data_parallel":
                continue
            dim, low_W, rows_W = owners.tables[t].dim, owners.low_TW[t], owners.high_TW[t] - owners.low_TW[t]
            replica = torch.empty((int(owners.rows_T[t]), dim), dtype=torch.float32, device=p.device)
            piece = max(1, PIECE_BYTES // (4 * dim))
            for first in range(0, int(rows_W.max()), piece):
                count_W = np.clip(rows_W - first, 0, piece)
                begin = int(owners.first_TW[t, rank]) + first
                own = np.arange(begin, begin + int(count_W[rank]), dtype=np.int32)
                found = self._find(rows, int(owners.group_TW[t, rank]), p.tensor(p.to_device(own)), dim)
                received = self._ranks.all_gather(found.view(-1), (count_W * dim).tolist(), "filling replicas")
                at = 0
                for low, count in zip((low_W + first).tolist(), count_W.tolist(), strict=True):
                    replica[low : low + count] = received[at : at + count * dim].view(count, dim)
                    at += count * dim
            self._replicas[t] = replica

    def _find(self, rows: Sequence[GroupRows], group: int, positions: torch.Tensor, dim: int) -> torch.Tensor:
        """Return vectors by position, in the wire's dtype."""
        p, count = self._backend, positions.numel()
        found, slots = p.tensor(p.empty((count, dim), np.float32)), p.empty((count,), np.int32)
        if count:
            p.find([RowRequest(rows[group], p.array(positions), slots, p.array(found))])
        return found.to(self._wire_dtype)

    def read(self, table: int, local: NDArray[np.int32], out: torch.Tensor) -> None:
        """Write the vectors of local ids (n,) of a table to ``out`` (n, dim)."""
        p = self._backend
        torch.index_select(self._replicas[table], 0, p.tensor(p.to_device(local)), out=out)

    def note(self, changed: Mapping[int, Sequence[NDArray[np.int32]]]) -> None:
        """Record, by group, the positions of rows that the next step changes."""
        for group, positions in changed.items():
            self._changed.setdefault(group, []).extend(positions)

    def forget(self) -> None:
        """Drop the recorded positions."""
        self._changed = {}

    def update(self, rows: Sequence[GroupRows]) -> None:
        """Update every rank's replicas to the last step. Collective."""
        if not self._replicas:
            return
        ranks, owners = self._ranks, self._owners
        assert owners is not None
        p = self._backend
        changed = {group: np.unique(np.concatenate(some)) for group, some in self._changed.items()}
        self._changed = {}
        ids, vectors = [], []
        for t in self._replicas:
            group, first = int(owners.group_TW[t, ranks.rank]), int(owners.first_TW[t, ranks.rank])
            owned = int(owners.high_TW[t, ranks.rank] - owners.low_TW[t, ranks.rank])
            found = changed.get(group, NONE_I4)
            own = found[(found >= first) & (found < first + owned)]
            ids.append(own + np.int32(int(owners.low_TW[t, ranks.rank]) - first))
            vectors.append(self._find(rows, group, p.tensor(p.to_device(own)), owners.tables[t].dim).view(-1))
        numbers = np.array([one.size for one in ids], dtype=np.int64)
        count_WM = ranks.exchange_splits(np.tile(numbers, (ranks.size, 1)), "counting changed rows of replicas")
        if not count_WM.any():
            return
        dims = np.array([owners.tables[t].dim for t in self._replicas], dtype=np.int64)
        changed_ids = torch.from_numpy(np.concatenate(ids))
        all_ids = ranks.all_gather(changed_ids, count_WM.sum(axis=1).tolist(), "sending changed local ids").numpy()
        received = ranks.all_gather(
            torch.cat(vectors), (count_WM * dims).sum(axis=1).tolist(), "having replicas follow"
        )
        at_id = at = 0
        for counts in count_WM.tolist():
            for replica, count in zip(self._replicas.values(), counts, strict=True):
                dim = replica.shape[1]
                new = received[at : at + count * dim].view(count, dim)
                local = all_ids[at_id : at_id + count]
                if error := out_of_bounds(ranks.rank, local, replica.shape[0], "of a replica, by what changed"):
                    raise error
                replica[p.tensor(p.to_device(local)).long()] = new.to(replica.dtype)
                at_id, at = at_id + count, at + count * dim
