"""p.sample: negatives drawn from the keys of the pass, with their counts and probabilities."""

from pathlib import Path

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.train.recorded import Clicks, converted, opened, record
from tests.train.test_bad_input import one_sentence
from tiercache.data.raw_batch import OOV_KEY
from tiercache.train.negatives import NegativeSampler


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tc.PassDataset:
    return record(tmp_path_factory.mktemp("recorded") / "keys")


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> tc.PassDataset:
    """Key sets of the clicks, in which rare keys share a row."""
    return record(tmp_path_factory.mktemp("recorded") / "keys", model=converted("meta"), min_count=2)


@pytest.mark.parametrize("by", ["uniform", "count"])
def test_each_key_is_drawn_with_its_probability(rare: tc.PassDataset, by: str) -> None:
    one, num_keys = rare.passes[0], 200_000
    assert OOV_KEY in one.keys("user")
    drawn = NegativeSampler(one, 0, 0).draw("user", num_keys, by, 0, torch.device("cpu"))  # type: ignore[arg-type]
    counts = {int(key): int(n) for key, n in zip(one.keys("user"), one.counts("user"), strict=True) if key != OOV_KEY}
    total = sum(counts.values())
    chances = {key: (1 / len(counts) if by == "uniform" else n / total) for key, n in counts.items()}
    seen = dict(zip(*np.unique(drawn.keys.numpy(), return_counts=True), strict=True))
    assert set(seen) <= set(chances)
    for key, chance in chances.items():
        assert abs(seen.get(key, 0) - chance * num_keys) < 5 * np.sqrt(chance * num_keys) + 1
    assert all(counts[int(key)] == int(n) for key, n in zip(drawn.keys[:500], drawn.counts[:500], strict=True))
    expected = [np.log(chances[int(key)]) for key in drawn.keys[:500]]
    np.testing.assert_allclose(drawn.log_probabilities[:500], expected, rtol=1e-6)
    assert drawn.log_probabilities.dtype == torch.float32


def test_draws_follow_from_seed_pass_samples_and_call(data: tc.PassDataset) -> None:
    device = torch.device("cpu")

    def draw(seed: int, index: int, samples: int, calls: int = 1) -> list[int]:
        sampler = NegativeSampler(data.passes[0], seed, index)
        return [sampler.draw("item", 20, "uniform", samples, device).keys.tolist() for _ in range(calls)][-1]

    drawn = [draw(0, 0, 0), draw(1, 0, 0), draw(0, 1, 0), draw(0, 0, 5), draw(0, 0, 0, 2)]
    assert len({tuple(one) for one in drawn}) == len(drawn)
    assert drawn[0] == draw(0, 0, 0)


def test_a_resumed_pass_draws_the_negatives_of_one_that_was_not_stopped(tmp_path: Path, data: tc.PassDataset) -> None:
    """They are keys of the pass, so they are trained."""

    def run(folder: Path, stops: list[int]) -> list[list[int]]:
        drawn: list[list[int]] = []
        for stop in [*stops, 10**9]:
            cache, step = opened(folder, data)
            with cache:
                for p in cache.passes(epochs=1):
                    for batch in p.loader(Clicks(), shuffle=True):
                        keys = [p.sample("item", 3).keys, p.sample("item", 2, by="count").keys]
                        drawn.append(torch.cat(keys).tolist())
                        step.model.item(torch.cat(keys)).sum().backward()  # type: ignore[operator, union-attr]
                        step(batch)
                        if len(drawn) == stop:
                            cache.commit()
                            p.stop()
                            break
        return drawn

    assert run(tmp_path / "a", []) == run(tmp_path / "b", [2, 9])


def test_wrong_arguments_are_refused(data: tc.PassDataset) -> None:
    sampler = NegativeSampler(data.passes[0], 0, 0)
    with one_sentence(ValueError, "invalid by 'rank'", "'uniform' or 'count'"):
        sampler.draw("item", 1, "rank", 0, torch.device("cpu"))  # type: ignore[arg-type]
    with one_sentence(ValueError, "negatives -1"):
        sampler.draw("item", -1, "count", 0, torch.device("cpu"))
    assert sampler.draw("item", 0, "count", 0, torch.device("cpu")).keys.shape == (0,)


def test_a_table_without_keys_in_the_pass_has_no_negatives(tmp_path: Path) -> None:
    tables = [tc.Table(name=name, dim=2, optimizer=tc.optim.SGD(learning_rate=0.1)) for name in "ab"]
    written = tc.write_key_sets(tmp_path / "keys", tables, [{"a": [1, 2]}])
    with one_sentence(ValueError, "pass 4 has no keys of table 'b'"):
        NegativeSampler(written.passes[0], 0, 4).draw("b", 1, "uniform", 0, torch.device("cpu"))
