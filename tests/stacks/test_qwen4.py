"""transformers' Qwen4Exp trains with its table out of core, to the losses of its own `nn.Embedding`.

Losses of every batch are those of transformers' model and torch's optimizer to 1e-5; -s prints them side by side.
"""

import copy
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.memory import Peak, run_alone
from tests.stacks.installed import installed
from tests.stacks.qwen4 import (
    BATCH,
    EPOCHS,
    PLACE,
    TABLE,
    VOCAB,
    Loop,
    Mode,
    assert_equal_losses,
    assert_equal_rows,
    config_of,
    converted,
    data_of,
    opened,
    optimizer_of,
    plain_twin,
    qwen,
    tokens_of,
)

transformers = installed("transformers")
installed("accelerate")
BaseTrainer = transformers.Trainer
ROOT, MAX_NORM, MIB = Path(__file__).parents[2], 0.1, 1 << 20


@pytest.mark.parametrize(
    "mode",
    [
        Mode(), Mode(accumulation=2), Mode(autocast=True), Mode(reentrant=False), Mode(reentrant=True),
        Mode(accumulation=2, autocast=True, reentrant=False),
    ],
    ids=["plain", "accumulates", "bfloat16", "checkpoints", "reentrant", "all"],
)  # fmt: skip
def test_a_loop_has_the_losses_of_the_plain_model(tmp_path: Path, mode: Mode) -> None:
    tokens = tokens_of()
    model = converted(data := data_of(tmp_path, tokens))
    assert len(data) > 2
    batches: list[Any] = []
    with opened(tmp_path, data, model=model, optimizer=optimizer_of(model)) as cache:
        plain = plain_twin(model, cache)
        ours = Loop(model, cache.optimizer, mode)
        for p in cache.passes(epochs=EPOCHS):
            for batch in p.loader(tokens, batch_size=BATCH, shuffle=True):
                batches.append(batch)
                ours.train(batch)
    theirs = Loop(plain, optimizer_of(plain), mode)
    for batch in batches:
        theirs.train(batch)
    assert_equal_losses(ours.losses, theirs.losses)
    assert_equal_rows(tmp_path, plain)
    times = 1 if mode.reentrant is None else 2
    assert ours.lookups == theirs.lookups == times * len(batches)


def as_inputs(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.stack(samples)
    return {"input_ids": tokens, "labels": tokens}


class Trainer(BaseTrainer):  # type: ignore[misc, valid-type]
    """The recipe of the documentation, which keeps losses and batches."""

    def get_train_dataloader(self) -> Any:
        self.losses, self.batches = list[float](), list[Any]()
        return self.train_dataset

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *others, **options)
        self.losses.append(loss.item())
        self.batches.append({name: one.clone() for name, one in inputs.items()})
        return loss


class Batches(list[Any]):
    """What the plain model is given in place of a loader."""


def fit(folder: Path, model: Any, optimizer: Any, batches: Any, cache: Any = None, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder / "output"), num_train_epochs=1, max_grad_norm=MAX_NORM, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, logging_steps=1, **options,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    trainer = Trainer(model=model, args=arguments, train_dataset=batches, optimizers=(optimizer, scheduler))
    if cache is not None:
        cache.register(scheduler=scheduler)
        trainer.accelerator.clip_grad_norm_ = lambda _, max_norm, *__: cache.clip_grad_norm_(max_norm)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    ],
    ids=["plain", "accumulates", "all"],
)
def test_a_trainer_has_the_losses_of_the_plain_model(tmp_path: Path, options: dict[str, Any]) -> None:
    tokens, per_step = tokens_of(), options.get("gradient_accumulation_steps", 1)
    model = converted(data := data_of(tmp_path, tokens))
    with opened(tmp_path, data, model=model, optimizer=optimizer_of(model)) as cache:
        plain = plain_twin(model, cache)
        batches = cache.batches(
            BATCH, epochs=EPOCHS, dataset=tokens, shuffle=True, collate_fn=as_inputs, batches_per_step=per_step
        )
        ours = fit(tmp_path, model, cache.optimizer, batches, cache, **options)
    assert ours.state.global_step == len(ours.batches) // per_step
    assert max(entry.get("grad_norm", 0) for entry in ours.state.log_history) > MAX_NORM
    theirs = fit(tmp_path, plain, optimizer_of(plain), Batches(ours.batches), **options)
    assert_equal_losses(ours.losses, theirs.losses)
    assert_equal_rows(tmp_path, plain)


