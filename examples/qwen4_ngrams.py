"""transformers' Qwen4Exp with its n-gram table out of core: python -m examples.qwen4_ngrams [--rows-per-head 20000000].

A tiny backbone, trained on bytes of texts (``--data``; default: the source of Python's standard library). The table has
16 x ``--rows-per-head`` rows of 160 numbers, as that of Qwen3.8-Flash-Next has with 20,000,000; its tensor is never
allocated. If it fits in memory, transformers' own model trains on the same batches with torch's optimizers, and both
losses are printed. Needs the extra ``stacks``.
"""

from __future__ import annotations

import argparse
import copy
import resource
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console

import tiercache as tc

BYTES, END, DIM, CONTEXT, BATCH, EVERY, RATE, EPS = 257, 256, 160, 64, 8, 5, 0.05, 1e-8
console = Console(highlight=False, width=120)


def texts_of(files: list[Path], most: int) -> Any:
    """Yield the bytes of texts, up to a limit."""
    for path in files or sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = np.frombuffer(path.read_bytes()[:most], np.uint8)
        yield text
        most -= text.size
        if most <= 0:
            return


def build(rows_per_head: int) -> Any:
    """Return the model on "meta": it has shapes, and no memory."""
    root = Path(__file__).resolve().parents[1]  # has a folder kernels, which transformers would take for a package
    sys.path[:] = [one for one in sys.path if Path(one or ".").resolve() != root]
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    config = Qwen4ExpTextConfig(
        vocab_size=BYTES, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=2, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, hc_count=2, hc_lowrank=16, ple_layer_ids=[2], ple_embed_dim=16 * DIM,
        ngram_vocab_size_base=rows_per_head, split_ngram_parts=1, eos_token_id=END, bos_token_id=END,
        layer_types=["linear_attention"] * 2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen4ExpForCausalLM(config)


def in_memory(model: Any, plain: Any) -> tuple[Any, list[Any]]:
    """Return transformers' own model with the weights of ``model``, a table of zeros, and its optimizers."""
    plain.to_empty(device="cpu").init_weights()
    plain.load_state_dict(model.state_dict(), strict=False)
    table = next(one for name, one in plain.named_parameters() if "ngram_embedding" in name)
    torch.nn.init.zeros_(table)
    rest = [one for one in plain.parameters() if one is not table]
    return plain, [torch.optim.AdamW(rest, lr=1e-3), torch.optim.Adagrad([table], lr=RATE, eps=EPS)]


def run(options: argparse.Namespace) -> None:
    """Record the keys of the texts, and train."""
    texts = texts_of(options.data, options.tokens)
    tokens = tc.TokenFiles(tc.TokenFiles.write(options.folder / "tokens.bin", texts, separator=END), CONTEXT)
    grams = tc.ngrams("qwen4_exp", vocab_size=BYTES, rows_per_head=options.rows_per_head, border=END)
    adagrad = tc.optim.Adagrad(learning_rate=RATE, eps=EPS)
    table = tc.Table(name="ngram", dim=DIM, initializer=tc.init.Zeros(), optimizer=adagrad)
    data = tc.record_ngrams(tokens, grams, options.folder / "keys", tables=table, device_budget="48MiB", progress=False)
    plain = build(options.rows_per_head)
    model = tc.convert(copy.deepcopy(plain), data, filter_fn=lambda _, name: name.endswith("ngram_embedding"))
    torch.manual_seed(0)
    model.to_empty(device="cpu").init_weights()
    dense, numbers = torch.optim.AdamW(model.parameters(), lr=1e-3), grams.num_embeddings * DIM
    console.print(f"{grams.num_embeddings:,} rows x {DIM} = {numbers:,} numbers, {len(data)} passes")
    with tc.TierCache(
        options.folder / "qwen4.tc", data, model=model, optimizer=dense, device_budget="96MiB", host_budget="256MiB",
        progress=False,
    ) as cache:  # fmt: skip
        trained: list[tuple[Any, list[Any]]] = [(model, [cache.optimizer])]
        if 4 * 4 * numbers < psutil.virtual_memory().available // 2:  # weights, gradients, sums, and a copy of one
            trained.append(in_memory(model, plain))
        console.print("batch  out of core    in memory" if len(trained) > 1 else "batch  out of core")
        for count, batch in enumerate(cache.batches(BATCH, epochs=1, dataset=tokens, shuffle=True)):
            losses = [one(input_ids=batch, labels=batch).loss for one, _ in trained]
            for loss, (_, optimizers) in zip(losses, trained, strict=True):
                loss.backward()
                for one in optimizers:
                    one.step()
                    one.zero_grad()
            if count % EVERY == 0:
                console.print(f"{count:5}" + "".join(f"{loss.item():13.6f}" for loss in losses))
        cache.drain()
        live, peak = cache.store.live_rows("ngram"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    console.print(f"{live:,} rows are in the store; the process took at most {peak:,} MiB")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("qwen4_ngrams"), help="a new folder for all files")
    parser.add_argument("--rows-per-head", type=int, default=5000, help="the released model has 20000000")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="texts")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    run(options)


if __name__ == "__main__":
    main()
