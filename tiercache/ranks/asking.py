"""Asking: for each batch ranks tell one another which rows they want, and which features pooled. On the host.

Legend as in `stretches` and `bags`. On the wire travel counts, then to each rank one message: the address of each
unique row (int32), then bags. What a rank owns itself does not travel. Nothing of it needs rows of the pass.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.errors import RankError
from tiercache.kernels.arrays import NONE_I4
from tiercache.ranks.bags import (
    MODES,
    AskedBags,
    Block,
    Candidate,
    Chooser,
    by_model,
    candidates_of,
    check_bags,
    message_of,
    read_message,
)
from tiercache.ranks.bounds import out_of_bounds
from tiercache.ranks.requests import Requester
from tiercache.ranks.stretches import Stretches
from tiercache.ranks.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.ranks.owners import Owners
    from tiercache.ranks.requests import Request
    from tiercache.schema import Feature
    from tiercache.store.table import Group
    from tiercache.values.ids import FeatureIds

_SAMPLES, _POOLED, _MODES, _TOKEN, _ERROR = range(-5, 0)
"""The counts behind those of sections and features."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What batches of a pass are asked for by."""

    stretches: Stretches
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Wanted:
    """What a batch of this rank wants."""

    ids: Mapping[str, FeatureIds] = field(default_factory=dict)
    """Local ids of the sub-dataset, by feature: of this rank's samples."""
    modes: Mapping[str, str | None] = field(default_factory=dict)
    """How features are looked up; others are not asked for."""
    whole: Mapping[str, str | None] | None = None
    """The same of those that may be pooled elsewhere; None: all."""
    num_samples: int = 1
    own: Sequence[Mapping[str, FeatureIds]] | None = None
    """If ranks read by owner, by rank: the ids of its samples for the features of tables that this rank owns; all
    candidates are pooled then."""
    token: int = 0
    """Says which of the global batches it is of: of ranks that ask for different ones none trains."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Asked:
    """What ranks want of one another for one batch, all in host memory. It holds no vectors."""

    stretches: Stretches
    request: Request
    """What this rank asks for, without the addresses, which were sent."""
    ids: dict[str, FeatureIds]
    """The batch's, as indices of its unique rows."""
    features_G: tuple[tuple[FeatureIds, ...], ...]
    """The same by group of whole tables."""
    counts_WS: NDArray[np.int64]
    """Rows that every rank asks this one for, by section of this rank."""
    positions: NDArray[np.int32]
    """Their positions, in the order of ranks but this rank's own last, in each section by section."""
    bags: AskedBags | None
    """What is pooled; None where no rank wants anything pooled."""
    where: str
    token: int
    error: Exception | None = None
    """What others asked for and this rank has not: all are told when the rows are brought."""


