"""EpochLoader: a recorded loader whose iterations are epochs over the passes of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from tiercache.errors import StateError
from tiercache.train.batches import check_epochs
from tiercache.train.loader_batches import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tiercache.train.cache import TierCache
    from tiercache.train.pass_loop import PassLoop
    from tiercache.train.passes import Pass

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor",
)  # fmt: skip
"""DataLoader settings that the loaders of passes also use."""
_IN_ANY_ORDER = ("SequentialSampler", "RandomSampler")  # recorded samplers whose samples a loop may shuffle or not


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
