"""The gradients that a rank received for the rows it owns: which rows they are of, in rank order.

Legend as in `stretches`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.kernels.arrays import NONE_F4, NONE_I4, NONE_I8
from tiercache.ranks.stretches import exclusive
from tiercache.values.lookups import SavedGradient, Span, position_spans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.backends.base import Backend
    from tiercache.training.row_gradients import RowGradients
    from tiercache.values.rows import GroupRows


class Received:
    """Gradients of one batch, from every rank, this one too."""

    def __init__(
        self, rank: int, asked_WS: NDArray[np.int64], came_WS: NDArray[np.int64], dims_H: NDArray[np.int64]
    ) -> None:
        """asked_WS: rows that each rank asked for. came_WS: gradients that come. dims_H: of this rank's groups."""
        self._rank, self._asked_WS, self._came_WS = rank, asked_WS, came_WS
        self._dims_S = np.concatenate([dims_H, dims_H])
        self.numbers_W = (came_WS * self._dims_S).sum(axis=1)
        """Numbers that come from each rank."""
        self._chosen: Mapping[int, NDArray[np.int32]] = {}
        self.positions: dict[int, list[NDArray[np.int32]]] = {}
        """By group: where the rows of the gradients stand in the pass, once they are added."""
        self.mirrored: dict[int, list[NDArray[np.int32]]] = {}
        """By group: the same of rows that have mirrors."""

    def choose(self, chosen: Mapping[int, NDArray[np.int32]]) -> None:
        """Say by rank which of the rows it asked for have a gradient, where not all have."""
        self._chosen = chosen

    def add(
        self, backend: Backend, positions: NDArray[np.int32], slots: torch.Tensor, flat: torch.Tensor,
        rows: Sequence[GroupRows], into: RowGradients,
    ) -> None:  # fmt: skip
        """Add the gradients of ``rows``, this rank's, to ``into``, one entry for each rank and row, in rank order.

        positions, slots: of all rows asked for, by rank, this rank's own last. flat: the gradients by rank, this rank's
        own first.
        """
        num_groups = self._dims_S.size // 2
        asked_W = self._asked_WS.sum(axis=1)
        own_last = [rank for rank in range(asked_W.size) if rank != self._rank] + [self._rank]
        own_first = own_last[-1:] + own_last[:-1]
        begin_W, at_W = np.empty_like(asked_W), np.empty_like(asked_W)
        begin_W[own_last] = exclusive(asked_W[own_last])
        at_W[own_first] = exclusive(self.numbers_W[own_first])
        found: dict[int, list[tuple[torch.Tensor, NDArray[np.int64]]]] = {}
        for rank, counts_S in enumerate(self._came_WS):
            mine, at = slice(int(begin_W[rank]), int(begin_W[rank] + asked_W[rank])), int(at_W[rank])
            places, named = positions[mine], slots[mine]
            if rank in self._chosen:
                places = places[self._chosen[rank]]
                named = named.index_select(0, backend.tensor(backend.to_device(self._chosen[rank])))
            first = 0
            for section in np.nonzero(counts_S)[0].tolist():
                h, count, dim = section % num_groups, int(counts_S[section]), int(self._dims_S[section])
                here = slice(first, first + count)
                found.setdefault(h, []).append((named[here], np.arange(at, at + count * dim, dim, dtype=np.int64)))
                self.positions.setdefault(h, []).append(places[here])
                if section >= num_groups:
                    self.mirrored.setdefault(h, []).append(places[here])
                first, at = first + count, at + count * dim
        for h, pieces in found.items():
            into.add(
                h,
                SavedGradient(
                    slots=backend.array(torch.cat([some for some, _ in pieces])),
                    gradient=backend.array(flat), width=1, cols=NONE_I8,
                    places=backend.to_device(np.concatenate([where for _, where in pieces])),
                    scales=NONE_F4, argmax=NONE_I4, spans=partial(self._spans, h, rows[h].first),
                ),
            )  # fmt: skip

    def _spans(self, group: int, first: Mapping[str, int]) -> list[Span]:
        """Return the spans of the gradient of a group."""
        return position_spans(first, np.concatenate(self.positions[group]))
