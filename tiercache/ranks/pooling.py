"""Pooled vectors travel: bags go to the owner of their table, vectors come back, and at the step their gradients go.

Legend as in `bags`. On the wire travel, for each batch: counts (P + 5 int64 to each rank), messages, vectors; at the
step counts again (P + 1) and gradients of the vectors. What a rank owns itself does not travel.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.backends.jagged import LookupIds, SavedGradient
from tiercache.errors import RankError
from tiercache.kernels.arrays import NONE_F4, NONE_I4
from tiercache.ranks.bags import MODES, Block, Candidate, Chooser, candidates_of, check_bags, message_of
from tiercache.ranks.bounds import confined
from tiercache.training.batch import Pooled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.backends.base import Backend
    from tiercache.passes.samples import FeatureIds
    from tiercache.ranks.exchange import RowExchange
    from tiercache.ranks.owners import Owners
    from tiercache.schema import Feature
    from tiercache.tiers.rows import GroupRows
    from tiercache.training.row_gradients import RowGradients

__all__ = ["AskedBags", "PooledBatch", "Pooling"]

_SAMPLES, _ASKED, _MODES, _TOKEN, _ERROR = range(5)
"""The counts behind those of the P features."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AskedBags:
    """What ranks want one another to pool for one batch, all in host memory: nothing was pooled yet."""

    candidates: tuple[Candidate, ...]
    modes: dict[str, str]
    """By name, of the features of this rank's batch that are pooled elsewhere."""
    num_samples: int
    num_samples_W: NDArray[np.int64]
    asked_W: tuple[Block, ...]
    """What this rank asks of each."""
    blocks_W: tuple[Block, ...]
    """What each asks of this rank."""
    counts_WP: NDArray[np.int64]
    """Ids of each feature that each asks of this rank."""
    modes_WP: NDArray[np.int8]
    messages_W: Sequence[Sequence[NDArray[np.int32]]]
    """What is told to each rank; with input by model what each would tell, and this rank has read."""
    travel: bool
    """Whether they are told."""
    what: str


@dataclass(frozen=True, slots=True)
class _Served:
    """The entries of one feature of one rank's bags: what its gradient becomes a `SavedGradient` with."""

    feature: int
    group: int
    entries: LookupIds
    """Of all features of the group in the block."""
    first: int
    last: int
    base: int
    """The position of local id 0."""


@dataclass(frozen=True, slots=True, eq=False)
class PooledBatch:
    """What the way back of one batch's pooled features needs. It holds their vectors too, which modules look up."""

    features: dict[str, Pooled]
    """By name."""
    candidates: tuple[Candidate, ...]
    num_samples_W: NDArray[np.int64]
    asked_W: tuple[Block, ...]
    """What this rank asked of each."""
    blocks_W: tuple[Block, ...]
    """What each asked of this rank."""
    served_W: tuple[tuple[_Served, ...], ...]