def run(folder: Path, *options: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, "-m", "tests.stacks.qwen4", str(folder), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("part", ["backbone", "whole"])
def test_two_ranks_have_the_losses_of_the_plain_model(tmp_path: Path, part: str) -> None:
    """FSDP2 shards the model over them, and the cache the rows; each rank has half of each batch."""
    data = data_of(tmp_path, tokens_of())
    ran = run(tmp_path, "--shard", part, ranks=2)
    assert ran.returncode == 0, ran.stderr
    losses, batches = zip(*(torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False)[:2] for rank in (0, 1)),
                          strict=True)  # fmt: skip
    (tmp_path / "first").mkdir()
    model = converted(data)
    with opened(tmp_path / "first", data) as cache:
        plain = plain_twin(model, cache)
    theirs = Loop(plain, optimizer := optimizer_of(plain), Mode())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    for batch in torch.cat(batches, dim=1):
        assert len(batch) == BATCH
        theirs.train(batch)
        scheduler.step()
    assert_equal_losses(np.mean(losses, axis=0).tolist(), theirs.losses)
    assert_equal_rows(tmp_path, plain)


def ended(folder: Path) -> dict[str, torch.Tensor]:
    found = dict(torch.load(folder / "rank-0.pt")[2])
    with tc.Store.open(folder / "store", mode="r") as store:
        assert store.commit is not None
        found["passes"] = torch.tensor(store.commit.cursor.pass_index)
        for keys, fields in store.scan("ngram"):
            found |= {f"rows {i}": torch.from_numpy(one.copy()) for i, one in enumerate((keys, *fields))}
    return found


def test_a_training_that_was_killed_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ran = run(whole)
    assert ran.returncode == 0, ran.stderr
    assert run(killed, "--stop", "15").returncode == -signal.SIGKILL
    assert not (killed / "rank-0.pt").exists()
    resumed = run(killed)
    assert resumed.returncode == 0, resumed.stderr
    losses, rest = (torch.load(folder / "rank-0.pt")[0] for folder in (whole, killed))
    assert 24 - 15 <= len(rest) < 24
    assert rest == losses[-len(rest) :]
    ours, theirs = ended(killed), ended(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name, one in ours.items() if not torch.equal(one, theirs[name])] == []


class Compact(torch.nn.Module):
    """The rows of a table that occur, in an `nn.Embedding`."""

    def __init__(self, keys: torch.Tensor, dim: int) -> None:
        super().__init__()
        self.keys, self.rows = keys, torch.nn.Embedding(len(keys), dim)

    @property
    def weight(self) -> torch.Tensor:
        return self.rows.weight

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        return self.rows(torch.searchsorted(self.keys, keys.contiguous()))  # type: ignore[no-any-return]


