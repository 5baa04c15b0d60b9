"""Next and last use of every key, against the slow obvious way."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.cases import table
from tiercache.planning.next_use import find_next_uses
from tiercache.planning.row_offsets import RowOffsets
from tiercache.planning.schedule import Schedule
from tiercache.store.bits import hash_keys
from tiercache.store.table import group_tables

KEYS = st.sets(st.integers(-(2**63) + 2, 2**63 - 1), max_size=12) | st.sets(st.integers(0, 15), max_size=12)


def obvious_gap(schedule: Schedule, keys: list[set[int]], pass_index: int, key: int, step: int) -> int:
    other = pass_index + step
    while key not in keys[int(schedule.order_of(other // schedule.num_passes)[other % schedule.num_passes])]:
        other += step
    return abs(other - pass_index)


@settings(max_examples=60)
@given(
    st.lists(KEYS, min_size=1, max_size=6),
    st.sampled_from([None, 0, 5]),
    st.integers(0, 3),
    st.sampled_from([1, 3, 1 << 20]),
)  # fmt: skip
def test_gaps_are_those_of_a_walk(
    keys: list[set[int]], order_seed: int | None, epoch: int, keys_per_range: int
) -> None:
    groups = group_tables([table("a", 4)])
    table_id = groups[0].tables[0].table_id
    arrays = []
    for some in keys:
        array = np.array(sorted(some), dtype=np.int64)
        arrays.append(array[np.argsort(hash_keys(array, table_id))])
    starts = np.array([[0, array.size] for array in arrays], dtype=np.int64)
    positions = RowOffsets(groups, starts)
    schedule = Schedule(num_passes=len(keys), dataset_digest="d", order=order_seed)
    out = np.empty((2, int(starts[:, 1].sum())), dtype=np.int32)
    uses = find_next_uses(schedule, epoch, positions, lambda p, _: arrays[p], out, keys_per_range=keys_per_range)
    order = schedule.order_of(epoch)
    for place, p in enumerate(order):
        pass_index = epoch * len(keys) + place
        for i, key in enumerate(arrays[p].tolist()):
            assert uses.next_distance[p][i] == obvious_gap(schedule, keys, pass_index, key, 1)
            assert uses.prev_distance[p][i] == obvious_gap(schedule, keys, pass_index, key, -1)
            assert uses.next_distance[p][i] <= uses.longest
