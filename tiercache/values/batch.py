"""A batch, one feature of a batch, and a request for a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tiercache.values.compiled import not_compiled, number_batch
from tiercache.values.ids import NoTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tiercache.values.ids import FeatureIds, FoundIds


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class Batch:
    """Samples of one pass, and the ids that modules look up.

    ``label`` (N,) and ``dense`` (N, dense features) are float32 on the training device. A batch is also a mapping of
    names: ``batch["price"]``, ``batch.keys()``, ``name in batch``; but ``len(batch)`` is N. Ids stay in host memory
    until a module looks them up. Ids of raw keys that were found on a GPU are copied to the host when you read them.
    """

    label: torch.Tensor
    dense: torch.Tensor
    ids: Mapping[str, FeatureIds | FoundIds]
    """Local ids by feature. They are valid only together with ``rows``, during their pass."""
    rows: Any
    """A `RowView`."""
    num_samples: int
    weight: float = 1.0
    """The weight of this batch's mean loss: 1 with one rank; W * n / N for n of the N samples of W ranks."""
    pooled: Mapping[str, Any] = field(default_factory=dict)
    """By name, features that another rank pooled; ``ids`` has all others that a module looks up."""
    end: int = 0
    """Samples of the pass up to the end of the batch, of all ranks."""
    collations: Any = field(default=None, repr=False)
    """Ids on the device, if the batch was made ahead. To change ``ids`` use ``dataclasses.replace``: writes to their
    arrays may be too late."""

    number: torch.Tensor | None = None
    """(N,) int64, all equal: the number by which compiled models find the batch."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Several labels and the columns that the schema keeps, by name: (N,) in their own dtypes, on the same device."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", number_batch(self, self.number))

    def __len__(self) -> int:
        return self.num_samples

    @property
    def features(self) -> Mapping[str, JaggedIds]:
        """The features by name: the input of an `EmbeddingBag` or `Embedding` of one feature."""
        return _Features(self)

    def keys(self) -> tuple[str, ...]:
        """Return the names that ``batch[name]`` takes: features, dense columns, the label, and kept columns."""
        return tuple(dict.fromkeys(name for name, _ in self._parts()))

    def __getitem__(self, name: str) -> torch.Tensor | JaggedIds:
        """Return a feature as in ``features``, or a column (N,); so a batch may be given as ``model(**batch)``.

        Raises KeyError for an unknown name, and for one that several of them have.
        """
        found = [make for other, make in self._parts() if other == name]
        if not found:
            raise KeyError(f"the batch has no {name!r}: it has {', '.join(self.keys())}")
        if found[1:]:
            raise KeyError(
                f"the batch has a feature and a column {name!r}: use batch.features[{name!r}], batch.dense or "
                "batch.label"
            )
        return found[0]()

    def get(self, name: str, default: Any = None) -> Any:
        """Return ``batch[name]``, or ``default`` for an unknown name."""
        return self[name] if name in self.keys() else default

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def _parts(self) -> Iterator[tuple[str, Callable[[], torch.Tensor | JaggedIds]]]:
        """Yield each name, and a function that returns its value."""
        features, schema = self.features, self.rows.schema
        yield from ((name, partial(features.__getitem__, name)) for name in features)
        if schema is not None:
            dense = schema.dense if len(schema.dense) == self.dense.shape[-1] else ()
            yield from ((one.column, partial(self.dense.select, 1, i)) for i, one in enumerate(dense))
            if schema.label is not None and len(self.label) == self.num_samples:
                yield schema.label, lambda: self.label
        yield from ((name, partial(self.columns.__getitem__, name)) for name in self.columns)

    def __repr__(self) -> str:
        return f"Batch({self.num_samples} samples of {self.rows.name}: {', '.join([*self.ids, *self.pooled])})"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch with ``label``, ``dense`` and kept columns on ``device``. Ids move by themselves."""
        return self._mapped(lambda one: one.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch with ``label``, ``dense`` and kept columns in pinned memory, if there is a GPU."""
        if self.label.device.type != "cpu" or not torch.cuda.is_available():
            return self
        return self._mapped(torch.Tensor.pin_memory)

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return the batch with tensors of samples changed, or itself if none is."""
        label, dense = change(self.label), change(self.dense)
        columns = {name: change(one) for name, one in self.columns.items()}
        is_same = label is self.label and dense is self.dense
        if is_same and all(one is self.columns[name] for name, one in columns.items()):
            return self
        return replace(self, label=label, dense=dense, columns=columns)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class JaggedIds(NoTensor):
    """The local ids of one feature of a batch, instead of a plain model's tensor of keys.

    ``ids == key`` and ``ids != key`` are as for that tensor, on the training device: bool (N,), (N, length) for lists
    of fixed length, (ids,) for ragged ones. ``shape`` and ``size`` are that tensor's, if the length is the same for
    all samples. Any other operation of a tensor raises TypeError.
    """

    batch: Batch
    feature: str

    @property
    def values(self) -> NDArray[np.int32]:
        """All ids, sample after sample: int32 (ids,), in host memory."""
        return self.batch.ids[self.feature].ids

    @property
    def offsets(self) -> NDArray[np.int64] | None:
        """The start of each sample's ids: int64 (N + 1,); None if each sample has one id."""
        return self.batch.ids[self.feature].offsets

    @property
    def weights(self) -> NDArray[np.float32] | None:
        """A weight for each id: float32 (ids,); None if all are 1."""
        return self.batch.ids[self.feature].weights

    @property
    def shape(self) -> torch.Size:
        """(N,), or (N, length) for lists of fixed length. Raises AttributeError for ragged lists."""
        schema, ids = self.batch.rows.schema, self.batch.ids.get(self.feature)
        length = None if schema is None else schema.feature(self.feature).length
        is_ragged = schema is not None and schema.feature(self.feature).hotness == "ragged"
        if length is None and (is_ragged or (ids is not None and ids.offsets is not None)):
            raise AttributeError(self._refusal(".shape"))
        return torch.Size([self.batch.num_samples] if length is None else [self.batch.num_samples, length])

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return ``shape``, or one number of it. Raises AttributeError for ragged lists."""
        return self.shape if dim is None else self.shape[dim]

    def to(self, *_: object, **__: object) -> JaggedIds:
        """Return it unchanged: ids move by themselves."""
        return self

    __hash__ = NoTensor.__hash__

    @property
    def _label(self) -> str:
        return f"feature {self.feature!r} of a batch"

    def __eq__(self, other: object) -> Any:
        """Return where the key is ``other``, a whole number. Raises TypeError for anything else."""
        return self._equal(other)

    def __ne__(self, other: object) -> Any:
        """Return where the key is not ``other``, a whole number. Raises TypeError for anything else."""
        return ~self._equal(other)

    @not_compiled
    def _equal(self, key: object) -> torch.Tensor:
        if isinstance(key, bool | np.bool_) or not isinstance(key, int | np.integer):
            raise TypeError(self._refusal(f"comparison with {key!r:.80}"))
        rows = self.batch.rows
        found = torch.from_numpy(rows.is_key(self.feature, self.batch.ids[self.feature], int(key)))
        length = None if rows.schema is None else rows.schema.feature(self.feature).length
        return (found if length is None else found.view(-1, length)).to(rows.backend.device)

    def __repr__(self) -> str:
        return f"JaggedIds({self.feature!r} of {self.batch.num_samples} samples)"


class _Features(Mapping[str, JaggedIds]):
    """The features of a batch, by name."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._names: tuple[str, ...] = getattr(batch.ids, "features", None) or tuple(batch.ids)
        """The names of the schema, in its order, on any number of ranks."""

    def __getitem__(self, name: str) -> JaggedIds:
        if name not in self._names:
            raise KeyError(f"the batch has no feature {name!r}: it has {', '.join(self)}")
        return JaggedIds(self._batch, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class BatchRequest(NamedTuple):
    """A batch to be made."""

    source: Any
    """The sub-dataset, a `SubDatasetView`."""
    places: NDArray[np.int64]
    """The places of its samples in the pass, for all ranks."""
    step_samples: int
    """Samples of its step: more than its own if it is a micro-batch."""
    done: int = 0
    """Samples of the pass up to the end of the batch."""
