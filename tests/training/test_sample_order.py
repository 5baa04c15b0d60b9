"""The order of a pass's samples: made for a batch at a time, however many there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tiercache.training.batch import cut_batches, sample_order
from tiercache.training.passes import Pass

MANY = 10**15
"""Samples of a pass whose order no memory holds."""


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_from_the_midst_of_a_pass_makes_no_order_of_all_its_samples(shuffle: bool) -> None:
    """Of a pass of 10^15 samples, after a commit inside it: the next batches come at once, and so does the last."""
    whole = SimpleNamespace(keys=nothing)
    source: Any = SimpleNamespace(index=3, samples=MANY, check_samples=nothing, whole=whole)
    rows: Any = SimpleNamespace(check=nothing)
    for done in (MANY // 2, MANY - 8192):
        pass_index = Pass(
            index=0, epoch=1, source=source, rows=rows, seed=2, raw=SimpleNamespace(), exchange=SimpleNamespace(),  # type: ignore[arg-type]
            pipeline=SimpleNamespace(), first_sample=done,  # type: ignore[arg-type]
        )  # fmt: skip
        cuts = pass_index._cuts(8192, shuffle)
        end, places = next(cuts)
        order = sample_order(MANY, seed=2, epoch=1, sub_dataset=3, shuffle=shuffle)
        assert places.size == 8192
        assert np.array_equal(places, order(done, done + 8192))
        assert end == done + 8192
    assert next(cuts, None) is None


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [1, 7, 8, 50])
def test_batches_of_any_size_are_stretches_of_one_order(size: int, shuffle: bool) -> None:
    """From any place on; the last one may be short, and none is empty."""
    order = sample_order(23, seed=1, epoch=0, sub_dataset=0, shuffle=shuffle)
    for first in (0, 5, 22, 23):
        cuts = list(cut_batches(order, size, first=first, last=23))
        assert [end for end, _ in cuts] == [*range(first + size, 23, size), 23][: len(cuts)]
        assert [sample for _, places in cuts for sample in places] == order(first, 23).tolist()
        assert all(places.size for _, places in cuts)


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_without_samples_is_refused(size: int) -> None:
    """There would be no end of them."""
    with pytest.raises(ValueError, match="the size must be at least 1"):
        next(cut_batches(sample_order(3, seed=0, epoch=0, sub_dataset=0, shuffle=True), size, first=0, last=3))
