"""The conformance list, and random trainings: lookups, rows, states and dense weights match one process."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tiercache as tc
from tests.dist.conformance import WAYS, Entry, ask_wrongly, evaluate, known, leave_a_loop, looked_up, run, train
from tests.dist.conformance_list import BEYOND, MERLIN
from tests.dist.pool import RanksPool
from tests.dist.trainings import stored
from tests.train.cases import all_keys, tiered
from tiercache.store import MemoryEngine

SIZES = (2, 3, 4)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], tc.InMemoryCache]]:
    """The result of an entry in one process, all in memory: expected for every number of ranks."""

    @cache
    def trained(name: str) -> tuple[dict[str, Any], tc.InMemoryCache]:
        entry = known(name)
        return train_alone(entry, entry.cut(tmp_path_factory.mktemp("alone") / "passes"))

    return trained


def train_alone(entry: Entry, passes: tc.PassDataset) -> tuple[dict[str, Any], tc.InMemoryCache]:
    orders = {name: entry.options.get(name) for name in ("order", "order_seed")}
    resident = tc.InMemoryCache(passes, **orders)
    return run(resident, entry), resident


def of_all_ranks(parts: list[dict[str, Any]], what: str) -> list[list[NDArray[np.float32]]]:
    """Return by batch the vectors of all ranks, joined in their order."""
    return [
        [np.concatenate(pieces) for pieces in zip(*(part[what][batch] for part in parts), strict=True)]
        for batch in range(len(parts[0][what]))
    ]


def assert_as_alone(
    parts: list[dict[str, Any]],
    folder: Path,
    alone: tuple[dict[str, Any], tc.InMemoryCache],
    *,
    tolerance: float = 1e-5,
    first: float = 1e-6,
) -> None:
    """Compare the ranks' lookups and store with one process; the first lookups within ``first``."""
    theirs, resident = alone
    for what in ("outputs", "weights"):
        for number, (mine, others) in enumerate(zip(of_all_ranks(parts, what), theirs[what], strict=True)):
            for one, other in zip(mine, others, strict=True):
                within = tolerance if number else first
                np.testing.assert_allclose(one, other, rtol=within, atol=within, err_msg=f"{what} of batch {number}")
    for part in parts:
        for name, weight in theirs.items():
            if name.startswith("dense."):
                np.testing.assert_allclose(part[name], weight, rtol=tolerance, atol=tolerance, err_msg=name)
    rows = stored(folder)
    for table in resident.tables:
        keys, order = resident.keys(table.name), np.argsort(resident.keys(table.name))
        np.testing.assert_array_equal(rows[table.name][0], keys[order], err_msg=table.name)
        for mine, other in zip(rows[table.name][1], resident.fields(table.name), strict=True):
            np.testing.assert_allclose(mine, other[order], rtol=tolerance, atol=tolerance, err_msg=table.name)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("entry", [*MERLIN, *BEYOND])
def test_ranks_train_as_one_process(ranks_pool: RanksPool, tmp_path: Path, alone: Any, entry: str, size: int) -> None:
    """Five steps: the first lookup within 1e-6, all else within 1e-5."""
    known(entry).cut(tmp_path / "passes")
    parts = ranks_pool.run(size, train, name=entry, folder=str(tmp_path))
    assert_as_alone(parts, tmp_path, alone(entry))
    assert all(part["fits"] for part in parts)
    if entry == "eight tables of width 2 are one array":
        assert [part["part_groups"] for part in parts] == [1] * size
    if entry == "more rows than memory":
        assert sum(part["read"] for part in parts) > 0, "no row ever left host memory"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["", ", bfloat16 rows", ", float16 rows"])
