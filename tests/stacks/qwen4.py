"""transformers' Qwen4Exp with a tiny backbone: trained out of core, and as transformers has it.

    python -m tests.stacks.qwen4 FOLDER [--stop BATCH] [--shard whole|backbone]

trains two epochs into FOLDER, or goes on from its last commit. Before batch STOP the process kills itself. With --shard
it is a rank of torchrun, and FSDP2 shards the model.
"""

import argparse
import os
import signal
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tiercache as tc
from tests.stacks.installed import installed

qwen = installed("transformers.models.qwen4_exp.modeling_qwen4_exp")
VOCAB, ROWS, DIM, LENGTH, BATCH, EPOCHS = 512, 300, 8, 32, 4, 2
RATE, DENSE_RATE = 100.0, 0.1
"""Of SGD: the learning rates of rows, whose gradients are small, and of the rest. Optimizers that divide by the size of
gradients also enlarge their rounding errors, by which routers of experts choose others, and losses part.
"""
TABLE = tc.Table(name="ngram", dim=DIM, initializer=tc.init.Normal(std=0.5), optimizer=tc.optim.SGD(learning_rate=RATE))
PLACE = "model.layers.1.ple.ple_embedding.ngram_embedding"  # the table in the model


def config_of(**changes: Any) -> Any:
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    return Qwen4ExpTextConfig(
        **{
            "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "linear_num_key_heads": 2, "linear_num_value_heads": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 4, "hc_count": 2,
            "hc_lowrank": 8, "ple_layer_ids": [2], "ple_embed_dim": 16 * DIM, "ngram_vocab_size_base": ROWS,
            "split_ngram_parts": 1, "eos_token_id": 0, "bos_token_id": 0, "layer_types": ["linear_attention"] * 2,
            "use_cache": False, "initializer_range": 0.05,
        }
        | changes
    )  # fmt: skip


def tokens_of(sequences: int = 48) -> tc.TokenFiles:
    drawn = np.random.default_rng(0).zipf(1.2, sequences * LENGTH)
    return tc.TokenFiles(np.minimum(drawn, VOCAB - 1).astype(np.uint16), LENGTH)


def data_of(folder: Path, tokens: tc.TokenFiles, table: tc.Table = TABLE, **options: Any) -> tc.PassDataset:
    grams = tc.ngrams("qwen4_exp", vocab_size=VOCAB, rows_per_head=ROWS, border=0)
    options = {"device_budget": "250KiB", "batch_multiple": 2 * BATCH} | options
    return tc.record_ngrams(tokens, grams, folder / "keys", tables=table, progress=False, **options)


def converted(schema: tc.PassDataset | tc.Schema, config: Any = None) -> Any:
    """Return the model with its table out of core, as the documentation says: built on "meta", then initialized."""
    with torch.device("meta"):
        model = qwen.Qwen4ExpForCausalLM(config_of() if config is None else config)
    tc.convert(model, schema, filter_fn=lambda _, name: name.endswith("ngram_embedding"))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    return model


def opened(folder: Path, data: tc.PassDataset, **objects: Any) -> tc.TierCache:
    return tc.TierCache(
        folder / "store", data, device_budget="1MiB", host_budget="64MiB", seed=3, progress=False, **objects
    )


