"""What a commit keeps beside rows: dense state, the row optimizers' settings, and where it was trained."""

from __future__ import annotations

import platform
import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tiercache.errors import StateError
from tiercache.training.dense_state import DenseState, tensors_of
from tiercache.training.matching import check_environment
from tiercache.training.row_optimizer import RowOptimizer
from tiercache.training.table_module import anchor_ids

if TYPE_CHECKING:
    from tiercache.backends.base import Backend
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.store import Store
    from tiercache.store.table import Group
    from tiercache.tiers.pass_switcher import StateBytes
    from tiercache.training.dense_state import RandomStates


class CommitState:
    """Dense state and row optimizer of one training."""

    def __init__(self, groups: tuple[Group, ...], backend: Backend) -> None:
        self.dense = DenseState(backend)
        self.optimizer = RowOptimizer(groups, backend)
        self.environment: dict[str, object] = {
            "threads": torch.get_num_threads(),
            "cpu": platform.processor() or platform.machine(),
        }
        """What the last bits of dense layers may depend on."""
        if backend.name:
            self.environment["device"] = backend.name

    def capture(self, random: RandomStates | None = None) -> StateBytes:
        """Clone it as it is now; the states of random generators where they are given."""
        return self.dense.capture(random), self.optimizer.settings()

    def warn_of_schedulers(self) -> None:
        """Name the optimizers whose schedulers were not registered: a resumed training would begin their rates anew."""
        known = [getattr(one, "optimizer", None) for one in self.dense.objects.values()]
        for name, one in (*self.dense.objects.items(), ("cache.optimizer", self.optimizer.joint)):
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
                f"{', '.join(names)} was not restored from commit {commit.id}, so the rows of that commit would be "
                "evaluated under other dense weights: call cache.restore() before you evaluate"
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
                    f"{name} has maximize=True for a module that looks rows up, but rows only descend: negate the loss "
                    "instead"
                )
        known = stepped | anchors
        left = [
            f"{name}.{path}"
            for name, value in modules.items()
            if not isinstance(value, AveragedModel)
            for path, one in value.named_parameters()
            if one.requires_grad and id(one) not in known
        ]
        if left:
            more = f" and {len(left) - 1} more parameters" if left[1:] else ""
            warnings.warn(
                f"{left[0]}{more} belong to no optimizer that the cache was given, so cache.optimizer does not train "
                "them: give the cache their optimizer (optimizer=..., or register()), or freeze them",
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
            lost = [one for one in parameters if one.untyped_storage().data_ptr() not in places or not one.numel()]
            if lost:
                raise StateError(
                    f"{name} steps {len(lost)} parameters that no registered module has (the first has shape "
                    f"{tuple(lost[0].shape)}), so no commit would keep them: give the cache the model that has them "
                    "(model=..., or register()), and make an optimizer after tc.convert, which replaces parameters"
                )

    def restore(self, store: Store, ranks: AnyCommunicator) -> None:
        """Put back what the last commit of ``store`` keeps; warns where that was trained elsewhere. Collective."""
        commit = store.commit
        assert commit is not None, "a store without a commit keeps no state"
        with ranks.raise_on_all("reading the state of the last commit"):
            check_environment(commit, self.environment)
            data = store.state()
        self.dense.restore(data, ranks)  # none with rows from outside
        with ranks.raise_on_all("restoring the row optimizer"):
            self.optimizer.restore(commit.settings)
