"""Requests: the unique rows of one batch, in the order in which their owners are asked for them. On the host.

Legend as in `shard_layout`.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.dist.communicator import Wire
from tiercache.dist.pooled import (
    MODES,
    PoolableFeature,
    PooledBlock,
    PooledInput,
    check_pooled_ids,
    decode_block,
    encode_block,
    poolable_features,
    pooled_by_bytes,
    pooled_by_owner,
    wrong_id,
)
from tiercache.dist.shard_layout import ShardLayout, exclusive, out_of_bounds
from tiercache.errors import RankError
from tiercache.kernels.arrays import NONE_I4
from tiercache.kernels.cpu.gathering import check_ids
from tiercache.kernels.cpu.sorting import SortBuffers, sort_slots
from tiercache.kernels.cpu.unique import BITS_PER_ENTRY, lay_out, unique_positions, unique_slots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.dist.shard_layout import Owners
    from tiercache.schema import Feature
    from tiercache.store.table import Group
    from tiercache.values.ids import FeatureIds


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The rows that a batch requests from every owner."""

    addresses: NDArray[np.int32]
    """In wire order: each row's position within its owner's group."""
    counts_WS: NDArray[np.int64]
    """Number of addresses for each section of each owner."""
    slots_U: NDArray[np.int32]
    """Each unique row's index within its group."""
    num_rows_G: NDArray[np.int64]
    """Number of unique rows of each group."""
    replicated: tuple[tuple[int, int, NDArray[np.int32]], ...]
    """(table, first slot, local ids): rows looked up in a replica."""
    rows_R: NDArray[np.int64]
    """Number of rows of each run."""
    slot_R: NDArray[np.int64]
    """The first slot of each run."""

    @property
    def num_unique(self) -> int:
        """U."""
        return int(self.slots_U.size)

    def span(self, run: int) -> slice:
        """Return the slots of a run."""
        first = int(self.slot_R[run])
        return slice(first, first + int(self.rows_R[run]))


