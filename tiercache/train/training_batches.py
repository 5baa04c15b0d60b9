"""The batches of all passes, as one sized iterable or by epoch, for trainers and loops that do not know passes."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from tiercache.errors import StateError
from tiercache.store.records import positive
from tiercache.train.batches import check_epochs, check_size
from tiercache.train.loader_batches import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tiercache.train.cache import TierCache
    from tiercache.train.pass_loop import PassLoop
    from tiercache.train.passes import Pass

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor",
)  # fmt: skip
"""DataLoader settings that the loaders of passes also use."""
_IN_ANY_ORDER = ("SequentialSampler", "RandomSampler")  # recorded samplers whose samples a loop may shuffle or not


class TrainingBatches:
    """The batches of all passes from the last commit to the end of an epoch; see ``TierCache.batches``.

    Each iteration starts at the last commit, like a loop over ``passes``. One iteration at a time.
    """

    def __init__(
        self, cache: TierCache, loop: PassLoop, size: int, *, epochs: int, dataset: Any, per_step: int, **options: Any
    ) -> None:
        """options: the arguments of ``Pass.batches``, or of ``Pass.loader`` if there is a ``dataset``."""
        check_epochs(epochs)
        size, per_step = check_size(size), positive(per_step, "batches_per_step")
        last = loop.last_sub_dataset(epochs) if epochs == 1 else None
        _check_steps([one.samples for one in cache.dataset.passes], size, per_step, last)
        for one in cache.dataset.passes:  # a trainer would treat a loader of length 0 as finished
            if dataset is not None:
                _ = one.recorded
            elif not one.has_samples:
                one.check_samples()
        self._cache, self._loop, self._size, self._epochs = cache, loop, size, epochs
        self._dataset, self._per_step, self._options = dataset, per_step, options
        self.current_pass: Pass | None = None
        """The pass of the newest batch, for ``skip``, ``stop`` and ``log_loss``; None before the first."""
        self._total: int | None = None
        self._before = 0  # batches that were yielded before the state that was loaded
        self._is_measured = False  # True if ``len`` was called before a state was loaded

    def __len__(self) -> int:
        """Return the number of batches that a new iteration yields, or that the current one yields in all.

        After ``load_state_dict`` it includes the batches before that state, as torchdata's StatefulDataLoader does.
        """
        if self._total is not None:
            return self._total
        self._is_measured = True
        return self._before + self._left()

    def _left(self, position: tuple[int, int] | None = None) -> int:
        return self._loop.batches_left(self._epochs, self._size, position)

    def state_dict(self) -> dict[str, Any]:
        """Return the store, its last commit, its pass and sample, and the number of batches that were yielded.

        Rows and registered objects are in the commit, so a checkpoint needs no more. Batches trained since the commit
        are not included: a run that loads the state repeats them.
        """
        (pass_index, sample), current = self._loop.position, self.current_pass
        done = (
            0
            if self._total is None or current is None
            else self._total - self._left((current.index, current.samples_done))
        )
        return self._cache.state_dict() | {"pass": pass_index, "sample": sample, "batches": done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the next iteration begins at the commit of ``state``, and count its batches in the length.

        You need not call this to resume: an iteration starts at the last commit automatically. To resume from an older
        checkpoint, roll the store back first (``store.rollback`` or `tiercache rollback`). Raises StateError if the
        store has another commit, or if the length was requested before: a trainer would stop too early.
        """
        self._cache.load_state_dict(state)
        before = int(state.get("batches", 0))
        if before and self._is_measured:
            raise StateError(
                f"the checkpoint was made after {before:,} batches, but the trainer requested the number of batches "
                "before it loaded the checkpoint, so it would stop too early: train without the trainer's checkpoint "
                "(ckpt_path), because the cache resumes from its last commit on its own"
            )
        self._before = before

    def _made(self, current: Pass) -> Any:
        """Return the batches of a pass, with a length."""
        if self._dataset is None:
            return current.batches(self._size, **self._options)
        made = current.loader(self._dataset, self._size, **self._options)
        assert current.loaded is not None
        current.loaded.per_step = self._per_step
        return made

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches. Does not bind them to locals: while the next is made, only the caller holds one.

        Trainers take ``len`` batches and then stop, so the loop over passes ends before the last batch is yielded. Its
        pass is committed when this iteration ends, or else by ``close``, ``commit`` or another loop.
        """
        self._total, thread, last = self._before + self._left(), threading.get_ident(), list[Any]()
        try:
            for current in self._cache.passes(self._epochs):
                self.current_pass = current
                made = self._made(current)
                count, batches = len(made), iter(made)
                if not self._loop.is_last(current, self._epochs):
                    yield from batches
                    continue
                yield from itertools.islice(batches, max(0, count - 1))
                last = list(batches)
            if last:
                try:
                    yield last.pop()
                except GeneratorExit:
                    if threading.get_ident() == thread:  # else garbage collection on a thread that must not wait
                        self._loop.leave(current)
                    raise
                self._loop.finish(current)
        finally:
            self._total, self._before = None, 0


def _check_steps(samples: Sequence[int], size: int, per_step: int, last: int | None) -> None:
    """Raise ValueError if a step would be of two passes. last: trained last and once, so it may end inside a step."""
    for index, count in enumerate(samples):
        if index != last and (rest := -(-count // size) % per_step):
            remedy = (
                f"drop the last {rest * size:,} samples or fewer"
                if index == len(samples) - 1
                else f"cut passes at multiples of {size * per_step:,} samples (batch_multiple, or a recorded loader "
                "with such batches)"
            )
            raise ValueError(
                f"sub-dataset {index} has {-(-count // size):,} batches of {size:,} samples, and a step of {per_step} "
                f"batches would have {rest} of its pass and others of the next one: choose another batch size, or "
                f"{remedy}"
            )


class EpochLoader:
    """Replaces a loader in a loop over epochs: iteration e yields the batches of epoch e, pass by pass.

    `TierCache.loader` makes it. Batches of committed epochs are left out, so a script that runs again yields nothing
    until it reaches the last commit. An epoch is committed when its iteration ends; what the script does after that,
    such as a step of a scheduler, belongs to the next commit and is repeated: the last commit is loaded again for it.
    """

    def __init__(
        self,
        cache: TierCache,
        loop: PassLoop,
        loader: DataLoader[Any] | Callable[[], Iterable[Any]],
        epochs: int,
        **options: Any,
    ) -> None:
        """options: arguments of ``Pass.loader``, overriding the settings of ``loader``."""
        check_epochs(epochs)
        self._cache, self._loop, self._epochs = cache, loop, epochs
        self._loader: Any = loader
        self._options = options
        if isinstance(loader, DataLoader):
            self._loader = loader.dataset
            self._options = _options_of(loader, cache.dataset.manifest.options, "batch_size" in options) | options
        self._skipped = self._first = 0
        """The epochs that were trained before, and the first iteration that continues from the last commit: the last
        of these if the commit ends it, else the next."""
        self._passes: Iterator[Pass] | None = None
        self._next: Pass | None = None  # the first pass of a later epoch, if it has been requested
        self.epoch = -1
        """The epoch of the last iteration, counted from 0."""
        self.current_pass: Pass | None = None
        """The pass of the newest batch, for ``skip``, ``stop`` and ``log_loss``; None before the first."""

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        total = 0
        for one in self._cache.dataset.passes:
            size = self._options.get("batch_size", one.recorded.recording.batch_size)
            total += int(one.recorded.ends.size) if size is None else -(-one.samples // size)
        return total

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        if self.epoch >= self._epochs:
            raise StateError(
                f"this loader was created for {self._epochs} epochs but is iterated once more: pass the number of "
                "epochs of your loop to cache.loader(..., epochs=...)"
            )
        return self._iterate(self.epoch)

    def _iterate(self, epoch: int) -> Iterator[Any]:
        if self._passes is None:
            if epoch == 0:
                index, sample = self._loop.position
                self._skipped, passes = divmod(index, len(self._cache.dataset.passes))
                is_within = passes > 0 or sample > 0
                self._first = min(max(0, self._skipped - (not is_within)), self._epochs - 1)
            if self._skipped and epoch in {0, self._first}:
                self._cache.restore()  # also at first: the script may evaluate after an epoch that it skips
            if epoch < self._first:
                return
            self._passes = iter(self._cache.passes(self._epochs))
        while True:
            current = next(self._passes, None) if self._next is None else self._next
            self._next = None
            if current is None or current.epoch > epoch:
                self._next = current
                return
            self.current_pass = current
            yield from current.loader(self._loader, **self._options)


def _options_of(loader: DataLoader[Any], recorded: Mapping[str, Any], has_size: bool) -> dict[str, Any]:
    """Return the arguments of ``Pass.loader`` that make the batches of a recorded loader.

    recorded: the options of its recording; n-grams are recorded without a loader, and have batches of any size.
    has_size: True if the caller sets the batch size. Raises ValueError if the loader has other samples or batches.
    """
    sampling, is_ngrams = Sampling.of(loader), "ngrams" in recorded
    found = {"batch_size": sampling.batch_size, "sampler": type(sampling.sampler).__name__}
    found["drop_last"] = sampling.drop_last
    expected = {"sampler": "SequentialSampler", "drop_last": False} if is_ngrams else {**recorded}
    if isinstance(sampling.sampler, SequentialSampler | RandomSampler) and expected.get("sampler") in _IN_ANY_ORDER:
        found.pop("sampler")
    if has_size:
        found.pop("batch_size")
    for name, value in found.items():
        if name in expected and value != expected[name]:
            size = (
                ", or set batch_size= in cache.loader to train batches of another size" if name == "batch_size" else ""
            )
            raise ValueError(
                f"the loader has {name} {value}, but the key sets were recorded with {expected[name]}: pass the loader "
                f"that was recorded, or record key sets of this one{size}"
            )
    options = {name: getattr(loader, name) for name in _KEPT}
    if is_ngrams and not has_size:
        if sampling.batch_size is None:
            raise ValueError("the loader has no batch_size: set batch_size= in cache.loader, or in the loader")
        options["batch_size"] = sampling.batch_size
    return options | {"shuffle": isinstance(sampling.sampler, RandomSampler)}