def train_geometry(folder: Path) -> None:
    """Train the table of the released model, and leave behind what that took."""
    peak = Peak()
    peak.begin()
    table = tc.Table(name="ngram", dim=160, initializer=TABLE.initializer, optimizer=TABLE.optimizer)
    tokens = tokens_of(sequences=16)
    grams = tc.ngrams("qwen4_exp", vocab_size=VOCAB, rows_per_head=20_000_000, border=0)
    data = tc.record_ngrams(tokens, grams, folder / "keys", tables=table, device_budget="3MiB", progress=False)
    model = converted(data, config_of(ngram_vocab_size_base=20_000_000, ple_embed_dim=16 * 160))
    ngrams = model.get_submodule(PLACE)
    keys = np.unique(grams(tokens.read(0, len(tokens))))
    optimizer = optimizer_of(model)
    with tc.TierCache(
        folder / "store", data, model=model, optimizer=optimizer, device_budget="16MiB", host_budget="64MiB",
        progress=False,
    ) as cache:  # fmt: skip
        plain = copy.deepcopy(model)
        compact = Compact(torch.from_numpy(keys), 160)
        first = cache.store.lookup("ngram", keys, missing="initial")["vector"]
        compact.rows.weight.data.copy_(torch.from_numpy(first))
        plain.set_submodule(PLACE, compact)
        loops = Loop(model, cache.optimizer, Mode()), Loop(plain, optimizer_of(plain), Mode())
        for p in cache.passes(epochs=EPOCHS):
            for batch in p.loader(tokens, batch_size=BATCH):
                for loop in loops:
                    loop.train(batch)
        cache.drain()
        live = cache.store.live_rows("ngram")
    figures = {
        "losses": [loop.losses for loop in loops], "shape": list(ngrams.weight.shape), "rows": [live, len(keys)],
        "last": int(keys.max()), "passes": len(data), "taken": peak.taken,
    }  # fmt: skip
    (folder / "figures.json").write_text(json.dumps(figures))


def test_the_released_table_trains_without_its_tensor(tmp_path: Path) -> None:
    """320,001,536 rows of 160 numbers, 205 GB: the process takes less than 512 MiB, the store what occurs."""
    run_alone(train_geometry, tmp_path)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["shape"] == [320_001_536, 160]
    assert figures["last"] > 300_000_000
    assert figures["rows"][0] == figures["rows"][1] > 1000
    assert figures["passes"] > 1
    assert_equal_losses(*figures["losses"])
    assert figures["taken"] < 512 * MIB


def test_an_initialized_model_has_the_buffers_and_weights_of_transformers(tmp_path: Path) -> None:
    """Also those that keys are computed with; weights of a checkpoint without the table load as they are."""
    schema = data_of(tmp_path, tokens_of()).schema
    plain = qwen.Qwen4ExpForCausalLM(config_of())
    rest = {name: one for name, one in plain.state_dict().items() if name != f"{PLACE}.weight"}
    with torch.device("meta"):
        model = qwen.Qwen4ExpForCausalLM(config_of())
    tc.convert(model, schema, filter_fn=lambda _, name: name.endswith("ngram_embedding"))
    model.to_empty(device="cpu")
    anchor = model.get_parameter(f"{PLACE}.anchor")
    with torch.no_grad():
        for one in (*model.parameters(), *model.buffers()):
            if one is not anchor:
                one.fill_(torch.nan if one.is_floating_point() else 1 << 40)  # what memory may have
    model.init_weights()
    buffers = dict(model.named_buffers())
    assert len(buffers) > 3
    assert all(torch.equal(one, plain.get_buffer(name)) for name, one in buffers.items())
    assert all(bool(one.isfinite().all()) for one in model.parameters())
    model.load_state_dict(rest)
    assert all(torch.equal(one, rest[name]) for name, one in model.state_dict().items())
    with pytest.raises(RuntimeError, match="is a whole table, whose rows are in the store"):
        model.load_state_dict({**rest, f"{PLACE}.weight": torch.zeros(1)})


def test_keys_of_a_model_that_was_not_initialized_are_refused(tmp_path: Path) -> None:
    tokens = tokens_of()
    model = converted(data := data_of(tmp_path, tokens))
    ngrams = model.get_submodule(PLACE.rpartition(".")[0])
    for name in ("ngram_heads_vocab_sizes", "ngram_heads_offsets"):
        ngrams.get_buffer(name).fill_(1 << 40)
    with opened(tmp_path, data, model=model, optimizer=optimizer_of(model)) as cache:
        loop = Loop(model, cache.optimizer, Mode())
        with pytest.raises(IndexError, match=r"2,048 of 2,048 keys of table 'ngram' are outside \[0, 5,632\)"):
            loop.train(next(iter(cache.batches(BATCH, epochs=1, dataset=tokens))))


