"""A visit: one training of one pass, as the training loop sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.errors import StateError
from tiercache.training.batch import SHUFFLED_BY, cut_batches, sample_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.passes.passset import Pass
    from tiercache.tiers.rows import RowView
    from tiercache.training.ahead import Ahead, Cut
    from tiercache.training.batch import Batch
    from tiercache.training.missing_rows import Missing
    from tiercache.training.raw_batch import RawKeys


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
        raw: RawKeys,
        ahead: Ahead,
        first_sample: int = 0,
        order: Mapping[str, object] | None = None,
        before_batch: Callable[[int], None] | None = None,
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
        self.start_sample = first_sample
        """Samples of this visit that a commit inside it has behind it: 0 but where training goes on from one. A loader
        of one's own begins after so many; ``batches`` does by itself."""
        self.start_batch = int(str((order or {}).get("raw_batches", 0)))
        """Batches of raw keys that such a commit has behind it."""
        self.batches_done = self.start_batch
        """Batches that ``batch`` made, those included."""
        self.rows = rows
        self.order = order
        """Seed and shuffling of the batches yielded so far, or how many were of raw keys; None before the first."""
        self.source = source
        """The pass, with its samples."""
        self._seed, self._raw, self._ahead = seed, raw, ahead
        self._before_batch, self._note_loss = before_batch or _nothing, note_loss

    def batches(self, size: int, *, shuffle: bool = False, ahead: int | None = None) -> Iterator[Batch]:
        """Yield batches of ``size`` samples from where the visit stands; the last one may be short.

        Shuffling is seeded by (seed, epoch, pass). After a commit inside the visit the rest follows in the same
        order, in batches of any size.

        ahead: how many batches are made, on as many threads, before they are asked for. None: 0 where rows are trained
        on a CPU; 2 on a GPU, and 4 beside 8 or more cores. They are the same batches, and count when they are yielded;
        what goes wrong in making one is raised in its place. Threads end with the iterator or the visit.

        Raises, with its cause, what went wrong on the reader or the writer thread; RuntimeError where the visit has
        ended; StateError where a commit inside it stands in another order, and in a fork of this process; PassSetError
        where the pass has a key set alone; ValueError for a size below 1 or an ``ahead`` below 0.
        """

        def counted(made: tuple[int, Batch]) -> Batch:
            self.samples_done, batch = made
            return batch

        cuts = self._cuts(size, shuffle)  # no name here is a batch's: while the next is made, it is the caller's alone
        yield from map(counted, self._ahead.batches(self.source, self.rows, cuts, most=ahead, before=self._before))

    def places(self, size: int, *, shuffle: bool = False) -> Iterator[NDArray[np.int64]]:
        """Yield the places in the sub-dataset of each batch that ``batches`` yields; counts it as yielded."""
        for done, places in self._cuts(size, shuffle):
            self._before()
            self.samples_done = done
            yield places

    def _cuts(self, size: int, shuffle: bool) -> Iterator[Cut]:
        """Yield the samples behind each batch and its places, from where the visit stands at the first."""
        self.source.check_samples()
        mine: dict[str, object] = {"seed": self._seed, "shuffle": shuffle}
        if shuffle:
            mine["by"] = SHUFFLED_BY
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
        yield from cut_batches(order, size, first=self.samples_done, last=self.num_samples)

    def end(self) -> None:
        """End it and its rows. Whoever still refers to it does not keep its cache."""
        self.rows.end()
        self._before_batch = _nothing

    def _before(self) -> None:
        self.rows.check()
        self._before_batch(self.samples_done)

    def batch(
        self,
        keys: Mapping[str, Any],
        *,
        weights: Mapping[str, Any] | None = None,
        label: Any = None,
        dense: Any = None,
        missing: Missing = "error",
    ) -> Batch:
        """Return the batch of raw int64 keys that a loader of one's own gave; modules look it up as any other.

        keys: of every feature, NumPy or torch: (N,), (N, L) for lists of one length, or a pair (values (E,), offsets
        (N + 1,)). weights: by feature, in the shape of its keys or values; without a gradient: the embedding module
        takes those with one. label (N,) and dense (N, columns) are handed through as float32.

        missing: what a key is that the key set of the pass lacks. "error": KeyNotInPassError, which names table, key
        and batch; the batch does not count. The others read a row that is **not trained**: no gradient goes to it and
        nothing is stored for it, for only rows of the pass are on the device. "zero": zeros. "init": the key's initial
        row. "load": its row as of now, from host or store, else what an evaluation would see; the first such batch of
        a visit waits until the last dump is durable. Such keys count in means, and their vectors in maxima. A batch
        with missing keys has in their group ids of its own in place of local ids, and a float32 copy of the vectors
        that it looks up there, made anew after each step.

        The batch counts when it is made: a commit inside the visit has its N samples behind it, so make it right before
        it is trained. Training goes on after ``start_sample`` samples and ``start_batch`` batches. On the training
        thread. Raises ValueError for keys, offsets or weights that do not fit each other or the schema, and for
        INT64_MIN and INT64_MIN + 1; RuntimeError where the visit has ended; StateError in a visit that takes its
        samples from ``batches``; and, with its cause, what went wrong on the reader or the writer thread.
        """
        self.begin_raw()
        made = self._raw.batch(
            self.source, self.rows, keys, number=self.batches_done, missing=missing, weights=weights, label=label,
            dense=dense,
        )  # fmt: skip
        self.count_raw(made.num_samples)
        return made

    def begin_raw(self) -> None:
        """Raise what ``batch`` raises of the visit, before a batch of raw keys is made."""
        self.rows.check()
        if self.order is not None and "raw_batches" not in self.order:
            raise StateError(
                f"visit {self.index} takes its samples from batches(), so batch() would count them twice: use one of "
                "them in a visit"
            )
        self._before_batch(self.samples_done)

    def count_raw(self, num_samples: int) -> None:
        """Count a batch of raw keys that was made."""
        self.batches_done += 1
        self.samples_done += num_samples
        self.order = {"raw_batches": self.batches_done}

    def note_loss(self, loss: float) -> None:
        """Add a loss to the visit's report."""
        self._note_loss(loss)

    def __repr__(self) -> str:
        return f"Visit({self.index}, epoch={self.epoch}, pass={self.pass_index}, samples={self.num_samples:,})"


def _nothing(_: int) -> None:
    """Of a cache that wants to know nothing."""
