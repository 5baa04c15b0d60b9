"""What a commit keeps beside rows: dense state, the row optimizers' settings, and where it was trained."""

from __future__ import annotations

import platform
import warnings
from typing import TYPE_CHECKING

import torch

from tiercache.training.dense_state import DenseState
from tiercache.training.matching import check_environment
from tiercache.training.row_optimizer import RowOptimizer

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
        for name, one in (*self.dense.objects.items(), ("cache.optimizer", self.optimizer)):
            if hasattr(getattr(one, "step", None), "_wrapped_by_lr_sched") and not any(one is other for other in known):
                warnings.warn(
                    f"{name} has a learning-rate scheduler that was not registered, so no commit keeps it: call "
                    "register(scheduler=...) before the loop",
                    stacklevel=5,
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