@pytest.mark.parametrize(("rows", "columns"), [("500", 3), ("20000000", 2)])
def test_the_example_trains_with_equal_losses(tmp_path: Path, rows: str, columns: int) -> None:
    command = [sys.executable, "-m", "examples.qwen4_ngrams", "--rows-per-head", rows, "--tokens", "6000"]
    ran = subprocess.run(
        [*command, "--folder", str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines() if line[:5].strip().isdigit()]
    losses = np.array(lines, float)
    assert losses.shape == (3, columns)
    assert losses[-1, 1] < losses[0, 1] - 0.5
    np.testing.assert_allclose(losses[:, 1], losses[:, -1], atol=1e-5)
    assert ("320,001,536 rows x 160 = 51,200,245,760 numbers" in ran.stdout) == (columns == 2)


def test_the_recipe_of_the_page_trains_the_released_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "language_models.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    names = {
        "tc": tc, "torch": torch, "transformers": transformers, "Qwen4ExpForCausalLM": qwen.Qwen4ExpForCausalLM,
        "tokens": tokens_of(), "config": config_of(ngram_vocab_size_base=20_000_000, ple_embed_dim=16 * 160),
    }  # fmt: skip
    for block in blocks:
        exec(compile(block, "docs/language_models.md", "exec"), names)
    for name in ("qwen.tc", "qwen-trainer.tc"):
        with tc.Store.open(tmp_path / name, mode="r") as store:
            assert store.commit is not None
            assert store.commit.cursor.pass_index == len(names["data"])
    assert names["trainer"].state.global_step == 6


def test_a_model_with_the_merged_table_has_the_logits_of_training(tmp_path: Path) -> None:
    """Its rows begin as those of a released checkpoint, and go back into a copy of it, which transformers loads."""
    torch.manual_seed(1)
    released = qwen.Qwen4ExpForCausalLM(config_of(split_ngram_parts=4))
    released.save_pretrained(tmp_path / "released")
    start = tc.init.Checkpoint(path=str(tmp_path / "released"), tensor=f"{PLACE}.shard_*.weight")
    tokens = tokens_of()
    data = data_of(tmp_path, tokens, replace(TABLE, initializer=start))
    model = converted(data)
    of_backbone = {name: one for name, one in released.state_dict().items() if not name.startswith(PLACE)}
    assert not model.load_state_dict(of_backbone, strict=False).unexpected_keys
    with opened(tmp_path, data, model=model, optimizer=optimizer_of(model)) as cache:
        for p in cache.passes(epochs=1):
            loop = Loop(model, cache.optimizer, Mode())
            for batch in p.loader(tokens, batch_size=BATCH, shuffle=True):
                loop.train(batch)
        cache.drain()
        model.eval()
        batch = torch.from_numpy(tokens.read(0, BATCH))
        with torch.no_grad():
            expected = model(input_ids=batch, use_cache=False).logits
        done = tc.export_overlay(cache.store, tmp_path / "merged" / "model.safetensors", merge=True)
    assert 0 < done.rows < len(released.get_submodule(PLACE).weight)
    (tmp_path / "merged" / "config.json").write_bytes((tmp_path / "released" / "config.json").read_bytes())
    merged = qwen.Qwen4ExpForCausalLM.from_pretrained(tmp_path / "merged").eval()
    dense = {name: one for name, one in model.state_dict().items() if not name.startswith(PLACE)}
    assert not merged.load_state_dict(dense, strict=False).unexpected_keys
    with torch.no_grad():
        found, before = (one.eval()(input_ids=batch, use_cache=False).logits for one in (merged, released))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert (before - expected).abs().max() > 1e-3
