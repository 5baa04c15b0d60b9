"""The exchange of one rank alone: batches look up rows where they are, whose gradients wait there for the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.kernels.arrays import NONE_I4, NONE_I8
from tiercache.ranks.exchange import Asked, Exchanged, RowExchange
from tiercache.ranks.requests import Request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.passes.samples import FeatureIds
    from tiercache.store.table import Group
    from tiercache.tiers.rows import GroupRows
    from tiercache.training.row_gradients import RowGradients
    from tiercache.training.row_optimizer import RowOptimizer

__all__ = ["RowsHere", "rows_are_here"]

_NO_COUNTS = np.zeros((1, 0), np.int64)
_NO_REQUEST = Request(NONE_I4, _NO_COUNTS, NONE_I4, NONE_I8, (), NONE_I8, NONE_I8)
_NO_NUMBERS = torch.empty(0, dtype=torch.int32)


def rows_are_here(ranks: AnyCommunicator, groups: Sequence[Group], part_groups: Sequence[Group]) -> bool:
    """Whether this rank has every row whole: it is alone, and its part has the groups of whole tables."""
    return ranks.size == 1 and tuple(groups) == tuple(part_groups)


class RowsHere(RowExchange):
    """Takes the place of `RowExchange` where `rows_are_here`; nothing is copied, and results are one process's bits."""

    def ask(
        self,
        ids: Mapping[str, FeatureIds],
        tables: Mapping[str, str],
        where: str,
        error: Exception | None = None,
        *,
        token: int = 0,
    ) -> Asked:
        """Leave ids what they are, local ids of the pass, which lookups check. Raises ``error``."""
        if error is not None:
            raise error
        return Asked(self._opened(), _NO_REQUEST, dict(ids), _NO_COUNTS, where)

    def answer(self, asked: Asked) -> tuple[list[GroupRows], Exchanged]:
        """Return the rows of the pass. Raises RuntimeError where another pass was opened since."""
        self._check_open(asked)
        return list(self._rows), Exchanged(asked.stretches, _NO_REQUEST, _NO_COUNTS, _NO_NUMBERS, _NO_NUMBERS)

    def gradients_of(self, exchanged: Exchanged, gradients: RowGradients, into: RowGradients) -> None:
        """Hand the gradients on as they are."""
        for group, pending in enumerate(gradients.pending):
            for one in pending:
                into.add(group, one)

    def step(self, optimizer: RowOptimizer, rows: Sequence[GroupRows]) -> None:
        """Step all rows, column slices too: they are whole."""
        optimizer.apply(rows)