def plain_twin(model: Any, cache: tc.TierCache) -> Any:
    """Return transformers' own model, with the weights of ``model`` and the rows of the cache, all in memory."""
    plain = qwen.Qwen4ExpForCausalLM(config_of())
    missing, unexpected = plain.load_state_dict(model.state_dict(), strict=False)
    assert missing == [f"{PLACE}.weight"]
    assert not unexpected
    table = plain.get_submodule(PLACE).weight
    rows = cache.store.lookup("ngram", np.arange(len(table), dtype=np.int64), missing="initial")["vector"]
    with torch.no_grad():
        table.copy_(torch.from_numpy(rows))
    assert table.std() > 0.4
    plain.first_rows = rows
    return plain


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer of all parameters; rows step as it steps the plain table."""
    groups: dict[bool, list[Any]] = {False: [], True: []}
    for name, one in model.named_parameters():
        groups[name.startswith(PLACE)].append(one)
    return torch.optim.SGD([{"params": groups[False], "lr": DENSE_RATE}, {"params": groups[True], "lr": RATE}])


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    accumulation: int = 1  # batches of a step
    autocast: bool = False  # in bfloat16
    reentrant: bool | None = None  # how activations are recomputed; None: they are kept


class Loop:
    """A plain loop, which keeps its losses and how often the table was looked up."""

    def __init__(self, model: Any, optimizer: Any, mode: Mode) -> None:
        self.model, self._optimizer, self._mode = model, optimizer, mode
        self.losses: list[float] = []
        self.lookups = 0
        model.get_submodule(PLACE).register_forward_hook(self._count)
        if mode.reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": mode.reentrant})
        model.train()

    def _count(self, *_: Any) -> None:
        self.lookups += 1

    def train(self, batch: torch.Tensor) -> None:
        mode = self._mode
        with torch.autocast("cpu", torch.bfloat16) if mode.autocast else nullcontext():
            found = self.model(input_ids=batch, labels=batch, use_cache=False)
        assert found.logits.dtype == (torch.bfloat16 if mode.autocast else torch.float32)
        (found.loss / mode.accumulation).backward()
        self.losses.append(found.loss.item())
        if len(self.losses) % mode.accumulation == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()


def assert_equal_losses(ours: list[float], theirs: list[float]) -> None:
    print("\n batch    out of core      in memory")  # noqa: T201 - shown by pytest -s, or if they differ
    for count, pair in enumerate(zip(ours, theirs, strict=True)):
        print(f"{count:6} {pair[0]:14.7f} {pair[1]:14.7f}")  # noqa: T201
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def assert_equal_rows(folder: Path, plain: Any) -> None:
    table = plain.get_submodule(PLACE).weight.detach().numpy()
    with tc.Store.open(folder / "store", mode="r") as store:
        rows = store.lookup("ngram", np.arange(len(table), dtype=np.int64), missing="initial")["vector"]
    np.testing.assert_allclose(rows, table, atol=1e-3)
    assert np.abs(rows - plain.first_rows).max() > 0.02


def shard(model: Any, *, whole: bool) -> None:
    """Shard a model by layer over all ranks; unless it is sharded whole, the table is left out."""
    ignored = set() if whole else set(model.get_submodule(PLACE).parameters())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, ignored_params=ignored)
    sharded = {name: isinstance(one, DTensor) for name, one in model.named_parameters()}
    assert [name for name, one in sharded.items() if not one] == ([] if whole else [f"{PLACE}.anchor"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stop", type=int)
    parser.add_argument("--shard", choices=["whole", "backbone"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens, batches = tokens_of(), list[torch.Tensor]()
    model = converted(data := data_of(options.folder, tokens))
    if options.shard:
        dist.init_process_group("gloo")
        shard(model, whole=options.shard == "whole")
    with opened(options.folder, data, model=model, optimizer=optimizer_of(model)) as cache:
        scheduler = torch.optim.lr_scheduler.LinearLR(cache.optimizer, total_iters=10)
        cache.register(scheduler=scheduler)
        loop = Loop(model, cache.optimizer, Mode(reentrant=False))
        for batch in cache.batches(BATCH, epochs=EPOCHS, dataset=tokens, shuffle=True):
            if len(loop.losses) == options.stop:
                os.kill(os.getpid(), signal.SIGKILL)
            batches.append(batch)
            loop.train(batch)
            scheduler.step()
        cache.drain()
    rank = os.environ.get("RANK", "0")
    torch.save((loop.losses, torch.stack(batches), model.state_dict()), options.folder / f"rank-{rank}.pt")
    if options.shard:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
