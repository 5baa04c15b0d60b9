"""Pooled output dist: owners pool features for other ranks and receive the gradients of the vectors.

Legend as in `pooled`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tiercache.kernels.arrays import NONE_I4
from tiercache.values.lookups import LookupIds, SavedGradient, position_spans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.dist.exchange import RowExchange
    from tiercache.dist.pooled import PooledInput, PooledPart
    from tiercache.rows.backends.base import Backend
    from tiercache.values.lookups import GroupGradients, LookedUp


class ServedPart(NamedTuple):
    """One block that this rank pooled for another rank."""

    part: PooledPart
    entries: LookupIds
    found: LookedUp


@dataclass(frozen=True, slots=True, eq=False)
class PooledBatch:
    """The pooled vectors of one batch, and the data needed to send their gradients back."""

    vectors: Mapping[str, torch.Tensor]
    """By feature: (N, dim)."""
    inputs: PooledInput
    served_W: tuple[tuple[ServedPart, ...], ...]
    """The blocks that this rank pooled, by rank."""


class PooledOutputDist:
    """Has owner ranks pool features. ``serve`` and ``send_gradients`` are collective.

    It uses the ranks, the wire, the rows and the threads of a `RowExchange`.
    """

    def __init__(self, exchange: RowExchange, backend: Backend) -> None:
        self._exchange, self._backend = exchange, backend
        self._ranks, self._wire = exchange.ranks, exchange.wire

    def serve(self, inputs: PooledInput) -> PooledBatch:
        """Have features pooled. Call it after ``RowExchange.serve`` of the same batch.

        Does not wait for the device if the backend queues its work.
        """
        entries_W = [[(part, part.on(self._backend)) for part in parts] for parts in inputs.parts_W]
        vectors_W, served_W = self._serve(inputs, entries_W)
        every = {one.name: p for p, one in enumerate(inputs.poolable)}
        vectors = {name: self._vectors(inputs, every[name], vectors_W) for name in inputs.modes}
        return PooledBatch(vectors, inputs, served_W)

    def _serve(
        self, inputs: PooledInput, entries_W: Sequence[Sequence[tuple[PooledPart, LookupIds]]]
    ) -> tuple[list[torch.Tensor], tuple[tuple[ServedPart, ...], ...]]:
        """Pool each rank's requests; return the vectors of this rank's blocks, and the blocks it served."""
        served_W: list[tuple[ServedPart, ...]] = [()] * self._ranks.size
        incoming_W, outgoing_W, num_samples = (
            inputs.incoming_W,
            inputs.outgoing_W,
            int(inputs.num_samples_W[self._ranks.rank]),
        )
        sizes_W = [block.width * int(n) for block, n in zip(incoming_W, inputs.num_samples_W, strict=True)]
        send, receive = self._wire.remote(sizes_W), self._wire.remote(b.width * num_samples for b in outgoing_W)
        sent, received = self._flat(sum(send)), self._flat(sum(receive))
        here = self._flat(sizes_W[self._ranks.rank])
        for rank, (block, out) in enumerate(zip(incoming_W, torch.split(sent, send), strict=True)):
            out = here if rank == self._ranks.rank else out  # noqa: PLW2901 - the same, elsewhere
            if out.numel():
                found = self._backend.pool(
                    [(self._exchange.rows[part.group], entries) for part, entries in entries_W[rank]],
                    self._backend.array(out.view(-1, block.width)),
                )
                served_W[rank] = tuple(ServedPart(*of, one) for of, one in zip(entries_W[rank], found, strict=True))
        self._wire.send(sent, send, receive, received, "pooling features")
        vectors = list(torch.split(received, receive))
        vectors[self._ranks.rank] = here
        views = [flat.view(num_samples, block.width) for flat, block in zip(vectors, outgoing_W, strict=True)]
        return views, tuple(served_W)

    def _flat(self, size: int) -> torch.Tensor:
        return self._backend.tensor(self._backend.empty((size,), np.float32))

    @staticmethod
    def _vectors(inputs: PooledInput, p: int, vectors_W: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenate the columns of a feature."""
        found = []
        for owner in inputs.poolable[p].owners:
            block = inputs.outgoing_W[owner.rank]
            col = block.cols[block.features.index(p)]
            found.append(vectors_W[owner.rank][:, col : col + owner.last_column - owner.first_column])
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    # -- gradients -----------------------------------------------------------------------------------------

    def send_gradients(
        self, batch: PooledBatch, gradients: Mapping[str, Sequence[torch.Tensor]], into: GroupGradients
    ) -> None:
        """Send the gradients of a batch's vectors to the owners, which add them to ``into``, averaged over the ranks.

        gradients: by feature, to be added up.

        Gradients are added in rank order, then feature order. Features without a gradient are skipped. Call it after
        ``RowExchange.send_gradients`` of the same batch.
        """
        inputs, P, what = batch.inputs, len(batch.inputs.poolable), "exchanging gradients of pooled vectors"
        sums = {name: torch.stack([*some]).sum(0) if len(some) > 1 else some[0]
                for name, some in gradients.items() if some}  # fmt: skip
        to = np.zeros((self._ranks.size, P + 1), dtype=np.int64)
        for rank, block in enumerate(inputs.outgoing_W):
            for p in block.features:
                to[rank, p] = inputs.poolable[p].name in sums
        to[:, P] = bool(sums)
        flags = self._wire.count(to, what)
        if not flags[:, P].any():
            return
        widths = [block.width if to[rank, :P].any() else 0 for rank, block in enumerate(inputs.outgoing_W)]
        n_W, here = inputs.num_samples_W.tolist(), self._ranks.rank
        send = self._wire.remote(width * n_W[here] for width in widths)
        receive = self._wire.remote(
            block.width * n if flags[rank, :P].any() else 0
            for rank, (block, n) in enumerate(zip(inputs.incoming_W, n_W, strict=True))
        )
        sent, received, mine = self._flat(sum(send)), self._flat(sum(receive)), self._flat(widths[here] * n_W[here])
        for rank, out in enumerate(torch.split(sent, send)):
            self._write(inputs, sums, rank, mine if rank == here else out)
        self._wire.send(sent, send, receive, received, what)
        flat_W = list(torch.split(received, receive))
        flat_W[here] = mine
        for rank, gradient in enumerate(flat_W):
            self._add(batch, rank, flags[rank, :P], gradient, into)

    def _write(self, inputs: PooledInput, sums: Mapping[str, torch.Tensor], rank: int, out: torch.Tensor) -> None:
        """Write the gradient of a block; zeros for features without one, which the owner does not add."""
        block = inputs.outgoing_W[rank]
        if not out.numel():
            return
        gradient = out.view(-1, block.width)
        for p, owner, col in zip(block.features, block.owners, block.cols, strict=True):
            found = sums.get(inputs.poolable[p].name)
            columns = gradient[:, col : col + owner.last_column - owner.first_column]
            if found is None:
                columns.zero_()
            else:
                torch.div(found[:, owner.first_column : owner.last_column], self._ranks.size, out=columns)

    def _add(self, batch: PooledBatch, rank: int, has_P: NDArray[np.int64], gradient: torch.Tensor,
             into: GroupGradients) -> None:  # fmt: skip
        """Add the gradients received from a rank."""
        width = batch.inputs.incoming_W[rank].width
        for part, e, found in batch.served_W[rank]:
            starts = e.starts.tolist()
            for i, f in enumerate(part.features):
                some = slice(starts[i], starts[i + 1])
                if not has_P[f] or some.start == some.stop:
                    continue
                assert found.places is not None
                positions = part.entries.ids[some] + np.int32(part.entries.bases[i])
                into[part.group].append(
                    SavedGradient(
                        slots=found.slots[some], gradient=self._backend.array(gradient), width=width, cols=e.cols,
                        places=found.places[some], scales=found.scales[some], argmax=NONE_I4,
                        spans=partial(position_spans, self._exchange.rows[part.group].first, positions),
                    )
                )  # fmt: skip
                self._exchange.slices.note_rows(part.group, positions, into)
