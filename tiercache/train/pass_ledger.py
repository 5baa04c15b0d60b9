"""PassLedger: the record of a pass's batches, and the rule that decides whether the pass was trained."""

from __future__ import annotations

from tiercache.errors import StateError

_ADVICE = "call p.skip() to count the pass as trained as it is, or p.stop() to end the training without counting it"


class PassLedger:
    """Counts the batches of one pass from the loader to the step.

    A pass is trained once all its batches were made and looked up with gradients enabled, and an optimizer of the cache
    has stepped. Such an optimizer also counts if a GradScaler skipped its steps, or if its ``zero_grad`` dropped the
    gradients. Without any lookup that trains rows (frozen modules, lookups under ``no_grad``), a pass is trained once
    its batches were looked up and, under ``no_grad``, an optimizer has stepped.
    """

    def __init__(self, name: str, num_samples: int, first_sample: int) -> None:
        """first_sample: samples that a commit inside the pass already has."""
        self.name, self.num_samples, self.first_sample = name, num_samples, first_sample
        self.is_skipped = self.is_stopped = False
        self._made: set[int] = set()  # ends of batches, in samples, as in the sets below
        self._trained: set[int] = set()  # looked up with gradients enabled
        self._read: set[int] = set()  # looked up under ``no_grad``
        self._newest = -1  # the last batch that was looked up with gradients
        self._open_loaders = 0
        self.is_exhausted = False  # True if an iterator over its batches was exhausted
        self._is_raw = False
        self._has_trainable = self._has_gradients = self._is_stepped = self._is_dropped = False
        self._has_pending = False  # True if gradients arrived since the last step, and no known optimizer dropped them
        self.is_step_due = False  # True if a batch was looked up with gradients since the last step, on all ranks

    def make(self, end: int, *, raw: bool = False) -> None:
        """Record a batch that was handed out."""
        self._made.add(end)
        self._is_raw |= raw

    def open_loader(self) -> None:
        """Record that a loader of raw keys has begun."""
        self._open_loaders += 1
        self._is_raw = True

    def close_loader(self) -> None:
        """Record that a loader of raw keys has no more batches."""
        self._open_loaders = max(0, self._open_loaders - 1)
        self.exhaust(raw=True)

    def exhaust(self, *, raw: bool = False) -> None:
        """Record that no batches are left."""
        self.is_exhausted = True
        self._is_raw |= raw

    def look_up(self, end: int, *, gradients: bool, trains: bool) -> None:
        """Record a lookup of a batch. trains: True if its gradients would move rows."""
        (self._trained if gradients else self._read).add(end)
        self._newest = end if gradients else self._newest
        self.is_step_due |= gradients
        self._has_trainable |= trains

    def arrive(self) -> None:
        """Record gradients of rows."""
        self._has_gradients = self._has_pending = True

    def step(self, *, applied: bool) -> None:
        """Record a step of a known optimizer. It does not count if another optimizer dropped the gradients before."""
        self.is_step_due = False
        if applied or not self._has_pending:
            self._is_stepped, self._has_pending = True, False

    def drop(self) -> None:
        """Record that a known optimizer dropped its gradients."""
        self._is_dropped |= self._has_gradients
        self._has_pending = False

    @property
    def num_made(self) -> int:
        """Batches that were handed out."""
        return len(self._made)

    @property
    def newest(self) -> str:
        """The name of the batch that was looked up last."""
        ends = sorted(self._made | self._trained | self._read)
        if self._newest < 0:
            return f"{self.name} began"
        return f"batch {ends.index(self._newest)} of {self.name} (up to sample {self._newest:,})"

    @property
    def is_looked_up(self) -> bool:
        """True if every batch that was handed out has been looked up."""
        return self.is_skipped or self._made <= self._looked_up

    @property
    def samples_trained(self) -> int:
        """Samples up to the end of the last batch that was trained."""
        return max(self._looked_up, default=self.first_sample)

    @property
    def _looked_up(self) -> set[int]:
        """Batches that were trained; under ``no_grad``, only by a dense optimizer."""
        return self._read if not self._trained and self._is_stepped else self._trained

    def check_made(self, samples_done: int) -> None:
        """Raise StateError if the loop did not take all batches of the pass."""
        if self.is_skipped:
            return
        is_resumed = self.first_sample > 0
        if self._is_raw:
            if self._open_loaders:
                raise StateError(
                    f"{self.name} ended before its loader did, after {_batches(self.num_made)}: train all batches of "
                    f"the loader, or {_ADVICE}"
                )
            return
        if samples_done < self.num_samples:
            raise StateError(
                f"{self.name} ended after {_batches(self.num_made)} with {samples_done:,} of its "
                f"{self.num_samples:,} samples: train all its batches, or {_ADVICE}"
            )
        if not self.num_samples and not self.is_exhausted and not is_resumed:
            raise StateError(f"{self.name} ended after 0 batches: train the batches of your loader, or {_ADVICE}")

    def check_trained(self) -> None:
        """Raise StateError if the batches were taken but not trained."""
        if self.is_skipped:
            return
        if not self.is_looked_up:
            count = len(self._made & self._looked_up)
            raise StateError(
                f"{self.name} ended with {count:,} of its {_batches(self.num_made)} looked up with gradients enabled: "
                f"train them before the loop continues (evaluate with cache.evaluate()), or {_ADVICE}"
            )
        if not self._has_trainable or self._is_stepped or self._is_dropped:
            return
        if self._has_gradients:
            raise StateError(
                f"{self.name} ended with {_batches(self.num_made)} whose rows got gradients, but no optimizer of this "
                "cache has stepped: pass the optimizer that your loop steps to the cache (optimizer=..., or "
                f"register()), or step cache.optimizer, or {_ADVICE}"
            )
        raise StateError(
            f"{self.name} ended with {_batches(self.num_made)} looked up with gradients enabled, but no gradient "
            "reached their rows and no optimizer of this cache has stepped: call backward() and step(), evaluate with "
            f"cache.evaluate(), or {_ADVICE}"
        )


def _batches(count: int) -> str:
    return f"{count:,} batch" if count == 1 else f"{count:,} batches"
