"""Samples with raw keys: checked against the schema, and found in the key set of the pass being trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from tiercache.errors import BudgetError, KeyNotInPassError
from tiercache.sizes import format_bytes
from tiercache.training.key_finder import KeyFinder
from tiercache.training.missing_rows import MISSING
from tiercache.training.raw_keys import feature_keys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.backends.base import Backend
    from tiercache.data.dataset import SubDataset
    from tiercache.data.raw_batch import FeatureKeys
    from tiercache.schema import Schema
    from tiercache.store.table import Table
    from tiercache.training.key_finder import IndexPlan
    from tiercache.training.missing_rows import Missing
    from tiercache.values.ids import Found, FoundIds

SCRATCH_BYTES = 40  # for each row that is read, beside it


@dataclass(frozen=True, slots=True, eq=False)
class RawSamples:
    """Samples as a loader gave them: ``label`` (N,) and ``dense`` (N, columns) are on the device."""

    num_samples: int
    features: dict[str, FeatureKeys]
    """By name, in the order of the schema."""
    label: torch.Tensor
    dense: torch.Tensor
    ids: dict[str, FoundIds]
    """By feature, local ids of the pass; -1 for keys that it lacks. Empty where no pass was looked at."""
    lacking: bool
    """Whether the pass lacks any of the keys."""

    def places(self) -> dict[str, NDArray[np.int32]]:
        """Return the local ids of each feature, in host memory; waits for the search. Without a pass all are -1."""
        if self.ids:
            return {name: found.ids for name, found in self.ids.items()}
        return {name: np.full(feature.keys.size, -1, np.int32) for name, feature in self.features.items()}


class RawReader:
    """Reads the samples that loaders give; on the training thread."""

    def __init__(self, schema: Schema, tables: Sequence[Table], backend: Backend, index: IndexPlan) -> None:
        self._schema, self._tables, self._backend = schema, {table.name: table for table in tables}, backend
        self._table_of = {feature.name: feature.table for feature in schema.features}
        self._finder = KeyFinder(tables, backend, index)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of keys."""
        return self._finder.index_bytes

    def close(self) -> None:
        """Let go of the index."""
        self._finder.close()

    def find(self, source: SubDataset, features: dict[str, FeatureKeys]) -> tuple[Found, dict[str, FoundIds]]:
        """Return the local ids of keys in the key sets of ``source``, of all features and by feature."""
        return self._finder.find(source, features, self._table_of)

    def read(
        self,
        source: SubDataset | None,
        pass_name: str,
        keys: Mapping[str, Any],
        *,
        number: int = 0,
        missing: Missing = "load",
        weights: Mapping[str, Any] | None = None,
        label: Any = None,
        dense: Any = None,
    ) -> RawSamples:
        """Return the samples of batch ``number`` of a pass, by its name, that trains ``source``; None: of no pass.

        Raises KeyNotInPassError where ``missing`` is "error" and a key is, and what ``Pass.batch`` promises.
        """
        if missing not in MISSING:
            raise ValueError(f"missing is {missing!r}: it must be one of {', '.join(map(repr, MISSING))}")
        num_samples, features = feature_keys(self._schema, keys, weights, (label, dense))
        found, ids = (None, {}) if source is None else self._finder.find(source, features, self._table_of)
        brought = self._bring("label", label, torch.empty(0, dtype=torch.float32, device="cpu"), (num_samples,))
        columns = self._bring(
            "dense", dense, torch.empty(num_samples, 0, dtype=torch.float32, device="cpu"), (num_samples, -1)
        )
        lost = None if found is None else found.missing()  # all is on its way: what is waited for is the search
        if lost is not None and lost.count and missing == "error":
            self._refuse(lost.first, features, ids, pass_name, number)
        return RawSamples(num_samples, features, brought, columns, ids, lost is None or lost.count > 0)

    def keys_of(self, samples: RawSamples) -> dict[str, NDArray[np.int64]]:
        """Return by table the keys that samples have and their pass lacks, each once, ascending; none are left out."""
        found: dict[str, list[NDArray[np.int64]]] = {}
        if samples.lacking:
            for name, places in samples.places().items():
                found.setdefault(self._table_of[name], []).append(samples.features[name].keys[places < 0])
        return {table: np.unique(np.concatenate(keys)) for table, keys in found.items() if sum(map(len, keys))}

    def check_budget(self, num_samples: int, keys: Mapping[str, NDArray[np.int64]], budget: int) -> None:
        """Raise BudgetError where the rows of an evaluation's keys, by table and each once, exceed ``budget`` bytes."""
        wanted = sum(some.size * (4 * self._tables[name].dim + SCRATCH_BYTES) for name, some in keys.items())
        if wanted > budget:
            raise BudgetError(
                f"the rows of {num_samples:,} samples take {format_bytes(wanted)}, but eval_budget is "
                f"{format_bytes(budget)}: give smaller batches, or raise eval_budget (and host_budget, which holds it)"
            )

    def _bring(self, what: str, given: Any, absent: torch.Tensor, shape: tuple[int, int] | tuple[int]) -> torch.Tensor:
        """Return numbers on the device; ``absent`` where none were given."""
        found = absent if given is None else _numbers(what, given, shape)
        if found.device == self._backend.device:
            return found
        return self._backend.tensor(self._backend.to_device(found.numpy()))

    def _refuse(
        self, entry: int, features: dict[str, FeatureKeys], ids: dict[str, FoundIds], pass_name: str, number: int
    ) -> NoReturn:
        """Raise KeyNotInPassError of an entry, counted over all features."""
        name, found = next((name, found) for name, found in ids.items() if found.first <= entry < found.last)
        at, table = entry - found.first, self._table_of[name]
        key = int(features[name].keys[at])
        wrapped = "" if not -(1 << 31) <= key < 0 else "; ids from 2**31 on are negative where they were int32"
        raise KeyNotInPassError(
            f"batch {number} of {pass_name} has the key {key} of table {table!r} at entry {at} of feature "
            f"{name!r}, and the key set of its pass lacks it: give samples of this pass, write key sets that have "
            f"all keys, or choose missing='load', 'init' or 'zero', which train no row for it{wrapped}",
            table=table,
            key=key,
            batch=number,
        )


def _numbers(what: str, given: Any, shape: tuple[int, int] | tuple[int]) -> torch.Tensor:
    try:
        if not isinstance(given, torch.Tensor):
            given = np.ascontiguousarray(
                given, np.float32
            )  # torch takes neither negative strides nor other byte orders
        found = (given if isinstance(given, torch.Tensor) else torch.from_numpy(given)).detach().to(torch.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is no array of numbers ({error}): give one, or a tensor") from error
    if found.is_sparse or found.is_meta:
        raise ValueError(f"{what} is a sparse tensor, or one without values: give a dense tensor")
    if found.ndim != len(shape) or any(s not in (-1, n) for s, n in zip(shape, found.shape, strict=True)):
        expected = "(N,)" if len(shape) == 1 else "(N, columns)"
        raise ValueError(f"{what} has shape {tuple(found.shape)}: give {expected} for the batch's {shape[0]} samples")
    if found.device.type == "cpu" and not found.isfinite().all():  # on a GPU, looking would wait for it
        at = int((~found.isfinite()).nonzero()[0, 0])
        raise ValueError(f"{what} of sample {at} is not finite: give numbers that are, or leave the sample out")
    return found
