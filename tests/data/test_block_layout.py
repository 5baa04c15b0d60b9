"""Blocks: the ids of lookups, their bags and weights are in one buffer, in the order of the lookups."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_sub_dataset import RICH, assert_read, some_samples, write
from tiercache.data.block_layout import IdOrder
from tiercache.data.sub_dataset import SampleBuffers

NAMES = [feature.name for feature in RICH.features]
ORDERS = st.builds(
    IdOrder, st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True).map(tuple), st.booleans()
)


@given(
    num_samples=st.integers(1, 40),
    seed=st.integers(0, 1000),
    picks=st.lists(st.integers(0, 10_000), max_size=50),
    orders=st.lists(ORDERS, max_size=3),
)
@settings(deadline=None, max_examples=60)
def test_a_block_has_ids_weights_and_bags_in_the_order_of_each_lookup(
    num_samples: int, seed: int, picks: list[int], orders: list[IdOrder]
) -> None:
    """Equal to concatenation by hand; within the device's bytes, at multiples of 128 bytes; a feature may be in two."""
    samples, indices, buffers = (
        some_samples(num_samples, seed),
        np.array(picks, np.int64) % num_samples,
        SampleBuffers(),
    )
    with tempfile.TemporaryDirectory() as folder:
        one = write(Path(folder), samples)
        for at in (indices, indices[::-1]):
            read = one.read(at, buffers, orders=orders)
            assert_read(one, read, samples, at)
            assert read.block is not None
            layout, places = read.block.layout, read.block.places
            ends = [4 * at.size * len(RICH.dense)]
            for order, pieces, starts in zip(orders, layout.order_pieces, places.starts, strict=True):
                found = [read.ids[name] for name in order.features]
                assert starts.tolist() == np.cumsum([0, *(each.num_ids for each in found)]).tolist()
                size, begin = int(starts[-1]), places.begins[pieces.ids]
                ids = read.block.array(pieces.ids, size, np.int32)
                assert np.array_equal(ids, np.concatenate([each.ids for each in found]))
                ends.append(begin + ids.nbytes)
                assert begin % 128 == 0
                is_weighted = order.bags and any(each.weights is not None for each in found)
                assert (pieces.weights is not None) == is_weighted
                assert (pieces.offsets is not None) == order.bags
                if pieces.weights is not None:
                    ones = [np.ones(each.num_ids) if each.weights is None else each.weights for each in found]
                    weights = read.block.array(pieces.weights, size, np.float32)
                    assert np.array_equal(weights, np.concatenate(ones))
                    ends.append(places.begins[pieces.weights] + weights.nbytes)
                if pieces.offsets is not None:
                    steps = np.arange(at.size + 1)
                    bags = [steps if each.offsets is None else each.offsets for each in found]
                    wanted = np.concatenate([[0], *(own[1:] + start for own, start in zip(bags, starts, strict=False))])
                    offsets = read.block.array(pieces.offsets, wanted.size, np.int64)
                    assert np.array_equal(offsets, wanted)
                    ends.append(places.begins[pieces.offsets] + offsets.nbytes)
            assert max(ends) <= places.device_bytes <= read.block.memory.size


def test_the_layout_of_a_block_is_made_once_for_a_size_and_the_orders(tmp_path: Path) -> None:
    """Batches of one size share it; another size or another order has a different layout."""
    one, order = write(tmp_path, some_samples(50, 1)), IdOrder(("a", "b"))
    blocks = [one.read(np.arange(at, at + 10), orders=[order]).block for at in (0, 10)]
    others = [one.read(np.arange(9), orders=[order]).block, one.read(np.arange(10), orders=[IdOrder(("b", "a"))]).block]
    layouts = [block.layout for block in (*blocks, *others) if block is not None]
    assert layouts[0] is layouts[1]
    assert len(set(map(id, layouts))) == 3
    for size in range(1, 50):
        one.read(np.arange(size))
    assert len(one._layout.blocks) <= 32, "layouts of sizes that are not used any more are dropped"
