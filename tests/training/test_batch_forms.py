"""Keys of a batch in the forms that people have: each is the same batch, and what is none of them is a sentence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tiercache.training.raw_keys import feature_keys

SCHEMA = tc.Schema(
    features=(
        tc.Feature(name="user", table="t"),
        tc.Feature(name="seen", table="t", hotness="ragged"),
        tc.Feature(name="words", table="t", hotness="multi_hot", length=2),
    ),
    tables=(tc.Table(name="t", dim=4, optimizer=tc.optim.SGD(learning_rate=0.1), initializer=tc.init.Zeros()),),
    label="y",
    dense=(),
)
USER, WORDS = [7, 8, 9], [[1, 2], [3, 4], [5, 6]]
VALUES, OFFSETS = [10, 11, 12], [0, 2, 2, 3]
LISTS = [torch.tensor(VALUES[low:high], dtype=torch.int64) for low, high in pairwise(OFFSETS)]


class Jagged:
    """What torchrec's JaggedTensor has."""

    def __init__(self, values: Any, offsets: Any, weights: Any = None) -> None:
        self._all = torch.tensor(values), torch.tensor(offsets), weights

    def values(self) -> Any:
        """Return all of them."""
        return self._all[0]

    def offsets(self) -> Any:
        """Return where each sample's begin, and the end."""
        return self._all[1]

    def weights(self) -> Any:
        """Return a weight for each, if there are any."""
        assert self._all[2] is not None
        return self._all[2]

    def weights_or_none(self) -> Any:
        """Return a weight for each, or None."""
        return self._all[2]


class KeyedJagged:
    """What torchrec's KeyedJaggedTensor has."""

    def __init__(self, parts: dict[str, Jagged]) -> None:
        self._parts = parts

    def keys(self) -> list[str]:
        """Return the features."""
        return [*self._parts]

    def values(self) -> Any:
        """Return all values."""
        return torch.cat([one.values() for one in self._parts.values()])

    def to_dict(self) -> dict[str, Jagged]:
        """Return what each feature has."""
        return self._parts


def sparse() -> torch.Tensor:
    """Return the lists as a matrix."""
    rows = [i for i, one in enumerate(LISTS) for _ in one]
    return torch.sparse_coo_tensor(torch.tensor([rows, VALUES]), torch.tensor([1.0, 2.0, 3.0]), (3, 20))


WHOLE = {"user": USER, "seen": (VALUES, OFFSETS), "words": WORDS}


@pytest.mark.parametrize(
    ("seen", "weights"),
    [
        ((VALUES, OFFSETS), None),
        ((torch.tensor(VALUES), torch.tensor(OFFSETS[:-1])), None),
        ((np.array(VALUES), np.array(OFFSETS[:-1], np.int32)), None),
        (torch.nested.nested_tensor(LISTS), None),
        (torch.nested.nested_tensor(LISTS, layout=torch.jagged), None),
        (Jagged(VALUES, OFFSETS, torch.tensor([1.0, 2.0, 3.0])), [1.0, 2.0, 3.0]),
        (sparse(), [1.0, 2.0, 3.0]),
        (sparse().to_sparse_csr(), [1.0, 2.0, 3.0]),
    ],
)
def test_lists_of_any_length_come_in_many_forms(seen: Any, weights: Any) -> None:
    """Offsets with the last or without it, nested and sparse tensors, and what torchrec has."""
    samples, found = feature_keys(SCHEMA, {"user": USER, "seen": seen, "words": WORDS}, None)
    assert samples == 3
    assert found["seen"].keys.tolist() == VALUES
    assert found["seen"].offsets.tolist() == OFFSETS
    assert (None if found["seen"].weights is None else found["seen"].weights.tolist()) == weights


def test_a_whole_keyed_jagged_tensor_is_taken() -> None:
    """Features with one key a sample, or a few, stand in it as lists do."""
    given = KeyedJagged(
        {
            "user": Jagged(USER, [0, 1, 2, 3]),
            "seen": Jagged(VALUES, OFFSETS),
            "words": Jagged([1, 2, 3, 4, 5, 6], [0, 2, 4, 6]),
        }
    )
    samples, found = feature_keys(SCHEMA, given, None)
    expected = feature_keys(SCHEMA, WHOLE, None)
    assert samples == expected[0] == 3
    for name, one in found.items():
        assert one.keys.tolist() == expected[1][name].keys.tolist()
        for mine, other in ((one.offsets, expected[1][name].offsets), (one.weights, expected[1][name].weights)):
            assert (None if mine is None else mine.tolist()) == (None if other is None else other.tolist())


def test_offsets_without_the_last_are_known_by_other_features() -> None:
    """Also where the last list is empty, and they could be whole."""
    seen = torch.tensor([10, 11, 12]), torch.tensor([0, 2, 3])
    assert feature_keys(SCHEMA, {"user": USER, "seen": seen, "words": WORDS}, None)[1]["seen"].offsets.tolist() == [
        0, 2, 3, 3
    ]  # fmt: skip


def test_one_tensor_has_a_column_for_each_feature() -> None:
    """As loaders of categorical columns give them."""
    table = SCHEMA.tables[0]
    schema = tc.Schema(
        features=tuple(tc.Feature(name=n, table="t") for n in "abc"), tables=(table,), label="y", dense=()
    )
    for keys in (torch.arange(12).view(4, 3), np.arange(12).reshape(4, 3)):
        samples, found = feature_keys(schema, keys, None)
        assert samples == 4
        assert [found[n].keys.tolist() for n in "abc"] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    with pytest.raises(
        ValueError, match=r"one array of shape \(4, 2\) and there are 3 features \(a, b, c\): give a map"
    ):
        feature_keys(schema, torch.zeros(4, 2, dtype=torch.int64), None)
    with pytest.raises(ValueError, match="the keys are a list: give a mapping from features to their keys"):
        feature_keys(schema, [1, 2, 3], None)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ((VALUES, [0, 2, 1, 3]), "the offsets of feature 'seen' are .* never fall"),
        ((VALUES, [1, 2, 2, 3]), "the offsets of feature 'seen' are .* begin with 0"),
        (torch.tensor([1.0, 2.0, 3.0]), "the keys of feature 'seen' are float32: keys are int64"),
        (torch.sparse_coo_tensor(torch.tensor([[0], [0], [0]]), [1.0], (3, 1, 1)), "a sparse tensor of shape"),
        (torch.zeros(3, 2, 2, dtype=torch.int64), r"have shape \(3, 2, 2\): give"),
        ((VALUES, [0, 3]), r"features have keys of different numbers of samples \(user: 3, seen: 1, words: 3\)"),
    ],
)
def test_what_cannot_be_keys_is_a_sentence(seen: Any, words: str) -> None:
    """It names the feature, what was seen and what to give."""
    keys = {"user": USER, "seen": seen, "words": WORDS}
    with pytest.raises(ValueError, match=words):
        feature_keys(SCHEMA, keys, None)
