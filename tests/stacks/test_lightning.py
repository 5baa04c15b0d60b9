"""Lightning trains what a plain loop trains, to the same bits, without an adapter, and validates meanwhile."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tiercache as tc
from tests.stacks.training import (
    CASE,
    EPOCHS,
    MAX_NORM,
    STEPS,
    assert_same,
    batches_of,
    ended,
    loss_of,
    model_of,
    opened,
    optimizer_of,
    plain,
    scheduler_of,
)
from tiercache.errors import StateError

pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: make test-stacks")


class Module(pl.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self, cache: tc.TierCache) -> None:
        super().__init__()
        self.net, self.cache = model_of(cache), cache
        self.validated: list[tuple[int, float]] = []

    def training_step(self, batch: tc.Batch, _: int) -> torch.Tensor:
        return loss_of(self.net, batch)

    def validation_step(self, batch: tc.Batch, _: int) -> None:
        self.log("val", loss_of(self.net, batch), batch_size=len(batch))

    def on_validation_epoch_end(self) -> None:
        self.validated.append((self.trainer.global_step, float(self.trainer.callback_metrics["val"])))

    def configure_optimizers(self) -> Any:
        scheduler = {"scheduler": self.scheduler, "interval": "step"}
        return {"optimizer": self.cache.optimizer, "lr_scheduler": scheduler}

    def on_train_end(self) -> None:
        if self.cache.samples_of_pass:
            self.cache.commit()


class Clipped(Module):
    """A module with the documented hook."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.cache.clip_grad_norm_(gradient_clip_val)


def module_of(cache: tc.TierCache, kind: type[Module] = Module) -> Module:
    module = kind(cache)
    optimizer_of(cache, module)
    module.scheduler = scheduler_of(cache)
    return module


def trainer_of(folder: Path, **options: Any) -> Any:
    arguments = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    arguments |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    return pl.Trainer(**{**arguments, **options})


def weights_of(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("net."): value for name, value in found.items()}


def fitted(folder: Path, name: str, *, kind: type[Module] = Module, generator: bool = False, **options: Any) -> Any:
    with opened(folder, name) as cache:
        module = module_of(cache, kind)
        loader = batches_of(cache)
        if generator:
            loader = (b for p in cache.passes(epochs=EPOCHS) for b in p.batches(CASE.batch, shuffle=True))
        trainer_of(folder, **options).fit(module, loader)
        return weights_of(ended(folder / name, module, cache))


@pytest.mark.parametrize("generator", [False, True])
def test_fit_takes_batches_without_an_adapter(tmp_path: Path, generator: bool) -> None:
    """Stopped inside a pass and after one, it resumes; so does a loader whose batches Lightning fetches ahead."""
    CASE.cut(tmp_path / "passes")
    expected = plain(tmp_path)
    assert_same(fitted(tmp_path, "fit.tc", generator=generator), expected)
    for steps in (7, 3, -1):
        found = fitted(tmp_path, "stopped.tc", generator=generator, max_steps=steps)
    assert_same(found, expected)


def test_fit_validates_between_batches(tmp_path: Path) -> None:
    CASE.cut(tmp_path / "passes")
    others = CASE.cut(tmp_path / "others")
    with opened(tmp_path, "fit.tc") as cache:
        module = module_of(cache)
        loader, validation = batches_of(cache), cache.evaluation_batches(others, 10)
        trainer_of(tmp_path, val_check_interval=9).fit(module, loader, validation)
        with torch.no_grad():
            losses = [float(loss_of(module.net, batch)) * len(batch) for batch in validation]
        assert [step for step, _ in module.validated] == [0, 9, 18]
        assert len({loss for _, loss in module.validated[1:]}) == 2
        module.validated.clear()
        trainer_of(tmp_path).validate(module, validation, verbose=False)
        assert module.validated[0][1] == pytest.approx(sum(losses) / CASE.num_samples, rel=1e-5)
        found = weights_of(ended(tmp_path / "fit.tc", module, cache))
    assert_same(found, plain(tmp_path))


def test_an_epoch_of_lightning_may_be_one_of_the_cache(tmp_path: Path) -> None:
    CASE.cut(tmp_path / "passes")

    class Reloaded(Module):
        def train_dataloader(self) -> Any:
            return self.cache.batches(CASE.batch, epochs=self.current_epoch + 1, shuffle=True)

    with opened(tmp_path, "fit.tc") as cache:
        module = module_of(cache, Reloaded)
        trainer = trainer_of(tmp_path, max_epochs=EPOCHS, reload_dataloaders_every_n_epochs=1)
        trainer.fit(module)
        assert trainer.global_step == STEPS
        found = weights_of(ended(tmp_path / "fit.tc", module, cache))
    assert_same(found, plain(tmp_path))


def test_gradients_are_clipped_by_the_hook(tmp_path: Path) -> None:
    CASE.cut(tmp_path / "passes")
    clipped = fitted(tmp_path, "clipped.tc", kind=Clipped, gradient_clip_val=MAX_NORM)
    assert_same(clipped, plain(tmp_path, clips=True))
    with pytest.raises(StateError, match=r"the trainer of Module has gradient_clip_val=0.05, .* call cache.clip_grad"):
        fitted(tmp_path, "refused.tc", gradient_clip_val=MAX_NORM)


class Killed(pl.Callback):  # type: ignore[name-defined, misc]
    """Ends a training before its ninth batch, with two passes committed."""

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        module.cache.drain(staged=False)
        if trainer.global_step == 8:
            raise InterruptedError


def test_a_checkpoint_of_lightning_names_the_commit_of_its_rows(tmp_path: Path) -> None:
    """Lightning would stop too early from one inside a run, which is refused; without it the run resumes."""
    CASE.cut(tmp_path / "passes")
    saving = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1)
    with pytest.raises(InterruptedError), opened(tmp_path, "fit.tc") as cache:  # noqa: PT012 - a with of two
        trainer = trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saving, Killed()])
        module = module_of(cache)
        trainer.fit(module, batches_of(cache))
    path = tmp_path / "step=8.ckpt"
    (named,) = torch.load(path, weights_only=False)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert (named["pass"], named["sample"], named["batches"]) == (2, 0, 8)
    with opened(tmp_path, "fit.tc") as cache:
        module, loader = module_of(cache), batches_of(cache)
        with pytest.raises(StateError, match=r"made after 8 batches, .* train without the trainer's checkpoint"):
            trainer_of(tmp_path).fit(module, loader, ckpt_path=path, weights_only=False)
        batches = batches_of(cache)
        batches.load_state_dict(named)
        assert len(batches) == 8 + STEPS - 6
    with opened(tmp_path, "fit.tc") as cache:
        module, loader, trainer = module_of(cache), batches_of(cache), trainer_of(tmp_path)
        trainer.fit(module, loader)
        assert trainer.global_step == STEPS - 6
        found = weights_of(ended(tmp_path / "fit.tc", module, cache))
    assert_same(found, plain(tmp_path))
    with opened(tmp_path, "fit.tc") as cache:
        module, loader = module_of(cache), cache.batches(CASE.batch, epochs=EPOCHS + 1)
        with pytest.raises(StateError, match=r"belongs to the rows of commit 2 .* roll the store back"):
            trainer_of(tmp_path).fit(module, loader, ckpt_path=path, weights_only=False)
