"""Commit state: dense state, the row optimizers' settings and the environment, committed with the rows."""

from __future__ import annotations

import math
import platform
import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tiercache.errors import StateError
from tiercache.train.dense_state import DenseState, tensors_of
from tiercache.train.joint_optimizer import JointOptimizer
from tiercache.train.row_optimizer import RowOptimizer
from tiercache.train.row_writes import vectors_of
from tiercache.train.table_module import anchor_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.rows.backends.base import Backend
    from tiercache.rows.switch import StateBytes
    from tiercache.store import Store
    from tiercache.store.table import Group
    from tiercache.train.dense_state import RandomStates
    from tiercache.train.pass_ledger import PassLedger
    from tiercache.values.lookups import GroupRows


NONFINITE_MODES = ("stop", "warn", "ignore")
_PIECE = 1 << 20  # numbers checked at a time


class FiniteCheck:
    """Checks rows and parameters for NaN and infinities before they are committed.

    On a CPU the kernels of a step report rows that are not finite, so errors name the batch. On a GPU that would wait
    for each step: there the rows of a pass are checked once, when it ends.
    """

    def __init__(self, mode: str, backend: Backend, dense: DenseState) -> None:
        self._mode, self._backend, self._dense = mode, backend, dense
        self._known: set[int] = set()  # parameters that were not finite when the loop began
        self._found: str | None = None
        self._warned: PassLedger | None = None

    def begin(self) -> None:
        """Begin with the restored state."""
        self._found = self._warned = None
        self._known = set()
        if self._mode != "ignore":
            self._known = {id(one) for _, one in self._bad_parameters()}
            self._backend.take_overflow()

    def step(self, groups: Sequence[GroupRows], ledger: PassLedger) -> None:
        """Check the rows if the kernels of the step reported rows that are not finite."""
        is_reported = self._warned is ledger or self._found is not None
        if self._mode == "ignore" or not self._backend.take_overflow() or is_reported:
            return
        if tables := nonfinite_tables(self._backend, groups):
            self._report(ledger, f"rows of {tables} are not finite after the step of {ledger.newest}")

    def check(self, groups: Sequence[GroupRows], ledger: PassLedger) -> None:
        """Raise StateError if a commit now would store numbers that are not finite."""
        if self._mode == "ignore":
            return
        self.raise_found()
        if self._backend.take_overflow() is None and (tables := nonfinite_tables(self._backend, groups)):
            self._report(ledger, f"rows of {tables} are not finite after {ledger.newest}")
        if bad := [name for name, one in self._bad_parameters() if id(one) not in self._known]:
            self._report(ledger, f"{len(bad)} parameters ({bad[0]}) are not finite after {ledger.newest}")
        self.raise_found()

    def raise_found(self) -> None:
        """Raise StateError if any were not finite since training began."""
        if self._found is not None:
            raise StateError(self._found)

    def _report(self, ledger: PassLedger, what: str) -> None:
        if self._mode == "stop":
            self._found = self._found or (
                f"{what}, so they are not committed: fix the cause, such as a learning rate or a loss, and resume "
                "from the last commit, or choose on_nonfinite='warn'"
            )
        elif self._warned is not ledger:
            self._warned = ledger
            warnings.warn(f"{what}, and are committed with {ledger.name}", stacklevel=5)

    def _bad_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trainable parameters of registered modules that are not finite; waits for each device once."""
        by_device: dict[torch.device, list[tuple[str, nn.Parameter]]] = {}
        for name, value in self._dense.objects.items():
            for path, one in value.named_parameters() if isinstance(value, nn.Module) else ():
                if one.requires_grad and one.is_floating_point() and one.numel():
                    by_device.setdefault(one.device, []).append((f"{name}.{path}", one))
        found = []
        for pairs in by_device.values():
            flags = torch.stack([_is_finite(one) for _, one in pairs]).tolist()
            found += [pair for pair, good in zip(pairs, flags, strict=True) if not good]
        return found


def nonfinite_tables(backend: Backend, groups: Sequence[GroupRows]) -> str:
    """Return the quoted names of tables with rows that are not finite; "" if there are none."""
    names, flags = [], []
    for rows in groups:
        fields = [vectors_of(rows, backend)[:, : rows.vectors.dim], *map(backend.tensor, rows.states)]
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
    """Return True (0-dim) if a parameter is finite, without a copy; of a DTensor, this rank's part."""
    local = parameter.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    largest: torch.Tensor = torch.linalg.vector_norm(local, ord=math.inf) if local.numel() else local.sum()
    return largest.isfinite()


def check_clipping(objects: Iterable[object]) -> None:
    """Raise StateError if Lightning's trainer clips gradients of a registered module by its own rule.

    It would take the norm of the gradients of outputs, in which a row that is looked up twice counts twice.
    """
    for one in objects:
        hook = getattr(type(one), "configure_gradient_clipping", None)
        max_norm = getattr(getattr(one, "_trainer", None), "gradient_clip_val", None)
        owner = str(getattr(hook, "__module__", "")).split(".")[0]
        if max_norm and owner in {"lightning", "pytorch_lightning"}:
            raise StateError(
                f"the trainer of {type(one).__name__} has gradient_clip_val={max_norm}, which does not add up the "
                "gradients of a row: define configure_gradient_clipping(self, optimizer, gradient_clip_val, "
                "gradient_clip_algorithm) in the module and call cache.clip_grad_norm_(gradient_clip_val) there"
            )


