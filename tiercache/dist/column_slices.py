"""Row-wise optimizers for tables split by column over ranks: partial sums of squares add up to whole rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.kernels.arrays import NONE_F4, NONE_I4
from tiercache.values.lookups import RowRequest, SavedGradient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.dist.shard_layout import Owners
    from tiercache.rows.backends.base import Backend
    from tiercache.rows.backends.optimizer_step import OptimizerStep
    from tiercache.store.table import Group
    from tiercache.values.lookups import GroupGradients, GroupRows

_FIRST_COLUMN = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _OwnSlice:
    """A slice that this rank owns."""

    group: int
    """The group in this rank's part; it has no other table."""
    ranks: tuple[int, ...]
    """The owners of the table's slices, in column order."""
    whole_dim: int


class SliceSteps:
    """Steps this rank's column slices of tables with row-wise optimizers.

    All owners of a table's slices receive gradients of the same rows, since every rank asks all of them for all its
    rows. Each owner sums the squares of its columns in row order, the owners add these sums in column order, and each
    updates its columns with the total; so all have the same optimizer state.
    """

    def __init__(
        self, ranks: AnyCommunicator, backend: Backend, owners: Owners, part_groups: tuple[Group, ...]
    ) -> None:
        self._ranks, self._backend, self._part_groups = ranks, backend, part_groups
        self._own_slices: list[_OwnSlice] = []
        self._any = False
        for t, table in enumerate(owners.tables):
            if owners.kinds[t] != "column_wise" or not table.optimizer.row_wise:
                continue
            self._any = True
            found = owners.destinations[t]
            for d in found:
                if d.rank == ranks.rank:
                    assert len(part_groups[d.group].tables) == 1, f"slices of {table.name} share a group"
                    self._own_slices.append(_OwnSlice(d.group, tuple(other.rank for other in found), table.dim))
        self._positions: dict[int, list[NDArray[np.int32]]] = {one.group: [] for one in self._own_slices}

    def note(self, positions: Mapping[int, Sequence[NDArray[np.int32]]], into: GroupGradients) -> None:
        """Record, by group, the positions of the rows whose gradients were added last."""
        for group, noted in self._positions.items():
            if group in positions:
                noted.append(np.concatenate(positions[group]))
            assert len(noted) == len(into[group])

    def note_rows(self, group: int, positions: NDArray[np.int32], into: GroupGradients) -> None:
        """Record the position of each entry of the one gradient that was added last."""
        if group in self._positions:
            self._positions[group].append(positions)
            assert len(self._positions[group]) == len(into[group])

    def forget(self) -> None:
        """Drop the recorded positions."""
        for noted in self._positions.values():
            noted.clear()

    def step(self, steps: Sequence[OptimizerStep], rows: Sequence[GroupRows]) -> list[OptimizerStep]:
        """Step the slices and return the other steps. Collective."""
        if not self._any:
            return [*steps]
        of_slices = {one.group.index: one for one in steps if one.group.index in self._positions}
        merged = [self._merge(one, of_slices.get(one.group), rows[one.group]) for one in self._own_slices]
        totals = self._add_up([squares for _, _, squares in merged])
        for one, (slots, gradient, _), total in zip(self._own_slices, merged, totals, strict=True):
            if slots.numel():
                self._update(of_slices[one.group], slots, gradient, total / one.whole_dim)
        self.forget()
        return [one for one in steps if one.group.index not in of_slices]

    def _merge(
        self, one: _OwnSlice, step: OptimizerStep | None, rows: GroupRows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the slots (K,) of the rows that have gradients, by position, their sums (K, dim), and squares (K,)."""
        p, noted = self._backend, self._positions[one.group]
        positions, number = np.unique(np.concatenate([NONE_I4, *noted]), return_inverse=True)
        slots = p.tensor(p.empty((positions.size,), np.int32))
        dim = self._part_groups[one.group].dim
        gradient, current = (p.tensor(p.empty((positions.size, dim), np.float32)) for _ in range(2))
        if not positions.size:
            return slots, gradient, gradient.sum(dim=1)
        assert step is not None, "recorded gradients need a step"
        numbers = torch.split(p.tensor(p.to_device(number.astype(np.int32))), [some.size for some in noted])
        renamed = [replace(old, slots=p.array(new)) for old, new in zip(step.saved, numbers, strict=True)]
        p.sum(renamed, 1.0, p.array(gradient))
        p.find([RowRequest(rows, p.to_device(positions), p.array(slots), p.array(current))])
        decayed = gradient.add(current, alpha=step.rule.decay)
        return slots, gradient, (decayed * decayed).sum(dim=1)

    def _add_up(self, own: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the squares of whole rows; all owners of a table pass the same number of rows. Collective."""
        rank, W = self._ranks.rank, self._ranks.size
        shared = [[i for i, one in enumerate(self._own_slices) if r in one.ranks and r != rank] for r in range(W)]
        sizes = [sum(own[i].numel() for i in some) for some in shared]
        send = [own[i] for some in shared for i in some]
        flat = (
            torch.cat(send)
            if send
            else torch.empty(0, dtype=own[0].dtype if own else torch.float32, device=self._backend.device)
        )
        received = self._ranks.all_to_all(flat, sizes, sizes, what="adding up the squares of column slices")
        owners = [(r, i) for r, some in enumerate(shared) for i in some]
        pieces = dict(zip(owners, torch.split(received, [own[i].numel() for _, i in owners]), strict=True))
        totals = []
        for i, one in enumerate(self._own_slices):
            total = torch.zeros_like(own[i])
            for r in one.ranks:
                total += own[i] if r == rank else pieces[r, i]
            totals.append(total)
        return totals

    def _update(self, step: OptimizerStep, slots: torch.Tensor, gradient: torch.Tensor, means: torch.Tensor) -> None:
        """Step the rows in `slots` by their gradients, with these means of squares of whole rows."""
        p = self._backend
        merged = SavedGradient(
            slots=p.array(slots), gradient=p.array(gradient.view(-1)), width=step.group.dim, cols=_FIRST_COLUMN,
            places=None, scales=NONE_F4, argmax=NONE_I4,
        )  # fmt: skip
        p.step([replace(step, saved=[merged], means=p.array(means))])
