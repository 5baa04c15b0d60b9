"""Writes to rows on the device besides steps: renormalization at a lookup (max_norm), and hooks after a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from tiercache.errors import StateError
from tiercache.rows.backends.saved_gradients import of_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.rows.backends.base import Backend
    from tiercache.rows.backends.optimizer_step import OptimizerStep
    from tiercache.train.table_lookup import TableLookup
    from tiercache.values.lookups import GroupRows

RowHook = Callable[[torch.Tensor], torch.Tensor]  # returns new vectors (rows, dim) for the given ones
_EPS = 1e-7  # the epsilon that torch.embedding_renorm_ adds to the norm


@torch.no_grad()
def renormalize(lookup: TableLookup, max_norm: float, norm_type: float) -> None:
    """Scale the rows of a lookup whose norm exceeds ``max_norm``, in place, as `torch.embedding_renorm_` does."""
    backend, ids = lookup.batch.rows.backend, lookup.entries
    local = torch.unique(backend.tensor(ids.ids)).long()  # of one feature
    if not local.numel():
        return
    slots = backend.tensor(lookup.rows.slot_of_local)[local + int(ids.bases[0])].long()
    vectors = vectors_of(lookup.rows, backend)
    found = vectors[slots, : lookup.rows.vectors.dim].float()
    norms = torch.linalg.vector_norm(found, norm_type, dim=1, keepdim=True)
    scaled = torch.where(norms > max_norm, found * (max_norm / (norms + _EPS)), found)
    vectors[slots, : lookup.rows.vectors.dim] = scaled.to(vectors.dtype)


class RowHooks:
    """Hooks that write the rows of a step, by table."""

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[int, RowHook]] = {}

    def register(self, table: str, hook: RowHook) -> RemovableHandle:
        """Call ``hook`` after each step of ``table``, after earlier hooks."""
        hooks: OrderedDict[int, Any] = self._of.setdefault(table, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    @torch.no_grad()
    def run(self, steps: Sequence[OptimizerStep], backend: Backend) -> None:
        """Call the hooks of the tables that ``steps`` have updated."""
        for table, hooks in self._of.items():
            for step in steps if hooks else ():
                if table in step.rows.first:
                    self._write(table, [*hooks.values()], step, backend)

    @staticmethod
    def _write(table: str, hooks: Sequence[RowHook], step: OptimizerStep, backend: Backend) -> None:
        alone = len(step.rows.first) == 1
        parts = [one for saved in step.saved for one in ([saved] if alone else of_tables(backend, saved, [table]))]
        if not parts:
            return
        slots = torch.unique(torch.cat([backend.tensor(one.slots) for one in parts])).long()
        vectors, dim = vectors_of(step.rows, backend), step.rows.vectors.dim
        now = vectors[slots, :dim].float()
        for hook in hooks:
            written = hook(now)
            if not isinstance(written, torch.Tensor) or written.shape != now.shape or written.dtype != torch.float32:
                seen = type(written).__name__
                if isinstance(written, torch.Tensor):
                    seen = f"{written.dtype} of shape {tuple(written.shape)}"
                raise StateError(
                    f"the row hook of table {table!r} got float32 vectors {tuple(now.shape)} but returned "
                    f"{seen}: return their new values, with the same shape and dtype"
                )
            now = written.to(vectors.device)
        vectors[slots, :dim] = now.to(vectors.dtype)


def vectors_of(rows: GroupRows, backend: Backend) -> torch.Tensor:
    """Return a view of a group's vectors (slots, dim or more) in their own dtype."""
    found: torch.Tensor = backend.tensor(rows.vectors.values)
    if not rows.vectors.is_narrow:
        return found
    return found.view(torch.float16 if rows.vectors.is_half else torch.bfloat16)
