"""Exchange: brings rows to batches, and gradients to rows; local for one rank, `RankExchange` for several."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tiercache.kernels.arrays import address_of
from tiercache.kernels.cuda.sorting import LookupPositions, SortPlan
from tiercache.train.row_gradients import ended_unstepped
from tiercache.train.row_view import make_batch
from tiercache.train.table_lookup import Collated, Collations, FeaturePart
from tiercache.values.batch import Batch, BatchRequest
from tiercache.values.lookups import FeatureRuns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    import torch
    from numpy.typing import NDArray

    from tiercache.data.block_layout import BlockLayout, IdOrder
    from tiercache.data.dataset import DatasetView
    from tiercache.data.sub_dataset import SampleBlock
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.rows.backends.base import Backend, BatchUpload
    from tiercache.train.rank_exchange import RankExchange
    from tiercache.train.raw_samples import RawSamples
    from tiercache.train.row_optimizer import RowOptimizer
    from tiercache.train.row_view import RowView
    from tiercache.values.ids import Array
    from tiercache.values.lookups import RowReader, Unseen

Exchange: TypeAlias = "LocalExchange | RankExchange"


class _MadeBatch(NamedTuple):
    """A batch and its upload."""

    batch: Batch
    upload: BatchUpload


class _Plan(NamedTuple):
    """The collation of the blocks of one layout."""

    num_trained: int  # number of parts that had been trained when it was planned
    sort: SortPlan | None
    parts: Sequence[tuple[Any, ...]]
    """Per key: starts, first bytes of ids, weights and offsets (None: absent), number of offsets, the run that has the
    ids, the index within the run, and the run's number of parts (None: not sorted)."""


def _sent(upload: BatchUpload, address: int, array: NDArray[Any]) -> Array:
    """Return an array of an uploaded block, at ``address``, on the device."""
    return upload.array(address_of(array) - address if array.size else 0, array.size, array.dtype).reshape(array.shape)


