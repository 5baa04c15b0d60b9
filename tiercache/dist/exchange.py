"""The exchange of rows: each batch receives unique rows from their owners and sends gradients back.

Legend as in `shard_layout`. Each batch sends two numbers that identify it and each unique row; each step sends counts
and each row's gradient. Rows that this rank owns are not sent.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from tiercache.dist.column_slices import SliceSteps
from tiercache.dist.communicator import Wire
from tiercache.dist.replicas import Replicas
from tiercache.dist.requests import check_tokens
from tiercache.dist.shard_layout import exclusive, out_of_bounds
from tiercache.kernels.arrays import NONE_F4, NONE_I4, NONE_I8, NONE_U8
from tiercache.kernels.step import Vectors
from tiercache.values.lookups import GroupRows, RowRequest, SavedGradient, Span, position_spans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.dist.requests import ExchangedInput, Request
    from tiercache.dist.shard_layout import ShardLayout
    from tiercache.rows.backends.base import Backend
    from tiercache.rows.backends.optimizer_step import OptimizerStep
    from tiercache.store.table import Group
    from tiercache.values.lookups import GroupGradients


_Positions: TypeAlias = "dict[int, list[NDArray[np.int32]]]"
"""By group: positions of rows in the pass."""


class RowExchange:
    """Exchanges the rows of batches between ranks, for one cache. All calls but ``close`` and ``discard`` are
    collective.

    All ranks make the same calls in the same order from one thread at a time. If the backend queues its work, that is
    the training thread, so that all ranks queue it in one order, between the same calls of the user. On a CPU only
    ``step`` and ``send_gradients`` must be on it: they use the backend's scratch.
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
        """Raises ValueError for a wire dtype that is not in `WIRE_DTYPES`.

        groups: of whole tables, which modules look up. part_groups: of this rank's part of the store.
        """
        self.ranks, self._backend, self.wire = ranks, backend, Wire(ranks, wire_dtype)
        self._send, self._remote, self._count = self.wire.send, self.wire.remote, self.wire.count
        self._groups, self._part_groups = groups, part_groups
        self._order = np.array([r for r in range(ranks.size) if r != ranks.rank] + [ranks.rank])
        self._replicas = Replicas(ranks, backend, wire_dtype)
        self._slices: SliceSteps | None = None
        self.rows: Sequence[GroupRows] = ()
        """The groups of this rank's part in the open pass."""

    @property
    def slices(self) -> SliceSteps:
        """Steps the column slices of the open pass."""
        assert self._slices is not None
        return self._slices

    @property
    def replica_bytes(self) -> int:
        """Bytes of the replicas of replicated tables on the device."""
        return self._replicas.num_bytes

    def open_pass(self, layout: ShardLayout, rows: Sequence[GroupRows]) -> None:
        """Begin to exchange rows of a pass; ``rows`` are the groups of this rank's part."""
        owners = layout.owners
        self.rows = rows
        self._slices = SliceSteps(self.ranks, self._backend, owners, self._part_groups)
        self._replicas.open(owners if layout.replicated else None, rows)

    def close(self) -> None:
        """Release the rows of the open pass."""
        self.rows, self._slices = (), None
        self._replicas.open(None, ())

    def serve(self, batch: ExchangedInput, error: Exception | None = None) -> tuple[list[GroupRows], torch.Tensor]:
        """Return the rows of a batch, by group of whole tables, and the slots of ``positions``.

        Each batch has separate rows, which only lookups read. Does not wait for the device if the backend queues its
        work. error: an error on this rank since the request. If a rank has one, or was asked for rows that it does not
        have, or if ranks pass different batches, every rank raises.
        """
        what = f"exchanging rows of {batch.where}"
        error = error or batch.error
        counts = self._count(np.tile(np.array([batch.token, error is not None], np.int64), (self.ranks.size, 1)), what)
        if counts[:, 1].any():
            self.ranks.agree(f"bringing a batch of {batch.where}", error)
        words = f"looks up a different batch than rank {self.ranks.rank} in {batch.where}"
        check_tokens(counts[:, 0], batch.token, words)
        slots, flat = self._serve(batch, what)
        return self._groups_of(batch.request, self._unpack(batch.layout, batch.request, flat)), slots

    def _serve(self, batch: ExchangedInput, what: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Send every rank its requested rows; return the slots and the rows: received ones, then this rank's."""
        p, H = self._backend, batch.layout.num_groups
        positions = p.tensor(p.to_device(batch.positions))
        slots = p.tensor(p.empty((batch.positions.size,), np.int32))
        dims_H = self._part_dims(H)
        out_W = (batch.counts_WS[:, :H] * dims_H).sum(axis=1)
        in_W = (batch.request.counts_WS * batch.layout.width_WS)[:, :H].sum(axis=1)
        send, receive = self._remote(out_W), self._remote(in_W)
        flat, sent = (p.tensor(p.empty((int(n),), np.float32)) for n in (in_W.sum(), sum(send)))
        spans: list[tuple[int, int, int, torch.Tensor | None, int]] = []
        counts = batch.counts_WS[self._order]
        ends = (counts.cumsum() - counts.reshape(-1)).reshape(counts.shape)
        at = {True: sum(receive), False: 0}
        for turn, rank in enumerate(self._order.tolist()):
            own = rank == self.ranks.rank
            for split in np.nonzero(counts[turn])[0].tolist():
                h, first, count = split % H, int(ends[turn, split]), int(counts[turn, split])
                target = None if split >= H else flat if own else sent
                if spans and spans[-1][0] == h and spans[-1][3] is target and sum(spans[-1][1:3]) == first:
                    spans[-1] = (h, spans[-1][1], spans[-1][2] + count, target, spans[-1][4])
                else:
                    spans.append((h, first, count, target, at[own]))
                at[own] += 0 if target is None else count * int(dims_H[h])
        requests = []
        for h, first, count, target, begin in spans:
            rows, part = self.rows[h], slice(first, first + count)
            dim = rows.vectors.dim
            out = None if target is None else p.array(target[begin : begin + count * dim].view(count, dim))
            requests.append(RowRequest(rows, p.array(positions[part]), p.array(slots[part]), out))
        p.find(requests)
        self._send(sent, send, receive, flat[: sum(receive)], what)
        return slots, flat

    def _part_dims(self, num_groups: int) -> NDArray[np.int64]:
        dims = [group.dim for group in self._part_groups[:num_groups]]
        return np.array(dims + [0] * (num_groups - len(dims)), dtype=np.int64)

    def _unpack(self, s: ShardLayout, request: Request, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each group, (U, dim): ``flat`` itself if there is one group of whole rows."""
        p = self._backend
        if s.is_plain:
            return [flat.view(request.num_unique, self._groups[0].dim)]
        found = [
            p.tensor(p.empty((int(rows), group.dim), np.float32))
            for rows, group in zip(request.num_rows_G, self._groups, strict=True)
        ]
        at = 0
        for r in np.nonzero((request.rows_R > 0) & ~s.runs.replicated_R)[0].tolist():
            rows, columns = request.span(r), s.runs.columns(r)
            size = (rows.stop - rows.start) * (columns.stop - columns.start)
            found[s.runs.group_R[r]][rows, columns] = flat[at : at + size].view(rows.stop - rows.start, -1)
            at += size
        for table, first, local in request.replicated:
            self._replicas.read(table, local, found[s.group_T[table]][first : first + local.size])
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

    # -- gradients -----------------------------------------------------------------------------------------

    def send_gradients(
        self, batch: ExchangedInput, slots: torch.Tensor, gradients: GroupGradients, into: GroupGradients,
        flags: Sequence[bool] = (),
    ) -> list[bool]:  # fmt: skip
        """Send the gradients of a batch to the owners of its rows, which add them to ``into``, by group of their part.

        slots: from ``serve``. gradients: of lookups in the batch's rows, by group of whole tables; summed by row and
        averaged over all ranks. Rows without a gradient are skipped. Gradients arrive in rank order. Does not wait for
        the device if the backend queues its work, except for gradients whose rows only the device knows.

        flags: sent to all ranks; returns, for each, True if any rank has set it.
        """
        p, s, request, what = self._backend, batch.layout, batch.request, "exchanging gradients"
        S = 2 * s.num_groups
        marks_G = [self._rows_with_gradients(batch, g, pending) for g, pending in enumerate(gradients)]
        named = [None if mark is None else np.concatenate([[0], np.cumsum(mark)]) for mark in marks_G]
        sent_R = request.rows_R.copy()
        for g, so_far in enumerate(named):
            if so_far is not None:
                part = s.runs.group_R == g
                first = request.slot_R[part]
                sent_R[part] = so_far[first + request.rows_R[part]] - so_far[first]
        words = np.packbits(np.pad(np.array(flags, np.bool_), (0, -len(flags) % 64))).view(np.int64)
        to = np.zeros((self.ranks.size, S + 1 + words.size), dtype=np.int64)
        runs_to = s.runs.rank_R * S + s.runs.split_R
        to[:, :S] = np.bincount(runs_to, sent_R, self.ranks.size * S).reshape(-1, S)
        to[:, S] = any(mark is not None for mark in marks_G)
        to[:, S + 1 :] = words
        counts = self._count(to, what)
        received_WS = counts[:, :S]
        selected = self._indices(batch, marks_G, to[:, :S], received_WS, what) if counts[:, S].any() else {}
        out_W, in_WS = (to[:, :S] * s.width_WS).sum(axis=1), received_WS * np.tile(self._part_dims(s.num_groups), 2)
        send, receive = self._remote(out_W), self._remote(in_WS.sum(axis=1))
        begin, end = sum(send), int(out_W.sum())
        buffer = p.tensor(p.empty((end + sum(receive),), np.float32))
        whole = s.is_plain and marks_G[0] is None
        sums = self._sum(request, gradients, buffer[:end] if whole else None)
        if not whole:
            self._pack(s, request, marks_G, sums, buffer)
        self._send(buffer[:begin], send, receive, buffer[end:], what)
        positions, replicated = self._add(batch, received_WS, in_WS, selected, slots, buffer[begin:], into)
        self.slices.note(positions, into)
        self._replicas.note(replicated)
        any_flags = np.bitwise_or.reduce(counts[:, S + 1 :], axis=0).view(np.uint8)
        return np.unpackbits(any_flags, count=len(flags)).astype(np.bool_).tolist()

    def _add(
        self, batch: ExchangedInput, received_WS: NDArray[np.int64], in_WS: NDArray[np.int64],
        selected: Mapping[int, NDArray[np.int32]], slots: torch.Tensor, flat: torch.Tensor, into: GroupGradients,
    ) -> tuple[_Positions, _Positions]:  # fmt: skip
        """Add the received gradients to ``into``, one entry for each rank and row, in rank order.

        received_WS, in_WS: rows and numbers received. selected: by rank, which of the requested rows have a gradient,
        if not all have. flat: the gradients by rank, this rank first. Returns the positions of their rows, and of those
        among them that have replicas.
        """
        p, num_groups = self._backend, batch.layout.num_groups
        requested_W, numbers_W = batch.counts_WS.sum(axis=1), in_WS.sum(axis=1)
        own_last, own_first = self._order, np.roll(self._order, 1)
        begin_W, at_W = np.empty_like(requested_W), np.empty_like(requested_W)
        begin_W[own_last] = exclusive(requested_W[own_last])
        at_W[own_first] = exclusive(numbers_W[own_first])
        found: dict[int, list[tuple[torch.Tensor, NDArray[np.int64]]]] = {}
        positions: _Positions = {}
        replicated: _Positions = {}
        for rank, counts_S in enumerate(received_WS):
            part, at = slice(int(begin_W[rank]), int(begin_W[rank] + requested_W[rank])), int(at_W[rank])
            places, named = batch.positions[part], slots[part]
            if rank in selected:
                places = places[selected[rank]]
                named = named.index_select(0, p.tensor(p.to_device(selected[rank])))
            first = 0
            for split in np.nonzero(counts_S)[0].tolist():
                h, count, size = split % num_groups, int(counts_S[split]), int(in_WS[rank, split])
                here, end = slice(first, first + count), at + size
                found.setdefault(h, []).append((named[here], np.arange(at, end, size // count, dtype=np.int64)))
                positions.setdefault(h, []).append(places[here])
                if split >= num_groups:
                    replicated.setdefault(h, []).append(places[here])
                first, at = first + count, end
        for h, pieces in found.items():
            into[h].append(
                SavedGradient(
                    slots=p.array(torch.cat([some for some, _ in pieces])),
                    gradient=p.array(flat), width=1, cols=NONE_I8,
                    places=p.to_device(np.concatenate([where for _, where in pieces])),
                    scales=NONE_F4, argmax=NONE_I4, spans=partial(_spans, self.rows[h].first, positions[h]),
                )
            )  # fmt: skip
        return positions, replicated

    def _rows_with_gradients(
        self, batch: ExchangedInput, g: int, pending: Sequence[SavedGradient]
    ) -> NDArray[np.bool_] | None:
        """Return a mask of the rows of a group that have a gradient; None if all have."""
        request, num_rows = batch.request, int(batch.request.num_rows_G[g])
        if not num_rows:
            return None
        known = [one.looked_up for one in pending if one.looked_up is not None]
        if len(known) < len(pending):
            return self._backend.slot_mask([one.slots for one in pending], num_rows)
        found = {id(ids): ids for some in known for ids in some}
        if all(id(ids) in found for ids in batch.features_G[g]):
            return None
        marks = np.zeros(num_rows, dtype=np.bool_)
        for ids in found.values():
            marks[request.slots_U[ids.ids]] = True
        return None if marks.all() else marks

    def _indices(
        self,
        batch: ExchangedInput,
        marks_G: list[NDArray[np.bool_] | None],
        to_WS: NDArray[np.int64],
        received_WS: NDArray[np.int64],
        what: str,
    ) -> dict[int, NDArray[np.int32]]:
        """Send owners the indices of their rows that have a gradient; return those of rows requested here, by rank.

        Sends nothing if all rows have one. The numbers go through host memory, where they are checked.
        """
        s, request = batch.layout, batch.request
        wire_R = exclusive(request.rows_R)
        requested_W, received_W = request.counts_WS.sum(axis=1), batch.counts_WS.sum(axis=1)
        send_W, receive_W = to_WS.sum(axis=1), received_WS.sum(axis=1)
        send_W[send_W == requested_W], receive_W[receive_W == received_W] = 0, 0
        first_W = exclusive(requested_W[self._order])[np.argsort(self._order)]
        found = [np.empty(0, np.int32)]
        for r in np.nonzero((request.rows_R > 0) & (send_W > 0)[s.runs.rank_R])[0].tolist():
            mark, rows = marks_G[s.runs.group_R[r]], request.span(r)
            indices = np.arange(rows.stop - rows.start) if mark is None else np.nonzero(mark[rows])[0]
            found.append((indices + (wire_R[r] - first_W[s.runs.rank_R[r]])).astype(np.int32))
        part = np.concatenate(found)
        send, receive = self._remote(send_W), self._remote(receive_W)
        received = np.empty(sum(receive), np.int32)
        self._send(torch.from_numpy(part[: sum(send)]), send, receive, torch.from_numpy(received), what)
        pieces = dict(enumerate(np.split(received, np.cumsum(receive)[:-1])))
        pieces[self.ranks.rank] = part[sum(send) :]
        for rank, piece in pieces.items():
            if error := out_of_bounds(self.ranks.rank, piece, int(received_W[rank]), f"of rank {rank}'s request"):
                raise error
        return {rank: piece for rank, piece in pieces.items() if receive_W[rank]}

    def _sum(self, request: Request, gradients: GroupGradients, into: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the sum of each row's gradients over W, by group (U, dim); a single group is written to ``into``."""
        p, sums = self._backend, []
        for group, rows, pending in zip(self._groups, request.num_rows_G.tolist(), gradients, strict=True):
            flat = p.tensor(p.empty((rows * group.dim,), np.float32)) if into is None else into
            sums.append(flat.view(rows, group.dim))
            if pending:
                p.sum(pending, 1.0 / self.ranks.size, p.array(sums[-1]))
        return sums

    def _pack(self, layout: ShardLayout, request: Request, marks_G: list[NDArray[np.bool_] | None],
              sums: list[torch.Tensor], buffer: torch.Tensor) -> None:  # fmt: skip
        """Write the rows that have a gradient in wire order."""
        p, runs, at = self._backend, layout.runs, 0
        for r in np.nonzero(request.rows_R)[0].tolist():
            g, rows, columns = int(runs.group_R[r]), request.span(r), runs.columns(r)
            mark = marks_G[g]
            part = sums[g][rows, columns]
            if mark is not None:
                part = part[p.tensor(p.to_device(np.nonzero(mark[rows])[0]))]
            buffer[at : at + part.numel()].view(part.shape).copy_(part)
            at += part.numel()

    def step(self, steps: Sequence[OptimizerStep], rows: Sequence[GroupRows]) -> None:
        """Step the rows that this rank owns and update their replicas.

        Column slices of a table with row-wise Adagrad first add up their squares.
        """
        if others := self.slices.step(steps, rows):
            self._backend.step(others)
        self._replicas.update(rows)

    def discard(self) -> None:
        """Drop the positions that `send_gradients` recorded, if its gradients are not stepped. Not collective."""
        if self._slices is not None:
            self._slices.forget()
        self._replicas.forget()


def _spans(first: Mapping[str, int], positions: list[NDArray[np.int32]]) -> list[Span]:
    """Return the spans of a gradient of rows at these positions of a group."""
    return position_spans(first, np.concatenate(positions))