class Pooling:
    """Has features pooled by the ranks that own their tables. Every call is collective, but ``__init__`` and ``open``.

    Beside a `RowExchange`, with its ranks and its wire; on one thread at a time, as that.
    """

    def __init__(self, exchange: RowExchange, backend: Backend, features: Sequence[Feature]) -> None:
        self._exchange, self._backend, self._features = exchange, backend, features
        self._ranks, self._wire = exchange.ranks, exchange.wire
        self._chooser = Chooser()
        self._rows: Sequence[GroupRows] = ()
        self.candidates: tuple[Candidate, ...] = ()
        """Features that may be pooled, in the pass that is open."""

    def open(self, owners: Owners, rows: Sequence[GroupRows]) -> None:
        """Begin with a pass: ``rows`` are the groups of this rank's part. Not collective."""
        self.candidates = candidates_of(owners, self._features) if self._ranks.size > 1 else ()
        self._rows = rows

    def close(self) -> None:
        """Let go of the rows of the pass that is open. Not collective."""
        self.candidates, self._rows = (), ()

    def by_model(self, modes: Mapping[str, str | None]) -> list[Candidate]:
        """Return the features that are read, with input by model, on the ranks that own their tables."""
        return [one for one in self.candidates if modes.get(one.name) in MODES]

    def ask(
        self,
        ids: Mapping[str, FeatureIds],
        modes: Mapping[str, str | None],
        num_samples: int,
        where: str,
        *,
        own: Sequence[Mapping[str, FeatureIds]] | None = None,
        trained: bool = True,
        error: Exception | None = None,
        token: int = 0,
    ) -> tuple[AskedBags | None, Exception | None]:
        """Ask for features of a batch to be pooled; those that are not in what is returned need their rows.

        ids: of this rank's samples. modes: how features are looked up. own: for input by model, by rank: the ids of its
        samples for the features of tables that this rank owns; all candidates are pooled then. error: what went wrong
        on this rank before; it is returned, or an IndexError, where nothing is pooled on any rank because of it.
        Nor is it where ranks bring different tokens: ``RowExchange.ask`` says so. Raises RankError, on all
        ranks, where ranks with input by model look different features up.
        """
        candidates, what = self.candidates, f"pooling features of {where}"
        P, W = len(candidates), self._ranks.size
        if not any(own is not None or one.length != 1 for one in candidates):
            return None, error
        chosen: list[int] = []
        if error is None:
            try:
                if own is None:
                    chosen = self._chooser.choose(
                        candidates, ids, modes, num_samples, item_bytes=self._wire.dtype.itemsize, trained=trained,
                        where=where,
                    )  # fmt: skip
                else:
                    chosen = [candidates.index(one) for one in self.by_model(modes)]
                    for p in chosen:
                        for some in own:
                            if candidates[p].name in some:
                                check_bags(candidates[p], some[candidates[p].name].ids, where)
            except Exception as bad:
                error = bad
        to = np.zeros((W, P + 5), dtype=np.int64)
        for p in chosen:
            one = candidates[p]
            for owner in one.owners:
                count = 0 if own is not None else ids[one.name].num_ids
                to[owner.rank, p] = 1 + 2 * count + (modes[one.name] == "mean")
        to[:, P:] = num_samples, bool(chosen), 0 if own is None else _digest(modes), token, error is not None
        told = self._wire.count(to, what)
        last = told[:, P:]
        if last[:, _ERROR].any() or (last[:, _TOKEN] != token).any():
            return None, error
        if (last[:, _MODES] != to[0, P + _MODES]).any():
            raise RankError(
                f"ranks look up different features in {where}, or pool them differently: with input by model all of "
                "them have the same embedding modules"
            )
        if not last[:, _ASKED].any():
            return None, None
        asked_W = tuple(Block.of(candidates, to[rank, :P], rank) for rank in range(W))
        blocks_W = tuple(Block.of(candidates, told[rank, :P], self._ranks.rank) for rank in range(W))
        counts_WP = (told[:, :P] - 1) >> 1
        if own is None:
            messages_W = [message_of(block, candidates, ids) for block in asked_W]
        else:
            messages_W = [message_of(block, candidates, some) for block, some in zip(blocks_W, own, strict=True)]
            for rank, (block, some) in enumerate(zip(blocks_W, own, strict=True)):
                for p in block.features:
                    counts_WP[rank, p] = some[candidates[p].name].num_ids
        asked = AskedBags(
            candidates=candidates,
            modes={candidates[p].name: str(modes[candidates[p].name]) for p in chosen},
            num_samples=num_samples,
            num_samples_W=last[:, _SAMPLES],
            asked_W=asked_W,
            blocks_W=blocks_W,
            counts_WP=counts_WP,
            modes_WP=np.where(told[:, :P] & 1, MODES["sum"], MODES["mean"]).astype(np.int8),
            messages_W=messages_W,
            travel=own is None,
            what=what,
        )
        return asked, None

    def answer(self, asked: AskedBags) -> PooledBatch:
        """Have the features pooled; where the backend queues its work, nothing is waited for."""
        self._exchange.bounds.check()
        messages = self._tell(asked) if asked.travel else [self._bring(pieces) for pieces in asked.messages_W]
        entries_W = [
            self._entries(block, message, counts_P, modes_P, int(n))
            for block, message, counts_P, modes_P, n in zip(
                asked.blocks_W, messages, asked.counts_WP, asked.modes_WP, asked.num_samples_W, strict=True
            )
        ]
        vectors_W = self._answer(asked, entries_W)
        every = {one.name: p for p, one in enumerate(asked.candidates)}
        features = {
            name: Pooled(mode, self._vectors(every[name], asked.asked_W, vectors_W))
            for name, mode in asked.modes.items()
        }
        return PooledBatch(
            features, asked.candidates, asked.num_samples_W, asked.asked_W, asked.blocks_W, tuple(map(tuple, entries_W))
        )

    def _bring(self, pieces: Sequence[NDArray[np.int32]]) -> torch.Tensor:
        joined = np.concatenate(pieces) if pieces else NONE_I4
        return self._backend.tensor(self._backend.to_device(joined))

    def _tell(self, asked: AskedBags) -> list[torch.Tensor]:
        """Send the messages; return what each rank asks of this one."""
        p, rank, pieces_W = self._backend, self._ranks.rank, asked.messages_W
        send = self._wire.remote(sum(piece.size for piece in pieces) for pieces in pieces_W)
        receive = self._wire.remote(
            sum(asked.candidates[f].words(int(n), int(counts_P[f])) for f in block.features)
            for block, counts_P, n in zip(asked.blocks_W, asked.counts_WP, asked.num_samples_W, strict=True)
        )
        sent = self._bring([piece for r, pieces in enumerate(pieces_W) if r != rank for piece in pieces])
        came = p.tensor(p.empty((sum(receive),), np.int32))
        self._wire.send(sent, send, receive, came, asked.what)
        messages = list(torch.split(came, receive))
        messages[rank] = self._bring(pieces_W[rank])
        return messages

    def _entries(
        self, block: Block, message: torch.Tensor, counts_P: NDArray[np.int64], modes_P: NDArray[np.int8], n: int
    ) -> list[_Served]:
        """Return the bags of a message, feature after feature, as entries for each group."""
        p, at, served = self._backend, 0, []
        every = zip(block.features, block.owners, block.cols, strict=True)
        for group, members in groupby(every, key=lambda one: one[1].group):
            some = list(members)
            ids, lengths, weights, starts = [], [], [], [0]
            for f, _, _ in some:
                one, count = self.candidates[f], int(counts_P[f])
                if one.length is None:
                    lengths.append(message[at : at + n].long())
                    at += n
                else:
                    lengths.append(torch.full((n,), one.length, device=message.device))
                ids.append(message[at : at + count])
                at += count
                if one.weighted:
                    found = message[at : at + count].view(torch.float32)
                    weights.append((starts[-1], starts[-1] + count, p.array(found)))
                    at += count
                starts.append(starts[-1] + count)
            joined, features = torch.cat(ids), [f for f, _, _ in some]
            for i, f in enumerate(features):
                one, mine = self.candidates[f], joined[starts[i] : starts[i + 1]]
                what = f"of table {one.table!r}, of which the pass has {one.rows:,}"
                self._exchange.bounds.expect(p.array(mine), one.rows, what)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=message.device), *lengths]).cumsum(0)
            offsets = confined(offsets, starts[-1] + 1, p)
            entries = LookupIds(
                ids=p.array(joined),
                starts=np.array(starts, dtype=np.int64),
                bases=np.array([owner.first for _, owner, _ in some], dtype=np.int64),
                modes=modes_P[features],
                cols=np.array([col for _, _, col in some], dtype=np.int64),
                offsets=p.array(offsets),
                weights=p.weights(starts[-1], weights) if weights else NONE_F4,
            )
            served += [
                _Served(f, group, entries, starts[i], starts[i + 1], owner.first)
                for i, (f, owner, _) in enumerate(some)
            ]
        return served

    def _answer(self, asked: AskedBags, entries_W: Sequence[list[_Served]]) -> list[torch.Tensor]:
        """Pool what each rank asked for; return the vectors of each of this rank's blocks."""
        blocks_W, asked_W, num_samples = asked.blocks_W, asked.asked_W, asked.num_samples
        sizes_W = [block.width * int(n) for block, n in zip(blocks_W, asked.num_samples_W, strict=True)]
        send, receive = self._wire.remote(sizes_W), self._wire.remote(b.width * num_samples for b in asked_W)
        sent, came = self._flat(sum(send)), self._flat(sum(receive))
        here = self._flat(sizes_W[self._ranks.rank])
        for rank, (block, out) in enumerate(zip(blocks_W, torch.split(sent, send), strict=True)):
            out = here if rank == self._ranks.rank else out  # noqa: PLW2901 - the same, elsewhere
            if out.numel():
                parts = {served.group: served.entries for served in entries_W[rank]}
                self._backend.pool(
                    [(self._rows[group], entries) for group, entries in parts.items()],
                    self._backend.array(out.view(-1, block.width)),
                )
        self._wire.send(sent, send, receive, came, asked.what)
        vectors = list(torch.split(came, receive))
        vectors[self._ranks.rank] = here
        return [flat.view(num_samples, block.width) for flat, block in zip(vectors, asked_W, strict=True)]

    def _flat(self, size: int) -> torch.Tensor:
        return self._backend.tensor(self._backend.empty((size,), np.float32))

    def _vectors(self, p: int, asked_W: Sequence[Block], vectors_W: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put the columns of a feature side by side."""
        found = []
        for owner in self.candidates[p].owners:
            block = asked_W[owner.rank]
            col = block.cols[block.features.index(p)]
            found.append(vectors_W[owner.rank][:, col : col + owner.last_column - owner.first_column])
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    # -- the way back -------------------------------------------------------------------------------------

    def gradients_of(self, batch: PooledBatch, into: RowGradients) -> None:
        """Send the gradients of a batch's vectors to the owners, which add them to ``into``, averaged over the ranks.

        In rank order, in each by feature. Features that no backward came to take no part. Call it behind
        ``RowExchange.gradients_of`` of the same batch.
        """
        P, what = len(batch.candidates), "exchanging gradients of pooled vectors"
        sums = {name: torch.stack(one.gradients).sum(0) if len(one.gradients) > 1 else one.gradients[0]
                for name, one in batch.features.items() if one.gradients}  # fmt: skip
        to = np.zeros((self._ranks.size, P + 1), dtype=np.int64)
        for rank, block in enumerate(batch.asked_W):
            for p in block.features:
                to[rank, p] = batch.candidates[p].name in sums
        to[:, P] = bool(sums)
        told = self._wire.count(to, what)
        if not told[:, P].any():
            return
        widths = [block.width if to[rank, :P].any() else 0 for rank, block in enumerate(batch.asked_W)]
        n_W, here = batch.num_samples_W.tolist(), self._ranks.rank
        send = self._wire.remote(width * n_W[here] for width in widths)
        receive = self._wire.remote(
            block.width * n if told[rank, :P].any() else 0
            for rank, (block, n) in enumerate(zip(batch.blocks_W, n_W, strict=True))
        )
        sent, came, mine = self._flat(sum(send)), self._flat(sum(receive)), self._flat(widths[here] * n_W[here])
        for rank, out in enumerate(torch.split(sent, send)):
            self._write(batch, sums, rank, mine if rank == here else out)
        self._wire.send(sent, send, receive, came, what)
        gradients = list(torch.split(came, receive))
        gradients[here] = mine
        for rank, gradient in enumerate(gradients):
            self._add(batch, rank, told[rank, :P], gradient, into)

    def _write(self, batch: PooledBatch, sums: Mapping[str, torch.Tensor], rank: int, out: torch.Tensor) -> None:
        """Write the gradient of a block; zeros for features without one, which are not added there."""
        block = batch.asked_W[rank]
        if not out.numel():
            return
        gradient = out.view(-1, block.width)
        for p, owner, col in zip(block.features, block.owners, block.cols, strict=True):
            found = sums.get(batch.candidates[p].name)
            columns = gradient[:, col : col + owner.last_column - owner.first_column]
            if found is None:
                columns.zero_()
            else:
                torch.div(found[:, owner.first_column : owner.last_column], self._ranks.size, out=columns)

    def _add(self, batch: PooledBatch, rank: int, has_P: NDArray[np.int64], gradient: torch.Tensor,
             into: RowGradients) -> None:  # fmt: skip
        """Add what came from a rank."""
        p = self._backend
        for one in batch.served_W[rank]:
            if not has_P[one.feature] or one.first == one.last:
                continue
            e, some = one.entries, slice(one.first, one.last)
            assert e.places is not None
            into.add(
                one.group,
                SavedGradient(
                    slots=e.slots[some], gradient=p.array(gradient), width=batch.blocks_W[rank].width, cols=e.cols,
                    places=e.places[some], scales=e.scales[some], argmax=NONE_I4,
                ),
            )  # fmt: skip
            self._exchange.slices.note_rows(one.group, p.tensor(e.ids)[some] + one.base, into)


def _digest(modes: Mapping[str, str | None]) -> int:
    return zlib.crc32(json.dumps(sorted(modes.items())).encode())