class CommitState:
    """Dense state and row optimizer of one training."""

    def __init__(self, groups: tuple[Group, ...], backend: Backend) -> None:
        self.dense = DenseState(backend)
        self.optimizer = RowOptimizer(groups, backend)
        self.joint = JointOptimizer(self.optimizer)
        self.environment: dict[str, object] = {
            "threads": torch.get_num_threads(),
            "cpu": platform.processor() or platform.machine(),
        }
        """These may affect the last bits of dense layers."""
        if backend.name:
            self.environment["device"] = backend.name

    def capture(self, random: RandomStates | None = None) -> StateBytes:
        """Clone the current state, with ``random`` instead of the current random states."""
        names = self.dense.sharded
        return self.dense.capture(random), self.optimizer.settings() | ({"sharded": names} if names else {})

    def warn_of_schedulers(self) -> None:
        """Warn of optimizers whose schedulers were not registered: a resumed run would restart their rates."""
        known = [getattr(one, "optimizer", None) for one in self.dense.objects.values()]
        for name, one in (*self.dense.objects.items(), ("cache.optimizer", self.joint)):
            if hasattr(getattr(one, "step", None), "_wrapped_by_lr_sched") and not any(one is other for other in known):
                warnings.warn(
                    f"{name} has a learning-rate scheduler that was not registered, so no commit keeps it: call "
                    "register(scheduler=...) before the loop",
                    stacklevel=5,
                )

    def check_restored(self, store: Store) -> None:
        """Raise StateError if a model is not the one that the last commit of ``store`` trained with its rows."""
        commit = store.commit
        if commit is not None and commit.state_bytes and (names := self.dense.unrestored):
            raise StateError(
                f"{', '.join(names)} was not restored from commit {commit.id}, so its dense weights do not match "
                "the rows in the store: call cache.restore() first"
            )

    def check_optimizers(self) -> None:
        """Warn about parameters that no optimizer steps. Raise StateError for an optimizer that maximizes."""
        modules = {name: value for name, value in self.dense.objects.items() if isinstance(value, nn.Module)}
        groups = [
            (name, group)
            for name, value in self.dense.objects.items()
            if isinstance(value, torch.optim.Optimizer)
            for group in value.param_groups
        ]
        anchors, stepped = anchor_ids(modules.values()), {id(one) for _, group in groups for one in group["params"]}
        for name, group in groups:
            if group.get("maximize") and any(id(one) in anchors for one in group["params"]):
                raise StateError(
                    f"{name} has maximize=True for a module that looks up rows, but rows only descend: negate the loss "
                    "instead"
                )
        known = stepped | anchors
        unstepped = [
            f"{name}.{path}"
            for name, value in modules.items()
            if not isinstance(value, AveragedModel)
            for path, one in value.named_parameters()
            if one.requires_grad and id(one) not in known
        ]
        if unstepped:
            more = f" and {len(unstepped) - 1} more parameters" if unstepped[1:] else ""
            warnings.warn(
                f"{unstepped[0]}{more} are in no optimizer of the cache, so cache.optimizer does not "
                "train them: pass their optimizer to the cache (optimizer=..., or register()), or freeze them",
                stacklevel=5,
            )

    def check_parameters(self) -> None:
        """Raise StateError if an optimizer steps parameters that no commit would keep."""
        objects = self.dense.objects
        kept = {id(one) for value in objects.values() if isinstance(value, nn.Module) for one in value.parameters()}
        places = {
            tensor.untyped_storage().data_ptr()
            for value in objects.values()
            if not isinstance(value, nn.Module | torch.optim.Optimizer)
            for tensor in tensors_of(value.state_dict())
        }
        for name, value in objects.items():
            if not isinstance(value, torch.optim.Optimizer):
                continue
            parameters = [one for group in value.param_groups for one in group["params"] if id(one) not in kept]
            unsaved = [one for one in parameters if one.untyped_storage().data_ptr() not in places or not one.numel()]
            if unsaved:
                raise StateError(
                    f"{name} steps {len(unsaved)} parameters that no registered module has (the first has shape "
                    f"{tuple(unsaved[0].shape)}), so no commit would keep them: pass their model to the "
                    "cache (model=..., or register()), and create optimizers after tc.convert, which replaces "
                    "parameters"
                )

    def restore(self, store: Store, ranks: AnyCommunicator) -> None:
        """Restore the last commit of ``store``; warns if it was trained in another environment. Collective."""
        commit = store.commit
        assert commit is not None, "a store without a commit keeps no state"
        with ranks.raise_on_all("reading the state of the last commit"):
            if commit.environment and commit.environment != self.environment:
                warnings.warn(
                    f"commit {commit.id} was trained with {commit.environment} and resumes with {self.environment}: "
                    "other threads or another CPU can change the last bits of dense layers",
                    stacklevel=4,
                )
            data = store.state()
        self.dense.restore(data, ranks)  # imported rows have none
        with ranks.raise_on_all("restoring the row optimizer"):
            self.optimizer.restore(commit.settings)
