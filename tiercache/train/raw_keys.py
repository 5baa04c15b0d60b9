"""Finds raw keys in the key set of the pass being trained: by an index where the device budget leaves room for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.train.missing_rows import MissingRows, check_unseen
from tiercache.train.raw_samples import RawReader
from tiercache.values.batch import Batch
from tiercache.values.ids import FeatureIds
from tiercache.values.lookups import UNSEEN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tiercache.data.sub_dataset import SubDataset
    from tiercache.rows.backends.base import Backend
    from tiercache.schema import Schema
    from tiercache.store.table import Group
    from tiercache.train.key_finder import IndexPlan
    from tiercache.train.local_exchange import Exchange
    from tiercache.train.missing_rows import Missing
    from tiercache.train.raw_samples import RawSamples
    from tiercache.train.row_optimizer import RowOptimizer
    from tiercache.train.row_view import RowView
    from tiercache.values.lookups import RowReader, Unseen


class _Turn(NamedTuple):
    """What a rank tells the others of its part of a batch."""

    num_samples: int = 0
    loads: bool = False
    """Whether it has keys to load."""
    ended: bool = False
    """Whether it had no keys to give."""
    unseen: int = 0
    """How it asks for keys to be read that were never trained: a place in `UNSEEN`."""


class RawKeys:
    """Makes the batches of raw keys of one cache. Every call but ``close`` is collective; on the training thread."""

    def __init__(
        self,
        schema: Schema,
        groups: Sequence[Group],
        exchange: Exchange,
        optimizer: RowOptimizer,
        backend: Backend,
        index: IndexPlan,
    ) -> None:
        """groups: of whole tables. optimizer: counts how often rows were stepped."""
        tables = [table for group in groups for table in group.tables]
        self._schema, self.exchange, self._ranks = schema, exchange, exchange.ranks
        self.reader = RawReader(schema, tables, backend, index)
        self.missing = MissingRows(schema, groups, optimizer, backend)
        self._dense_columns = len(schema.dense)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of keys."""
        return self.reader.index_bytes

    def close(self) -> None:
        """Let go of the index."""
        self.reader.close()

    def batch(
        self,
        source: SubDataset,
        rows: RowView,
        number: int,
        keys: Mapping[str, Any] | None,
        *,
        begin: Callable[[], None],
        missing: Missing,
        **samples: Any,
    ) -> tuple[Batch, int] | None:
        """Return this rank's part of batch ``number`` of a pass, and the samples of all ranks; see ``Pass.batch``.

        begin: called first; its errors are raised on all ranks. samples: as of ``RawReader.read``.
        """
        mine, error = None, None
        name = f"batch {number} of {rows.name}"
        try:
            begin()
            if keys is not None:
                mine = self.reader.read(source, rows.name, keys, number=number, missing=missing, **samples)
                self._dense_columns = mine.dense.shape[1]
        except Exception as caught:  # told to all ranks
            error = caught
        turn = _Turn(ended=True) if mine is None else _Turn(mine.num_samples, missing == "load" and mine.lacking)
        turns = self._turns(turn, f"making {name}", error)
        if all(turn.ended for turn in turns):
            return None
        sizes = [turn.num_samples for turn in turns]
        if any(sizes) and not all(sizes):
            mine, missing = self._borrowed(source, mine, missing, sizes)
        elif mine is None:
            mine = self._nothing(source)
        reader: RowReader | None = None
        if any(turn.loads for turn in turns):
            lacking = mine if missing == "load" else None
            reader = self.exchange.load(lambda: {} if lacking is None else self.reader.keys_of(lacking))
        made, ids = self.exchange.raw(mine, rows, name, self._weight(sizes))
        if ids is not None:
            made = self.exchange.named(self.missing.add(made, mine.features, ids, missing, reader))
        return made, sum(sizes)

    def evaluate(
        self, keys: Mapping[str, Any] | None, budget: int, *, unseen: Unseen = "initial", **given: Any
    ) -> Batch | None:
        """Return a batch outside any pass: ``TierCache.evaluate_batch`` promises it."""
        check_unseen(unseen)
        what, mine, error, wanted = "an evaluation of raw keys", None, None, dict[str, Any]()
        try:
            if keys is not None:
                mine = self.exchange.used(self.reader.read(None, "", keys, **given))
                self._dense_columns = mine.dense.shape[1]
                wanted = self.reader.keys_of(mine)
                self.reader.check_budget(mine.num_samples, wanted, budget)
        except Exception as caught:  # told to all ranks
            error = caught
        turn = _Turn(0 if mine is None else mine.num_samples, True, mine is None, UNSEEN.index(unseen))
        turns = self._turns(turn, f"making a batch of {what}", error)
        if len(asked := {one.unseen for one in turns}) > 1:
            listed = ", ".join(repr(UNSEEN[one]) for one in sorted(asked))
            raise ValueError(f"ranks gave different values of unseen ({listed}): give the same one on all ranks")
        if all(turn.ended for turn in turns):
            return None
        reader = self.exchange.load(lambda: wanted, budget, unseen)
        mine = self.exchange.used(self._nothing(None)) if mine is None else mine
        places = mine.places()
        ids = {name: FeatureIds(places[name], one.offsets, one.weights) for name, one in mine.features.items()}
        weight = self._weight([turn.num_samples for turn in turns])
        made = Batch(mine.label, mine.dense, ids, self.missing.no_rows(what), mine.num_samples, weight)
        return self.exchange.named(self.missing.add(made, mine.features, places, "load", reader))

    def _turns(self, mine: _Turn, what: str, error: Exception | None) -> list[_Turn]:
        """Tell the others of this rank's part; raises where any rank has an error."""
        told = self.exchange.tell([*map(int, mine)], what, error)
        return [_Turn(samples, bool(loads), bool(ended), unseen) for samples, loads, ended, unseen in told]

    def _weight(self, sizes: Sequence[int]) -> float:
        """Return what the mean loss of this rank's samples counts for; 1 of one rank."""
        return self._ranks.size * (sizes[self._ranks.rank] / max(1, sum(sizes))) if len(sizes) > 1 else 1.0

    def _borrowed(
        self, source: SubDataset, mine: RawSamples | None, missing: Missing, sizes: Sequence[int]
    ) -> tuple[RawSamples, Missing]:
        """Return this rank's samples; the first one of the first rank that has some in place of none."""
        lender = next(rank for rank, size in enumerate(sizes) if size)
        lent = self._lent(mine, missing) if self._ranks.rank == lender and mine is not None else None
        lent = self._ranks.all_gather_object(lent, "lending a sample to ranks without")[lender]
        borrowed = None
        with self._ranks.raise_on_all("borrowing a sample"):
            if mine is None or not mine.num_samples:
                keys = {name: tuple(given) if ragged else given for name, (given, ragged) in lent["keys"].items()}
                others = {name: lent[name] for name in ("weights", "label", "dense", "missing")}
                borrowed = self.reader.read(source, "", keys, **others)
        if borrowed is None:
            assert mine is not None
            return mine, missing
        return borrowed, lent["missing"]

    def _lent(self, mine: RawSamples, missing: Missing) -> dict[str, Any]:
        """Return the first sample as its reader takes it."""
        keys, weights = {}, {}
        for feature in self._schema.features:
            one, ragged = mine.features[feature.name].slice(0, 1), feature.hotness == "ragged"
            values, shape = one.keys, (1, -1) if feature.hotness == "multi_hot" else (-1,)
            given = values.reshape(shape).tolist()
            keys[feature.name] = ([given, [0, values.size]] if ragged else given), ragged
            if one.weights is not None:
                weights[feature.name] = one.weights.reshape(shape).tolist()
        return {
            "keys": keys,
            "weights": weights,
            "label": mine.label[:1].tolist() or None,
            "dense": mine.dense[:1].tolist(),
            "missing": missing,
        }

    def _nothing(self, source: SubDataset | None) -> RawSamples:
        """Return no samples, with as many dense columns as those before."""
        keys: dict[str, Any] = {}
        for feature in self._schema.features:
            none = np.empty(0, np.int64)
            keys[feature.name] = none.reshape(0, feature.length or 0) if feature.hotness == "multi_hot" else none
        return self.reader.read(source, "", keys, dense=np.empty((0, self._dense_columns), np.float32))
