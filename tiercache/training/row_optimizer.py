"""The row optimizers: pending gradients of the batches since the last step, and the step that applies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import StateError
from tiercache.kernels.arrays import NONE_F4, NONE_I4
from tiercache.kernels.rounding import make_rounding
from tiercache.kernels.sorting import SortBuffers, sort_slots
from tiercache.kernels.update import (
    Gradients,
    UpdateBuffers,
    bag_gradients,
    one_id_gradients,
    update_adagrad,
    update_adam,
    update_rowwise_adagrad,
    update_sgd,
)
from tiercache.store.table import SGD, Adagrad, Adam, RowWiseAdagrad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.store.table import Group
    from tiercache.tiers.rows import GroupRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """The gradient of one lookup: entries in batch order, each with its slot and its place in ``gradient``."""

    slots: NDArray[np.int32]
    """(E,)"""
    gradient: NDArray[np.float32]
    """Flat; of (N, ``width``)."""
    width: int
    cols: NDArray[np.int64]
    """The first column of each feature, where every feature has one entry a sample and ``offset`` is None."""
    offset: NDArray[np.int64] | None
    """(E,) where each entry's gradient begins; its complement where ``argmax`` decides element by element."""
    scale: NDArray[np.float32]
    """(E,) what each entry's gradient is multiplied by; empty: 1."""
    argmax: NDArray[np.int32]
    """Flat like ``gradient``: the entry that gave each maximum; empty where nothing was pooled by max."""

    @property
    def num_samples(self) -> int:
        """Rows of the gradient."""
        return self.gradient.size // self.width

    def offsets(self) -> NDArray[np.int64]:
        """Return where each entry's gradient begins, written out."""
        if self.offset is not None:
            return self.offset
        samples = np.arange(self.num_samples, dtype=np.int64) * self.width
        return (self.cols[:, None] + samples[None, :]).reshape(-1)


class RowGradients:
    """What backward leaves for the step, by group, in the order of the backward calls."""

    def __init__(self, num_groups: int) -> None:
        self.pending: list[list[Pending]] = [[] for _ in range(num_groups)]

    def add(self, group: int, pending: Pending) -> None:
        """Add the gradient of one lookup."""
        self.pending[group].append(pending)

    def clear(self) -> None:
        """Drop everything."""
        for pending in self.pending:
            pending.clear()


