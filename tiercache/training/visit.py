"""A visit: one training of one pass, as the training loop sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.errors import StateError
from tiercache.training.batch import read_batches, sample_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tiercache.passes.passset import Pass
    from tiercache.tiers.rows import RowView
    from tiercache.training.batch import Batch


class Visit:
    """What ``passes()`` yields. It ends when the loop asks for the next one."""

    def __init__(
        self,
        *,
        index: int,
        epoch: int,
        source: Pass,
        rows: RowView,
        seed: int,
        first_sample: int = 0,
        order: Mapping[str, object] | None = None,
        before_batch: Callable[[int], None] = lambda _: None,
        note_loss: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.index = index
        """The visit's number, counted from 0 over all epochs."""
        self.epoch = epoch
        """The epoch it belongs to, counted from 0."""
        self.pass_index = source.index
        """The pass it trains."""
        self.num_samples = source.samples
        """Samples of the pass."""
        self.samples_done = first_sample
        """Samples whose batches were yielded, those before the last commit inside this visit included."""
        self.rows = rows
        self.order = order
        """Seed and shuffling of the batches yielded so far; None before the first."""
        self._source, self._seed = source, seed
        self._before_batch, self._note_loss = before_batch, note_loss

    def batches(self, size: int, *, shuffle: bool = False) -> Iterator[Batch]:
        """Yield batches of ``size`` samples from where the visit stands; the last one may be short.

        Shuffling is seeded by (seed, epoch, pass). After a commit inside the visit the rest follows in the same
        order, in batches of any size. Raises, with its cause, what went wrong on the reader or the writer thread;
        RuntimeError where the visit has ended; StateError where a commit inside it stands in another order.
        """
        mine = {"seed": self._seed, "shuffle": shuffle}
        if self.samples_done and self.order is not None and self.order != mine:
            raise StateError(
                f"visit {self.index} stands after {self.samples_done:,} samples in the order {dict(self.order)}, and "
                f"batches were asked for in {mine}: some samples would be trained twice and some never, so ask for "
                "the same order"
            )
        self.order = mine
        order = sample_order(
            self.num_samples, seed=self._seed, epoch=self.epoch, pass_index=self.pass_index, shuffle=shuffle
        )
        for done, batch in read_batches(self._source, order, size, self.rows, first=self.samples_done):
            self._before_batch(self.samples_done)
            self.samples_done = done
            yield batch

    def note_loss(self, loss: float) -> None:
        """Add a loss to the visit's report."""
        self._note_loss(loss)

    def __repr__(self) -> str:
        return f"Visit({self.index}, epoch={self.epoch}, pass={self.pass_index}, samples={self.num_samples:,})"
