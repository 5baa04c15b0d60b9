"""Plain tensors of keys in forward: `Embedding` and `EmbeddingBag` take the inputs of torch's modules of these names.

With gradients a lookup trains rows of the pass, whose key set must have the keys. Without, the current row of any key
is read: on the device, on its way to the store, in host memory or in the store.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from tiercache.data.dataset_writer import as_keys
from tiercache.data.raw_batch import FeatureKeys
from tiercache.errors import KeyNotInPassError, RankError, StateError
from tiercache.train.raw_samples import RawSamples
from tiercache.train.table_module import check_within, refuse_reserved, refuse_trace, refuse_transform
from tiercache.values.ids import NoTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tiercache.schema import Feature
    from tiercache.train.passes import Pass
    from tiercache.train.raw_keys import RawKeys
    from tiercache.train.table_module import TableModule
    from tiercache.values.batch import Batch
    from tiercache.values.lookups import RowReader

_NONE = torch.empty(0, dtype=torch.float32, device="cpu")


class KeyInput(NamedTuple):
    """A plain tensor of keys, the input of a module of one feature."""

    keys: NDArray[np.int64]  # flat, in host memory
    offsets: NDArray[np.int64] | None  # (N + 1,) of bags; None: one vector for each key
    num_samples: int  # the first dimension of the tensor

    def without(self, key: int) -> tuple[KeyInput, NDArray[np.bool_]]:
        """Return the input without a key, and a mask of the others."""
        kept = self.keys != key
        ends = None if self.offsets is None else np.concatenate([[0], np.cumsum(kept)])[self.offsets]
        return KeyInput(np.ascontiguousarray(self.keys[kept]), ends, self.num_samples), kept


def row_input(feature: str, keys: torch.Tensor) -> KeyInput:
    """Return keys of any shape, or of a nested tensor, one by one. Raises TypeError or ValueError."""
    return KeyInput(_flat(feature, keys), None, int(keys.size(0)) if keys.ndim else 1)


def shaped_as(keys: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors (E, dim) in the shape of their keys, with one more dimension."""
    if not keys.is_nested:
        return vectors.view(*keys.shape, vectors.shape[1])
    if keys.layout == torch.jagged and keys.dim() == 2 and keys.is_contiguous():
        offsets = keys.offsets().to(vectors.device)  # type: ignore[attr-defined]
        return torch.nested.nested_tensor_from_jagged(vectors, offsets)
    every = keys.unbind()
    pieces = torch.split(vectors, [one.numel() for one in every])
    parts = [piece.view(*one.shape, vectors.shape[1]) for piece, one in zip(pieces, every, strict=True)]
    return torch.nested.as_nested_tensor(parts, layout=keys.layout)


def bag_input(feature: str, keys: torch.Tensor, offsets: torch.Tensor | None, *, has_last: bool = False) -> KeyInput:
    """Return bags of keys: (N, L), a nested tensor, or (E,) with offsets (N,), or (N + 1,) if ``has_last``."""
    if keys.is_nested:
        if offsets is not None:
            raise ValueError(f"offsets were given with a nested tensor of feature {feature!r}: it has its own")
        lengths = [one.numel() for one in keys.unbind()]
        return KeyInput(_flat(feature, keys), np.cumsum([0, *lengths]).astype(np.int64), len(lengths))
    flat = _flat(feature, keys)
    if keys.ndim == 2:
        if offsets is not None:
            raise ValueError(f"offsets were given with keys (N, L) of feature {feature!r}: leave them out")
        return KeyInput(flat, np.arange(keys.shape[0] + 1, dtype=np.int64) * keys.shape[1], int(keys.shape[0]))
    if keys.ndim != 1 or offsets is None:
        raise ValueError(
            f"the keys of feature {feature!r} have shape {tuple(keys.shape)}: expected (N, L), or (E,) with offsets "
            "(N,)"
        )
    begins = as_keys(f"the offsets of feature {feature!r}", offsets).copy()
    ends = begins if has_last else np.append(begins, flat.size)
    if ends.size < 1 or ends[0] != 0 or ends[-1] > flat.size or (np.diff(ends) < 0).any():
        raise ValueError(
            f"the offsets of feature {feature!r} are {tuple(offsets.shape)} for {flat.size} keys: they must begin with "
            "0, never decrease, and not exceed the number of keys"
        )
    return KeyInput(flat[: int(ends[-1])], ends, ends.size - 1)


