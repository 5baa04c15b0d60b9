"""FiniteCheck: stops a training whose rows or dense weights are no longer finite, before they are committed."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn

from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.backends.base import Backend
    from tiercache.training.dense_state import DenseState
    from tiercache.training.passes import Pass
    from tiercache.values.rows import GroupRows

_MODES = ("stop", "warn", "ignore")
_PIECE = 1 << 20
"""Numbers that are read at a time."""


class FiniteCheck:
    """Looks for NaN and infinities in what a training is about to commit.

    On a CPU the kernels of a step say whether a row is not finite, so the batch is known. On a GPU that would wait for
    each step: there the rows of a pass are read once, when it ends.
    """

    def __init__(self, mode: str, backend: Backend, dense: DenseState) -> None:
        self._mode, self._backend, self._dense = mode, backend, dense
        self._known: set[int] = set()
        """Parameters that were not finite when the loop began."""
        self._found: str | None = None
        self._warned: Pass | None = None

    def begin(self) -> None:
        """Begin with what was restored."""
        self._found = self._warned = None
        self._known = set()
        if self._mode != "ignore":
            self._known = {id(one) for _, one in self._bad_parameters()}
            self._backend.take_overflow()

    def step(self, current: Pass | None) -> None:
        """Look at the rows that were stepped, where the kernels say that some are not finite."""
        is_told = self._warned is current or self._found is not None
        if self._mode == "ignore" or current is None or not self._backend.take_overflow() or is_told:
            return
        if tables := nonfinite_tables(self._backend, current.rows.groups):
            self._tell(current, f"rows of {tables} are not finite after the step of {current.ledger.newest}")

    def check(self, current: Pass) -> None:
        """Raise StateError if something is not finite that the end of a pass, or a commit inside, would commit."""
        if self._mode == "ignore":
            return
        self.raise_found()
        if self._backend.take_overflow() is None and (tables := nonfinite_tables(self._backend, current.rows.groups)):
            self._tell(current, f"rows of {tables} are not finite after {current.ledger.newest}")
        if bad := [name for name, one in self._bad_parameters() if id(one) not in self._known]:
            self._tell(current, f"{len(bad)} parameters ({bad[0]}) are not finite after {current.ledger.newest}")
        self.raise_found()

    def raise_found(self) -> None:
        """Raise StateError for what was found, until training begins anew."""
        if self._found is not None:
            raise StateError(self._found)

    def _tell(self, current: Pass, what: str) -> None:
        if self._mode == "stop":
            self._found = self._found or (
                f"{what}, so they are not committed: look for the cause, such as a learning rate or a loss, and train "
                "again from the last commit, or choose on_nonfinite='warn'"
            )
        elif self._warned is not current:
            self._warned = current
            warnings.warn(f"{what}, and are committed with pass {current.index}", stacklevel=5)

    def _bad_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trainable parameters of registered modules that are not finite; waits for each device once."""
        named = [
            (f"{name}.{path}", parameter)
            for name, value in self._dense.objects.items()
            if isinstance(value, nn.Module)
            for path, parameter in value.named_parameters()
            if parameter.requires_grad and parameter.is_floating_point() and parameter.numel()
        ]
        by_device: dict[torch.device, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            by_device.setdefault(parameter.device, []).append((name, parameter))
        found = []
        for some in by_device.values():
            flags = torch.stack([_is_finite(one) for _, one in some]).tolist()
            found += [one for one, good in zip(some, flags, strict=True) if not good]
        return found


def check_nonfinite(mode: str) -> None:
    """Raise ValueError for an unknown mode."""
    if mode not in _MODES:
        raise ValueError(f"on_nonfinite {mode!r} is unknown: it must be one of {', '.join(map(repr, _MODES))}")


def nonfinite_tables(backend: Backend, groups: Sequence[GroupRows]) -> str:
    """Return the names of the tables some of whose rows are not finite, as messages have them; "" if all are."""
    names, flags = [], []
    for rows in groups:
        vectors = backend.tensor(rows.vectors.values)
        if rows.vectors.is_narrow:
            vectors = vectors.view(torch.float16 if rows.vectors.is_half else torch.bfloat16)
        fields = [vectors[:, : rows.vectors.dim], *map(backend.tensor, rows.states)]
        slots, piece = backend.tensor(rows.slot_of_local), max(1, _PIECE // rows.vectors.dim)
        for table, first in rows.first.items():
            good = torch.ones((), dtype=torch.bool, device=slots.device)
            for at in torch.split(slots[first : first + rows.num_local[table]], piece):
                for field in fields:
                    good = good & field[at.long()].isfinite().all()
            names.append(table)
            flags.append(good)
    kept = torch.stack(flags).tolist() if flags else []
    return ", ".join(repr(name) for name, good in sorted(zip(names, kept, strict=True)) if not good)


def _is_finite(parameter: torch.Tensor) -> torch.Tensor:
    """Return whether a parameter, of a DTensor this rank's part, is finite, without memory of its size."""
    local = parameter.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    largest: torch.Tensor = torch.linalg.vector_norm(local, ord=math.inf) if local.numel() else local.sum()
    return largest.isfinite()
