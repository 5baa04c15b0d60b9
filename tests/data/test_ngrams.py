"""N-gram keys: the published numbers, the obvious loop, torch's operators, and errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc

VOCAB = 13
MADE: dict[str, tc.NGrams] = {
    "exact": tc.ngrams("exact", vocab_size=VOCAB, orders=(2, 4)),
    "exact with borders": tc.ngrams("exact", vocab_size=VOCAB, orders=(2, 3), border=5),
    "qwen4_exp": tc.ngrams("qwen4_exp", vocab_size=VOCAB, rows_per_head=50, border=0, heads=3),
    "engram": tc.ngrams(
        "engram", vocab_size=7, orders=(2, 3, 4), rows_per_head=20, padding=2, layers=(1, 4), layer=4, heads=2,
        token_map=np.arange(VOCAB) % 7,
    ),
}  # fmt: skip


def obvious(grams: tc.NGrams, sequence: list[int]) -> list[list[int]]:
    """Return the keys of each token, n-gram by n-gram."""
    numbers = sequence if grams.token_map is None else [int(grams.token_map[token]) for token in sequence]
    found, begin = [], 0
    for t, number in enumerate(numbers):
        keys = []
        for order, moduli, offsets in zip(grams.orders, grams.moduli, grams.offsets, strict=True):
            mixed = 0
            for k in range(order):
                token = numbers[t - k] if t - k >= begin else grams.padding
                mixed ^= token * grams.factors[k]
            mixed = (mixed + (1 << 63)) % (1 << 64) - (1 << 63)
            keys += [(mixed % m if m else mixed) + offset for m, offset in zip(moduli, offsets, strict=True)]
        found.append(keys)
        if number == grams.border:
            begin = t + 1
    return found


@pytest.mark.parametrize("name", MADE)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_keys_are_those_of_the_obvious_loop(name: str, data: st.DataObject) -> None:
    """With NumPy and with torch, and with torch's operators as on a GPU."""
    grams, length = MADE[name], data.draw(st.integers(1, 12))
    token = st.integers(0, VOCAB - 1)
    rows = data.draw(st.lists(st.lists(token, min_size=length, max_size=length), min_size=1, max_size=3))
    expected = np.array([obvious(grams, row) for row in rows])
    found = grams(np.array(rows, np.uint16))
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, expected)
    tensor = torch.tensor(rows)
    np.testing.assert_array_equal(grams(tensor).numpy(), expected)
    np.testing.assert_array_equal(grams._on_device(tensor).numpy(), expected)
    np.testing.assert_array_equal(grams(tensor[0]).numpy(), expected[0])
    assert 0 <= int(found.min()) <= int(found.max()) < grams.num_embeddings


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0,), (2, 0, 4), ()])
def test_keys_have_the_shape_of_the_tokens(name: str, shape: tuple[int, ...]) -> None:
    """With one more axis, also if there are no tokens, and for one token alone."""
    grams = MADE[name]
    expected = (*shape, grams.num_heads)
    tokens = np.ones(shape, np.int64)
    assert grams(tokens).shape == grams(torch.from_numpy(tokens)).shape == expected
    assert grams._on_device(torch.from_numpy(tokens)).shape == expected
    assert grams(tokens.tolist()).dtype == np.int64
    np.testing.assert_array_equal(grams._on_device(torch.from_numpy(tokens)).numpy(), grams(tokens))


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.uint64])
def test_a_map_of_tokens_may_be_a_view(dtype: Any) -> None:
    """Backwards, of another dtype, and read-only."""
    view = (np.arange(VOCAB) % 7).astype(dtype)[::-1]
    view.flags.writeable = False
    grams, copied = (replace(MADE["engram"], token_map=one) for one in (view, view.astype(np.int64)))
    tokens = torch.arange(VOCAB)
    expected = copied(tokens).numpy()
    np.testing.assert_array_equal(grams(tokens).numpy(), expected)
    np.testing.assert_array_equal(grams._on_device(tokens).numpy(), expected)


@pytest.mark.parametrize("factor", [(1 << 63) - 1, 1 << 63, (1 << 64) - 59, -5, (1 << 70) + 3])
def test_factors_are_taken_modulo_2_to_the_64(factor: int) -> None:
    """With NumPy and with torch's operators; moduli may be as large as keys."""
    grams = replace(
        MADE["exact"], orders=(2,), factors=(factor, 3), moduli=((101, (1 << 62) + 1, (1 << 63) - 102),),
        offsets=((0, 101, 101),),
    )  # fmt: skip
    row = [12, 0, 7, 7]
    np.testing.assert_array_equal(grams(np.array(row)), obvious(grams, row))
    np.testing.assert_array_equal(grams._on_device(torch.tensor(row)).numpy(), obvious(grams, row))


def test_exact_keys_are_those_of_one_ngram_alone() -> None:
    """For either order, also if tokens are missing at the beginning."""
    grams = tc.ngrams("exact", vocab_size=3, orders=(2, 3))
    sequences = np.stack(np.meshgrid(*[np.arange(3)] * 4, indexing="ij"), -1).reshape(-1, 4)
    keys, seen = grams(sequences), dict[int, tuple[int, ...]]()
    for row, of_row in zip(sequences.tolist(), keys.tolist(), strict=True):
        for t, of_token in enumerate(of_row):
            for order, key in zip(grams.orders, of_token, strict=True):
                gram = (order, *([-1] * order + row)[t + 1 : t + 1 + order])
                assert seen.setdefault(key, gram) == gram
    assert len(set(seen.values())) == len(seen) == (3 + 9) + (3 + 9 + 27)