def _flat(feature: str, keys: torch.Tensor) -> NDArray[np.int64]:
    if keys.is_nested:
        return np.concatenate([np.empty(0, np.int64), *(_flat(feature, one) for one in keys.unbind())])
    refuse_transform([feature])
    refuse_trace([feature])
    if keys.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"the keys of feature {feature!r} are {keys.dtype}: expected torch.int64 or torch.int32")
    found = np.ascontiguousarray(as_keys(f"the keys of feature {feature!r}", keys).reshape(-1))
    refuse_reserved(found, f"feature {feature!r}")
    return found


class PlainKeys:
    """Makes batches of one feature's keys, for one lookup. With several ranks collective, on the training thread."""

    def __init__(self, raw: RawKeys, source: Callable[[bool], tuple[Pass | None, int]]) -> None:
        """source: a method of the cache, held weakly: see `TierCache._lookup_source`."""
        self._raw, self._source = raw, weakref.WeakMethod(source)
        self._tables = {table.name: table for table in raw.tables}
        self.committed: RowReader | None = None  # reads the last commit where lookups must not be collective

    def batch(self, feature: Feature, plain: KeyInput, *, trains: bool, bound: int | None) -> Batch:
        """Return a batch with the rows of ``plain``: rows of the pass, or copies of current rows.

        Raises IndexError for a key outside [0, ``bound``), KeyNotInPassError for one that the pass lacks, StateError
        outside a pass, BudgetError above ``eval_budget``, and RankError if ranks look up different features.
        """
        if (source := self._source()) is None:
            raise StateError("the cache of this module is gone: keep a reference to it while its model looks up keys")
        current, budget = source(trains)
        if trains and self.committed is not None:
            raise StateError(
                f"keys of table {feature.table!r} were looked up with gradients inside cache.lookups(local=True), "
                "where rows of the last commit are read: look them up under torch.no_grad()"
            )
        if torch.is_grad_enabled() and current is not None and (loaded := current.loaded) is not None:
            loaded.look_up(self._tables[feature.table], plain.keys, trains=trains)
        keys = FeatureKeys(plain.keys, plain.offsets, None)
        if trains:
            return self._trained(feature, keys, plain.num_samples, bound, current)
        return self._read(feature, keys, plain.num_samples, bound, budget)

    def _trained(
        self, feature: Feature, keys: FeatureKeys, num_samples: int, bound: int | None, current: Pass | None
    ) -> Batch:
        error, samples = None, None
        try:
            check_within(keys.keys, bound, feature.table)
            if current is None:
                raise StateError(
                    f"keys of table {feature.table!r} were looked up with gradients outside a pass: train inside "
                    "`for p in cache.passes(...)`, or look them up under torch.no_grad()"
                )
            current.begin_plain()
            found, ids = self._raw.find(current.source.whole, {feature.name: keys})
            missing = found.missing()
            if missing.count:
                key, (number, batch, advice) = int(keys.keys[missing.first]), _batch_lacking(current)
                raise KeyNotInPassError(
                    f"{missing.count:,} of {keys.keys.size:,} keys of table {feature.table!r} are not in the key set "
                    f"of pass {current.index} (the first is {key}, of feature {feature.name!r}, in {batch}): {advice}, "
                    "or look up keys under torch.no_grad(), which trains no row",
                    table=feature.table,
                    key=key,
                    batch=number,
                )
            samples = RawSamples(num_samples, {feature.name: keys}, _NONE, _NONE, ids, lacking=False)
        except Exception as caught:  # raised on all ranks
            error = caught
        samples_of_all = self._check_same(feature, num_samples, trains=True, error=error)
        assert current is not None
        assert samples is not None
        name = f"a lookup of feature {feature.name!r} in pass {current.index}"
        made, _ = self._raw.exchange.raw(samples, current.rows, name, 1.0, modes={feature.name: None})
        return replace(made, end=current.count_plain(samples_of_all))

    def _read(self, feature: Feature, keys: FeatureKeys, num_samples: int, bound: int | None, budget: int) -> Batch:
        error, requested = None, dict[str, Any]()
        try:
            check_within(keys.keys, bound, feature.table)
            if keys.keys.size:
                requested = {feature.table: np.unique(keys.keys)}
            self._raw.check_budget(num_samples, requested, budget)
        except Exception as caught:  # raised on all ranks
            error = caught
        reader = self.committed
        if reader is None:
            self._check_same(feature, num_samples, trains=False, error=error)
            reader = self._raw.exchange.load(lambda: requested, budget, "initial")
        elif error is not None:
            raise error
        samples = RawSamples(num_samples, {feature.name: keys}, _NONE, _NONE, {}, lacking=True)
        return self._raw.missing.read_only(samples, "a lookup without gradients", reader)

    def _check_same(self, feature: Feature, num_samples: int, *, trains: bool, error: Exception | None) -> int:
        """Return the samples of all ranks. Raises RankError if other lookups differ in more, or any ``error``."""
        own = [crc32(feature.name.encode()), int(trains)]
        calls = self._raw.exchange.tell([*own, num_samples], "looking up keys", error)
        if others := [rank for rank, one in enumerate(calls) if one[:2] != own]:
            how = "with" if trains else "without"
            raise RankError(
                f"rank {others[0]} made a different lookup while this one looked up feature {feature.name!r} {how} "
                "gradients: all ranks must make the same lookups in the same order"
            )
        return sum(one[2] for one in calls)


