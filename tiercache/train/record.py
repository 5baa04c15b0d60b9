"""Recording key sets: a loader is run once to find the keys that each of its batches looks up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from tiercache.data.manifest import Recording
from tiercache.data.recording import RecordingPlan, write_recording
from tiercache.errors import DatasetError
from tiercache.sizes import parse_bytes
from tiercache.store.files import local_path
from tiercache.store.records import integer, positive
from tiercache.train.batches import in_order, sample_order
from tiercache.train.key_recorder import KeyRecorder, schema_of
from tiercache.train.loader_batches import BatchIndices, Sampling, SeededDataset, as_is, made_batches, own_generator
from tiercache.train.random_numbers import OwnNumbers, kept_numbers, mixed
from tiercache.train.table_module import named_table_modules

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    from numpy.typing import NDArray
    from torch import nn

    from tiercache.data.dataset import PassDataset
    from tiercache.data.extraction_progress import ExtractionProgress
    from tiercache.data.recording import RecordedBatch

_BATCH, _ORDER = 4, 5  # purposes of random numbers, the first word of `mixed`


def record_key_sets(
    model: nn.Module,
    loader: DataLoader[Any] | Callable[[], Iterable[Any]],
    out: str | os.PathLike[str],
    *,
    device_budget: int | str,
    call: Callable[[nn.Module, Any], object] | None = None,
    keys: Callable[[Any], Mapping[str, Any]] | None = None,
    min_count: int = 1,
    same_draws: bool = False,
    seed: int = 0,
    devices: int = 1,
    memory_limit: int | str = "1GiB",
    progress: bool | Callable[[ExtractionProgress], None] = True,
) -> PassDataset:
    """Run a loader once, and write the keys that its batches look up: a dataset of key sets and sample indices.

    Each batch is passed to a copy of ``model`` whose embeddings return synthetic rows; its dense part runs as it is.
    The model, its buffers, the generators of random numbers, the loader and its sampler are restored afterwards. A
    sub-dataset has as many batches, in the loader's order, as fit the device budget. In training, ``Pass.loader``
    yields exactly its samples.

    A loader with a default sampler (``shuffle=False`` or ``True``) is recorded by the index of each sample: in order,
    or in an order seeded by ``seed``. Any other sampler is run with generators seeded by ``seed``, and is recorded in
    its order.

    Args:
        model: a model with tiercache's embeddings, such as `convert` returns. Its lookups with gradients enabled are
            recorded; lookups under ``no_grad`` find any key, so those are not.
        loader: a `torch.utils.data.DataLoader` of a dataset with ``len()`` and indices. Or a function that makes an
            iterable of batches, such as a DataLoader of an `IterableDataset`, which must give the same batches each
            time: ``lambda: loader``. Its batches are recorded and later trained in order.
        out: the directory for the dataset.
        device_budget: the device memory for the rows of a pass, their optimizer state and slot maps, as in `extract`.
        call: ``call(model, batch)`` runs the model on a batch of the loader as your loop does, without the loss.
            Default: ``model(batch)`` for a tensor, a mapping or an object.
        keys: ``keys(batch)`` returns the keys of a batch, by name of table or module: one tensor of any shape or a
            tuple of several, padding included. The model does not run then, so lookups may use other keys than the
            batch alone has: add negatives, for example.
        min_count: keys with fewer occurrences share the out-of-vocabulary row of their table. The loader runs twice.
            Converted modules must have no weights then: create them on "meta".
        same_draws: whether ``dataset[i]`` and the collation draw the same random numbers here and in each epoch of
            training, seeded by ``seed`` and the sample, so that negatives that a dataset draws are those recorded.
            False: each epoch draws new ones. Drawing the same costs about 20 microseconds per sample.
        seed: of the order and of all random numbers.
        devices: the number of devices with that budget that train a pass together, as in `extract`.
        memory_limit: host memory for counting keys, with ``min_count``.
        progress: True shows a bar, False nothing; a function is called with each ExtractionProgress.

    Memory: up to 100 bytes for each key of a sub-dataset, and 8 for each of its samples if they are shuffled. After a
    kill, the same call resumes from the last closed sub-dataset; a finished dataset of the same arguments is returned
    unchanged. Not collective: record before you start the ranks.

    Raises:
        TypeError: the loader is a generator, an iterator, or neither a DataLoader nor a function; or the model cannot
            be called on its batches without ``call``.
        ValueError: the model has no tiercache embedding, or an argument is invalid.
        DatasetError: the loader yields no batches, or a batch without keys; or the sampler's order has changed since
            the run that was stopped.
        IndexError: a key exceeds the ``num_embeddings`` of its module.
        BudgetError: one batch exceeds the budget.
        ExtractionError: ``out`` holds a dataset of other arguments, or another process writes it.
    """
    schema = schema_of(model)
    min_count, devices = positive(min_count, "min_count"), positive(devices, "devices")
    seed = integer(seed, "seed")
    if call is not None and keys is not None:
        raise ValueError("call= and keys= exclude each other: pass keys=, which needs no forward, or call=")
    if min_count > 1 and (weighted := [name for name, one in named_table_modules(model) if one.weights]):
        raise ValueError(
            f"min_count is {min_count}, but module {weighted[0]!r} has a weight for each key, including those "
            'that would share a row: create the module on "meta" (device="meta") before you convert it, or omit '
            "min_count"
        )
    batches = _source(loader, seed, same_draws=same_draws)
    recording = Recording(
        batches=0, lookups=0, batch_size=batches.batch_size, first_batch=0, dataset_length=batches.length,
        seed=seed, same_draws=same_draws, unbatched=batches.unbatched,
    )  # fmt: skip
    facts = {"seed": seed, "same_draws": same_draws, "by": "forward" if keys is None else "keys", **batches.facts}
    plan = RecordingPlan(
        schema=schema, device_bytes=parse_bytes(device_budget), devices=devices, min_count=min_count,
        memory_bytes=parse_bytes(memory_limit), facts=facts, recording=recording,
    )  # fmt: skip
    folder = local_path(out, "a dataset that one machine writes")
    with kept_numbers(devices=True):
        recorder = KeyRecorder(model, schema, call=call, keys=keys, seed=seed)
        return write_recording(folder, plan, partial(_recorded, batches, recorder), progress)


def _source(loader: Any, seed: int, *, same_draws: bool) -> _Samples | _Iterable:
    if isinstance(loader, DataLoader):
        if isinstance(loader.dataset, IterableDataset):
            raise TypeError(
                "the loader has an IterableDataset, whose samples have no indices: pass a function that makes the "
                "same batches each time, such as lambda: loader"
            )
        return _Samples(loader, seed, same_draws=same_draws)
    if hasattr(loader, "__next__"):
        raise TypeError(
            f"the loader is a {type(loader).__name__}, which yields its batches once, but training needs them again in "
            "each epoch: pass a DataLoader, or a function that makes a new iterable, such as lambda: batches()"
        )
    if not callable(loader):
        raise TypeError(
            f"the loader is a {type(loader).__name__}: pass a torch.utils.data.DataLoader, or a function that makes an "
            "iterable of the same batches each time, such as lambda: loader"
        )
    if same_draws:
        raise ValueError(
            "same_draws was given with a function that makes batches: these have no indices to seed random numbers "
            "with, and must be the same each time anyway"
        )
    return _Iterable(loader, seed)


class _Samples:
    """The batches of a DataLoader over a dataset with indices."""

    def __init__(self, loader: DataLoader[Any], seed: int, *, same_draws: bool) -> None:
        self._loader, self._seed, self._sampling = loader, seed, Sampling.of(loader)
        self._sample_seed = seed if same_draws else None
        self._is_batched = loader.batch_sampler is not None
        try:
            self.length: int | None = len(loader.dataset)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(
                f"the loader's dataset, a {type(loader.dataset).__name__}, has no len(): add one, or pass a "
                "function that makes the loader, such as lambda: loader"
            ) from error
        self.batch_size = self._sampling.batch_size if self._order() is not None else None  # None: batches vary in size
        self.unbatched = None if self.batch_size is not None else not self._is_batched
        self.facts = {
            "dataset_length": self.length,
            "batch_size": self._sampling.batch_size,
            "sampler": type(self._sampling.sampler).__name__,
            "drop_last": self._sampling.drop_last,
        }

    def indexed(self, first: int, skipped: Callable[[NDArray[np.int64]], None]) -> Iterator[tuple[Any, Any]]:
        """Yield the indices and the batch of each batch from number ``first`` on."""
        old, pending = self._loader, list[Any]()
        lists = self._lists()
        for _, indices in zip(range(first), lists, strict=False):
            skipped(indices)

        def seeded() -> Iterator[BatchIndices]:
            for indices in lists:
                pending.append(indices)
                yield BatchIndices(indices.tolist(), mixed(self._seed, _BATCH, int(indices[0])))

        assert old.collate_fn is not None
        dataset: Any = SeededDataset(
            old.dataset, old.collate_fn, is_batched=self._is_batched, sample_seed=self._sample_seed
        )
        workers: dict[str, Any] = {}
        if old.num_workers:
            workers = {"multiprocessing_context": old.multiprocessing_context, "prefetch_factor": old.prefetch_factor}
        made: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=seeded(), collate_fn=as_is, num_workers=old.num_workers, timeout=old.timeout,
            worker_init_fn=old.worker_init_fn, generator=own_generator(self._seed), **workers,
        )  # fmt: skip
        for batch in made:
            yield pending.pop(0), batch

    def _order(self) -> Any:
        """Return the order of samples that torch's own samplers have; None for another sampler."""
        sampler = self._sampling.sampler
        if not self._sampling.is_plain or type(sampler) not in (SequentialSampler, RandomSampler):
            return None
        if len(sampler.data_source) != self.length or len(sampler) != self.length:
            return None  # it samples something else than the dataset
        if type(sampler) is SequentialSampler:
            return in_order
        if not sampler.replacement:
            return sample_order(
                self.length, seed=mixed(self._seed, _ORDER) >> 1, epoch=0, sub_dataset=0, shuffle=True
            )  # fmt: skip
        return None

    def _lists(self) -> Iterator[NDArray[np.int64]]:
        order, loader = self._order(), self._loader
        if order is not None:
            assert self.length is not None
            size = self._sampling.batch_size or 1
            for first in range(0, self.length, size):
                last = min(self.length, first + size)
                if last - first == size or not self._sampling.drop_last:
                    yield order(first, last)
            return
        own = OwnNumbers(mixed(self._seed, _ORDER))
        within = getattr(loader.batch_sampler, "sampler", None)
        parts = (loader, loader.sampler, loader.batch_sampler, within)
        generators: list[Any] = [getattr(part, "generator", None) for part in parts]
        kept = [(one, one.get_state()) for one in generators if hasattr(one, "get_state")]
        try:
            with own.used():
                lists = iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
            while True:
                with own.used():
                    indices = next(lists, None)
                if indices is None:
                    return
                yield _as_indices([indices] if loader.batch_sampler is None else indices)
        finally:
            for generator, state in kept:
                generator.set_state(state)


