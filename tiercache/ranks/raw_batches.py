"""Batches of raw keys on several ranks: each brings its own samples, and all make them together.

On every rank an index finds local ids in the key set of the whole pass; from there on a batch is one of samples. Before
that ranks tell each other how many samples they have and whether their loaders have ended.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.passes.samples import FeatureIds
from tiercache.training.batch import Batch
from tiercache.training.missing_rows import MissingRows
from tiercache.training.raw_samples import RawReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.backends.base import Backend
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.passes.passset import Pass, PassSet
    from tiercache.ranks.batches import BatchMaker
    from tiercache.ranks.loaded_rows import RowLoader
    from tiercache.store.table import Group
    from tiercache.tiers.rows import RowView
    from tiercache.training.batch import Pooled
    from tiercache.training.missing_rows import Missing
    from tiercache.training.raw_samples import RawSamples
    from tiercache.training.row_optimizer import RowOptimizer
    from tiercache.training.visit import Visit

__all__ = ["RawBatches"]


class _Turn(NamedTuple):
    """What a rank tells the others of its part of a batch."""

    num_samples: int = 0
    loads: bool = False
    """Whether it has keys to load."""
    ended: bool = False
    """Whether it had no keys to give."""


class RawBatches:
    """Makes the batches of raw keys of one cache. Every call but ``close`` is collective; on the training thread."""

    def __init__(
        self,
        passes: PassSet,
        groups: Sequence[Group],
        ranks: AnyCommunicator,
        beside: AnyCommunicator,
        maker: BatchMaker,
        loader: RowLoader,
        optimizer: RowOptimizer,
        backend: Backend,
        index_room: int,
    ) -> None:
        """groups: of whole tables. beside: the ranks as batches are asked for. index_room: bytes for an index.

        optimizer: counts how often rows were stepped.
        """
        self._schema, self._ranks, self._beside, self._maker, self._loader = (
            passes.schema, ranks, beside, maker, loader,
        )  # fmt: skip
        self._reader = RawReader(passes.schema, passes.tables, backend, index_room)
        self._missing = MissingRows(passes.schema, groups, optimizer, backend)
        self._dense_columns = len(passes.schema.dense)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of keys."""
        return self._reader.index_bytes

    def close(self) -> None:
        """Let go of the index."""
        self._reader.close()

    def batch(self, visit: Visit, keys: Mapping[str, Any] | None, *, missing: Missing, **others: Any) -> Batch | None:
        """Return this rank's part of the next batch of a visit: ``ShardedVisit.batch`` promises it."""
        source: Pass = visit.source.whole  # type: ignore[attr-defined]  # a SharedPass
        number, mine, error = visit.batches_done, None, None
        name = f"batch {number} of visit {visit.index}"
        try:
            visit.begin_raw()
            if keys is not None:
                mine = self._reader.read(source, f"visit {visit.index}", keys, number=number, missing=missing, **others)
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
        loaded = None
        if any(turn.loads for turn in turns):
            loaded = self._loader.load(self._reader.keys_of(mine) if missing == "load" else {})
        made = self._made(mine, missing, loaded, name, self._weight(sizes))
        visit.count_raw(sum(sizes))
        return made

    def evaluation_batch(self, keys: Mapping[str, Any] | None, budget: int, **others: Any) -> Batch | None:
        """Return a batch outside any visit: ``ShardedCache.evaluation_batch`` promises it."""
        what, mine, error, wanted = "an evaluation of raw keys", None, None, dict[str, Any]()
        try:
            if keys is not None:
                mine = self._used(self._reader.read(None, "", keys, **others))
                self._dense_columns = mine.dense.shape[1]
                wanted = self._reader.keys_of(mine)
                self._reader.check_budget(mine.num_samples, wanted, budget)
        except Exception as caught:  # told to all ranks
            error = caught
        turn = _Turn(0 if mine is None else mine.num_samples, True, mine is None)
        turns = self._turns(turn, f"making a batch of {what}", error)
        if all(turn.ended for turn in turns):
            return None
        loaded = self._loader.load(wanted, budget)
        mine = self._used(self._nothing(None)) if mine is None else mine
        places = mine.places()
        ids = {name: FeatureIds(places[name], one.offsets, one.weights) for name, one in mine.features.items()}
        weight = self._weight([turn.num_samples for turn in turns])
        made = Batch(mine.label, mine.dense, ids, self._missing.no_rows(what), mine.num_samples, weight)
        made = self._missing.add(made, mine.features, places, "load", lambda: loaded)
        return replace(made, ids=self._maker.named(made.ids, {}))  # type: ignore[arg-type]  # all are FeatureIds

    def _turns(self, mine: _Turn, what: str, error: Exception | None) -> list[_Turn]:
        """Tell the others of this rank's part; raises where any rank has an error."""
        self._maker.rest()
        told = self._beside.exchange_splits(np.array([[*mine, error is not None]] * self._ranks.size, np.int64), what)
        if told[:, -1].any():
            self._beside.agree(what, error)
        return [_Turn(samples, bool(loads), bool(ended)) for samples, loads, ended, _ in told.tolist()]

    def _weight(self, sizes: Sequence[int]) -> float:
        """Return what the mean loss of this rank's samples counts for."""
        return self._ranks.size * (sizes[self._ranks.rank] / max(1, sum(sizes)))

    def _borrowed(
        self, source: Pass, mine: RawSamples | None, missing: Missing, sizes: Sequence[int]
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
                borrowed = self._reader.read(source, "", keys, **others)
        if borrowed is None:
            assert mine is not None
            return mine, missing
        return borrowed, lent["missing"]

    def _lent(self, mine: RawSamples, missing: Missing) -> dict[str, Any]:
        """Return the first sample as its reader takes it."""
        keys, weights = {}, {}
        for feature in self._schema.features:
            one, ragged = mine.features[feature.name].slice(0, 1), feature.hotness == "ragged"
            values, shape = one.keys, (1, -1) if feature.hotness == "fixed" else (-1,)
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

    def _nothing(self, source: Pass | None) -> RawSamples:
        """Return no samples, with as many dense columns as those before."""
        keys: dict[str, Any] = {}
        for feature in self._schema.features:
            none = np.empty(0, np.int64)
            keys[feature.name] = none.reshape(0, feature.length or 0) if feature.hotness == "fixed" else none
        return self._reader.read(source, "", keys, dense=np.empty((0, self._dense_columns), np.float32))

    def _used(self, samples: RawSamples) -> RawSamples:
        """Return samples with the features that some module looks up."""
        used = self._maker.used()
        return replace(samples, features={name: one for name, one in samples.features.items() if name in used})

    def _made(self, mine: RawSamples, missing: Missing, loaded: Any, name: str, weight: float) -> Batch:
        """Bring the rows of samples, and those of their missing keys beside them."""
        places = mine.places()
        lacking = {name for name, found in places.items() if found.size and int(found.min()) < 0}
        there = {name: found[found >= 0] if name in lacking else found for name, found in places.items()}
        ids = {name: FeatureIds(there[name], one.offsets, one.weights) for name, one in mine.features.items()}

        def finish(rows: RowView, *, ids: Mapping[str, FeatureIds], pooled: Mapping[str, Pooled]) -> Batch:
            return Batch(mine.label, mine.dense, ids, rows, mine.num_samples, weight, pooled)

        made = self._maker.make_raw(ids, mine.num_samples, name, finish, lacking=lacking)
        if not lacking & made.ids.keys():
            return made
        found = {name: self._found(places[name], some.ids) for name, some in made.ids.items()}
        made = self._missing.add(made, mine.features, found, missing, lambda: loaded)
        return replace(made, ids=self._maker.named(made.ids, made.pooled))  # type: ignore[arg-type]  # as above

    @staticmethod
    def _found(places: NDArray[np.int32], rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the rows of a batch that its keys are, -1 where the pass lacks them."""
        found = np.full(places.size, -1, np.int32)
        found[places >= 0] = rows
        return found