def test_published_tables_have_their_sizes_and_factors() -> None:
    """Qwen3.8-Flash-Next's 320,001,536 rows, and both layers of DeepSeek-V4.1-Flash."""
    grams = tc.ngrams("qwen4_exp", vocab_size=248_320, rows_per_head=20_000_000, border=0)
    assert (grams.num_embeddings, grams.num_heads) == (320_001_536, 16)
    options: dict[str, Any] = {
        "vocab_size": 99_092, "orders": (2, 3, 4), "rows_per_head": 16_000_000, "padding": 2, "layers": (1, 14),
    }  # fmt: skip
    first, second = (tc.ngrams("engram", layer=layer, **options) for layer in (1, 14))
    assert (first.num_embeddings, second.num_embeddings) == (384_006_168, 384_016_682)
    assert first.factors == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert second.factors == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    primes = [one for grams in (first, second) for of_order in grams.moduli for one in of_order]
    assert len(set(primes)) == 48


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "unknown recipe 'bigram'", lambda: tc.ngrams("bigram", vocab_size=4)),  # type: ignore[arg-type]
        (ValueError, "vocab_size is 0", lambda: tc.ngrams("exact", vocab_size=0)),
        (ValueError, "4 tokens of a vocabulary of 70,000 take 68 bits, but a key has 61",
         lambda: tc.ngrams("exact", vocab_size=70_000, orders=(2, 4))),
        (ValueError, r"orders are \(3, 2\)", lambda: tc.ngrams("exact", vocab_size=4, orders=(3, 2))),
        (ValueError, "orders are 2: expected whole numbers from 2 on, ascending, such as",
         lambda: tc.ngrams("exact", vocab_size=4, orders=2)),  # type: ignore[arg-type]
        (ValueError, r"orders are \(\): expected whole numbers",
         lambda: tc.ngrams("engram", vocab_size=4, orders=(), rows_per_head=9, padding=0)),
        (ValueError, r"orders are \(2.0, 3\): expected", lambda: tc.ngrams("exact", vocab_size=4, orders=(2.0, 3))),  # type: ignore[arg-type]
        (ValueError, "orders are '23'", lambda: tc.ngrams("exact", vocab_size=4, orders="23")),  # type: ignore[arg-type]
        (ValueError, "orders are 3: expected", lambda: replace(MADE["exact"], orders=3)),  # type: ignore[arg-type]
        (ValueError, r"orders of 'engram' are \(3,\)",
         lambda: tc.ngrams("engram", vocab_size=4, orders=(3,), rows_per_head=9, padding=0)),
        (ValueError, "rows_per_head is 1", lambda: tc.ngrams("qwen4_exp", vocab_size=4, rows_per_head=1, border=0)),
        (ValueError, r"layer 3 is not among layers \(1, 2\)",
         lambda: tc.ngrams("engram", vocab_size=4, rows_per_head=9, padding=0, layers=(1, 2), layer=3)),
        (ValueError, "heads is 0", lambda: tc.ngrams("qwen4_exp", vocab_size=4, rows_per_head=9, border=0, heads=0)),
        (ValueError, "border is 4, which is not a token", lambda: tc.ngrams("exact", vocab_size=4, border=4)),
        (ValueError, r"token_map and padding go up to 5: expected numbers of canonical tokens, \[0, 4\)",
         lambda: tc.ngrams("engram", vocab_size=4, rows_per_head=9, padding=0, token_map=[0, 5])),
        (ValueError, "moduli are", lambda: replace(MADE["exact"], moduli=((0,), (-3,)))),
        (ValueError, "modulus 9 and offset 9223372036854775800 has keys that are not in",
         lambda: replace(MADE["exact"], moduli=((9,), (1,)), offsets=(((1 << 63) - 8,), (0,)))),
        (ValueError, r"modulus 3 and offset -1 has keys that are not in \[0, 7\): use smaller ones",
         lambda: replace(MADE["exact"], moduli=((5,), (3,)), offsets=((0,), (-1,)), num_embeddings=7)),
        (ValueError, "have 1.5: expected whole numbers", lambda: replace(MADE["exact"], factors=(1, 1.5, 2, 3))),
        (ValueError, r"token_map has float64 of shape \(2,\): expected an integer for each",
         lambda: tc.ngrams("engram", vocab_size=4, rows_per_head=9, padding=0, token_map=[0.5, 1.7])),
        (ValueError, "divisible_by is -3: expected a divisor",
         lambda: tc.ngrams("qwen4_exp", vocab_size=4, rows_per_head=9, border=0, divisible_by=-3)),
        (TypeError, "border", lambda: tc.ngrams("qwen4_exp", vocab_size=4, rows_per_head=9)),
        (ValueError, r"token 13 is outside the vocabulary, \[0, 13\)", lambda: MADE["exact"](np.array([1, 13]))),
        (ValueError, r"token -1 is outside", lambda: MADE["exact"](torch.tensor([-1, 3]))),
        (TypeError, "tokens are float64: expected integers", lambda: MADE["exact"](np.array([1.0]))),
        (TypeError, "tokens are torch.bfloat16: expected integers", lambda: MADE["exact"](torch.ones(2).bfloat16())),
        (TypeError, "tokens have masked values: pass", lambda: MADE["exact"](np.ma.array([1, 2], mask=[0, 1]))),
    ],
)  # fmt: skip
def test_what_makes_no_keys_is_refused(error: type[Exception], words: str, call: Any) -> None:
    """The error has the value found, and a remedy."""
    with pytest.raises(error, match=words):
        call()
