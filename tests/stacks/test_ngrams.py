"""N-gram keys are those of transformers, and its model with an n-gram table trains out of core."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.stacks.qwen4 import BATCH, LENGTH, ROWS, VOCAB, config_of, qwen


@pytest.mark.parametrize("layer", [0, 1])
def test_keys_of_a_million_tokens_are_those_of_transformers(layer: int) -> None:
    """Key for key, with the geometry of the released model, borders included."""
    config = config_of(vocab_size=248_320, ngram_vocab_size_base=20_000_000)
    with torch.device("meta"):
        theirs = qwen.Qwen4ExpTextNGramEmbedding(config, 16 * 160, 2, layer)
    theirs.layer_multipliers = qwen._build_layer_multipliers(248_320, 3, layer, config.seed)
    theirs.ngram_heads_vocab_sizes = torch.tensor(theirs.head_vocab_sizes)
    theirs.ngram_heads_offsets = torch.tensor(theirs.head_offsets)
    grams = tc.ngrams("qwen4_exp", vocab_size=248_320, rows_per_head=20_000_000, border=0, layer=layer)
    assert grams.num_embeddings == theirs.ngram_embedding.num_embeddings
    tokens = torch.randint(248_320, (256, 4096), generator=torch.Generator().manual_seed(0))
    tokens[torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) < 0.01] = 0

    class Keys(torch.nn.Module):
        weight = torch.empty(0)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.ids = ids
            return torch.empty(*ids.shape, 1)

    theirs.ngram_embedding = keys = Keys()
    theirs(tokens, None)
    assert torch.equal(grams(tokens), keys.ids)


def test_a_model_of_transformers_trains_its_table_out_of_core(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = qwen.Qwen4ExpForCausalLM(config_of(initializer_range=0.02))
    rows = tc.optim.Adagrad(learning_rate=0.05, eps=1e-8, initial_accumulator=0.1)
    mine = tc.convert(copy.deepcopy(theirs), filter_fn=lambda _, name: name.endswith("ngram_embedding"), optimizer=rows)
    ((name, module),) = ((n, m) for n, m in mine.named_modules() if isinstance(m, tc.Embedding))
    grams = tc.ngrams("qwen4_exp", vocab_size=VOCAB, rows_per_head=ROWS, border=0)
    rng = np.random.default_rng(0)
    tokens = tc.TokenFiles(np.minimum(rng.zipf(1.2, 64 * LENGTH), VOCAB - 1).astype(np.uint16), LENGTH)
    tables = [*module.table_specs.values()]
    data = tc.record_ngrams(tokens, grams, tmp_path / "keys", tables=tables, device_budget="400KiB", progress=False)
    assert len(data) > 1
    table = theirs.get_submodule(name).weight
    rest = [one for one in theirs.parameters() if one is not table]
    others = [
        torch.optim.AdamW(rest, lr=1e-3),
        torch.optim.Adagrad([table], lr=0.05, eps=1e-8, initial_accumulator_value=0.1),
    ]
    anchors = {id(module.anchor)}
    optimizer = torch.optim.AdamW([one for one in mine.parameters() if id(one) not in anchors], lr=1e-3)
    with tc.TierCache(
        tmp_path / "store", data, model=mine, optimizer=optimizer, device_budget="1MiB", host_budget="32MiB",
        progress=False,
    ) as cache:  # fmt: skip
        for p in cache.passes(epochs=2):
            for x in p.loader(tokens, batch_size=BATCH, shuffle=True):
                losses = [one(input_ids=x, labels=x, use_cache=False).loss for one in (mine, theirs)]
                for loss, each in zip(losses, ([cache.optimizer], others), strict=True):
                    loss.backward()
                    for one in each:
                        one.step()
                        one.zero_grad()
                torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
