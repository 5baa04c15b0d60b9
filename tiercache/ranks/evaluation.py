"""Evaluation on several ranks: read-only passes over any keys, rows as of now, brought by their owners."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.cpu.next_use import search_keys
from tiercache.passes.keybatch import OOV_KEY
from tiercache.planning.positions import Positions
from tiercache.training.batch import cut_batches, in_order
from tiercache.training.evaluation import Wanted, bring_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tiercache.backends.base import Backend
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.passes.passset import Pass
    from tiercache.ranks.batches import BatchMaker
    from tiercache.ranks.exchange import RowExchange
    from tiercache.ranks.pooling import Pooling
    from tiercache.ranks.shares import Share
    from tiercache.training.batch import Batch
    from tiercache.training.evaluation import RowsNow


class ShardedEvaluation:
    """A slice of an evaluation pass, of which every rank gets its part of each batch."""

    def __init__(self, source: Pass, first: int, last: int, maker: BatchMaker) -> None:
        self.pass_index = source.index
        """The pass of the evaluation set."""
        self.num_samples = last - first
        """Samples of the slice, those of all ranks."""
        self._source, self._first, self._last, self._maker = source, first, last, maker

    def batches(self, size: int, *, schedule: str = "interleaved") -> Iterator[Batch]:
        """Yield this rank's part of each batch of ``size`` samples, in the order of the data. Collective.

        Rank r of W has samples [r * n // W, (r + 1) * n // W) of a batch of n; one without any gets the first of them
        with weight 0: leave such a batch out. "interleaved": rows of the next batch are exchanged while this one is
        used; "simple": one thing after the other.
        """
        name = f"samples {self._first:,} to {self._last:,} of evaluation pass {self.pass_index}"
        begin = partial(self._maker.begin, self._source, name=name, trained=False)
        cuts = cut_batches(in_order, size, first=self._first, last=self._last)
        begins = (partial(begin, places) for _, places in cuts)
        return self._maker.ahead(begins, schedule)


def evaluation_slices(
    share: Share,
    rows_now: RowsNow,
    budget: int,
    backend: Backend,
    exchange: RowExchange,
    pooling: Pooling,
    maker: BatchMaker,
    ranks: AnyCommunicator,
) -> Iterator[ShardedEvaluation]:
    """Cut every pass into slices for which no rank brings more than ``budget`` bytes of its rows, and bring them."""
    positions = Positions.of(share, rows_now.groups)  # type: ignore[arg-type]
    for source in share.passes:
        with ranks.raise_on_all("beginning a pass of an evaluation"):
            source.check_samples()
            owners = share.owners(source.index)
            found = {table.name: source.span(table.name) for table in share.tables}
            spans = {name: (span.start, span.stop) for name, span in found.items()}
            wanted = Wanted(source, positions, share.schema.features, spans)  # type: ignore[arg-type]
        first = 0
        while first < source.samples:
            with ranks.raise_on_all("cutting a slice of an evaluation"):
                mine = wanted.cut(first, budget)
            last = ranks.all_reduce_min([mine])[0]
            with ranks.raise_on_all("reading the rows of an evaluation"):
                if last < mine:
                    wanted.end_at(first, last)
                rows = bring_rows(rows_now, source, positions, wanted.used, backend)  # type: ignore[arg-type]
            exchange.open_pass(owners, rows, mirrored=False)
            pooling.open(owners, rows)
            yield ShardedEvaluation(source, first, last, maker)  # type: ignore[arg-type]
            maker.rest()
            exchange.bounds.check()
            first = last


def unknown_rows(share: Share, rows_now: RowsNow, ranks: AnyCommunicator) -> dict[str, list[NDArray[np.float32]]]:
    """Return the out-of-vocabulary rows of tables that are divided by hash: one rank has them, all stand in for it."""
    mine: dict[str, list[list[float]]] = {}
    with ranks.raise_on_all("reading rows of keys out of the vocabulary"):
        mine = _own_unknown_rows(share, rows_now)
    found = {name: fields for values in ranks.all_gather_object(mine) for name, fields in values.items()}
    return {name: [np.array([field], dtype=np.float32) for field in fields] for name, fields in found.items()}


def _own_unknown_rows(share: Share, rows_now: RowsNow) -> dict[str, list[list[float]]]:
    mine = {}
    for table in share.tables:
        if share.placement.tables[table.name].by_hash:
            place = np.full(1, -1, dtype=np.int64)
            unknown = np.array([OOV_KEY], dtype=np.int64)
            for source in share.passes:
                if place[0] < 0:
                    search_keys(np.asarray(source.keys(table.name)), table.table_id, unknown, place)
            if place[0] >= 0:
                mine[table.name] = [field[0].tolist() for field in rows_now.fields(table.name, unknown)]
    return mine
