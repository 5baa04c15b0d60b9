"""N-gram keys of tokens, for the tables of language models.

A key is a function of a token and the tokens before it, so the keys of a text are known before training. `NGrams`
computes them; `ngrams` returns the published recipes by name.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tiercache.kernels.cpu.ngram_numbers import mix_ngrams, spread_ngrams
from tiercache.store.records import as_integer, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

Recipe: TypeAlias = Literal["qwen4_exp", "engram", "exact"]
_MOST = (1 << 63) - 1
_MASK = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_OF_LAYER = 10007
"""The seeds of two layers differ by this, in both published recipes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NGrams:
    """The computation of n-gram keys: the heads of each order, one after another.

    The tokens of an n-gram, the last one first, are multiplied by ``factors`` and XORed, modulo 2^64. Each head takes
    the result modulo its modulus and adds its offset.
    """

    orders: tuple[int, ...]
    """Tokens of an n-gram, ascending, from 2 on."""
    factors: tuple[int, ...]
    """Factors of the last token and the tokens before it, one for each token of the largest order."""
    moduli: tuple[tuple[int, ...], ...]
    """By order and head; if all of an order are 0, every n-gram has its own key."""
    offsets: tuple[tuple[int, ...], ...]
    """By order and head: the first key."""
    vocab_size: int
    """Tokens are in [0, vocab_size)."""
    padding: int
    """The number used for tokens before the beginning of a sequence, after `token_map`."""
    border: int | None = None
    """The token that ends a sequence, after `token_map`: n-grams contain it only as their last token. None: none."""
    token_map: NDArray[np.int64] | None = None
    """(vocab_size,): the number of each token; None: the token."""
    num_embeddings: int = _MOST
    """Keys are in [0, num_embeddings)."""
    _on: dict[Any, list[Any]] = field(default_factory=dict, init=False, repr=False)
    """By device: moduli and offsets of each order, and the map of tokens, as tensors."""

    def __post_init__(self) -> None:
        _orders(self.orders)
        numbers = [*self.factors, self.padding, *chain(*self.moduli, *self.offsets)]
        if wrong := [one for one in numbers if as_integer(one) is None]:
            raise ValueError(f"factors, moduli, offsets or padding have {wrong[0]!r}: expected whole numbers")
        words = (operator.index(one) + (1 << 63) & _MASK for one in self.factors)
        object.__setattr__(self, "factors", tuple(word - (1 << 63) for word in words))  # with the same bits as int64
        if len(self.factors) != self.orders[-1]:
            raise ValueError(
                f"orders up to {self.orders[-1]} have {len(self.factors)} factors: expected one for each token"
            )
        heads, others = ([len(one) for one in numbers] for numbers in (self.moduli, self.offsets))
        if heads != others or len(heads) != len(self.orders):
            raise ValueError("moduli and offsets have different heads or orders: pass one of each for every head")
        if any(not of or any((one > 0) != (of[0] > 0) or one < 0 for one in of) for of in self.moduli):
            raise ValueError(f"moduli are {self.moduli}: expected positive ones for all heads of an order, or only 0")
        most = positive(self.num_embeddings, "num_embeddings", "the number of keys")
        for modulus, offset in zip(chain(*self.moduli), chain(*self.offsets), strict=True):
            if not 0 <= offset <= min(most, _MOST) - modulus:
                raise ValueError(
                    f"a head with modulus {modulus} and offset {offset} has keys that are not in [0, {most}): use "
                    "smaller ones, or a larger num_embeddings, at most 2^63 - 1"
                )
        if self.token_map is not None:
            of_token = np.asarray(self.token_map)
            if of_token.shape != (self.vocab_size,) or of_token.dtype.kind not in "iu":
                raise ValueError(
                    f"token_map has {of_token.dtype} of shape {of_token.shape}: expected an integer for each of "
                    f"{self.vocab_size} tokens"
                )
            object.__setattr__(self, "token_map", np.array(of_token, np.int64, order="C"))
        tokens = range(self.vocab_size) if self.token_map is None else self.token_map
        if self.border is not None and self.border not in tokens:
            raise ValueError(
                f"border is {self.border}, which is not a token: pass the number of the token that ends a text"
            )

    @property
    def num_heads(self) -> int:
        """Number of keys per token."""
        return sum(map(len, self.moduli))

    def __call__(self, tokens: Any) -> Any:
        """Return the keys of each token: int64 (..., num_heads) for integers (..., T), of NumPy or torch.

        The last axis of ``tokens`` is the sequence. Keys of a tensor are computed on its device. Tokens on a GPU are
        not checked, to avoid waiting for it. Raises ValueError for tokens outside the vocabulary, TypeError for
        anything but integers.
        """
        if hasattr(tokens, "detach") and tokens.device.type != "cpu":
            return self._on_device(tokens)
        array = self.checked(tokens)
        rows = array.reshape(-1, max(1, array.shape[-1])) if array.ndim else array.reshape(1, 1)
        keys = np.empty((rows.size, self.num_heads), np.int64)
        first = 0
        for mixed, moduli, offsets in zip(self.mixed(rows), self.moduli, self.offsets, strict=True):
            spread_ngrams(mixed, np.array(moduli), np.array(offsets), first, keys)
            first += len(moduli)
        keys = keys.reshape(*array.shape, self.num_heads)
        if not hasattr(tokens, "detach"):
            return keys
        import torch

        return torch.from_numpy(keys)

    def checked(self, tokens: Any) -> NDArray[np.int64]:
        """Return tokens on the host as int64. Raises ValueError outside the vocabulary, TypeError if not integers."""
        if hasattr(tokens, "detach") and "int" not in str(tokens.dtype):  # NumPy has no bfloat16
            raise TypeError(f"tokens are {tokens.dtype}: expected integers in [0, {self.vocab_size})")
        if np.ma.is_masked(tokens):
            raise TypeError("tokens have masked values: pass an array without them, such as one with padding there")
        array: NDArray[Any] = tokens.detach().numpy() if hasattr(tokens, "detach") else np.asarray(tokens)
        if not array.size and not hasattr(tokens, "dtype"):
            array = array.astype(np.int64)  # NumPy's dtype of an empty list is float64
        if array.dtype.kind not in "iu":
            raise TypeError(f"tokens are {array.dtype}: expected integers in [0, {self.vocab_size})")
        if array.size and (int(array.min()) < 0 or int(array.max()) >= self.vocab_size):
            bad = int(array.min()) if int(array.min()) < 0 else int(array.max())
            raise ValueError(
                f"token {bad} is outside the vocabulary, [0, {self.vocab_size}): pass the vocab_size of the tokenizer"
            )
        return array.astype(np.int64, copy=False)

    def mixed(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each n-gram that ends at a token, (orders, N * T), for checked tokens (N, T).

        N-grams of one order have the same keys if they have the same number.
        """
        mixed = np.empty((len(self.orders), tokens.size), np.int64)
        numbers = np.ascontiguousarray(tokens if self.token_map is None else self.token_map[tokens])
        border = -1 if self.border is None else self.border
        mix_ngrams(numbers, np.array(self.factors), np.array(self.orders), border, self.padding, mixed)
        return mixed

    def keys_of(self, order: int, mixed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the keys (U, heads) of n-grams of ``orders[order]`` that have the numbers ``mixed`` (U,)."""
        keys = np.empty((mixed.size, len(self.moduli[order])), np.int64)
        spread_ngrams(mixed, np.array(self.moduli[order]), np.array(self.offsets[order]), 0, keys)
        return keys

    def _on_device(self, tokens: Any) -> Any:
        import torch

        if tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool:
            raise TypeError(f"tokens are {tokens.dtype}: expected integers in [0, {self.vocab_size})")
        if not tokens.ndim:
            return self._on_device(tokens[None])[0]
        device, numbers = tokens.device, tokens.long()
        if device not in self._on:
            arrays: list[Any] = [*self.moduli, *self.offsets]
            if self.token_map is not None:
                arrays.append(self.token_map)
            self._on[device] = [torch.as_tensor(one, dtype=torch.int64).to(device) for one in arrays]
        moduli, offsets = (self._on[device][first:][: len(self.orders)] for first in (0, len(self.orders)))
        if self.token_map is not None:
            numbers = self._on[device][-1][numbers]
        places = torch.arange(tokens.shape[-1], device=device)
        begins = torch.zeros_like(numbers)
        if self.border is not None:  # the first position after the last border before each token
            after = torch.where(numbers == self.border, places + 1, 0)
            begins[..., 1:] = after.cummax(dim=-1).values[..., :-1]
        number, found = numbers * self.factors[0], list[Any]()
        for k in range(1, self.orders[-1]):
            before = torch.nn.functional.pad(numbers, (k, 0))[..., : tokens.shape[-1]]
            token = torch.where(places - k >= begins, before, self.padding)
            number = number ^ (token * self.factors[k])
            if k + 1 in self.orders:
                order, of_heads = self.orders.index(k + 1), number[..., None]
                found.append(
                    (of_heads.remainder(moduli[order]) if self.moduli[order][0] else of_heads) + offsets[order]
                )
        return torch.cat(found, dim=-1)


def ngrams(recipe: Recipe, *, vocab_size: int, orders: Sequence[int] = (2, 3), **options: Any) -> NGrams:
    """Return n-gram keys by the name of their recipe.

    "exact": every n-gram has its own key, one of each order. They have to fit 62 bits: orders up to 3 have fewer than
    2^20 tokens, orders up to 4 fewer than 2^15. Options: ``border``.

    "qwen4_exp": as `Qwen4ExpTextNGramEmbedding` of transformers, key for key: ``heads`` (8) of each order, each with a
    prime modulus from ``rows_per_head`` (its ngram_vocab_size_base) on. ``border`` is its eos_token_id, which is also
    used for tokens before the first one. Options: ``layer`` (0, its ple_layer_index), ``seed`` (1234), ``divisible_by``
    (128, of the number of rows).

    "engram": as DeepSeek's Engram (arXiv 2601.07372): ``heads`` (8) of each order, with distinct primes from
    ``rows_per_head`` on for all orders of all ``layers``, of which this is ``layer``. vocab_size is the number of
    canonical tokens, to which ``token_map`` maps the tokenizer's tokens (None: they are the same), and ``padding`` the
    canonical token before the first one. Options: ``seed`` (0).

    Args:
        recipe: the name.
        vocab_size: tokens of the vocabulary.
        orders: tokens of an n-gram; for the published recipes, all orders from 2 to the largest.
        options: of the recipe.

    Raises:
        ValueError: an argument is invalid.
        TypeError: the recipe has no such option.
    """
    makers = {"exact": _exact, "qwen4_exp": _qwen4_exp, "engram": _engram}
    if recipe not in makers:
        raise ValueError(f"unknown recipe {recipe!r}: expected {', '.join(map(repr, makers))}; or create an NGrams")
    vocab_size, orders = positive(vocab_size, "vocab_size", "the number of tokens"), _orders(orders)
    options = {name: value if (number := as_integer(value)) is None else number for name, value in options.items()}
    for name, what in (("heads", "the number of keys of each n-gram"), ("divisible_by", "a divisor")):
        positive(options.get(name, 1), name, what)
    if recipe != "exact" and orders != tuple(range(2, len(orders) + 2)):
        raise ValueError(f"orders of {recipe!r} are {orders}: it has all from 2 on, such as (2, 3)")
    make: Any = makers[recipe]
    return make(vocab_size, orders, **options)  # type: ignore[no-any-return]


def _orders(orders: Any) -> tuple[int, ...]:
    """Return orders as a tuple. Raises ValueError unless they are whole numbers from 2 on, ascending."""
    try:
        found = tuple(map(operator.index, orders))
    except TypeError:
        found = ()
    if not found or list(found) != sorted({*found}) or found[0] < 2:
        raise ValueError(f"orders are {orders!r}: expected whole numbers from 2 on, ascending, such as (2, 3)")
    return found


def _exact(vocab_size: int, orders: tuple[int, ...], *, border: int | None = None) -> NGrams:
    bits, most, largest = vocab_size.bit_length(), 62 - (len(orders) - 1).bit_length(), max(orders, default=0)
    if bits * largest > most:
        raise ValueError(
            f"{largest} tokens of a vocabulary of {vocab_size:,} take {bits * largest} bits, but a key has {most} for "
            "them: use smaller orders, or the recipe 'engram'"
        )
    return NGrams(
        orders=orders, factors=tuple(1 << (bits * k) for k in range(largest)), moduli=tuple((0,) for _ in orders),
        offsets=tuple((i << most,) for i in range(len(orders))), vocab_size=vocab_size, padding=vocab_size,
        border=border,
    )  # fmt: skip


def _qwen4_exp(
    vocab_size: int,
    orders: tuple[int, ...],
    *,
    rows_per_head: int,
    border: int,
    heads: int = 8,
    layer: int = 0,
    seed: int = 1234,
    divisible_by: int = 128,
) -> NGrams:
    half = max(1, _MOST // vocab_size // 2)
    base = seed + _OF_LAYER * layer
    factors = tuple(2 * (_splitmix((base + _GAMMA * (k + 1)) & _MASK) % half) + 1 for k in range(orders[-1]))
    total = len(orders) * heads
    primes = _primes(rows_per_head, (layer + 1) * total)[layer * total :]
    offsets = np.cumsum([0, *primes]).tolist()
    return NGrams(
        orders=orders, factors=factors, moduli=_by_order(primes, heads), offsets=_by_order(offsets[:-1], heads),
        vocab_size=vocab_size, padding=border, border=border,
        num_embeddings=-(-offsets[-1] // divisible_by) * divisible_by,
    )  # fmt: skip


def _engram(
    vocab_size: int,
    orders: tuple[int, ...],
    *,
    rows_per_head: int,
    padding: int,
    layers: Sequence[int] = (0,),
    layer: int | None = None,
    heads: int = 8,
    seed: int = 0,
    token_map: ArrayLike | None = None,
) -> NGrams:
    layer = layers[0] if layer is None else layer
    if layer not in layers:
        raise ValueError(f"layer {layer} is not among layers {tuple(layers)}: list those that have a table")
    half = max(1, _MOST // vocab_size // 2)
    drawn = np.random.default_rng(seed + _OF_LAYER * layer).integers(0, half, orders[-1], dtype=np.int64)
    total = len(orders) * heads
    primes = _primes(rows_per_head, len(layers) * total)[[*layers].index(layer) * total :][:total]
    offsets = np.cumsum([0, *primes]).tolist()
    numbers = None if token_map is None else np.asarray(token_map)
    largest = padding if numbers is None else max(padding, int(numbers.max(initial=0)))
    if not 0 <= largest < vocab_size or padding < 0 or (numbers is not None and int(numbers.min(initial=0)) < 0):
        raise ValueError(
            f"token_map and padding go up to {largest}: expected numbers of canonical tokens, [0, {vocab_size})"
        )
    return NGrams(
        orders=orders, factors=tuple((2 * drawn + 1).tolist()), moduli=_by_order(primes, heads),
        offsets=_by_order(offsets[:-1], heads), vocab_size=vocab_size if numbers is None else numbers.size,
        padding=padding, token_map=numbers, num_embeddings=offsets[-1],
    )  # fmt: skip


def _by_order(numbers: Sequence[int], heads: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(numbers[first : first + heads]) for first in range(0, len(numbers), heads))


def _splitmix(value: int) -> int:
    """Return the next number of splitmix64 (Steele, Lea and Flood, 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _primes(first: int, count: int) -> list[int]:
    if as_integer(first) is None or not 2 <= first <= 1 << 40:
        raise ValueError(f"rows_per_head is {first!r}: expected the rows of a head, from 2 to 2^40")
    found, size = list[int](), 1 << 12
    while len(found) < count:  # a sieve of one segment after another
        least, is_prime = np.arange(first, first + size), np.ones(size, np.bool_)
        for divisor in _small_primes(math.isqrt(first + size)).tolist():
            begin = max(divisor * divisor, -(-first // divisor) * divisor)
            is_prime[begin - first :: divisor] = False
        found += least[is_prime].tolist()
        first += size
    return found[:count]


def _small_primes(last: int) -> NDArray[np.int64]:
    is_prime = np.ones(last + 1, np.bool_)
    is_prime[:2] = False
    for number in range(2, math.isqrt(last) + 1):
        if is_prime[number]:
            is_prime[number * number :: number] = False
    return np.nonzero(is_prime)[0]