def _as_indices(indices: Any) -> NDArray[np.int64]:
    found = np.asarray(indices)
    if found.dtype.kind not in "iu" or found.ndim != 1 or not found.size:
        raise DatasetError(
            f"the loader's sampler yields {str(indices)[:60]}: samples are recorded by their index, so it must yield "
            "integers, at least one for each batch; otherwise pass a function that makes the loader"
        )
    return found.astype(np.int64)


class _Iterable:
    """The batches of an iterable that a function makes."""

    batch_size = length = unbatched = None

    def __init__(self, make: Callable[[], Iterable[Any]], seed: int) -> None:
        self._make, self._seed = make, seed
        self.facts: dict[str, Any] = {"dataset_length": None}

    def indexed(self, first: int, skipped: object) -> Iterator[tuple[Any, Any]]:
        """Yield None and the batch of each batch from number ``first`` on."""
        for number, batch in enumerate(made_batches(self._make, self._seed)):
            if number >= first:
                yield None, batch


def _recorded(
    batches: _Samples | _Iterable, recorder: KeyRecorder, first: int, skipped: Callable[[NDArray[np.int64]], None]
) -> Generator[RecordedBatch, None, None]:
    """Yield the keys of the batches from number ``first`` on, as a `BatchSource`."""
    for number, (indices, batch) in enumerate(batches.indexed(first, skipped), first):
        yield recorder.record(number, batch, indices)
