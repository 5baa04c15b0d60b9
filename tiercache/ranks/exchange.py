"""The exchange of rows: of each batch, unique rows come from their owners, and their gradients go back.

Legend as in `stretches`. On the wire travel, for each batch: counts (2 H + 3 int64 to each rank),
each unique row's address (int32), the row; at the step counts again and each row's gradient. What a rank owns itself
does not travel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.backends.jagged import RowRequest
from tiercache.errors import RankError
from tiercache.kernels.arrays import NONE_U8
from tiercache.kernels.step import Vectors
from tiercache.ranks.bounds import Bounds
from tiercache.ranks.mirrors import Mirrors
from tiercache.ranks.received import Received
from tiercache.ranks.requests import Requester
from tiercache.ranks.slices import SliceSteps
from tiercache.ranks.stretches import Stretches, exclusive
from tiercache.ranks.wire import WIRE_DTYPES, Wire
from tiercache.tiers.rows import GroupRows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.backends.base import Backend
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.passes.samples import FeatureIds
    from tiercache.ranks.owners import Owners
    from tiercache.ranks.requests import Request
    from tiercache.store.table import Group
    from tiercache.training.row_gradients import RowGradients
    from tiercache.training.row_optimizer import RowOptimizer

__all__ = ["WIRE_DTYPES", "Asked", "Exchanged", "RowExchange"]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What ranks want of one another for one batch, all in host memory: nothing was brought yet."""

    stretches: Stretches
    request: Request
    """What this rank asks for."""
    ids: dict[str, FeatureIds]
    """The batch's, as indices of its unique rows."""
    counts_WS: NDArray[np.int64]
    """Rows that every rank asks this one for, by section of this rank."""
    where: str


@dataclass(frozen=True, slots=True, eq=False)
class Exchanged:
    """What the way back of one batch needs. It holds no vectors: batches wait in it for their step."""

    stretches: Stretches
    request: Request
    """What this rank asked for."""
    counts_WS: NDArray[np.int64]
    """Rows that every rank asked this one for, by section of this rank."""
    positions: torch.Tensor
    """Their positions, int32, in the order of ranks but this rank's own last, in each section by section."""
    slots: torch.Tensor
    """Their slots, likewise."""