class RowOptimizer:
    """Steps rows of every group: all gradients of a row since the last step are summed, then it is updated once.

    The sum is in the order of the backward calls, in each by feature and sample, whatever slots rows have and
    however many threads there are.
    """

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self._groups = groups
        self.gradients = RowGradients(len(groups))
        self.learning_rates = [float(group.optimizer.learning_rate) for group in groups]
        """One rate for each group."""
        self.steps = 0
        """Steps applied so far: Adam's bias correction counts them, and stochastic rounding draws its bits by them."""
        self._sorting, self._buffers = SortBuffers(), UpdateBuffers()

    @property
    def pending(self) -> bool:
        """Whether a backward was not stepped yet."""
        return any(self.gradients.pending)

    def check_stepped(self, visit: str) -> None:
        """Raise StateError where gradients are pending though ``visit`` ends."""
        if self.pending:
            raise StateError(
                f"{visit} ended between backward and step, and its row gradients would be lost: call step() after its "
                "last batch, or discard()"
            )

    def discard(self) -> None:
        """Drop the pending gradients."""
        self.gradients.clear()

    def step(self, rows: Sequence[GroupRows]) -> None:
        """Apply the pending gradients to ``rows`` and drop them. Without any, only the step is counted."""
        self.steps += 1
        for group, pending, view, rate in zip(
            self._groups, self.gradients.pending, rows, self.learning_rates, strict=True
        ):
            if pending:
                slots, gradients = _together(pending, group.dim)
                self._update(group, view, slots, gradients, rate)
        self.gradients.clear()

    def _update(
        self,
        group: Group,
        rows: GroupRows,
        slots: NDArray[np.int32],
        gradients: Gradients,
        rate: float,
    ) -> None:
        vectors, states = rows.vectors, rows.states
        pairs, buffers = sort_slots(slots, vectors.values.shape[0], self._sorting), self._buffers
        shared: dict[str, Any] = {"learning_rate": rate, "decay": group.optimizer.decay}
        if rows.streams.size:
            shared["rounding"] = make_rounding(rows.streams, self.steps)
        match group.optimizer:
            case SGD():
                update_sgd(vectors, pairs, gradients, buffers, **shared)
            case Adagrad(eps=eps):
                update_adagrad(vectors, states[0], pairs, gradients, buffers, eps=eps, **shared)
            case RowWiseAdagrad(eps=eps):
                update_rowwise_adagrad(vectors, states[0], pairs, gradients, buffers, eps=eps, **shared)
            case Adam(beta1=beta1, beta2=beta2, eps=eps):
                shared |= {"step": self.steps, "beta1": beta1, "beta2": beta2, "eps": eps}
                update_adam(vectors, states[0], states[1], pairs, gradients, buffers, **shared)

    def set_learning_rate(self, learning_rate: float, tables: Sequence[str] | None = None) -> None:
        """Change the rate of the groups of ``tables``, or of all, from the next step on."""
        if not np.isfinite(learning_rate) or learning_rate < 0:
            raise ValueError(f"learning rate {learning_rate} is not a finite number of at least 0")
        known = {table.name for group in self._groups for table in group.tables}
        wanted = known if tables is None else set(tables)
        if unknown := wanted - known:
            raise ValueError(f"there is no table {sorted(unknown)[0]!r}: there are {', '.join(sorted(known))}")
        for g, group in enumerate(self._groups):
            names = {table.name for table in group.tables}
            if names <= wanted:
                self.learning_rates[g] = float(learning_rate)
            elif both := names & wanted:
                raise ValueError(
                    f"table {sorted(both)[0]!r} shares its group, and so its rate, with "
                    f"{', '.join(sorted(names - wanted))}: "
                    "name them all, or give the table an optimizer of its own (any other value of eps or decay will do)"
                )

    def settings(self) -> dict[str, Any]:
        """Return what a commit keeps."""
        return {"steps": self.steps, "learning_rates": list(self.learning_rates)}

    def restore(self, settings: dict[str, Any]) -> None:
        """Take back what a commit kept; one of rows from outside may keep the steps alone, or nothing."""
        rates = [float(rate) for rate in settings.get("learning_rates", self.learning_rates)]
        if len(rates) != len(self._groups):
            raise StateError(
                f"the commit has learning rates for {len(rates)} groups of tables and the cache has "
                f"{len(self._groups)}: open the store with the tables it was made with"
            )
        self.learning_rates, self.steps = rates, int(settings.get("steps", 0))


def _together(pending: list[Pending], dim: int) -> tuple[NDArray[np.int32], Gradients]:
    """Return all entries of a group as one step's; one lookup is passed on as it is."""
    if len(pending) == 1:
        one = pending[0]
        gradient = one.gradient.reshape(one.num_samples, one.width)
        if one.offset is None:
            return one.slots, one_id_gradients(gradient, one.cols)
        return one.slots, bag_gradients(gradient, one.offset, one.scale, one.argmax)
    slots = np.concatenate([p.slots for p in pending])
    shared: dict[tuple[int, int], int] = {}  # lookups of one module share their gradient
    flats: list[NDArray[np.float32]] = []
    bases, size = [], 0
    for p in pending:
        place = p.gradient.ctypes.data, p.gradient.size
        if place in shared and not p.argmax.size:  # a maximum marks its places, which another may have marked
            bases.append(shared[place])
            continue
        shared.setdefault(place, size)
        bases.append(size)
        flats.append(p.gradient)
        size += p.gradient.size
    flat = flats[0] if len(flats) == 1 else np.concatenate(flats)
    offsets = np.empty(slots.size, dtype=np.int64)
    scaled, argmaxed = any(p.scale.size for p in pending), any(p.argmax.size for p in pending)
    scales = np.ones(slots.size, dtype=np.float32) if scaled else NONE_F4
    argmax = np.full(flat.size, -1, dtype=np.int32) if argmaxed else NONE_I4
    first = 0
    for p, start in zip(pending, bases, strict=True):
        last = first + p.slots.size
        mine = p.offsets()
        offsets[first:last] = np.where(mine >= 0, mine + start, mine - start)  # ~(x + start) == ~x - start
        if p.scale.size:
            scales[first:last] = p.scale
        if p.argmax.size:
            places = np.unique(~mine[mine < 0])[:, None] + np.arange(dim)
            argmax[start + places] = p.argmax[places] + first
        first = last
    return slots, bag_gradients(flat.reshape(1, -1), offsets, scales, argmax)
