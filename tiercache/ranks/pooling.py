"""Pooled vectors travel: bags go to the owner of their table, vectors come back, and at the step their gradients go.

Legend as in `bags`. On the wire travel, for each batch: counts, messages, vectors; at the step counts again and
gradients of the vectors. What a rank owns itself does not travel.
Counts and messages go ahead, over host memory, as what `RowExchange.ask` says.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.backends.jagged import LookupIds, SavedGradient
from tiercache.errors import RankError
from tiercache.kernels.arrays import NONE_F4, NONE_I4
from tiercache.ranks.bags import MODES, Block, Candidate, Chooser, by_model, candidates_of, check_bags, message_of
from tiercache.ranks.bounds import out_of_bounds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.backends.base import Backend
    from tiercache.passes.samples import FeatureIds
    from tiercache.ranks.exchange import RowExchange
    from tiercache.ranks.owners import Owners
    from tiercache.schema import Feature
    from tiercache.tiers.rows import GroupRows
    from tiercache.training.batch import Pooled
    from tiercache.training.row_gradients import RowGradients

__all__ = ["AskedBags", "PooledBatch", "Pooling"]

_SAMPLES, _ASKED, _MODES, _TOKEN, _ERROR = range(5)
"""The counts behind those of the P features."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The bags of some features of one group, as one rank asks this one for them. In host memory."""

    group: int
    features: tuple[int, ...]
    entries: LookupIds
    offsets: NDArray[np.int64]
    """Those of the bags."""
    weights: list[tuple[int, int, NDArray[np.float32]]]
    """Of entries from a first up to a last."""

    def on(self, backend: Backend) -> LookupIds:
        """Return the entries on the device."""
        e, size = self.entries, int(self.entries.starts[-1])
        weights = backend.weights(size, self.weights) if self.weights else NONE_F4
        return replace(e, ids=backend.to_device(e.ids), offsets=backend.to_device(self.offsets), weights=weights)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AskedBags:
    """What ranks want one another to pool for one batch, all in host memory: nothing was pooled yet."""

    candidates: tuple[Candidate, ...]
    modes: dict[str, str]
    """By name, of the features of this rank's batch that are pooled elsewhere."""
    num_samples_W: NDArray[np.int64]
    asked_W: tuple[Block, ...]
    """What this rank asks of each."""
    blocks_W: tuple[Block, ...]
    """What each asks of this rank."""
    parts_W: list[list[_Part]]
    """The same, bag by bag."""
    error: Exception | None
    """What others asked for and this rank has not."""
    what: str


@dataclass(frozen=True, slots=True, eq=False)
class PooledBatch:
    """What the way back of one batch's pooled features needs. It holds their vectors too, which modules look up."""

    features: Mapping[str, Pooled]
    """By name."""
    asked: AskedBags
    served_W: tuple[tuple[tuple[_Part, LookupIds], ...], ...]
    """What each rank had pooled here."""