class RowExchange:
    """Exchanges the rows of batches among the ranks, for one cache. Every call is collective, but `__init__`.

    All ranks make the same calls in the same order, one thread at a time. ``ask`` is on any thread. All else is, where
    the backend queues its work, on the training thread, so that all ranks queue it in one order, between the same
    calls of the user's. On a CPU only ``step`` and ``gradients_of`` are there: they use the backend's scratch.
    """

    def __init__(
        self,
        ranks: AnyCommunicator,
        backend: Backend,
        groups: tuple[Group, ...],
        part_groups: tuple[Group, ...],
        *,
        wire_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Raises ValueError for a wire dtype that is none of `WIRE_DTYPES`.

        groups: of whole tables, which modules look up. part_groups: of this rank's part of the store.
        """
        self.ranks, self._backend, self.wire = ranks, backend, Wire(ranks, wire_dtype)
        self._send, self._remote, self._count = self.wire.send, self.wire.remote, self.wire.count
        self._groups, self._part_groups = groups, part_groups
        self._order = np.array([r for r in range(ranks.size) if r != ranks.rank] + [ranks.rank])
        self._requester, self._mirrors = Requester(), Mirrors(ranks, backend, wire_dtype)
        self.bounds = Bounds(ranks, backend)
        """What other ranks may ask this one for."""
        self._slices: SliceSteps | None = None
        self._stretches: Stretches | None = None
        self._rows: Sequence[GroupRows] = ()

    @property
    def bytes_sent(self) -> int:
        """Bytes that left this rank for others so far: counts, addresses, rows, gradients and their indices."""
        return self.wire.bytes_sent

    @property
    def slices(self) -> SliceSteps:
        """What steps the column slices of the pass that is open."""
        assert self._slices is not None
        return self._slices

    @property
    def mirror_bytes(self) -> int:
        """Bytes of the mirrors of replicated tables on the device."""
        return self._mirrors.num_bytes

    def open_pass(self, owners: Owners, rows: Sequence[GroupRows], *, mirrored: bool = True) -> None:
        """Begin to exchange rows of a pass: those of ``rows``, the groups of this rank's part, on this rank.

        mirrored: whether replicated tables get a mirror here, filled now; else their rows travel as any other.
        """
        num_groups, mirrored = int(owners.group_TW.max()) + 1, mirrored and self.ranks.size > 1
        self._stretches = Stretches(owners, self._groups, self.ranks.rank, num_groups, mirrored=mirrored)
        self._rows = rows
        self._slices = SliceSteps(self.ranks, self._backend, owners, self._part_groups)
        self._mirrors.open(owners if mirrored else None, rows)

    def close(self) -> None:
        """Let go of the rows of the pass that is open. Not collective."""
        self._rows, self._slices, self._stretches = (), None, None
        self.bounds.forget()
        self._mirrors.open(None, ())

    def ask(
        self,
        ids: Mapping[str, FeatureIds],
        tables: Mapping[str, str],
        where: str,
        error: Exception | None = None,
        *,
        token: int = 0,
    ) -> Asked:
        """Tell the owners how many rows a batch needs: ``ids`` (local ids of the sub-dataset) and ``tables`` by
        feature.

        On the host alone; ``answer`` brings the rows. error: what went wrong on this rank before. Where a rank has one,
        or an id that is not in the sub-dataset (IndexError; ``where`` names batch and pass), every rank raises: it its
        own, others RankError; and all where they bring different tokens, which say of which global batch this is a
        part.
        """
        stretches, what = self._opened(), f"exchanging rows of {where}"
        request: Request | None = None
        renamed: dict[str, FeatureIds] = {}
        if error is None:
            try:
                request, renamed = self._requester.request(stretches, ids, tables, where)
            except Exception as bad:
                error = bad
        to = np.zeros((self.ranks.size, 2 * stretches.num_groups + 2), dtype=np.int64)
        to[:, -2], to[:, -1] = token, error is not None
        if request is not None:
            to[:, :-2] = request.counts_WS
        told = self._count(to, what)
        if told[:, -1].any():
            self.ranks.agree(f"making a batch of {where}", error)
        assert request is not None
        if others := np.nonzero(told[:, -2] != token)[0].tolist():
            raise RankError(
                f"rank {others[0]} makes another batch than rank {self.ranks.rank} in {where}: all ranks must ask for "
                "batches of one size, in one order"
            )
        return Asked(stretches, request, renamed, told[:, :-2], where)

    def answer(self, asked: Asked) -> tuple[list[GroupRows], Exchanged]:
        """Bring the rows of a batch: its own rows of each group of whole tables, and what the way back needs.

        Every batch has rows of its own, which lookups read and nobody changes. Where the backend queues, nothing is
        waited for. Raises RankError where this rank is, or was by the batch before, asked for rows that it has not, and
        RuntimeError where another pass was opened since.
        """
        self._check_open(asked)
        self.bounds.check()
        request, what = asked.request, f"exchanging rows of {asked.where}"
        exchanged = self._ask(asked.stretches, request, asked.counts_WS, what)
        flat = self._answer(exchanged, what)
        groups = self._groups_of(request, self._unpack(asked.stretches, request, flat))
        return groups, replace(exchanged, request=request.asked())

    def _check_open(self, asked: Asked) -> None:
        if asked.stretches is not self._stretches:
            raise RuntimeError(
                f"this batch belongs to {asked.where}, which has ended: use batches inside their own loop"
            )

    def _opened(self) -> Stretches:
        if self._stretches is None:
            raise RuntimeError("rows were to be exchanged before a pass was opened: call open_pass first")
        return self._stretches

    def _ask(self, stretches: Stretches, request: Request, counts_WS: NDArray[np.int64], what: str) -> Exchanged:
        """Send every owner the addresses of its rows, and receive what others ask for."""
        p, rank = self._backend, self.ranks.rank
        mine = p.tensor(p.to_device(request.addresses))
        send, receive = self._remote(request.counts_WS.sum(axis=1)), self._remote(counts_WS.sum(axis=1))
        came, remote = p.tensor(p.empty((int(counts_WS.sum()),), np.int32)), sum(receive)
        self._send(mine[: sum(send)], send, receive, came[:remote], what)
        came[remote:] = mine[sum(send) :]
        assert int(request.counts_WS[rank].sum()) == came.numel() - remote
        return Exchanged(stretches, request, counts_WS, came, p.tensor(p.empty((came.numel(),), np.int32)))

    def _answer(self, exchanged: Exchanged, what: str) -> torch.Tensor:
        """Send every rank the rows that it asked for; return those that came, then this rank's own, flat."""
        p, H = self._backend, exchanged.stretches.num_groups
        dims_H = self._part_dims(H)
        out_W = (exchanged.counts_WS[:, :H] * dims_H).sum(axis=1)
        in_W = (exchanged.request.counts_WS * exchanged.stretches.width_WS)[:, :H].sum(axis=1)
        send, receive = self._remote(out_W), self._remote(in_W)
        flat, sent = (p.tensor(p.empty((int(n),), np.float32)) for n in (in_W.sum(), sum(send)))
        wanted: list[tuple[int, int, int, torch.Tensor | None, int]] = []
        counts = exchanged.counts_WS[self._order]
        ends = (counts.cumsum() - counts.reshape(-1)).reshape(counts.shape)
        at = {True: sum(receive), False: 0}
        for turn, rank in enumerate(self._order.tolist()):
            own = rank == self.ranks.rank
            for section in np.nonzero(counts[turn])[0].tolist():
                h, first, count = section % H, int(ends[turn, section]), int(counts[turn, section])
                target = None if section >= H else flat if own else sent
                if wanted and wanted[-1][0] == h and wanted[-1][3] is target and sum(wanted[-1][1:3]) == first:
                    wanted[-1] = (h, wanted[-1][1], wanted[-1][2] + count, target, wanted[-1][4])
                else:
                    wanted.append((h, first, count, target, at[own]))
                at[own] += 0 if target is None else count * int(dims_H[h])
        p.find([self._wanted(exchanged, *one) for one in wanted])
        self._send(sent, send, receive, flat[: sum(receive)], what)
        return flat

    def _wanted(self, exchanged: Exchanged, h: int, first: int, count: int, target: torch.Tensor | None,
                at: int) -> RowRequest:  # fmt: skip
        p, rows, mine = self._backend, self._rows[h], slice(first, first + count)
        have = int(rows.slot_of_local.shape[0])
        self.bounds.expect(p.array(exchanged.positions[mine]), have, f"of a group of {have:,} in the pass")
        out = None if target is None else target[at : at + count * rows.vectors.dim].view(count, rows.vectors.dim)
        return RowRequest(
            rows,
            p.array(exchanged.positions[mine]),
            p.array(exchanged.slots[mine]),
            None if out is None else p.array(out),
        )

    def _part_dims(self, num_groups: int) -> NDArray[np.int64]:
        dims = [group.dim for group in self._part_groups[:num_groups]]
        return np.array(dims + [0] * (num_groups - len(dims)), dtype=np.int64)

    def _unpack(self, s: Stretches, request: Request, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each group, (U, dim): ``flat`` itself where there is one group of whole rows."""
        p = self._backend
        if s.is_plain:
            return [flat.view(request.num_unique, self._groups[0].dim)]
        found = [
            p.tensor(p.empty((int(rows), group.dim), np.float32))
            for rows, group in zip(request.num_rows_G, self._groups, strict=True)
        ]
        at = 0
        for r in np.nonzero((request.rows_R > 0) & ~s.runs.mirrored_R)[0].tolist():
            rows, columns = request.span(r), s.runs.columns(r)
            size = (rows.stop - rows.start) * (columns.stop - columns.start)
            found[s.runs.group_R[r]][rows, columns] = flat[at : at + size].view(rows.stop - rows.start, -1)
            at += size
        for table, first, local in request.mirrored:
            self._mirrors.read(table, local, found[s.group_T[table]][first : first + local.size])
        return found

    def _groups_of(self, request: Request, found: list[torch.Tensor]) -> list[GroupRows]:
        p = self._backend
        slots = p.to_device(request.slots_U)
        return [
            GroupRows(
                Vectors.of(p.array(rows), group.dim, "float32"), (), slots, {t.name: 0 for t in group.tables},
                {t.name: request.num_unique for t in group.tables}, NONE_U8,
            )
            for rows, group in zip(found, self._groups, strict=True)
        ]  # fmt: skip

    # -- the way back -------------------------------------------------------------------------------------

    def gradients_of(self, exchanged: Exchanged, gradients: RowGradients, into: RowGradients) -> None:
        """Send the gradients of a batch to the owners of its rows, which add them to ``into``, by group of their part.

        gradients: of lookups in the batch's rows, by group of whole tables; summed for each row, and over all ranks
        averaged. Rows without a gradient take no part. What comes is in rank order. Raises RankError as ``answer``.
        """
        self.bounds.check()
        p, s, request, what = self._backend, exchanged.stretches, exchanged.request, "exchanging gradients"
        S = 2 * s.num_groups
        marks_G = [
            p.named([one.slots for one in pending], int(rows)) if rows else None
            for pending, rows in zip(gradients.pending, request.num_rows_G, strict=True)
        ]
        named = [None if mark is None else np.concatenate([[0], np.cumsum(mark)]) for mark in marks_G]
        sent_R = request.rows_R.copy()
        for g, so_far in enumerate(named):
            if so_far is not None:
                mine = s.runs.group_R == g
                first = request.slot_R[mine]
                sent_R[mine] = so_far[first + request.rows_R[mine]] - so_far[first]
        to = np.zeros((self.ranks.size, S + 1), dtype=np.int64)
        runs_to = s.runs.rank_R * S + s.runs.section_R
        to[:, :-1] = np.bincount(runs_to, sent_R, self.ranks.size * S).reshape(-1, S)
        to[:, -1] = any(mark is not None for mark in marks_G)
        told = self._count(to, what)
        came = Received(self.ranks.rank, exchanged.counts_WS, told[:, :-1], self._part_dims(s.num_groups))
        if told[:, -1].any():
            came.choose(self._indices(exchanged, marks_G, to[:, :-1], told[:, :-1], what))
        out_W = (to[:, :-1] * s.width_WS).sum(axis=1)
        send, receive = self._remote(out_W), self._remote(came.numbers_W)
        begin, end = sum(send), int(out_W.sum())
        buffer = p.tensor(p.empty((end + sum(receive),), np.float32))
        whole = s.is_plain and marks_G[0] is None
        sums = self._sum(request, gradients, buffer[:end] if whole else None)
        if not whole:
            self._pack(s, request, marks_G, sums, buffer)
        self._send(buffer[:begin], send, receive, buffer[end:], what)
        came.add(p, exchanged.positions, exchanged.slots, buffer[begin:], into)
        self.slices.note(came, into)
        self._mirrors.note(came)

    def _indices(
        self,
        exchanged: Exchanged,
        marks_G: list[NDArray[np.bool_] | None],
        to_WS: NDArray[np.int64],
        told_WS: NDArray[np.int64],
        what: str,
    ) -> dict[int, torch.Tensor]:
        """Tell owners which of their rows have a gradient; return that of rows asked for here, by rank.

        Nothing is said where all have one.
        """
        p, s, request = self._backend, exchanged.stretches, exchanged.request
        wire_R = exclusive(request.rows_R)
        asked_W, told_W = request.counts_WS.sum(axis=1), exchanged.counts_WS.sum(axis=1)
        send_W, receive_W = to_WS.sum(axis=1), told_WS.sum(axis=1)
        send_W[send_W == asked_W], receive_W[receive_W == told_W] = 0, 0
        first_W = exclusive(asked_W[self._order])[np.argsort(self._order)]
        found = [np.empty(0, np.int32)]
        for r in np.nonzero((request.rows_R > 0) & (send_W > 0)[s.runs.rank_R])[0].tolist():
            mark, rows = marks_G[s.runs.group_R[r]], request.span(r)
            there = np.arange(rows.stop - rows.start) if mark is None else np.nonzero(mark[rows])[0]
            found.append((there + (wire_R[r] - first_W[s.runs.rank_R[r]])).astype(np.int32))
        mine = p.tensor(p.to_device(np.concatenate(found)))
        send, receive = self._remote(send_W), self._remote(receive_W)
        came = p.tensor(p.empty((sum(receive),), np.int32))
        self._send(mine[: sum(send)], send, receive, came, what)
        pieces = dict(enumerate(torch.split(came, receive)))
        pieces[self.ranks.rank] = mine[sum(send) :]
        return {rank: piece for rank, piece in pieces.items() if receive_W[rank]}

    def _sum(self, request: Request, gradients: RowGradients, into: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the sum of each row's gradients over W, of each group (U, dim); of the only one ``into`` memory."""
        p, sums = self._backend, []
        for group, rows, pending in zip(self._groups, request.num_rows_G.tolist(), gradients.pending, strict=True):
            flat = p.tensor(p.empty((rows * group.dim,), np.float32)) if into is None else into
            sums.append(flat.view(rows, group.dim))
            if pending:
                p.sum(pending, 1.0 / self.ranks.size, p.array(sums[-1]))
        return sums

    def _pack(self, stretches: Stretches, request: Request, marks_G: list[NDArray[np.bool_] | None],
              sums: list[torch.Tensor], buffer: torch.Tensor) -> None:  # fmt: skip
        """Write the rows that have a gradient in wire order."""
        p, runs, at = self._backend, stretches.runs, 0
        for r in np.nonzero(request.rows_R)[0].tolist():
            g, rows, columns = int(runs.group_R[r]), request.span(r), runs.columns(r)
            mark = marks_G[g]
            part = sums[g][rows, columns]
            if mark is not None:
                part = part[p.tensor(p.to_device(np.nonzero(mark[rows])[0]))]
            buffer[at : at + part.numel()].view(part.shape).copy_(part)
            at += part.numel()

    def step(self, optimizer: RowOptimizer, rows: Sequence[GroupRows]) -> None:
        """Step the rows that this rank owns, in place of ``optimizer.apply(rows)``; mirrors follow.

        Column slices of a table with row-wise Adagrad add up their squares first.
        """
        self.slices.step(optimizer, rows)
        optimizer.apply(rows)
        self._mirrors.follow(rows)

    def discard(self) -> None:
        """Forget what `gradients_of` noted, where its gradients are dropped in place of a step. Not collective."""
        if self._slices is not None:
            self._slices.forget()
        self._mirrors.forget()
