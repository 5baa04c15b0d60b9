"""Pooled vectors travel: bags go to the owner of their table, vectors come back, and at the step their gradients go.

Legend as in `bags`. On the wire travel, for each batch that was asked for, vectors; at the step counts and gradients of
the vectors. What a rank owns itself does not travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tiercache.kernels.arrays import NONE_I4
from tiercache.values.lookups import SavedGradient, position_spans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.backends.base import Backend
    from tiercache.ranks.bags import AskedBags, Part
    from tiercache.ranks.exchange import RowExchange
    from tiercache.training.batch import Pooled
    from tiercache.training.row_gradients import RowGradients
    from tiercache.values.lookups import LookedUp, LookupIds
    from tiercache.values.rows import GroupRows


class Served(NamedTuple):
    """Bags that a rank had pooled here."""

    part: Part
    entries: LookupIds
    found: LookedUp


@dataclass(frozen=True, slots=True, eq=False)
class PooledBatch:
    """What the way back of one batch's pooled features needs. It holds their vectors too, which modules look up."""

    features: Mapping[str, Pooled]
    """By name."""
    asked: AskedBags
    served_W: tuple[tuple[Served, ...], ...]
    """What each rank had pooled here."""


class Pooling:
    """Has features pooled by the ranks that own their tables. ``answer`` and ``gradients_of`` are collective.

    Beside a `RowExchange`, with its ranks and its wire, and on the same threads.
    """

    def __init__(self, exchange: RowExchange, backend: Backend) -> None:
        self._exchange, self._backend = exchange, backend
        self._ranks, self._wire = exchange.ranks, exchange.wire
        self._rows: Sequence[GroupRows] = ()

    def open(self, rows: Sequence[GroupRows]) -> None:
        """Begin with a pass: ``rows`` are the groups of this rank's part; none: with no pass."""
        self._rows = rows

    def answer(self, asked: AskedBags, features: Mapping[str, Pooled]) -> PooledBatch:
        """Have ``features`` pooled, by name: they get their vectors. Behind ``RowExchange.answer`` of the same batch.

        Where the backend queues its work, nothing is waited for.
        """
        entries_W = [[(part, part.on(self._backend)) for part in parts] for parts in asked.parts_W]
        vectors_W, served_W = self._answer(asked, entries_W)
        every = {one.name: p for p, one in enumerate(asked.candidates)}
        for name, found in features.items():
            found.vectors = self._vectors(asked, every[name], vectors_W)
        return PooledBatch(features, asked, served_W)

    def _answer(
        self, asked: AskedBags, entries_W: Sequence[Sequence[tuple[Part, LookupIds]]]
    ) -> tuple[list[torch.Tensor], tuple[tuple[Served, ...], ...]]:
        """Pool what each rank asked for; return the vectors of each of this rank's blocks, and what was served."""
        served_W: list[tuple[Served, ...]] = [()] * self._ranks.size
        blocks_W, asked_W, num_samples = asked.blocks_W, asked.asked_W, int(asked.num_samples_W[self._ranks.rank])
        sizes_W = [block.width * int(n) for block, n in zip(blocks_W, asked.num_samples_W, strict=True)]
        send, receive = self._wire.remote(sizes_W), self._wire.remote(b.width * num_samples for b in asked_W)
        sent, came = self._flat(sum(send)), self._flat(sum(receive))
        here = self._flat(sizes_W[self._ranks.rank])
        for rank, (block, out) in enumerate(zip(blocks_W, torch.split(sent, send), strict=True)):
            out = here if rank == self._ranks.rank else out  # noqa: PLW2901 - the same, elsewhere
            if out.numel():
                found = self._backend.pool(
                    [(self._rows[part.group], entries) for part, entries in entries_W[rank]],
                    self._backend.array(out.view(-1, block.width)),
                )
                served_W[rank] = tuple(Served(*of, one) for of, one in zip(entries_W[rank], found, strict=True))
        self._wire.send(sent, send, receive, came, "pooling features")
        vectors = list(torch.split(came, receive))
        vectors[self._ranks.rank] = here
        views = [flat.view(num_samples, block.width) for flat, block in zip(vectors, asked_W, strict=True)]
        return views, tuple(served_W)

    def _flat(self, size: int) -> torch.Tensor:
        return self._backend.tensor(self._backend.empty((size,), np.float32))

    @staticmethod
    def _vectors(asked: AskedBags, p: int, vectors_W: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put the columns of a feature side by side."""
        found = []
        for owner in asked.candidates[p].owners:
            block = asked.asked_W[owner.rank]
            col = block.cols[block.features.index(p)]
            found.append(vectors_W[owner.rank][:, col : col + owner.last_column - owner.first_column])
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    # -- the way back -------------------------------------------------------------------------------------

    def gradients_of(self, batch: PooledBatch, into: RowGradients) -> None:
        """Send the gradients of a batch's vectors to the owners, which add them to ``into``, averaged over the ranks.

        In rank order, in each by feature. Features that no backward came to take no part. Call it behind
        ``RowExchange.gradients_of`` of the same batch.
        """
        asked, P, what = batch.asked, len(batch.asked.candidates), "exchanging gradients of pooled vectors"
        sums = {name: torch.stack(one.gradients).sum(0) if len(one.gradients) > 1 else one.gradients[0]
                for name, one in batch.features.items() if one.gradients}  # fmt: skip
        to = np.zeros((self._ranks.size, P + 1), dtype=np.int64)
        for rank, block in enumerate(asked.asked_W):
            for p in block.features:
                to[rank, p] = asked.candidates[p].name in sums
        to[:, P] = bool(sums)
        told = self._wire.count(to, what)
        if not told[:, P].any():
            return
        widths = [block.width if to[rank, :P].any() else 0 for rank, block in enumerate(asked.asked_W)]
        n_W, here = asked.num_samples_W.tolist(), self._ranks.rank
        send = self._wire.remote(width * n_W[here] for width in widths)
        receive = self._wire.remote(
            block.width * n if told[rank, :P].any() else 0
            for rank, (block, n) in enumerate(zip(asked.blocks_W, n_W, strict=True))
        )
        sent, came, mine = self._flat(sum(send)), self._flat(sum(receive)), self._flat(widths[here] * n_W[here])
        for rank, out in enumerate(torch.split(sent, send)):
            self._write(asked, sums, rank, mine if rank == here else out)
        self._wire.send(sent, send, receive, came, what)
        gradients = list(torch.split(came, receive))
        gradients[here] = mine
        for rank, gradient in enumerate(gradients):
            self._add(batch, rank, told[rank, :P], gradient, into)

    def _write(self, asked: AskedBags, sums: Mapping[str, torch.Tensor], rank: int, out: torch.Tensor) -> None:
        """Write the gradient of a block; zeros for features without one, which are not added there."""
        block = asked.asked_W[rank]
        if not out.numel():
            return
        gradient = out.view(-1, block.width)
        for p, owner, col in zip(block.features, block.owners, block.cols, strict=True):
            found = sums.get(asked.candidates[p].name)
            columns = gradient[:, col : col + owner.last_column - owner.first_column]
            if found is None:
                columns.zero_()
            else:
                torch.div(found[:, owner.first_column : owner.last_column], self._ranks.size, out=columns)

    def _add(self, batch: PooledBatch, rank: int, has_P: NDArray[np.int64], gradient: torch.Tensor,
             into: RowGradients) -> None:  # fmt: skip
        """Add what came from a rank."""
        width = batch.asked.blocks_W[rank].width
        for part, e, found in batch.served_W[rank]:
            starts = e.starts.tolist()
            for i, f in enumerate(part.features):
                some = slice(starts[i], starts[i + 1])
                if not has_P[f] or some.start == some.stop:
                    continue
                assert found.places is not None
                positions = part.entries.ids[some] + np.int32(part.entries.bases[i])
                into.add(
                    part.group,
                    SavedGradient(
                        slots=found.slots[some], gradient=self._backend.array(gradient), width=width, cols=e.cols,
                        places=found.places[some], scales=found.scales[some], argmax=NONE_I4,
                        spans=partial(position_spans, self._rows[part.group].first, positions),
                    ),
                )  # fmt: skip
                self._exchange.slices.note_rows(part.group, positions, into)
