"""A rank that leaves out a backward, while others do it, takes part in the step with no gradients.

Each table counts the steps in which some rank had gradients.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.dist.pool import RanksPool
from tests.dist.trainings import OPTIONS, assert_same_rows, stored
from tests.train.cases import SPECS, Case, table
from tiercache.dist.communicator import AnyCommunicator

TABLES = {
    "decided": (tc.optim.SGD(learning_rate=0.1), tc.optim.Adagrad(learning_rate=0.1)),
    "counted": (tc.optim.SGD(learning_rate=0.1), tc.optim.Adam(learning_rate=0.01)),
}


def alternate(ranks: AnyCommunicator, folder: str, name: str, *, sharding: dict[str, str]) -> dict[str, int]:
    """Train the second table at every third batch, by gradients of one rank alone, the first one at every other."""
    options = OPTIONS | {"sharding": sharding}
    with tc.TierCache(Path(folder) / name, tc.PassDataset.open(Path(folder) / name[:-3]), **options) as cache:
        schema = cache.schema
        both = tc.EmbeddingBagCollection(schema, mode={spec.name: spec.mode for spec in SPECS})
        first = tc.EmbeddingBagCollection(schema, ["f"])
        model = nn.ModuleList([both, first])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cache.register(model=model, optimizer=optimizer)
        optimizer = cache.optimizer
        for p in cache.passes(epochs=1):
            for i, batch in enumerate(p.batches(16)):
                if i % 3 == 2 and ranks.rank == i % 2:
                    (both(batch).square().mean() * batch.weight).backward()
                else:  # the collective lookup, without training
                    both(batch)
                if i % 3 != 2:
                    (first(batch).square().mean() * batch.weight).backward()
                optimizer.step()
                optimizer.zero_grad()
        return {group["table"]: group["step"] for group in cache.optimizer.rows.param_groups}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise", "data_parallel"])
def test_a_table_counts_the_steps_of_any_rank(ranks_pool: RanksPool, tmp_path: Path, sharding: str) -> None:
    """Tables of one layout end like tables of two layouts, which differ only in a setting without effect."""
    adam = tc.optim.Adam(learning_rate=0.01)
    rows = []
    for name, other in (("one", adam), ("two", tc.optim.Adam(learning_rate=0.01, eps=1.0000001e-8))):
        tables = table("a", 4, adam), table("b", 4, other)
        Case(tables=tables, specs=SPECS, num_samples=192, pass_rows=96).cut(tmp_path / name)
        arguments = {"folder": str(tmp_path), "name": f"{name}.tc", "sharding": {"a": sharding, "b": sharding}}
        steps = ranks_pool.run(2, alternate, **arguments)
        assert steps == [{"a": 12, "b": 4}] * 2
        rows.append(stored(tmp_path, f"{name}.tc"))
    for one, two in zip(*(found.values() for found in rows), strict=True):
        for numbers, others in zip(one[1], two[1], strict=True):
            np.testing.assert_allclose(numbers, others, rtol=1e-5, atol=1e-7)


def train(ranks: AnyCommunicator, folder: str, name: str, *, left_out: bool) -> dict[str, Any]:
    """Train with an optimizer for each table; rank 1 leaves out a backward of the second, or has it of zeros."""
    with tc.TierCache(Path(folder) / name, tc.PassDataset.open(Path(folder) / "passes"), **OPTIONS) as cache:
        features = {t: [f.name for f in cache.schema.features if f.table == t] for t in ("a", "b")}
        bags = nn.ModuleDict({t: tc.EmbeddingBagCollection(cache.schema, names) for t, names in features.items()})
        first, second = (torch.optim.SGD(bags[t].parameters(), lr=0.1) for t in ("a", "b"))
        cache.register(model=bags, first=first, second=second)
        for p in cache.passes(epochs=1):
            for i, batch in enumerate(p.batches(16)):
                (bags["a"](batch).square().mean() * batch.weight).backward()
                loss = bags["b"](batch).square().mean() * batch.weight
                is_out = ranks.rank == 1 and i % 2 == 0
                if not is_out:
                    loss.backward()
                elif not left_out:
                    (loss * 0).backward()
                for optimizer in map(cache.optimizer.part, (first, second)):
                    optimizer.step()
                    optimizer.zero_grad()
        rows = cache.optimizer.rows
        return {"steps": rows.steps, "tables": [group["step"] for group in rows.param_groups]}


@pytest.mark.parametrize("what", TABLES)
def test_a_backward_that_a_rank_leaves_out_is_one_of_zeros(ranks_pool: RanksPool, tmp_path: Path, what: str) -> None:
    """Ranks keep gradients that wait for the second optimizer together, and count the same steps."""
    tables = tuple(table(name, 4, optimizer) for name, optimizer in zip("ab", TABLES[what], strict=True))
    Case(tables=tables, specs=SPECS, num_samples=96, pass_rows=48).cut(tmp_path / "passes")
    found = {
        left_out: ranks_pool.run(
            2, train, folder=str(tmp_path), name=f"{left_out}.tc", left_out=left_out
        )
        for left_out in (False, True)
    }  # fmt: skip

    assert found[True][0] == found[True][1] == found[False][0] == found[False][1]
    if what == "decided":  # Adam moves rows by gradients of zero, too
        assert_same_rows(stored(tmp_path, "True.tc"), stored(tmp_path, "False.tc"))


def drop(ranks: AnyCommunicator, folder: str) -> list[int]:
    """Drop the gradients of the last batch, in which rank 1 looks up no key of the second table."""
    keys, dense = torch.arange(6), torch.nn.Linear(4, 1)
    data = tc.PassDataset.open(Path(folder) / "keys")
    a, b = (tc.Embedding(data.schema, name) for name in "ab")
    model = nn.ModuleList([a, b, dense])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tc.TierCache(Path(folder) / "model.tc", data, model=model, optimizer=optimizer, **OPTIONS) as cache:
        for _ in cache.passes(epochs=1):
            for some in (keys, keys[: 6 - 6 * ranks.rank]):
                (dense(a(keys)).sum() + dense(b(some)).sum()).backward()
                if some is keys:
                    cache.optimizer.step()
                cache.optimizer.zero_grad()
        assert cache.store.commit is not None
        return [*cache.store.commit.cursor]


def test_ranks_with_and_without_keys_drop_their_last_gradients(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """The last pass ends on all ranks: a lookup without keys waits for no backward."""
    tables = [table(name, 4, tc.optim.SGD(learning_rate=0.1)) for name in "ab"]
    tc.write_key_sets(tmp_path / "keys", tables, [dict.fromkeys("ab", np.arange(6))])
    assert ranks_pool.run(2, f"{__name__}:drop", folder=str(tmp_path)) == [[1, 0]] * 2
