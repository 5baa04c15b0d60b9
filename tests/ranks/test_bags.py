"""Which features are pooled by their owners: those for which that is fewer bytes, by the formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tiercache.data.encoded_batch import FeatureIds
from tiercache.ranks.bags import Block, Candidate, Chooser, cut_bags, message_of
from tiercache.ranks.owners import Destination

WHOLE = (Destination(1, 0, 1000, 0, 40, 0, 16),)
HALVES = (Destination(2, 0, 1000, 1, 0, 0, 8), Destination(0, 0, 1000, 0, 7, 8, 16))
RAGGED = Candidate("f", "t", None, False, 16, 1000, WHOLE)


def bags(ids: list[int], lengths: list[int] | None, weights: list[float] | None = None) -> FeatureIds:
    """Return bags."""
    offsets = None if lengths is None else np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    given = None if weights is None else np.array(weights, np.float32)
    return FeatureIds(np.array(ids, np.int32), offsets, given)


def is_pooled(one: Candidate, some: FeatureIds, num_samples: int, *, item_bytes: int = 4, trained: bool = True) -> bool:
    """Whether the only candidate is pooled."""
    found = Chooser().choose(
        [one], {"f": some}, {"f": "sum"}, num_samples, item_bytes=item_bytes, trained=trained, where="a test"
    )
    return found == [0]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("owners", [WHOLE, HALVES])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("length", [None, 8])
def test_a_feature_is_pooled_exactly_where_that_is_fewer_bytes(
    length: int | None, weighted: bool, owners: tuple[Destination, ...], item_bytes: int, trained: bool
) -> None:
    """One more row that is unique decides."""
    n, ids, times = 4, 32, 1 + trained
    words = ids * (1 + weighted) + (n if length is None else 0)
    pooled = 4 * words * len(owners) + times * n * 16 * item_bytes
    row = 4 * len(owners) + times * 16 * item_bytes
    most = pooled // row  # so many unique rows are not more bytes than vectors
    assert 1 <= most < ids
    one = replace(RAGGED, length=length, weighted=weighted, owners=owners)

    for unique, expected in ((most, False), (most + 1, True)):
        some = bags(sorted([*range(unique), *([0] * (ids - unique))]), [8] * n, [1.0] * ids if weighted else None)
        assert is_pooled(one, some, n, item_bytes=item_bytes, trained=trained) == expected


def test_one_id_a_sample_a_maximum_and_empty_bags_stay_rows() -> None:
    """Vectors of the samples are never fewer than their unique rows."""
    assert not is_pooled(replace(RAGGED, length=1), bags([1, 2, 3], None), 3)
    assert not is_pooled(RAGGED, bags([], [0, 0, 0]), 3)
    many = bags(list(range(64)), [64])
    assert is_pooled(RAGGED, many, 1)
    for mode in ("max", None):
        assert not Chooser().choose([RAGGED], {"f": many}, {"f": mode}, 1, item_bytes=4, trained=True, where="a test")


def test_a_wrong_id_is_named() -> None:
    """As a lookup names it."""
    with pytest.raises(IndexError, match=r"feature 'f' has local id 1000 at entry 1 of the batch.* 0 to 999 in a test"):
        is_pooled(RAGGED, bags([3, 1000], [2]), 1)


def test_a_block_has_features_by_group_and_its_message_their_bags() -> None:
    """Lengths where bags may have any number of ids, then ids, then weights."""
    first = Candidate("f", "t", None, True, 16, 1000, HALVES)
    second = Candidate("g", "u", 2, False, 16, 1000, (replace(WHOLE[0], rank=2),))
    block = Block.of([first, second, RAGGED], np.array([3, 3, 0]), 2)

    assert (block.features, block.cols, block.width) == ((1, 0), (0, 16), 24)
    pieces = message_of(block, [first, second], {"f": bags([4, 5, 6], [1, 2], [1, 2, 3]), "g": bags([7, 8], [2])})
    words = [7, 8, 1, 2, 4, 5, 6, *np.array([1, 2, 3], np.float32).view(np.int32).tolist()]
    assert np.concatenate(pieces).tolist() == words


def test_bags_of_all_ranks_are_divided_by_rank() -> None:
    """Offsets of each begin with 0."""
    every = {"f": bags([1, 2, 3, 4], [1, 0, 3], [1, 2, 3, 4]), "g": bags([5, 6, 7], None)}
    first, second = cut_bags(every, [2, 1])

    assert first["f"].ids.tolist() == [1]
    assert first["g"].ids.tolist() == [5, 6]
    assert second["f"].ids.tolist() == [2, 3, 4]
    assert second["f"].offsets is not None
    assert second["f"].offsets.tolist() == [0, 3]
    assert second["f"].weights is not None
    assert second["f"].weights.tolist() == [2, 3, 4]
