"""Batches of raw keys: reads their samples, and finds their keys in the key set of the current pass."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch

from tiercache.data.raw_batch import OOV_KEY
from tiercache.errors import BudgetError, KeyNotInPassError
from tiercache.kernels.cpu.key_index import KeySet
from tiercache.kernels.cpu.key_sweeps import search_keys
from tiercache.rows.backends.cpu import HostFound
from tiercache.sizes import distinct_sizes
from tiercache.train.batches import check_word
from tiercache.train.missing_rows import MissingRows
from tiercache.train.raw_samples import MISSING, RawSamples, dense_numbers, feature_keys
from tiercache.train.table_module import check_within
from tiercache.values.ids import FoundIds
from tiercache.values.lookups import UNSEEN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.data.dataset import PassDataset
    from tiercache.data.keyset import KeySet as DataKeySet
    from tiercache.data.raw_batch import FeatureKeys
    from tiercache.data.sub_dataset import SubDataset
    from tiercache.rows.backends.base import Backend, KeyIndex
    from tiercache.schema import Schema
    from tiercache.store.table import Group
    from tiercache.train.local_exchange import Exchange
    from tiercache.train.raw_samples import Missing
    from tiercache.train.row_optimizer import RowOptimizer
    from tiercache.train.row_view import RowView
    from tiercache.values.batch import Batch
    from tiercache.values.ids import Found
    from tiercache.values.lookups import RowReader, Unseen


_SHARED_KEYS = 1 << 15  # fewer are found before other threads have begun
SCRATCH_BYTES = 40  # for each row that is read, in addition to its vector


class IndexPlan(NamedTuple):
    """The planned index of the raw keys of a pass."""

    num_keys: int  # keys of the largest pass, of all tables
    num_bytes: int  # bytes on the device; 0 if no index is built

    @classmethod
    def of(cls, data: PassDataset, backend: Backend, room: int | None = None) -> IndexPlan:
        """Plan an index for the passes of a dataset. room: bytes left of the device budget."""
        num_keys = max(sum(one.rows(table.name) for table in data.tables) for one in data.passes)
        num_bytes = backend.index_bytes(num_keys, len(data.tables))
        return cls(num_keys, num_bytes if room is None or num_bytes <= room else 0)


@cache
def _search_threads(_process: int, threads: int) -> ThreadPoolExecutor:
    """Return the threads of this process, started at their first use: to start them takes longer than a search."""
    return ThreadPoolExecutor(threads, thread_name_prefix="tiercache-search")


class _Part(NamedTuple):
    """A rank's part of a batch, as sent to the other ranks."""

    num_samples: int = 0
    loads: bool = False  # it has keys to load
    ended: bool = False  # its loader has ended
    unseen: int = 0  # its choice for keys that were never trained, by its index in `UNSEEN`