def _batch_lacking(current: Pass) -> tuple[int, str, str]:
    """Return the number and name of a batch whose keys the pass lacks, and advice."""
    loaded = current.loaded
    if loaded is None or (batch := loaded.current) is None:
        number = current.batches_done
        return number, f"batch {number}", "pass samples of this pass, write key sets that have all keys"
    return current.ledger.num_made - 1, loaded.name_of(batch), (
        "the data or random numbers differ from the recording, so record key sets again, draw negatives with "
        "p.sample(), or record the dataset's draws with same_draws=True"
    )  # fmt: skip


def refuse_weight(name: str, table: str) -> None:
    """Raise AttributeError for a new parameter of a module if it is the weight."""
    if name == "weight":
        raise AttributeError(
            f"the weight of table {table!r} was assigned, but its rows are in the store and on the device: assign it "
            "before tc.convert, or import the rows into a new store with tc.import_store"
        )


def table_weight(module: TableModule) -> TableWeight:
    """Return the replacement of ``weight`` for a module that looks up one table."""
    return TableWeight(module.anchor, (module.num_embeddings, module.dims[0]), module.tables[0])


class TableWeight(NoTensor):
    """The ``.weight`` of a module: device, dtype and shape of its table, without values; can freeze the module."""

    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    ndim: int
    _table: str
    _anchor: torch.Tensor
    _error = AttributeError

    def __init__(self, anchor: torch.Tensor, shape: tuple[int, int], table: str) -> None:
        for name, value in {
            "device": anchor.device, "dtype": anchor.dtype, "shape": torch.Size(shape), "ndim": 2, "_table": table,
            "_anchor": anchor,
        }.items():  # fmt: skip
            object.__setattr__(self, name, value)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one of its numbers."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return 2."""
        return 2

    def numel(self) -> int:
        """Return the maximum number of elements of the table."""
        return self.shape.numel()

    @property
    def requires_grad(self) -> bool:
        """True if the rows are trained."""
        return self._anchor.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> TableWeight:
        """Train the rows or freeze them, as the module's ``requires_grad_`` does."""
        self._anchor.requires_grad_(requires_grad)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "requires_grad":
            raise AttributeError(self._refusal(f".{name} = ..."))
        self.requires_grad_(value)

    def _refusal(self, what: str) -> str:
        return (
            f"the weight of table {self._table!r} has no {what.removeprefix('.')} here: its rows are in the store and "
            "on the device, so look up keys with the module, read rows with Store.lookup(), and set their initial "
            "values with the initializer of the table"
        )

    def __repr__(self) -> str:
        return f"TableWeight({self._table!r}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"