class RequestBuilder:
    """Builds the requests of batches and reuses its scratch between them. For one thread at a time."""

    def __init__(self) -> None:
        self._sorting = SortBuffers()
        self._bits = np.zeros(0, dtype=np.uint64)
        self._scratch: dict[str, NDArray[np.int32]] = {}

    def request(
        self, layout: ShardLayout, ids: Mapping[str, FeatureIds], tables: Mapping[str, str], where: str
    ) -> tuple[Request, dict[str, FeatureIds]]:
        """Return the request of a batch, and its ids as indices of unique rows.

        tables: by feature. Raises IndexError, which names ``where``, for a local id that its table does not have in the
        pass, as a lookup does.
        """
        names = sorted(ids, key=lambda name: layout.table_of[tables[name]])
        table_F = np.array([layout.table_of[tables[name]] for name in names], dtype=np.int64)
        starts = np.zeros(len(names) + 1, dtype=np.int64)
        np.cumsum([ids[name].num_ids for name in names], out=starts[1:])
        flat_ids = self._take("joined", int(starts[-1]))
        np.concatenate([ids[name].ids for name in names] or [flat_ids], out=flat_ids)
        _check(flat_ids, starts, layout.rows_T[table_F], names, tables, where)
        unique = self._take("unique", flat_ids.size)
        inverse = np.empty(flat_ids.size, dtype=np.int32)  # becomes the batch's ids
        begin_K, end_K = np.zeros_like(layout.low_K), np.zeros_like(layout.low_K)
        num_unique = 0
        for first, end in layout.sets:
            low, high = np.searchsorted(table_F, [first, end]).tolist()
            entries = slice(int(starts[low]), int(starts[high]))
            for f in range(low, high):
                flat_ids[starts[f] : starts[f + 1]] += np.int32(layout.base_T[table_F[f]])
            out, numbers = unique[num_unique : num_unique + entries.stop - entries.start], inverse[entries]
            rows = int(layout.rows_T[first:end].sum())
            out = out[: self._unique(flat_ids[entries], rows, out, numbers)]
            if num_unique:
                numbers += num_unique
            k = layout.table_order_K[slice(*np.searchsorted(layout.by_table_K, [first, end]).tolist())]
            base = layout.base_T[layout.table_K[k]]
            begin_K[k] = num_unique + np.searchsorted(out, base + layout.low_K[k])
            end_K[k] = num_unique + np.searchsorted(out, base + layout.high_K[k])
            num_unique += out.size
        made = _lay_out(layout, unique[:num_unique], begin_K, end_K)
        return made, {name: replace(ids[name], ids=inverse[starts[f] : starts[f + 1]]) for f, name in enumerate(names)}

    def _unique(
        self, positions: NDArray[np.int32], rows: int, unique: NDArray[np.int32], inverse: NDArray[np.int32]
    ) -> int:
        """Write the unique positions, ascending, and each entry's index among them; return their number."""
        if rows > BITS_PER_ENTRY * positions.size:
            return unique_slots(sort_slots(positions, rows, self._sorting), unique, inverse)
        words = -(-rows // 64)
        if self._bits.size < words:
            self._bits = np.zeros(words, dtype=np.uint64)
        return unique_positions(positions, rows, self._bits, self._take("before", words), unique, inverse)

    def _take(self, name: str, size: int) -> NDArray[np.int32]:
        """Return uninitialized scratch."""
        if name not in self._scratch or self._scratch[name].size < size:
            self._scratch[name] = np.empty(size + size // 8, dtype=np.int32)
        return self._scratch[name][:size]


def _lay_out(
    layout: ShardLayout, unique: NDArray[np.int32], begin_K: NDArray[np.int64], end_K: NDArray[np.int64]
) -> Request:
    """Compute each row's owner, wire position and slot."""
    s, rows_K = layout, end_K - begin_K
    shift_K = s.first_K - s.low_K - s.base_T[s.table_K]
    wire_K = exclusive(rows_K)
    num_groups = s.num_whole_groups
    by_slot = s.slot_order
    num_rows_G = np.bincount(s.group_K[by_slot], rows_K[by_slot], num_groups).astype(np.int64)
    slot_K = np.empty_like(rows_K)
    slot_K[by_slot] = exclusive(rows_K[by_slot]) - exclusive(num_rows_G)[s.group_K[by_slot]]
    slot_K = slot_K[s.counted_K]
    addresses = np.empty(int(rows_K.sum()), dtype=np.int32)
    slots = np.empty(unique.size, dtype=np.int32)
    lay_out(unique, begin_K, end_K, shift_K, wire_K, np.where(s.is_first_K, slot_K, -1), addresses, slots)
    num_splits = 2 * s.num_groups
    counts = np.bincount(s.rank_K * num_splits + s.split_K, rows_K, s.num_ranks * num_splits)
    replicated = s.replicated_k[rows_K[s.replicated_k] > 0].tolist()
    local = [unique[begin_K[k] : end_K[k]] - np.int32(s.base_T[s.table_K[k]]) for k in replicated]
    runs = s.runs
    return Request(
        addresses=addresses,
        counts_WS=counts.astype(np.int64).reshape(s.num_ranks, num_splits),
        slots_U=slots,
        num_rows_G=num_rows_G,
        replicated=tuple((int(s.table_K[k]), int(slot_K[k]), one) for k, one in zip(replicated, local, strict=True)),
        rows_R=np.add.reduceat(rows_K, runs.first_R) if runs.first_R.size else rows_K,
        slot_R=slot_K[runs.first_R],
    )


def _check(
    ids: NDArray[np.int32],
    starts: NDArray[np.int64],
    limits: NDArray[np.int64],
    names: Sequence[str],
    tables: Mapping[str, str],
    where: str,
) -> None:
    bad = check_ids(ids, starts, limits)
    if bad >= 0:
        f = int(np.searchsorted(starts, bad, side="right")) - 1
        raise wrong_id(names[f], int(ids[bad]), bad - int(starts[f]), tables[names[f]], int(limits[f]), where)


_SAMPLES, _POOLED, _MODES, _TOKEN, _ERROR = range(-5, 0)
"""Indices, from the end, of the numbers after the counts of sections and features."""


@dataclass(frozen=True, slots=True, eq=False)
class InputLayout:
    """The layout of a pass's rows, and its poolable features."""

    shards: ShardLayout
    poolable: tuple[PoolableFeature, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LocalInput:
    """The input of a batch of this rank."""

    ids: Mapping[str, FeatureIds] = field(default_factory=dict)
    """Local ids of the sub-dataset, by feature, for this rank's samples."""
    modes: Mapping[str, str | None] = field(default_factory=dict)
    """Pooling modes by feature; other features are not looked up."""
    whole: Mapping[str, str | None] | None = None
    """The same, for features that may be pooled elsewhere; None: all."""
    num_samples: int = 1
    own: Sequence[Mapping[str, FeatureIds]] | None = None
    """By rank, if ranks read by owner: the ids of its samples for features of tables that this rank owns. All
    candidates are pooled then."""
    token: int = 0
    """Identifies the global batch: if ranks pass different tokens, all raise."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExchangedInput:
    """The requests of all ranks for one batch, in host memory, without vectors."""

    layout: ShardLayout
    request: Request
    """This rank's request, without the addresses, which were sent."""
    ids: dict[str, FeatureIds]
    """The ids of the batch, as indices of its unique rows."""
    features_G: tuple[tuple[FeatureIds, ...], ...]
    """The same, by group of whole tables."""
    counts_WS: NDArray[np.int64]
    """Number of rows that every rank requests from this one, by section of this rank."""
    positions: NDArray[np.int32]
    """Their positions, in rank order with this rank last, by section within a rank."""
    bags: PooledInput | None
    """Pooling requests; None if no rank has any."""
    where: str
    token: int
    error: Exception | None = None
    """An error for requested rows that this rank does not have; all ranks raise it when rows are served."""


class InputDist:
    """Exchanges the requests of batches of one cache over its own communicator. For one thread at a time."""

    def __init__(
        self, ranks: AnyCommunicator, groups: tuple[Group, ...], features: Sequence[Feature], wire_dtype: torch.dtype
    ) -> None:
        """groups: of whole tables. wire_dtype: dtype in which rows and vectors will travel."""
        self._ranks, self._groups, self._features, self._wire_dtype = ranks, groups, features, wire_dtype
        self.wire = Wire(ranks, torch.float32)
        self._tables = {feature.name: feature.table for feature in features}
        self._requester, self._sorting = RequestBuilder(), SortBuffers()
        self._order = np.array([r for r in range(ranks.size) if r != ranks.rank] + [ranks.rank])

    def lay_out(self, owners: Owners, *, replicated: bool = True) -> InputLayout:
        """Return the layout by which batches of a pass make requests. Not collective.

        replicated: True if replicated tables have replicas here; else their rows travel like any others.
        """
        num_groups, several = int(owners.group_TW.max()) + 1, self._ranks.size > 1
        layout = ShardLayout(owners, self._groups, self._ranks.rank, num_groups, replicated=replicated and several)
        return InputLayout(layout, poolable_features(owners, self._features) if several else ())

    def exchange(
        self,
        layout: InputLayout,
        local: LocalInput,
        where: str,
        *,
        trained: bool = True,
        error: Exception | None = None,
    ) -> ExchangedInput:
        """Send the requests of a batch to the owners. Collective.

        error: an earlier error on this rank. If a rank has one, or an id that is not in the sub-dataset (IndexError,
        which names ``where``), every rank raises: that rank its error, others RankError. All also raise if ranks pass
        different tokens, or read by owner and look up different features.
        """
        shards, poolable, rank = layout.shards, layout.poolable, self._ranks.rank
        what, S, P, own = f"asking for rows of {where}", 2 * shards.num_groups, len(poolable), local.own
        to = np.zeros((self._ranks.size, S + P + 5), dtype=np.int64)
        request: Request | None = None
        renamed: dict[str, FeatureIds] = {}
        pooled: dict[str, str] = {}
        if error is None:
            try:
                pooled = self._pooled(poolable, local, where, to[:, S:], trained=trained)
                rows = {n: some for n, some in local.ids.items() if n in local.modes and n not in pooled}
                request, renamed = self._requester.request(shards, rows, self._tables, where)
                to[:, :S] = request.counts_WS
            except Exception as bad:
                error = bad
        to[:, _SAMPLES:] = (
            local.num_samples, bool(pooled), 0 if own is None else _digest(local.modes), local.token,
            error is not None,
        )  # fmt: skip
        received = self.wire.count(to, what)
        if received[:, _ERROR].any():
            self._ranks.agree(f"making a batch of {where}", error)
        assert request is not None
        check_tokens(received[:, _TOKEN], local.token, f"makes a different batch than rank {rank} in {where}")
        if (received[:, _MODES] != to[0, _MODES]).any():
            raise RankError(
                f"ranks look up different features in {where}, or pool them differently: with read_by='owner' all of "
                "them need the same embedding modules"
            )
        outgoing_W = tuple(PooledBlock.of(poolable, to[r, S : S + P], r) for r in range(self._ranks.size))
        incoming_W = tuple(PooledBlock.of(poolable, received[r, S : S + P], rank) for r in range(self._ranks.size))
        counts_WP, n_W = (received[:, S : S + P] - 1) >> 1, received[:, _SAMPLES]
        words_W = [
            sum(poolable[f].words(int(n), int(counts_P[f])) for f in block.features) if own is None else 0
            for block, counts_P, n in zip(incoming_W, counts_WP, n_W, strict=True)
        ]
        pieces_W = [encode_block(block, poolable, local.ids) if own is None else [] for block in outgoing_W]
        positions, messages_W = self._send(request, received[:, :S].sum(axis=1), pieces_W, words_W, what)
        if own is not None:
            messages_W = [np.concatenate([NONE_I4, *encode_block(block, poolable, some)])
                          for block, some in zip(incoming_W, own, strict=True)]  # fmt: skip
            for r, (block, some) in enumerate(zip(incoming_W, own, strict=True)):
                for p in block.features:
                    counts_WP[r, p] = some[poolable[p].name].num_ids
        features_G: list[list[FeatureIds]] = [[] for _ in self._groups]
        for name, found in renamed.items():
            features_G[shards.group_T[shards.table_of[self._tables[name]]]].append(found)
        exchanged = ExchangedInput(
            layout=shards, request=replace(request, addresses=NONE_I4), ids=renamed,
            features_G=tuple(map(tuple, features_G)), counts_WS=received[:, :S], positions=positions, bags=None,
            where=where, token=local.token,
        )  # fmt: skip
        try:
            self._check_positions(exchanged)
            if not received[:, _POOLED].any():
                return exchanged
            modes_WP = np.where(received[:, S : S + P] & 1, MODES["sum"], MODES["mean"]).astype(np.int8)
            parts_W = [
                decode_block(rank, poolable, block, messages_W[r], counts_WP[r], modes_WP[r], int(n_W[r]))
                for r, block in enumerate(incoming_W)
            ]
        except RankError as bad:
            return replace(exchanged, error=bad)
        return replace(exchanged, bags=PooledInput(poolable, pooled, n_W, outgoing_W, incoming_W, parts_W))

    def _pooled(
        self,
        poolable: Sequence[PoolableFeature],
        local: LocalInput,
        where: str,
        to_WP: NDArray[np.int64],
        *,
        trained: bool,
    ) -> dict[str, str]:
        """Return the features to pool, with their modes, and write the counts that owners receive for them."""
        modes = local.modes if local.whole is None else local.whole
        if local.own is None:
            chosen = pooled_by_bytes(
                poolable, local.ids, modes, local.num_samples, item_bytes=self._wire_dtype.itemsize,
                trained=trained, where=where, sorting=self._sorting,
            )  # fmt: skip
        else:
            chosen = [poolable.index(one) for one in pooled_by_owner(poolable, modes)]
            for p in chosen:
                for some in local.own:
                    if poolable[p].name in some:
                        check_pooled_ids(poolable[p], some[poolable[p].name].ids, where)
        for p in chosen:
            one = poolable[p]
            count = 0 if local.own is not None else local.ids[one.name].num_ids
            for owner in one.owners:
                to_WP[owner.rank, p] = 1 + 2 * count + (modes[one.name] == "mean")
        return {poolable[p].name: str(modes[poolable[p].name]) for p in chosen}

    def _send(
        self, request: Request, rows_W: NDArray[np.int64], pieces_W: Sequence[Sequence[NDArray[np.int32]]],
        words_W: Sequence[int], what: str,
    ) -> tuple[NDArray[np.int32], list[NDArray[np.int32]]]:  # fmt: skip
        """Send each rank the addresses of its rows and its message; return the received positions and messages."""
        wire, rank, outgoing_W = self.wire, self._ranks.rank, request.counts_WS.sum(axis=1)
        pieces = np.split(request.addresses, np.cumsum(outgoing_W[self._order])[:-1])
        addresses_W = dict(zip(self._order.tolist(), pieces, strict=True))
        remote = [one for r, pieces in enumerate(pieces_W) if r != rank for one in (addresses_W[r], *pieces)]
        send = wire.remote(outgoing_W[r] + sum(one.size for one in pieces) for r, pieces in enumerate(pieces_W))
        receive = wire.remote(rows_W + words_W)
        received_words = np.empty(sum(receive), np.int32)
        wire.send(
            torch.from_numpy(np.concatenate([NONE_I4, *remote])), send, receive, torch.from_numpy(received_words), what
        )
        each_W = np.split(received_words, np.cumsum(receive)[:-1])
        each_W[rank] = np.concatenate([addresses_W[rank], *pieces_W[rank]])
        positions = [each_W[r][: rows_W[r]] for r in self._order]
        return np.concatenate(positions), [each[rows:] for each, rows in zip(each_W, rows_W, strict=True)]

    def _check_positions(self, exchanged: ExchangedInput) -> None:
        """Raise RankError if others request rows that this rank does not have; kernels would not notice."""
        s, first = exchanged.layout, 0
        for counts_S in exchanged.counts_WS[self._order]:
            for split in np.nonzero(counts_S)[0].tolist():
                here, have = exchanged.positions[first : first + int(counts_S[split])], s.rows_H[split % s.num_groups]
                if error := out_of_bounds(self._ranks.rank, here, have, f"of a group of {have:,} in the pass"):
                    raise error
                first += here.size


def check_tokens(tokens_W: NDArray[np.int64], token: int, what: str) -> None:
    """Raise RankError if ranks pass different tokens; ``what`` describes the call of the first rank that differs."""
    if others := np.nonzero(tokens_W != token)[0].tolist():
        raise RankError(f"rank {others[0]} {what}: all ranks must request batches of the same size in the same order")


def _digest(modes: Mapping[str, str | None]) -> int:
    return zlib.crc32(json.dumps(sorted(modes.items())).encode())