class Asking:
    """Asks for the batches of one cache, over a communicator of its own. On one thread at a time."""

    def __init__(
        self, ranks: AnyCommunicator, groups: tuple[Group, ...], features: Sequence[Feature], wire_dtype: torch.dtype
    ) -> None:
        """groups: of whole tables. wire_dtype: in which rows and vectors will travel."""
        self._ranks, self._groups, self._features, self._wire_dtype = ranks, groups, features, wire_dtype
        self.wire = Wire(ranks, torch.float32)
        self._tables = {feature.name: feature.table for feature in features}
        self._requester, self._chooser = Requester(), Chooser()
        self._order = np.array([r for r in range(ranks.size) if r != ranks.rank] + [ranks.rank])

    def lay_out(self, owners: Owners, *, mirrored: bool = True) -> Layout:
        """Return what batches of a pass are asked for by. Not collective.

        mirrored: whether replicated tables have a mirror here; else their rows travel as any other.
        """
        num_groups, several = int(owners.group_TW.max()) + 1, self._ranks.size > 1
        stretches = Stretches(owners, self._groups, self._ranks.rank, num_groups, mirrored=mirrored and several)
        return Layout(stretches, candidates_of(owners, self._features) if several else ())

    def ask(
        self, layout: Layout, wanted: Wanted, where: str, *, trained: bool = True, error: Exception | None = None
    ) -> Asked:
        """Tell the owners what a batch wants. Collective.

        error: what went wrong on this rank before. Where a rank has one, or an id that is not in the sub-dataset
        (IndexError; ``where`` names batch and pass), every rank raises: it its own, others RankError; and all where
        they bring different tokens, or read by owner and look different features up.
        """
        stretches, candidates, rank = layout.stretches, layout.candidates, self._ranks.rank
        what, S, P, own = f"asking for rows of {where}", 2 * stretches.num_groups, len(candidates), wanted.own
        to = np.zeros((self._ranks.size, S + P + 5), dtype=np.int64)
        request: Request | None = None
        renamed: dict[str, FeatureIds] = {}
        pooled: dict[str, str] = {}
        if error is None:
            try:
                pooled = self._pooled(candidates, wanted, where, to[:, S:], trained=trained)
                rows = {n: some for n, some in wanted.ids.items() if n in wanted.modes and n not in pooled}
                request, renamed = self._requester.request(stretches, rows, self._tables, where)
                to[:, :S] = request.counts_WS
            except Exception as bad:
                error = bad
        to[:, _SAMPLES:] = (
            wanted.num_samples, bool(pooled), 0 if own is None else _digest(wanted.modes), wanted.token,
            error is not None,
        )  # fmt: skip
        told = self.wire.count(to, what)
        if told[:, _ERROR].any():
            self._ranks.agree(f"making a batch of {where}", error)
        assert request is not None
        check_tokens(told[:, _TOKEN], wanted.token, f"makes another batch than rank {rank} in {where}")
        if (told[:, _MODES] != to[0, _MODES]).any():
            raise RankError(
                f"ranks look up different features in {where}, or pool them differently: with read_by='owner' all of "
                "them have the same embedding modules"
            )
        asked_W = tuple(Block.of(candidates, to[r, S : S + P], r) for r in range(self._ranks.size))
        blocks_W = tuple(Block.of(candidates, told[r, S : S + P], rank) for r in range(self._ranks.size))
        counts_WP, n_W = (told[:, S : S + P] - 1) >> 1, told[:, _SAMPLES]
        words_W = [
            sum(candidates[f].words(int(n), int(counts_P[f])) for f in block.features) if own is None else 0
            for block, counts_P, n in zip(blocks_W, counts_WP, n_W, strict=True)
        ]
        pieces_W = [message_of(block, candidates, wanted.ids) if own is None else [] for block in asked_W]
        positions, messages_W = self._exchange(request, told[:, :S].sum(axis=1), pieces_W, words_W, what)
        if own is not None:
            messages_W = [np.concatenate([NONE_I4, *message_of(block, candidates, some)])
                          for block, some in zip(blocks_W, own, strict=True)]  # fmt: skip
            for r, (block, some) in enumerate(zip(blocks_W, own, strict=True)):
                for p in block.features:
                    counts_WP[r, p] = some[candidates[p].name].num_ids
        features_G: list[list[FeatureIds]] = [[] for _ in self._groups]
        for name, found in renamed.items():
            features_G[stretches.group_T[stretches.table_of[self._tables[name]]]].append(found)
        asked = Asked(
            stretches=stretches, request=replace(request, addresses=NONE_I4), ids=renamed,
            features_G=tuple(map(tuple, features_G)), counts_WS=told[:, :S], positions=positions, bags=None,
            where=where, token=wanted.token,
        )  # fmt: skip
        try:
            self._check_positions(asked)
            if not told[:, _POOLED].any():
                return asked
            modes_WP = np.where(told[:, S : S + P] & 1, MODES["sum"], MODES["mean"]).astype(np.int8)
            parts_W = [
                read_message(rank, candidates, block, messages_W[r], counts_WP[r], modes_WP[r], int(n_W[r]))
                for r, block in enumerate(blocks_W)
            ]
        except RankError as bad:
            return replace(asked, error=bad)
        return replace(asked, bags=AskedBags(candidates, pooled, n_W, asked_W, blocks_W, parts_W))

    def _pooled(
        self,
        candidates: Sequence[Candidate],
        wanted: Wanted,
        where: str,
        to_WP: NDArray[np.int64],
        *,
        trained: bool,
    ) -> dict[str, str]:
        """Return the features that are to be pooled, with how, and write what owners are told of them."""
        modes = wanted.modes if wanted.whole is None else wanted.whole
        if wanted.own is None:
            chosen = self._chooser.choose(
                candidates, wanted.ids, modes, wanted.num_samples, item_bytes=self._wire_dtype.itemsize,
                trained=trained, where=where,
            )  # fmt: skip
        else:
            chosen = [candidates.index(one) for one in by_model(candidates, modes)]
            for p in chosen:
                for some in wanted.own:
                    if candidates[p].name in some:
                        check_bags(candidates[p], some[candidates[p].name].ids, where)
        for p in chosen:
            one = candidates[p]
            count = 0 if wanted.own is not None else wanted.ids[one.name].num_ids
            for owner in one.owners:
                to_WP[owner.rank, p] = 1 + 2 * count + (modes[one.name] == "mean")
        return {candidates[p].name: str(modes[candidates[p].name]) for p in chosen}

    def _exchange(
        self, request: Request, rows_W: NDArray[np.int64], pieces_W: Sequence[Sequence[NDArray[np.int32]]],
        words_W: Sequence[int], what: str,
    ) -> tuple[NDArray[np.int32], list[NDArray[np.int32]]]:  # fmt: skip
        """Send each rank the addresses of its rows and its message; return the positions and messages that came."""
        wire, rank, asked_W = self.wire, self._ranks.rank, request.counts_WS.sum(axis=1)
        mine = dict(zip(self._order.tolist(), np.split(request.addresses, np.cumsum(asked_W[self._order])[:-1]),
                        strict=True))  # fmt: skip
        remote = [one for r, pieces in enumerate(pieces_W) if r != rank for one in (mine[r], *pieces)]
        send = wire.remote(asked_W[r] + sum(one.size for one in pieces) for r, pieces in enumerate(pieces_W))
        receive = wire.remote(rows_W + words_W)
        came = np.empty(sum(receive), np.int32)
        wire.send(torch.from_numpy(np.concatenate([NONE_I4, *remote])), send, receive, torch.from_numpy(came), what)
        each_W = np.split(came, np.cumsum(receive)[:-1])
        each_W[rank] = np.concatenate([mine[rank], *pieces_W[rank]])
        positions = [each_W[r][: rows_W[r]] for r in self._order]
        return np.concatenate(positions), [each[rows:] for each, rows in zip(each_W, rows_W, strict=True)]

    def _check_positions(self, asked: Asked) -> None:
        """Raise RankError where others ask for rows that this one has not: kernels would take no notice."""
        s, first = asked.stretches, 0
        for counts_S in asked.counts_WS[self._order]:
            for section in np.nonzero(counts_S)[0].tolist():
                here, have = asked.positions[first : first + int(counts_S[section])], s.rows_H[section % s.num_groups]
                if error := out_of_bounds(self._ranks.rank, here, have, f"of a group of {have:,} in the pass"):
                    raise error
                first += here.size


def check_tokens(tokens_W: NDArray[np.int64], token: int, what: str) -> None:
    """Raise RankError where ranks bring different tokens: the first other one does ``what``."""
    if others := np.nonzero(tokens_W != token)[0].tolist():
        raise RankError(f"rank {others[0]} {what}: all ranks must ask for batches of one size, in one order")


def _digest(modes: Mapping[str, str | None]) -> int:
    return zlib.crc32(json.dumps(sorted(modes.items())).encode())
