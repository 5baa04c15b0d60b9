"""What new shards take over from old ones beside rows, and what is known of it before."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import tiercache as tc
from tests.ranks.sharded_world import TABLES, WHOLE, expected, old_shards, one_store, sharding_on
from tests.training.cases import table
from tiercache.ranks.resharding import copy_share
from tiercache.store import Cursor, MemoryEngine, Store, hash_keys
from tiercache.store.shards.sharding import ShardingPlan, TableSharding, hash_bounds, sliced


def test_learning_rates_follow_tables_to_their_new_groups() -> None:
    """A table cut into columns had a group of its own; where its rate differs, it cannot join the others."""
    alike = tuple(table(name, 4, tc.optim.RowWiseAdagrad(learning_rate=0.1)) for name in ("a", "b"))
    row = TableSharding("row")
    old = ShardingPlan(2, {"a": row, "b": sliced(4, [0, 1])})
    new = ShardingPlan(1, {"a": row, "b": row})
    for rates, answer in (({"a": 0.5, "b": 0.5}, [0.5]), ({"a": 0.5, "b": 0.25}, None)):
        shards = [Store.open(None, tables=old.shard_tables(alike, rank), engine=MemoryEngine()) for rank in range(2)]
        for shard in shards:
            of_groups = [rates[group.tables[0].name] for group in shard.groups]
            kept = {"steps": 7, "learning_rates": of_groups}
            shard.publish(Cursor(0), state=b"", schedule_digest="", settings=kept, environment={})
        with Store.open(None, tables=alike, engine=MemoryEngine()) as store:
            if answer is None:
                with pytest.raises(ValueError, match=r"'b', 'a' of .* share a group, .* and had 0.25 and 0.5: set one"):
                    copy_share(one_store(alike, old, shards), store, new, 0)
            else:
                commit = copy_share(one_store(alike, old, shards), store, new, 0)
                assert commit.settings == {"steps": 7, "learning_rates": answer}


def test_rows_of_a_rank_are_predicted_from_sizes() -> None:
    """As many as it gets, or up to four standard deviations more."""
    old, new = sharding_on(3), sharding_on(4, 1)
    shards = old_shards(old, 5)
    known = expected(shards[0].commit.cursor)
    predicted = one_store(TABLES, old, shards)
    for name, keys in known.items():
        hashes = hash_keys(np.array(list(keys), np.int64), WHOLE[name].table_id).astype(object)
        assert predicted.most_rows(name, (0, 1 << 64)) == len(keys)
        bounds = hash_bounds(new.num_ranks)
        for low, high in pairwise(bounds):
            assert np.count_nonzero((hashes >= low) & (hashes < high)) <= predicted.most_rows(name, (low, high))
