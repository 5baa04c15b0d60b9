"""Which features are pooled by their owners, those for which that is fewer bytes; and the tensors of a batch."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tiercache.backends.jagged import LookupIds
from tiercache.data.encoded_batch import FeatureIds
from tiercache.kernels.step import Vectors
from tiercache.ranks.bags import Candidate, Chooser
from tiercache.ranks.owners import Destination
from tiercache.ranks.pending_batches import tensors_of
from tiercache.ranks.pooling import PooledBatch
from tiercache.tiers.rows import GroupRows
from tiercache.training.batch import Pooled

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


def test_every_tensor_of_a_batch_is_found_wherever_it_is() -> None:
    """In rows, entries and pooled vectors; arrays of the host are none."""
    all_ = [torch.full((2,), float(i)) for i in range(9)]
    host = np.zeros(1, np.int64)
    rows = GroupRows(Vectors(all_[0], 1, 0), (), all_[1], {"t": 0}, {"t": 1}, host)
    entries = LookupIds(ids=all_[2], starts=host, bases=host, modes=host.astype(np.int8), cols=host, offsets=all_[3],
                      weights=all_[4], slots=all_[5], places=all_[6], scales=all_[7])  # fmt: skip
    asked: Any = None
    pooled = PooledBatch({"f": Pooled("sum", all_[8])}, asked, (((asked, entries),),))
    found = tensors_of(([rows], pooled, None, "words", 3))
    assert {int(tensor[0]) for tensor in found} == set(range(9))