class Pooling:
    """Has features pooled by the ranks that own their tables. ``ask``, ``answer`` and ``gradients_of`` are collective.

    Beside a `RowExchange`, with its ranks and its wires, and on the same threads.
    """

    def __init__(self, exchange: RowExchange, backend: Backend, features: Sequence[Feature]) -> None:
        self._exchange, self._backend, self._features = exchange, backend, features
        self._ranks, self._wire, self._asking = exchange.ranks, exchange.wire, exchange.asking
        self._chooser = Chooser()
        self._rows: Sequence[GroupRows] = ()

    def candidates(self, owners: Owners) -> tuple[Candidate, ...]:
        """Return the features that may be pooled, in a pass."""
        return candidates_of(owners, self._features) if self._ranks.size > 1 else ()

    def open(self, rows: Sequence[GroupRows]) -> None:
        """Begin with a pass: ``rows`` are the groups of this rank's part; none: with no pass."""
        self._rows = rows

    def ask(
        self,
        candidates: tuple[Candidate, ...],
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

        ids: of this rank's samples. modes: how features are looked up. own: if ranks read by owner, by rank, the ids of
        its samples for the features of tables that this rank owns; all candidates are pooled then. error: what went
        wrong on this rank before; it is returned, or an IndexError, where nothing is pooled on any rank because of it.
        Nor is it where ranks bring different tokens: ``RowExchange.ask`` says so. Raises RankError, on all ranks, if
        they read by owner and look different features up.
        """
        what = f"pooling features of {where}"
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
                    chosen = [candidates.index(one) for one in by_model(candidates, modes)]
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
        told = self._asking.count(to, what)
        last = told[:, P:]
        if last[:, _ERROR].any() or (last[:, _TOKEN] != token).any():
            return None, error
        if (last[:, _MODES] != to[0, P + _MODES]).any():
            raise RankError(
                f"ranks look up different features in {where}, or pool them differently: with read_by='owner' all of "
                "them have the same embedding modules"
            )
        if not last[:, _ASKED].any():
            return None, None
        asked_W = tuple(Block.of(candidates, to[rank, :P], rank) for rank in range(W))
        blocks_W = tuple(Block.of(candidates, told[rank, :P], self._ranks.rank) for rank in range(W))
        counts_WP = (told[:, :P] - 1) >> 1
        if own is None:
            pieces_W = [message_of(block, candidates, ids) for block in asked_W]
            messages_W = self._tell(candidates, blocks_W, counts_WP, last[:, _SAMPLES], pieces_W, what)
        else:
            pieces_W = [message_of(block, candidates, some) for block, some in zip(blocks_W, own, strict=True)]
            messages_W = [np.concatenate([NONE_I4, *pieces]) for pieces in pieces_W]
            for rank, (block, some) in enumerate(zip(blocks_W, own, strict=True)):
                for p in block.features:
                    counts_WP[rank, p] = some[candidates[p].name].num_ids
        modes_WP = np.where(told[:, :P] & 1, MODES["sum"], MODES["mean"]).astype(np.int8)
        wrong: RankError | None = None
        parts_W: list[list[_Part]] = []
        try:
            for rank, block in enumerate(blocks_W):
                n = int(last[rank, _SAMPLES])
                parts_W.append(self._parts(candidates, block, messages_W[rank], counts_WP[rank], modes_WP[rank], n))
        except RankError as refused:
            wrong = refused
        asked = AskedBags(
            candidates=candidates, modes={candidates[p].name: str(modes[candidates[p].name]) for p in chosen},
            num_samples_W=last[:, _SAMPLES], asked_W=asked_W, blocks_W=blocks_W, parts_W=parts_W, error=wrong,
            what=what,
        )  # fmt: skip
        return asked, None

    def _tell(
        self, candidates: Sequence[Candidate], blocks_W: Sequence[Block], counts_WP: NDArray[np.int64],
        num_samples_W: NDArray[np.int64], pieces_W: Sequence[Sequence[NDArray[np.int32]]], what: str,
    ) -> list[NDArray[np.int32]]:  # fmt: skip
        """Send the messages; return what each rank asks of this one."""
        wire, rank = self._asking, self._ranks.rank
        send = wire.remote(sum(piece.size for piece in pieces) for pieces in pieces_W)
        receive = wire.remote(
            sum(candidates[f].words(int(n), int(counts_P[f])) for f in block.features)
            for block, counts_P, n in zip(blocks_W, counts_WP, num_samples_W, strict=True)
        )
        remote = [piece for r, pieces in enumerate(pieces_W) if r != rank for piece in pieces]
        came = np.empty(sum(receive), np.int32)
        sent = torch.from_numpy(np.concatenate([NONE_I4, *remote]))
        wire.send(sent, send, receive, torch.from_numpy(came), what)
        messages: list[NDArray[np.int32]] = np.split(came, np.cumsum(receive)[:-1])
        messages[rank] = np.concatenate([NONE_I4, *pieces_W[rank]])
        return messages

    def _parts(
        self, candidates: Sequence[Candidate], block: Block, message: NDArray[np.int32], counts_P: NDArray[np.int64],
        modes_P: NDArray[np.int8], n: int,
    ) -> list[_Part]:  # fmt: skip
        """Return the bags of a message, feature after feature, by group.

        Raises RankError where another rank asks for what this one has not.
        """
        at, parts = 0, []
        every = zip(block.features, block.owners, block.cols, strict=True)
        for group, members in groupby(every, key=lambda one: one[1].group):
            some = list(members)
            ids, lengths, weights, starts = [], [], [], [0]
            for f, _, _ in some:
                one, count = candidates[f], int(counts_P[f])
                if one.length is None:
                    lengths.append(message[at : at + n])
                    at += n
                else:
                    lengths.append(np.full(n, one.length, np.int32))
                ids.append(message[at : at + count])
                at += count
                what = f"of table {one.table!r}, of which the pass has {one.rows:,}"
                if error := out_of_bounds(self._ranks.rank, ids[-1], one.rows, what):
                    raise error
                if int(lengths[-1].sum(dtype=np.int64)) != count or (n and int(lengths[-1].min()) < 0):
                    raise RankError(f"rank {self._ranks.rank} was asked to pool {count} ids of {one.name!r} in bags "
                                    "of another number: start all ranks again with one dataset")  # fmt: skip
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
            )
            parts.append(_Part(group, tuple(features), entries, offsets, weights))
        return parts

    def answer(self, asked: AskedBags, features: Mapping[str, Pooled]) -> PooledBatch:
        """Have ``features`` pooled, by name: they get their vectors. Behind ``RowExchange.answer`` of the same batch.

        Where the backend queues its work, nothing is waited for.
        """
        served_W = tuple(tuple((part, part.on(self._backend)) for part in parts) for parts in asked.parts_W)
        vectors_W = self._answer(asked, served_W)
        every = {one.name: p for p, one in enumerate(asked.candidates)}
        for name, found in features.items():
            found.vectors = self._vectors(asked, every[name], vectors_W)
        return PooledBatch(features, asked, served_W)

    def _answer(self, asked: AskedBags, served_W: Sequence[Sequence[tuple[_Part, LookupIds]]]) -> list[torch.Tensor]:
        """Pool what each rank asked for; return the vectors of each of this rank's blocks."""
        blocks_W, asked_W, num_samples = asked.blocks_W, asked.asked_W, int(asked.num_samples_W[self._ranks.rank])
        sizes_W = [block.width * int(n) for block, n in zip(blocks_W, asked.num_samples_W, strict=True)]
        send, receive = self._wire.remote(sizes_W), self._wire.remote(b.width * num_samples for b in asked_W)
        sent, came = self._flat(sum(send)), self._flat(sum(receive))
        here = self._flat(sizes_W[self._ranks.rank])
        for rank, (block, out) in enumerate(zip(blocks_W, torch.split(sent, send), strict=True)):
            out = here if rank == self._ranks.rank else out  # noqa: PLW2901 - the same, elsewhere
            if out.numel():
                self._backend.pool(
                    [(self._rows[part.group], entries) for part, entries in served_W[rank]],
                    self._backend.array(out.view(-1, block.width)),
                )
        self._wire.send(sent, send, receive, came, asked.what)
        vectors = list(torch.split(came, receive))
        vectors[self._ranks.rank] = here
        return [flat.view(num_samples, block.width) for flat, block in zip(vectors, asked_W, strict=True)]

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
        for part, e in batch.served_W[rank]:
            starts = e.starts.tolist()
            for i, f in enumerate(part.features):
                some = slice(starts[i], starts[i + 1])
                if not has_P[f] or some.start == some.stop:
                    continue
                assert e.places is not None
                into.add(
                    part.group,
                    SavedGradient(
                        slots=e.slots[some], gradient=self._backend.array(gradient), width=width, cols=e.cols,
                        places=e.places[some], scales=e.scales[some], argmax=NONE_I4,
                    ),
                )  # fmt: skip
                positions = part.entries.ids[some] + np.int32(part.entries.bases[i])
                self._exchange.slices.note_rows(part.group, positions, into)


def _digest(modes: Mapping[str, str | None]) -> int:
    return zlib.crc32(json.dumps(sorted(modes.items())).encode())