def test_where_no_sum_is_rounded_all_bits_are_those_of_one_process(
    ranks_pool: RanksPool, tmp_path: Path, alone: Any, dtype: str, size: int
) -> None:
    """Gradients are whole sixteenths: the order of addition cannot matter, so any wrong sum shows, also in rows of 16
    bits, whose rounding has the same numbers on every rank.
    """
    entry = f"no sum is rounded{dtype}"
    known(entry).cut(tmp_path / "passes")
    parts = ranks_pool.run(size, train, name=entry, folder=str(tmp_path))
    assert_as_alone(parts, tmp_path, alone(entry), tolerance=0, first=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("size", "comm_dtype", "entry"),
    [
        (2, "float32", "everything at once"),
        (2, "bfloat16", "everything at once, read by owner"),
        (3, "float16", "everything at once"),
        (3, "bfloat16", "pooled by owners of column slices"),
        (4, "float32", "pooled by owners, read by owner"),
    ],
)
def test_two_runs_on_as_many_ranks_end_with_the_same_bits(
    ranks_pool: RanksPool, tmp_path: Path, size: int, comm_dtype: str, entry: str
) -> None:
    """Lookups, gradients of weights, dense weights, rows and states: sums are in the order of ranks and features."""
    runs = []
    for name in ("one", "other"):
        folder = tmp_path / name
        known(entry).cut(folder / "passes")
        parts = ranks_pool.run(size, train, name=entry, folder=str(folder), comm_dtype=comm_dtype)
        dense = [value for part in parts for name, value in part.items() if name.startswith("dense.")]
        found = [one for what in ("outputs", "weights") for batch in of_all_ranks(parts, what) for one in batch]
        runs.append(found + dense + [field for _, fields in stored(folder).values() for field in fields])
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("comm_dtype", ["bfloat16", "float16"])
def test_a_wire_of_16_bits_loses_no_more_than_its_bits(
    ranks_pool: RanksPool, tmp_path: Path, alone: Any, comm_dtype: str
) -> None:
    """In every sharding, with shared tables; and it does lose some. For traveling rows it is half the bytes."""
    entry = "shared tables in every sharding"
    for folder in (tmp_path, tmp_path / "wide"):
        known(entry).cut(folder / "passes")
    parts = ranks_pool.run(3, train, name=entry, folder=str(tmp_path), comm_dtype=comm_dtype)
    lost = 2.0 ** (-8 if comm_dtype == "bfloat16" else -11)
    assert_as_alone(parts, tmp_path, alone(entry), tolerance=8 * lost, first=4 * lost)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_as_alone(parts, tmp_path, alone(entry), tolerance=lost / 8, first=lost / 8)
    wide = ranks_pool.run(3, train, name=entry, folder=str(tmp_path / "wide"))
    for half, whole in zip(parts, wide, strict=True):
        assert 0.5 < half["bytes"] / whole["bytes"] < 0.8, "ids and addresses stay as they are"


def test_rows_of_replicated_tables_are_mirrored_and_do_not_travel(ranks_pool: RanksPool, tmp_path: Path) -> None:
    passes = known("all replicated").cut(tmp_path / "passes")
    known("row slices").cut(tmp_path / "rows" / "passes")
    parts = ranks_pool.run(2, train, name="all replicated", folder=str(tmp_path))
    rows = ranks_pool.run(2, train, name="row slices", folder=str(tmp_path / "rows"))
    replicas = sum(4 * table.dim * passes.passes[-1].rows(table.name) for table in passes.tables)
    for replicated, divided in zip(parts, rows, strict=True):
        assert (replicated["mirror_bytes"], divided["mirror_bytes"]) == (replicas, 0)
        assert replicated["bytes"] < divided["bytes"]


def test_owners_pool_features_where_that_is_fewer_bytes(ranks_pool: RanksPool, tmp_path: Path, alone: Any) -> None:
    """Not those with one id a sample, trained weights or a maximum, unless the owner reads their ids."""
    sent, pooled = [], []
    for name in ("pooled nowhere", "pooled by owners", "pooled by owners, read by owner"):
        known(name).cut(tmp_path / name / "passes")
        parts = ranks_pool.run(2, train, name=name, folder=str(tmp_path / name))
        assert_as_alone(parts, tmp_path / name, alone(name))
        sent.append(sum(part["bytes"] for part in parts))
        pooled += [part["pooled"] for part in parts[:1] if part["pooled"] == parts[1]["pooled"]]
    assert pooled == [
        [],
        ["list", "mean", "ragged", "sum"],
        ["list", "mean", "one", "other", "ragged", "sum", "weighted"],
    ]
    assert sent[1] < 0.9 * sent[0]
    assert sent[2] < sent[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "bad_rank", "number"), [(2, 0, -1), (3, 2, 40), (4, 1, 1 << 30)])
def test_an_id_outside_its_table_is_said_on_every_rank_and_training_goes_on(
    ranks_pool: RanksPool, tmp_path: Path, alone: Any, size: int, bad_rank: int, number: int
) -> None:
    known("row slices").cut(tmp_path / "passes")
    parts = ranks_pool.run(
        size, ask_wrongly, name="row slices", folder=str(tmp_path), bad_rank=bad_rank,
        number=number,
    )  # fmt: skip
    for rank, part in enumerate(parts):
        kind, sentence = part["said"]
        assert kind == ("IndexError" if rank == bad_rank else "RankError")
        assert f"feature 'f0' has local id {number} at entry 0 of the batch, but table 't0' has local ids" in sentence
        assert "\n" not in sentence
    assert_as_alone(parts, tmp_path, alone("row slices"))


