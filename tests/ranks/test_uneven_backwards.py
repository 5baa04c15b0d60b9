"""A rank that leaves a backward out, while others do it, takes part in the step without gradients of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiercache as tc
from tests.ranks.pool import RanksPool
from tests.ranks.trainings import OPTIONS, assert_same_rows, stored
from tests.training.cases import SPECS, Case, table
from tiercache.dist.communicator import AnyCommunicator

TABLES = {
    "decided": (tc.optim.SGD(learning_rate=0.1), tc.optim.Adagrad(learning_rate=0.1)),
    "counted": (tc.optim.SGD(learning_rate=0.1), tc.optim.Adam(learning_rate=0.01)),
}


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
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
        return {"steps": cache.optimizer.steps, "tables": [group["step"] for group in cache.optimizer.param_groups]}


@pytest.mark.parametrize("what", TABLES)
def test_a_backward_that_a_rank_leaves_out_is_one_of_zeros(ranks_pool: RanksPool, tmp_path: Path, what: str) -> None:
    """Ranks keep what waits for the second optimizer together, and count the same steps."""
    tables = tuple(table(name, 4, optimizer) for name, optimizer in zip("ab", TABLES[what], strict=True))
    Case(tables=tables, specs=SPECS, num_samples=96, pass_rows=48).cut(tmp_path / "passes")
    found = {
        left_out: ranks_pool.run(
            2, f"{__name__}:train", folder=str(tmp_path), name=f"{left_out}.tc", left_out=left_out
        )
        for left_out in (False, True)
    }  # fmt: skip

    assert found[True][0] == found[True][1] == found[False][0] == found[False][1]
    if what == "decided":  # Adam moves rows by gradients of zero, too
        assert_same_rows(stored(tmp_path, "True.tc"), stored(tmp_path, "False.tc"))
