"""N-gram keys are those of transformers, and its model with an n-gram table trains out of core."""

import pytest
import torch

import tiercache as tc
from tests.stacks.qwen4 import config_of, qwen


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