def test_a_loop_that_is_left_open_ends_without_a_word(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Also after an error whose traceback outlives the cache."""
    known("basic").cut(tmp_path / "passes")
    told = ranks_pool.run(2, leave_a_loop, name="basic", folder=str(tmp_path))
    assert told == [[], []]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", SIZES)
def test_keys_of_32_and_of_64_bits_are_the_same_rows(ranks_pool: RanksPool, tmp_path: Path, size: int) -> None:
    """Columns of both types look into one table; ranks find its rows by the same hashes."""
    entry, rng = known("keys of 32 and of 64 bits"), np.random.default_rng(3)
    n = entry.num_samples
    narrow, wide = (rng.integers(-20, 20, n).astype(dtype) for dtype in (np.int32, np.int64))
    lists = pa.array([rng.integers(0, 30, rng.integers(0, 4)).tolist() for _ in range(n)], pa.list_(pa.int32()))
    label, x = rng.integers(0, 2, n).astype(np.float32), rng.random(n).astype(np.float32)
    pq.write_table(
        pa.table({"label": label, "x": x, "narrow": narrow, "wide": wide, "list": lists}), tmp_path / "data.parquet"
    )
    passes = tc.extract(
        tmp_path / "data.parquet", entry.schema, tmp_path / "passes", split_by="rows=32", batch_multiple=1,
        device_budget="1GiB", progress=False,
    )  # fmt: skip
    assert {int(key) for one in passes for key in one.keys("t0")} == {*narrow.tolist(), *wide.tolist()}
    parts = ranks_pool.run(size, train, name="keys of 32 and of 64 bits", folder=str(tmp_path))
    assert_as_alone(parts, tmp_path, train_alone(entry, passes))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("entry", ["evaluated", "evaluated, with rows for unknown keys"])
def test_evaluation_finds_the_rows_of_one_process(
    ranks_pool: RanksPool, tmp_path: Path, alone: Any, entry: str, size: int
) -> None:
    """Within a pass and after the last, in slices of the budget, with unknown keys, which share the out-of-vocabulary
    row if there is one; training is unaffected.
    """
    case = known(entry)
    passes, tests = case.cut(tmp_path / "passes"), case.cut(tmp_path / "tests", times=3, seed=9)
    assert len(np.setdiff1d(all_keys(tests, "t0"), all_keys(passes, "t0"))) > 10
    told = ranks_pool.run(
        size, evaluate, name=entry, folder=str(tmp_path), at=[1, 3, -1],
        schedule=("simple", "interleaved")[size % 2],
    )  # fmt: skip
    theirs: dict[str, NDArray[np.float32]] = {}
    with tc.Store.open(None, tables=case.tables, engine=MemoryEngine()) as store, tiered(store, passes) as cache:

        def look(step: int) -> None:
            theirs[str(step)] = np.concatenate(looked_up(cache, case, tests)["vectors"])

        run(cache, case, each_step=lambda step: look(step) if step in {1, 3} else None)
        look(-1)
    assert told[0].keys() == theirs.keys()
    for step, vectors in theirs.items():
        slices = [part[step]["slices"] for part in told]
        assert slices == slices[:1] * size
        assert slices[0] > len(tests.passes) or "eval_budget" not in case.options
        by_batch = zip(*(part[step]["vectors"] for part in told), strict=True)
        mine = np.concatenate([one for batch in by_batch for one in batch])
        np.testing.assert_allclose(mine, vectors, rtol=1e-5, atol=1e-5, err_msg=f"step {step}")
    rows, (_, resident) = stored(tmp_path), alone(entry)
    for table in resident.tables:
        order = np.argsort(resident.keys(table.name))
        for one, other in zip(rows[table.name][1], resident.fields(table.name), strict=True):
            np.testing.assert_allclose(one, other[order], rtol=1e-5, atol=1e-5, err_msg=table.name)


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
def test_many_steps_stay_with_one_process(ranks_pool: RanksPool, tmp_path: Path, alone: Any, size: int) -> None:
    """Two hundred batches: rounding errors add up slowly."""
    known("many steps").cut(tmp_path / "passes")
    parts = ranks_pool.run(size, train, name="many steps", folder=str(tmp_path), limit=300)
    assert_as_alone(parts, tmp_path, alone("many steps"), tolerance=1e-3)


# -- random trainings ------------------------------------------------------------------------------------------

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
    with tempfile.TemporaryDirectory() as folder:
        entry = known(record)
        passes = entry.cut(Path(folder) / "passes")
        parts = pool.run(size, train, name=record, folder=folder)
        assert_as_alone(parts, Path(folder), train_alone(entry, passes))


@settings(max_examples=4, deadline=None, suppress_health_check=ANY)
@given(record=records(), size=st.integers(2, 4))
def test_random_trainings_are_those_of_one_process(ranks_pool: RanksPool, record: dict[str, Any], size: int) -> None:
    compare(ranks_pool, record, size)


@pytest.mark.long
@settings(max_examples=300, deadline=None, suppress_health_check=ANY)
@given(record=records(), size=st.integers(1, 4))
def test_many_random_trainings_are_those_of_one_process(
    ranks_pool: RanksPool, record: dict[str, Any], size: int
) -> None:
    compare(ranks_pool, record, size)
