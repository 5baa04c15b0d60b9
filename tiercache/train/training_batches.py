"""TrainingBatches: the batches of all passes as one sized iterable, for trainers that do not know passes."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

from tiercache.errors import StateError
from tiercache.store.records import positive
from tiercache.train.batches import check_epochs, check_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tiercache.train.cache import TierCache
    from tiercache.train.pass_loop import PassLoop
    from tiercache.train.passes import Pass


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
