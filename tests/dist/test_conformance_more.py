"""Random trainings on random ranks match one process, and literal ones end with the numbers below."""

import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.dist.conformance import WAYS, known
from tests.dist.pool import RanksPool
from tests.dist.test_conformance import BODY, assert_as_alone, train_alone
from tests.dist.trainings import OPTIONS, stored
from tests.train.cases import table
from tiercache.data.dataset_writer import write_dataset
from tiercache.data.raw_batch import FeatureKeys, RawBatch
from tiercache.dist.communicator import AnyCommunicator
from tiercache.planning.sharding_planner import sliced
from tiercache.store.sharding import ShardingPlan, Slice, TableSharding

ANY = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a training as plain values, for ``random_entry``: at most five steps."""
    dims = st.one_of(st.integers(1, 20), st.sampled_from([31, 64, 65, 128]))
    tables = draw(
        st.lists(
            st.fixed_dictionaries(
                {"dim": dims, "rows": st.integers(1, 100), "rule": st.integers(0, 3), "way": st.sampled_from(WAYS)}
            ),
            min_size=1, max_size=6,
        )
    )  # fmt: skip
    specs, singles = [], []
    for i in range(draw(st.integers(1, 7))):
        hotness = draw(st.sampled_from(["one_hot", "multi_hot", "ragged", "ragged"]))
        mode = draw(st.sampled_from(["sum", "mean", "max"]))
        specs.append(
            {
                "table": draw(st.integers(0, len(tables) - 1)), "hotness": hotness, "mode": mode,
                "length": draw(st.integers(1, 5)),
                "weighted": hotness != "one_hot" and mode != "max" and draw(st.booleans()),
            }
        )  # fmt: skip
        if i and draw(st.integers(0, 4)) == 0:
            singles.append(f"f{i}")
    batch = draw(st.integers(1, 40))
    num_samples = draw(st.integers(1, 5 * batch))
    return {
        "tables": tables, "specs": specs, "singles": singles, "batch": batch, "num_samples": num_samples,
        "pass_samples": draw(st.sampled_from([num_samples, -(-num_samples // 2)])),
        "longest": draw(st.sampled_from([1, 4, 20])), "empty": draw(st.sampled_from([0.0, 0.0, 0.8])),
        "seed": draw(st.integers(0, 1000)), "shuffle": draw(st.booleans()), "accumulate": draw(st.integers(1, 3)),
        "read_by": draw(st.sampled_from(["rank", "owner"])),
        "twice": draw(st.booleans()), "options": {"commit_every": draw(st.integers(1, 2))},
    }  # fmt: skip


def compare(pool: RanksPool, record: dict[str, Any], size: int) -> None:
    """Train a record on ranks and alone."""
    with tempfile.TemporaryDirectory() as folder:
        entry = known(record)
        passes = entry.cut(Path(folder) / "passes")
        parts = pool.run(size, BODY, name=record, folder=folder)
        assert_as_alone(parts, Path(folder), train_alone(entry, passes))


@settings(max_examples=4, deadline=None, suppress_health_check=ANY)
@given(record=records(), size=st.integers(2, 4))
def test_random_trainings_are_those_of_one_process(ranks_pool: RanksPool, record: dict[str, Any], size: int) -> None:
    """Any tables, features, sharding plans, batches, accumulation and commits on 2 to 4 ranks."""
    compare(ranks_pool, record, size)


@pytest.mark.long
@settings(max_examples=300, deadline=None, suppress_health_check=ANY)
@given(record=records(), size=st.integers(1, 4))
def test_many_random_trainings_are_those_of_one_process(
    ranks_pool: RanksPool, record: dict[str, Any], size: int
) -> None:
    """The same at greater length."""
    compare(ranks_pool, record, size)


# -- literal rows, bags and steps ----------------------------------------------------------------------------

SUM = [[2, 4], [4, 6], [0, 0], [12, 15]]
MEAN = [[0, 1], [3, 4], [0, 0], [4 / 3, 7 / 3]]
ROWS = [[-2, -1], [1, 2], [0, 1], [6, 7]]
"""[[0, 1], [2, 3], [4, 5], [6, 7]] less how often each was in a bag."""
RULES = {
    "sgd": tc.optim.SGD(learning_rate=1.0),
    "adagrad": tc.optim.Adagrad(learning_rate=1.0),
    "rowwise": tc.optim.RowWiseAdagrad(learning_rate=1.0),
    "adam": tc.optim.Adam(learning_rate=0.5),
}
NUMBERS = np.arange(8, dtype=np.float32).reshape(4, 2)
"""[[0, 1], [2, 3], [4, 5], [6, 7]]: the rows of keys 0 to 3, and the gradients of four samples."""
BAGS = [[5, 5], [5], [5, 5, 5], [5]]
"""For the samples that step one row by each rule."""
SUMMED = [[0, 1], [2, 0], [], [2, 2, 2]]
AVERAGED = [[0], [1, 2], [], [0, 1, 1]]


def bags(lists: list[list[int]]) -> FeatureKeys:
    """Return ragged keys."""
    return FeatureKeys(np.array(list(chain(*lists)), np.int64), np.cumsum([0, *map(len, lists)]).astype(np.int64))


def cut(folder: Path) -> tc.PassDataset:
    """Make a pass that gives every row its numbers, and one that looks up bags."""
    ragged = {name: tc.Feature(name=name, columns=(name,), table="rows", hotness="ragged") for name in ("sum", "mean")}
    rules = {f"by {n}": tc.Feature(name=f"by {n}", columns=(n,), table=n, hotness="ragged") for n in RULES}
    schema = tc.Schema(
        label="label",
        dense=(tc.DenseFeature(column="x"), tc.DenseFeature(column="y")),
        features=(tc.Feature(name="id", columns=("id",), table="rows"), *ragged.values(), *rules.values()),
        tables=tuple(
            table(name, 2, rule, tc.init.Zeros()) for name, rule in [("rows", RULES["sgd"]), *RULES.items()]
        ),
    )  # fmt: skip
    nothing: list[list[int]] = [[]] * 4
    passes = [
        {"id": [0, 1, 2, 3], "sum": nothing, "mean": nothing, "rules": BAGS},
        {"id": [3, 3, 3, 3], "sum": SUMMED, "mean": AVERAGED, "rules": nothing},
    ]
    return write_dataset(
        folder,
        schema,
        [
            RawBatch(
                np.zeros(4, np.float32), NUMBERS,
                {"id": FeatureKeys(np.array(one["id"]), None), "sum": bags(one["sum"]), "mean": bags(one["mean"])}
                | {name: bags(one["rules"]) for name in rules},
            )
            for one in passes
        ],
    )  # fmt: skip


def train(ranks: AnyCommunicator, folder: str) -> dict[str, Any]:
    """Train with all tables sharded in each way; return by way the outputs of the second pass."""
    passes, found = tc.PassDataset.open(Path(folder) / "passes"), {}
    for way in WAYS:
        sharding = ShardingPlan(ranks.size, {one.name: sharded(way, ranks.size) for one in passes.tables})
        path = Path(folder) / f"{way}.tc"
        with tc.TierCache(path, passes, sharding=sharding, **OPTIONS) as cache:
            by_rule = [f"by {name}" for name in RULES]
            bag = tc.EmbeddingBagCollection(cache.schema, ["id", "sum", "mean", *by_rule], mode={"mean": "mean"})
            cache.register(bag=bag)
            for p in cache.passes(epochs=1):
                for batch in p.batches(4):
                    out = bag(batch)
                    if p.index == 0:
                        wanted = out[:, 6:].reshape(-1, 4, 2).sum(dim=1) - out[:, :2]
                        each = (wanted * batch.dense).sum(dim=1)
                    else:
                        each = out[:, 2:4].sum(dim=1)
                        found[way] = out[: None if batch.weight else 0, 2:6].detach().numpy().copy()
                    (4 * each.mean() * batch.weight).backward()
                    cache.optimizer.step()
    return found


def sharded(way: str, size: int) -> TableSharding:
    """Place a table of two columns."""
    if way == "column_wise" and size > 1:
        return sliced(2, [size - 1, 0])
    if way in {"column_wise", "table_wise"}:
        return TableSharding("table_wise", (Slice(size - 1, 0, 2),))
    return TableSharding(way)  # type: ignore[arg-type]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_literal_rows_bags_and_steps(ranks_pool: RanksPool, tmp_path: Path, size: int) -> None:
    """A table [[0, 1], [2, 3], [4, 5], [6, 7]] in every sharding: sums, ragged means, empty bags, and the step of
    their gradients; and by each rule a row that is in all samples' bags, several times in some: its gradient is summed
    over all ranks before it is squared.
    """
    cut(tmp_path / "passes")
    parts = ranks_pool.run(size, f"{__name__}:train", folder=str(tmp_path))
    g = np.array([2 * 0 + 2 + 3 * 4 + 6, 2 * 1 + 3 + 3 * 5 + 7], np.float32)  # [20, 27]
    fields = {
        "sgd": [-g],
        "adagrad": [-g / abs(g), g**2],
        "rowwise": [-g / np.sqrt((g**2).mean()), [(g**2).mean()]],
        "adam": [-0.5 * g / abs(g), 0.1 * g, 0.001 * g**2],
    }
    for way in WAYS:
        found = np.concatenate([part[way] for part in parts])
        np.testing.assert_allclose(found, np.hstack([SUM, MEAN]), rtol=0, atol=2e-6, err_msg=way)
        rows = stored(tmp_path, f"{way}.tc")
        assert rows["rows"][0].tolist() == [0, 1, 2, 3]
        np.testing.assert_allclose(rows["rows"][1][0], ROWS, rtol=0, atol=2e-6, err_msg=way)
        for name, wanted in fields.items():
            keys, found = rows[name]
            assert keys.tolist() == [5]
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one[0], other, rtol=1e-6, err_msg=f"{name} {way}")
