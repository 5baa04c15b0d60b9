"""Lightning: a data module with the batches of a cache's passes, and a callback that registers what trains them."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningDataModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lightning.pytorch import LightningModule, Trainer

    from tiercache.train.cache import TierCache
    from tiercache.train.passes import Pass
    from tiercache.values.batch import Batch


class PassesDataModule(LightningDataModule):
    """The batches of all passes of some epochs, from where the last commit stands: one epoch of Lightning.

    Trainer(max_epochs=1) trains them all: the cache counts its own epochs, and commits at the end of each pass.
    """

    def __init__(self, cache: TierCache, batches: Callable[[Pass], Iterable[Batch]], *, epochs: int) -> None:
        """batches: what is trained of a pass, as ``lambda p: p.batches(8192, shuffle=True)`` or ``p.wrap(loader)``."""
        super().__init__()
        self._cache, self._batches, self._epochs = cache, batches, epochs

    def train_dataloader(self) -> Iterable[Batch]:
        """Return the batches; passes begin, and the last commit is restored, when the first one is asked for."""
        return _Batches(lambda: chain.from_iterable(map(self._batches, self._cache.passes(epochs=self._epochs))))

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Return the batch with its labels and dense features there."""
        return batch.to(device)


class PassesCallback(Callback):
    """Registers the model, its optimizers and schedulers with the cache, and commits when training has ended."""

    def __init__(self, cache: TierCache) -> None:
        self._cache = cache

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register: before the first batch, which restores the last commit."""
        objects: dict[str, Any] = {"model": pl_module}
        objects |= {f"optimizer{i}": one for i, one in enumerate(trainer.optimizers)}
        objects |= {f"scheduler{i}": one.scheduler for i, one in enumerate(trainer.lr_scheduler_configs)}
        self._cache.register(**objects)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Commit what was trained of a pass that was left in its midst."""
        if self._cache.samples_of_pass:
            self._cache.commit()


class _Batches:
    """What can be iterated, once for each epoch of Lightning."""

    def __init__(self, begin: Callable[[], Iterator[Batch]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Batch]:
        return self._begin()