class RawKeys:
    """Makes the batches of raw keys of one cache, and finds keys in the key set of a pass. On the training thread.

    The backend's index has room for the largest pass and is built at the first batch of each. If it does not fit the
    budget, keys are searched in the mapped key set by interpolation, which takes 4 to 9 times as long.
    """

    def __init__(
        self, schema: Schema, groups: Sequence[Group], exchange: Exchange, optimizer: RowOptimizer, backend: Backend,
        plan: IndexPlan, rare: DataKeySet | None,
    ) -> None:  # fmt: skip
        """groups: of whole tables. optimizer: counts steps. rare: keys that share the out-of-vocabulary row."""
        self._schema, self.exchange, self._ranks = schema, exchange, exchange.ranks
        self._backend, self._plan, self._rare = backend, plan, rare
        self.tables = tuple(table for group in groups for table in group.tables)
        self._table_numbers = {table.name: t for t, table in enumerate(self.tables)}
        self._table_of = {feature.name: feature.table for feature in schema.features}
        self.missing = MissingRows(schema, groups, optimizer, backend)
        self.bounds: dict[str, int] = {}  # by table, the key range of converted modules; other keys are refused
        self._dense_columns = len(schema.dense)
        self._index: KeyIndex | None = None
        self._indexed: SubDataset | None = None

    @property
    def index_bytes(self) -> int:
        """Bytes of the index; 0 before the first batch, and if none is planned."""
        return 0 if self._index is None else self._index.num_bytes

    def close(self) -> None:
        """Free the index; the next search would build another."""
        self._index = self._indexed = None

    def find(self, source: SubDataset, features: dict[str, FeatureKeys]) -> tuple[Found, dict[str, FoundIds]]:
        """Return the local ids of keys in the key sets of ``source``, of all features in one array and by feature."""
        tables = np.array([self._table_numbers[self._table_of[name]] for name in features], np.int64)
        starts = np.zeros(tables.size + 1, np.int64)
        np.cumsum([feature.keys.size for feature in features.values()], out=starts[1:])
        keys = [self._frequent(self._table_of[name], feature.keys) for name, feature in features.items()]
        index = self._index_of(source)
        found = self._search(source, keys, starts, tables) if index is None else index.find(keys, starts, tables)
        ends = starts.tolist()
        return found, {
            name: FoundIds(found, first, last, feature.offsets, feature.weights)
            for (name, feature), first, last in zip(features.items(), ends[:-1], ends[1:], strict=True)
        }

    def _frequent(self, table: str, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return keys with the dataset's rare keys replaced by the out-of-vocabulary key."""
        if self._rare is None or not self._rare.rows(table):
            return keys
        places = np.empty(keys.size, np.int64)
        search_keys(self._rare.keys(table), self.tables[self._table_numbers[table]].table_id, keys, places)
        return np.where(places < 0, keys, OOV_KEY)

    def read(
        self,
        source: SubDataset | None,
        keys: Mapping[str, Any],
        *,
        pass_name: str = "",
        number: int = 0,
        missing: Missing = "load",
        weights: Mapping[str, Any] | None = None,
        label: Any = None,
        dense: Any = None,
    ) -> RawSamples:
        """Return the samples of batch ``number`` of a pass over ``source``; None: outside any pass."""
        check_word("missing", missing, MISSING)
        needs_all = self._ranks.size > 1  # all ranks exchange keys of the same features
        num_samples, features = feature_keys(self._schema, keys, weights, (label, dense), needs_all=needs_all)
        for name, of_feature in features.items():
            table = self._table_of[name]
            check_within(of_feature.keys, self.bounds.get(table), table)
        found, ids = (None, {}) if source is None else self.find(source, features)
        labels = self._to_device("label", label, (0,), (num_samples,))
        columns = self._to_device("dense", dense, (num_samples, 0), (num_samples, -1))
        lost = None if found is None else found.missing()  # all copies have begun: this waits only for the search
        if lost is not None and lost.count and missing == "error":
            self._refuse(lost.first, features, ids, pass_name, number)
        return RawSamples(num_samples, features, labels, columns, ids, lost is None or lost.count > 0)

    def keys_of(self, samples: RawSamples) -> dict[str, NDArray[np.int64]]:
        """Return, by table, the unique keys of samples that their pass lacks, ascending; omits tables without any."""
        found: dict[str, list[NDArray[np.int64]]] = {}
        if samples.lacking:
            for name, places in samples.places().items():
                found.setdefault(self._table_of[name], []).append(samples.features[name].keys[places < 0])
        return {table: np.unique(np.concatenate(keys)) for table, keys in found.items() if sum(map(len, keys))}

    def check_budget(self, num_samples: int, keys: Mapping[str, NDArray[np.int64]], budget: int) -> None:
        """Raise BudgetError if the rows of an evaluation's unique keys, by table, exceed ``budget`` bytes."""
        dims = {table.name: table.dim for table in self.tables}
        num_bytes = sum(unique.size * (4 * dims[name] + SCRATCH_BYTES) for name, unique in keys.items())
        if num_bytes > budget:
            need, allowed = distinct_sizes(num_bytes, budget)
            raise BudgetError(
                f"the rows of {num_samples:,} samples take {need}, but eval_budget is {allowed}: use smaller batches, "
                f"or raise eval_budget to {num_bytes} bytes (and host_budget, which contains it)"
            )

    def _to_device(
        self, what: str, values: Any, absent: tuple[int, ...], shape: tuple[int, int] | tuple[int]
    ) -> torch.Tensor:
        """Return numbers on the device; without ``values`` an empty tensor of shape ``absent``."""
        if values is None:
            numbers = torch.empty(absent, dtype=torch.float32, device="cpu")
        else:
            numbers = dense_numbers(what, values, shape)
        if numbers.device == self._backend.device:
            return numbers
        return self._backend.tensor(self._backend.to_device(numbers.numpy()))

    def _refuse(
        self, entry: int, features: dict[str, FeatureKeys], ids: dict[str, FoundIds], pass_name: str, number: int
    ) -> NoReturn:
        name, found = next((name, found) for name, found in ids.items() if found.first <= entry < found.last)
        at, table = entry - found.first, self._table_of[name]
        key = int(features[name].keys[at])
        wrapped = "" if not -(1 << 31) <= key < 0 else "; ids from 2**31 on become negative as int32"
        raise KeyNotInPassError(
            f"batch {number} of {pass_name} has the key {key} of table {table!r} at entry {at} of feature "
            f"{name!r}, but the key set of its pass lacks it: use samples of this pass, write key sets with "
            f"all keys, or choose missing='load', 'init' or 'zero', which train no row for it{wrapped}",
            table=table,
            key=key,
            batch=number,
        )

    def _index_of(self, source: SubDataset) -> KeyIndex | None:
        """Return the index of a pass; None if none is planned, or the device has no memory for it."""
        if self._indexed is source or not self._plan.num_bytes:
            return self._index
        self._indexed = None
        if self._index is None:
            table_ids = np.array([table.table_id for table in self.tables], np.uint64)
            self._index = self._backend.key_index(self._plan.num_keys, table_ids)
        if self._index is not None:
            self._index.build([KeySet(t, source.keys(table.name), 0) for t, table in enumerate(self.tables)])
        self._indexed = source
        return self._index

    def _search(
        self,
        source: SubDataset,
        keys: Sequence[NDArray[np.int64]],
        starts: NDArray[np.int64],
        tables: NDArray[np.int64],
    ) -> Found:
        found = np.empty(int(starts[-1]), np.int32)
        threads = torch.get_num_threads() if found.size >= _SHARED_KEYS else 1
        step = max(1, -(-found.size // threads))
        mapped = [source.keys(self.tables[t].name) for t in tables]
        parts = [
            (f, low, min(low + step, part.size)) for f, part in enumerate(keys) for low in range(0, part.size, step)
        ]

        def search(part: tuple[int, int, int]) -> None:
            f, low, high = part
            places = np.empty(high - low, np.int64)
            search_keys(mapped[f], self.tables[tables[f]].table_id, keys[f][low:high], places)
            found[starts[f] + low : starts[f] + high] = places

        if threads == 1:
            for part in parts:
                search(part)
        else:
            list(_search_threads(os.getpid(), threads).map(search, parts))
        return HostFound(found, self._backend.to_device(found))

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
        """Return this rank's part of a batch, and the samples of all ranks. begin: called first; may raise on all."""
        read, error = None, None
        name = f"batch {number} of {rows.name}"
        try:
            begin()
            if keys is not None:
                read = self.read(source, keys, pass_name=rows.name, number=number, missing=missing, **samples)
                self._dense_columns = read.dense.shape[1]
        except Exception as caught:  # sent to all ranks
            error = caught
        part = _Part(ended=True) if read is None else _Part(read.num_samples, missing == "load" and read.lacking)
        parts = self._exchange_parts(part, f"making {name}", error)
        if all(part.ended for part in parts):
            return None
        sizes = [part.num_samples for part in parts]
        if any(sizes) and not all(sizes):
            read, missing = self._borrow(source, read, missing, sizes)
        elif read is None:
            read = self._no_samples(source)
        reader: RowReader | None = None
        if any(part.loads for part in parts):
            lacking = read if missing == "load" else None
            reader = self.exchange.load(lambda: {} if lacking is None else self.keys_of(lacking))
        made, ids = self.exchange.raw(read, rows, name, self._weight(sizes))
        if ids is not None:
            made = self.exchange.named(self.missing.add(made, read.features, ids, missing, reader))
        return made, sum(sizes)

    def evaluate(
        self, keys: Mapping[str, Any] | None, budget: int, *, unseen: Unseen = "initial", **samples: Any
    ) -> Batch | None:
        """Return a batch outside any pass; see ``TierCache.evaluate_batch``."""
        check_word("unseen", unseen, UNSEEN)
        what, read, error, missing_keys = "an evaluation of raw keys", None, None, dict[str, Any]()
        try:
            if keys is not None:
                read = self.exchange.used(self.read(None, keys, **samples))
                self._dense_columns = read.dense.shape[1]
                missing_keys = self.keys_of(read)
                self.check_budget(read.num_samples, missing_keys, budget)
        except Exception as caught:  # sent to all ranks
            error = caught
        part = _Part(0 if read is None else read.num_samples, True, read is None, UNSEEN.index(unseen))
        parts = self._exchange_parts(part, f"making a batch of {what}", error)
        if len(choices := {one.unseen for one in parts}) > 1:
            listed = ", ".join(repr(UNSEEN[one]) for one in sorted(choices))
            raise ValueError(f"ranks passed different values of unseen ({listed}): pass the same one on all ranks")
        if all(part.ended for part in parts):
            return None
        reader = self.exchange.load(lambda: missing_keys, budget, unseen)
        read = self.exchange.used(self._no_samples(None)) if read is None else read
        weight = self._weight([part.num_samples for part in parts])
        return self.exchange.named(self.missing.read_only(read, what, reader, weight, until_step=True))

    def _exchange_parts(self, part: _Part, what: str, error: Exception | None) -> list[_Part]:
        received = self.exchange.tell([*map(int, part)], what, error)
        return [_Part(samples, bool(loads), bool(ended), unseen) for samples, loads, ended, unseen in received]

    def _weight(self, sizes: Sequence[int]) -> float:
        """Return the weight of the mean loss of this rank's samples; 1 with one rank."""
        return self._ranks.size * (sizes[self._ranks.rank] / max(1, sum(sizes))) if len(sizes) > 1 else 1.0

    def _borrow(
        self, source: SubDataset, samples: RawSamples | None, missing: Missing, sizes: Sequence[int]
    ) -> tuple[RawSamples, Missing]:
        """Return this rank's samples; if it has none, the first sample of the first rank that has some."""
        lender = next(rank for rank, size in enumerate(sizes) if size)
        lent = self._first_sample(samples) if self._ranks.rank == lender and samples is not None else None
        lent, choice = self._ranks.all_gather_object((lent, missing), "lending a sample to ranks without")[lender]
        borrowed = None
        with self._ranks.raise_on_all("borrowing a sample"):
            if samples is None or not samples.num_samples:
                ragged = {feature.name for feature in self._schema.features if feature.hotness == "ragged"}
                keys = {name: tuple(one) if name in ragged else one for name, one in lent.pop("keys").items()}
                borrowed = self.read(source, keys, **lent, missing=choice)
        if borrowed is None:
            assert samples is not None
            return samples, missing
        return borrowed, choice

    def _first_sample(self, samples: RawSamples) -> dict[str, Any]:
        keys, weights = dict[str, Any](), {}
        for feature in self._schema.features:
            one = samples.features[feature.name].slice(0, 1)
            shape = (1, -1) if feature.hotness == "multi_hot" else (-1,)
            values = one.keys.reshape(shape).tolist()
            keys[feature.name] = (values, [0, one.keys.size]) if feature.hotness == "ragged" else values
            if one.weights is not None:
                weights[feature.name] = one.weights.reshape(shape).tolist()
        label, dense = samples.label[:1].tolist() or None, samples.dense[:1].tolist()
        return {"keys": keys, "weights": weights, "label": label, "dense": dense}

    def _no_samples(self, source: SubDataset | None) -> RawSamples:
        """Return no samples, with as many dense columns as the previous samples."""
        keys: dict[str, Any] = {}
        for feature in self._schema.features:
            none = np.empty(0, np.int64)
            keys[feature.name] = none.reshape(0, feature.length or 0) if feature.hotness == "multi_hot" else none
        return self.read(source, keys, dense=np.empty((0, self._dense_columns), np.float32))
