"""Writes to rows besides steps match torch's: max_norm at a lookup, and hooks after a step."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import tiercache as tc
from tests.dist.pool import RanksPool
from tests.train.cases import table, tiered
from tests.train.test_convert import SCHEMA, Small
from tiercache.dist.communicator import AnyCommunicator
from tiercache.errors import StateError

ROWS, DIM = 40, 6


class Normed(nn.Module):
    """Renormalizes the rows it looks up, with a padding row."""

    def __init__(self, norm_type: float, mode: str) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, DIM, padding_idx=0, max_norm=0.7, norm_type=norm_type)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode=mode, max_norm=0.9, norm_type=norm_type)
        self.top = nn.Linear(DIM, 1)

    def forward(self, words: torch.Tensor, bag: torch.Tensor) -> torch.Tensor:
        """Return a number for each sample (N, 1)."""
        out: torch.Tensor = self.top(self.words(words).sum(dim=1) + self.bag(bag))
        return out


@pytest.mark.parametrize(
    ("norm_type", "mode"), [(2.0, "sum"), (2.0, "mean"), (2.0, "max"), (1.0, "mean"), (float("inf"), "sum")]
)
def test_max_norm_scales_rows_at_a_lookup_as_torch_does(tmp_path: Path, norm_type: float, mode: str) -> None:
    """Only the rows of the lookup, in place, before the gradient is computed; also rows read in an evaluation."""
    torch.manual_seed(3)
    theirs = Normed(norm_type, mode)
    model = copy.deepcopy(theirs)
    reference = torch.optim.Adagrad(theirs.parameters(), lr=0.3)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    tc.convert(model, optimizer=optimizer)
    assert (model.words.max_norm, model.bag.norm_type) == (0.7, norm_type)
    every = [(torch.randint(0, ROWS - 5, (8, 3)), torch.randint(0, ROWS - 5, (8, 2))) for _ in range(6)]
    sets = [
        {name: [one[i].numpy().ravel() for one in every[p::2]] for i, name in enumerate(("words", "bag"))}
        for p in range(2)
    ]
    data = tc.write_key_sets(tmp_path / "keys", model.words.schema, sets)  # type: ignore[arg-type]
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        for p in cache.passes(epochs=2):
            for batch in every[p.sub_dataset :: 2]:
                for one, step in ((theirs, reference), (model, cache.optimizer)):
                    out = one(*batch)
                    step.zero_grad()
                    (out - 3).square().mean().backward()
                    step.step()
                    if one is theirs:
                        expected = out.detach()
                torch.testing.assert_close(out.detach(), expected)
        for name in ("words", "bag"):
            vectors = cache.store.lookup(name, np.arange(ROWS))["vector"]
            torch.testing.assert_close(torch.from_numpy(vectors), getattr(theirs, name).weight.data)
        with torch.no_grad():
            far = torch.arange(ROWS - 5, ROWS)  # never trained: the returned vectors are scaled
            torch.testing.assert_close(model.words(far), theirs.words(far))
            torch.testing.assert_close(model.bag(far[None]), theirs.bag(far[None]))
            served = tc.to_torch(model, cache.store)
            batch = torch.arange(ROWS - 1).view(-1, 3), torch.arange(ROWS - 14, ROWS - 1)[:, None]
            torch.testing.assert_close(served(*batch), theirs(*batch))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_hook_writes_the_rows_of_a_step(tmp_path: Path, dtype: str) -> None:
    """Only rows of its table, each once, after the step; after its removal, it does nothing."""
    names, every, rate = ("entity", "other"), torch.arange(10), 0.5
    tables = [table(name, 4, tc.optim.SGD(learning_rate=rate), tc.init.Normal(), dtype=dtype) for name in names]
    data = tc.write_key_sets(tmp_path / "k", tables, [dict.fromkeys(names, every.numpy())])
    model = nn.ModuleDict({name: tc.Embedding(data.schema, name) for name in names})
    seen: list[tuple[int, ...]] = []

    def normalize(vectors: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(vectors.shape))
        assert not torch.is_grad_enabled()
        return functional.normalize(vectors, dim=1)

    with tiered(tmp_path / "m.tc", data, model=model) as cache:
        handle = cache.optimizer.register_row_hook("entity", normalize)
        with pytest.raises(ValueError, match="unknown table 'user': the cache has "):
            cache.optimizer.register_row_hook("user", normalize)
        for p in cache.passes(epochs=1):
            keys = torch.tensor([[1, 2], [2, 7]])
            with torch.no_grad():
                before = {name: model[name](every) for name in names}
            (model["entity"](keys).sum() + model["other"](keys).sum()).backward()
            cache.optimizer.step()
            cache.optimizer.zero_grad()
            with torch.no_grad():
                after = {name: model[name](every) for name in names}
            expected = {name: before[name].clone() for name in names}
            for rows in expected.values():
                rows[[1, 2, 7]] -= rate * torch.tensor([1.0, 2.0, 1.0])[:, None]
            expected["entity"][[1, 2, 7]] = functional.normalize(expected["entity"][[1, 2, 7]], dim=1)
            tolerance = dict.fromkeys(["rtol", "atol"], 1e-6 if dtype == "float32" else 2e-2)
            for name in names:
                torch.testing.assert_close(after[name], expected[name], **tolerance)
            assert torch.equal(after["entity"][[0, 3, 9]], before["entity"][[0, 3, 9]])
            assert seen == [(3, 4)]
            handle.remove()
            cache.optimizer.register_row_hook("entity", lambda vectors: vectors[:1])
            model["entity"](keys).sum().backward()
            with pytest.raises(StateError, match=r"got float32 vectors \(3, 4\) but returned torch.float32 of shape"):
                cache.optimizer.step()
            cache.optimizer.zero_grad()
            assert seen == [(3, 4)]
            p.skip()


def refused_on_ranks(ranks: AnyCommunicator, folder: str) -> list[str]:
    """Return the errors of a row hook and of a model with max_norm."""
    model, said = tc.convert(Small(mode="sum", max_norm=1.0), SCHEMA, {"items": "item"}), []
    with tiered(Path(folder) / "m.tc", tc.PassDataset.open(Path(folder) / "k")) as cache:
        for one in (model.user_emb, model.items):
            one.weights = {}
        for call in (
            lambda: cache.optimizer.register_row_hook("user", lambda vectors: vectors),
            lambda: cache.register(model=model),
        ):
            with pytest.raises(StateError) as caught:
                call()
            said.append(str(caught.value))
    return said


def test_several_ranks_refuse_to_write_rows_where_they_are_looked_up(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Each has copies of the rows of others."""
    tc.write_key_sets(tmp_path / "k", SCHEMA, [{"user": np.arange(10), "item": np.arange(20)}])
    for hook, max_norm in ranks_pool.run(2, f"{__name__}:refused_on_ranks", folder=str(tmp_path)):
        assert "a row hook writes rows on the rank that looks them up, but this cache has 2 ranks" in hook
        assert "max_norm writes rows on the rank that looks them up" in max_norm