class LocalExchange:
    """The exchange of one rank: batches look up rows in place, and gradients wait there for the step."""

    bytes_sent = device_bytes = least_ahead = 0

    def __init__(
        self, ranks: AnyCommunicator, backend: Backend, optimizer: RowOptimizer, live_rows: Callable[[], RowReader]
    ) -> None:
        """live_rows: a method of the cache, held weakly; it returns a reader of current rows."""
        self.ranks = ranks
        self._backend, self._optimizer, self._live_rows = backend, optimizer, weakref.WeakMethod(live_rows)
        self.step, self.discard, self.expire = optimizer.step_rows, optimizer.discard, optimizer.gradients.expire
        self._seen: weakref.WeakValueDictionary[IdOrder, FeaturePart] = weakref.WeakValueDictionary()  # as modules live
        self._trained: weakref.WeakValueDictionary[IdOrder, FeaturePart] = weakref.WeakValueDictionary()
        self._plans: weakref.WeakKeyDictionary[BlockLayout, _Plan] = weakref.WeakKeyDictionary()

    @property
    def pending(self) -> bool:
        """True if gradients of a backward wait for their step."""
        return self._optimizer.pending

    @property
    def awaits_backward(self) -> bool:
        """True if rows were looked up for training, and neither a backward nor a step came since."""
        return self._optimizer.gradients.awaits_backward

    @property
    def ended_unstepped(self) -> str:
        """The error message if a pass ends between backward and step."""
        return ended_unstepped(len(self._optimizer.gradients.unstepped))

    def rest(self, *_: object) -> None:
        """Do nothing: no other rank exchanges anything."""

    prepare = open = wait = follow = close = rest

    def read(self, request: BatchRequest, rows: RowView, *, ahead: bool, by_owner: bool = False) -> Callable[[], Any]:
        """Return a function that makes a batch, with the ids of modules on the device."""
        return partial(self._make, request, rows, [*self._seen.items()])

    def _make(self, request: BatchRequest, rows: RowView, parts: Sequence[tuple[IdOrder, FeaturePart]]) -> _MadeBatch:
        upload = self._backend.upload()
        samples = request.source.read(request.places, upload, orders=tuple([key for key, _ in parts]))
        block = samples.block
        assert block is not None
        plan = self._plan(rows, parts, block)
        runs, collated = upload.send(block.places.column_bytes, block.places.device_bytes, plan.sort), {}
        for key, starts, ids, weights, offsets, num_offsets, order in plan.parts:
            num_ids = int(starts[-1])
            collated[key] = Collated(
                upload.array(ids, num_ids, np.int32), starts,
                None if offsets is None else upload.array(offsets, num_offsets, np.int64), None,
                None if weights is None else upload.array(weights, num_ids, np.float32),
                FeatureRuns(runs[order[0]], order[1], order[2]) if runs is not None and order and num_ids else None,
            )  # fmt: skip
        batch = make_batch(
            samples, rows, weight=samples.num_samples / request.step_samples, end=request.done,
            collations=Collations(self._seen, self._trained, samples.ids, collated),
            to_device=partial(_sent, upload, address_of(block.memory)),
        )  # fmt: skip
        return _MadeBatch(batch, upload)

    def _plan(self, rows: RowView, parts: Sequence[tuple[IdOrder, FeaturePart]], block: SampleBlock) -> _Plan:
        """Return how to collate and sort the parts of a block, across those of a group; computed once per layout."""
        layout, places = block.layout, block.places
        trains = rows.gradients is not None and self._backend.queues  # a CPU sorts in the step
        num_trained = len(self._trained) if trains else 0  # a trained part remains one as long as it lives
        found = self._plans.get(layout)
        if found is not None and found.num_trained == num_trained:
            return found
        groups: dict[int, list[LookupPositions]] = {}
        made = []
        for (key, part), pieces, starts in zip(parts, layout.order_pieces, places.starts, strict=True):
            order = None
            if trains and key in self._trained:
                spans = np.array([(rows.spans[table].start, rows.spans[table].stop) for table in part.tables])
                group = groups.setdefault(part.group, [])
                order = part.group, len(group)
                begin, firsts, sizes = places.begins[pieces.ids], spans[:, 0], spans[:, 1] - spans[:, 0]
                group.append(LookupPositions(begin, starts, firsts, sizes))
            made.append((key, starts, pieces, len(part.features) * layout.size + 1, order))
        numbers = {group: g for g, group in enumerate(groups)}
        found = _Plan(
            num_trained,
            SortPlan.of([*groups.values()]) if groups else None,
            [
                (
                    key, starts, *(None if one is None else places.begins[one] for one in pieces), num_offsets,
                    None if order is None else (numbers[order[0]], order[1], len(groups[order[0]])),
                )
                for key, starts, pieces, num_offsets, order in made
            ],
        )  # fmt: skip
        if layout.fixed is not None:
            self._plans[layout] = found
        return found

    def begin(
        self, read: Callable[[], Any] | Future[Any], rows: RowView, *, previous: object = None
    ) -> Callable[[], Any] | Future[Any]:
        """Return ``read``."""
        return read

    def finish(self, read: Callable[[], Any], rows: RowView, before: Callable[[], None] | None) -> Batch:
        """Return the batch, for torch's current stream. ``before`` is called first."""
        if before is not None:
            before()
        made: _MadeBatch = read()
        made.upload.receive()
        return made.batch

    def overlapped(self, begun: Iterator[Any], rows: RowView, before: Callable[[], None] | None) -> Iterator[Batch]:
        """Yield batches as ``finish`` returns them."""
        return (self.finish(read, rows, before) for read in begun)

    def tell(self, numbers: Sequence[int], what: str, error: Exception | None) -> list[list[int]]:
        """Return the numbers of every rank."""
        if error is not None:
            raise error
        return [list(numbers)]

    def raw(
        self,
        samples: RawSamples,
        rows: RowView,
        name: str,
        weight: float,
        modes: Mapping[str, str | None] | None = None,
    ) -> tuple[Batch, dict[str, NDArray[np.int32]] | None]:
        """Return the batch of samples, whose ids stay on the device, and local ids if the pass lacks some keys."""
        made = Batch(samples.label, samples.dense, samples.ids, rows, samples.num_samples, weight)
        return made, samples.places() if samples.lacking else None

    def used(self, samples: RawSamples) -> RawSamples:
        """Return all samples."""
        return samples

    def named(self, batch: Batch) -> Batch:
        """Return the batch, which has all features."""
        return batch

    def live_rows(self) -> Any:
        """Return a reader of any rows."""
        live_rows = self._live_rows()
        assert live_rows is not None, "the cache must be alive"
        return live_rows()

    def load(
        self, keys: Callable[[], Mapping[str, NDArray[np.int64]]], budget: int | None = None,
        unseen: Unseen = "initial",
    ) -> RowReader:  # fmt: skip
        """Return a reader of any rows."""
        reader: RowReader = self.live_rows()
        reader.unseen = unseen
        return reader

    def evaluating(self, passes: DatasetView) -> LocalExchange:
        """Return this exchange."""
        return self

    def clip(
        self, max_norm: float, optimizer: torch.optim.Optimizer | None, *, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Clip gradients; see `TierCache.clip_grad_norm_`."""
        ready = self._optimizer.ready(optimizer)
        squares = self._optimizer.squared_norm(self._optimizer.gradients.preview(ready, self._backend.gradient))
        return self._optimizer.clip(max_norm, optimizer, ready, squares, error_if_nonfinite=error_if_nonfinite)
