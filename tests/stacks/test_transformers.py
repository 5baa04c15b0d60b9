"""Hugging Face's Trainer takes the batches of a cache, to the bits of a plain loop, and evaluates meanwhile."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tiercache as tc
from tests.stacks.installed import installed
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

transformers = installed("transformers")
installed("accelerate")
BaseTrainer = transformers.Trainer


class Trainer(BaseTrainer):  # type: ignore[misc, valid-type]
    """The recipe of the documentation."""

    def get_train_dataloader(self) -> Any:
        return self.train_dataset

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.eval_dataset if eval_dataset is None else eval_dataset

    def compute_loss(
        self, model: Any, inputs: tc.Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = loss_of(model, inputs)
        return (loss, {"loss": loss}) if return_outputs else loss


def trainer_of(folder: Path, cache: tc.TierCache, model: Any, *, clips: bool = True, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "output"), "num_train_epochs": 1, "max_grad_norm": torch.inf, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "label_names": ["label"],
    }  # fmt: skip
    loaders = {name: options.pop(name) for name in ("train_dataset", "eval_dataset") if name in options}
    trainer = Trainer(
        model=model, args=transformers.TrainingArguments(**{**arguments, **options}),
        optimizers=(cache.optimizer, scheduler_of(cache)), **{"train_dataset": batches_of(cache), **loaders},
    )  # fmt: skip
    if clips:
        trainer.accelerator.clip_grad_norm_ = lambda _, max_norm, *__: cache.clip_grad_norm_(max_norm)
    return trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    CASE.cut(tmp_path / "passes")
    return tmp_path


def fitted(folder: Path, name: str, **options: Any) -> dict[str, torch.Tensor]:
    with opened(folder, name) as cache:
        model = model_of(cache)
        optimizer_of(cache, model)
        trainer_of(folder, cache, model, **options).train()
        return ended(folder / name, model, cache)


def test_a_trainer_ends_with_the_bits_of_a_plain_loop(folder: Path) -> None:
    assert_same(fitted(folder, "all.tc"), plain(folder))


def test_a_trainer_that_was_stopped_resumes_from_the_last_commit(folder: Path) -> None:
    """The last commit is the end of a pass, and the remaining batches are trained."""
    fitted(folder, "stopped.tc", max_steps=7)
    with opened(folder, "stopped.tc") as cache:
        model = model_of(cache)
        optimizer_of(cache, model)
        trainer = trainer_of(folder, cache, model)
        assert len(trainer.train_dataset) == STEPS - 6
        trainer.train()
        assert trainer.state.global_step == STEPS - 6
        found = ended(folder / "stopped.tc", model, cache)
    assert_same(found, plain(folder))


def test_a_trainer_evaluates_between_steps(folder: Path) -> None:
    others = CASE.cut(folder / "others")
    with opened(folder, "fit.tc") as cache:
        model = model_of(cache)
        optimizer_of(cache, model)
        validation = cache.evaluation_batches(others, 8)
        trainer = trainer_of(folder, cache, model, eval_dataset=validation, eval_strategy="steps", eval_steps=8)
        trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        with torch.no_grad():
            last = torch.stack([loss_of(model, batch) for batch in validation]).mean()
        assert len(set(losses)) == STEPS // 8
        assert losses[-1] == pytest.approx(float(last), rel=1e-5)
        found = ended(folder / "fit.tc", model, cache)
    assert_same(found, plain(folder))


def test_gradients_are_clipped_by_the_cache(folder: Path) -> None:
    assert_same(fitted(folder, "clipped.tc", max_grad_norm=MAX_NORM), plain(folder, clips=True))
    with pytest.raises(StateError, match=r"clip with cache.clip_grad_norm_\(max_norm\)"):
        fitted(folder, "refused.tc", clips=False, max_grad_norm=1.0)


def test_gradients_accumulate_within_a_pass(folder: Path) -> None:
    """Three batches a pass, so three steps of the trainer's; two would reach into the next pass, and are refused."""
    with opened(folder, "fit.tc") as cache:
        model = model_of(cache)
        optimizer_of(cache, model)
        trainer = trainer_of(folder, cache, model, gradient_accumulation_steps=3)
        trainer.train()
        assert trainer.state.global_step == STEPS // 3
    with pytest.raises(StateError, match="ended between backward and step"):
        fitted(folder, "refused.tc", gradient_accumulation_steps=2)
    assert EPOCHS * CASE.num_samples == STEPS * CASE.batch
