"""Evaluation sees current rows, writes nothing, stays within its budget and changes no bit of the run."""

import itertools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import tiercache as tc
from tests.train.cases import (
    Case,
    Net,
    Spec,
    assert_bits_of_memory,
    open_store,
    resident,
    smallest_host_budget,
    table,
    tiered,
    train,
)
from tests.train.devices import DEVICES
from tests.train.loops import descend
from tiercache.data.raw_batch import OOV_KEY
from tiercache.errors import BudgetError, StateError
from tiercache.store.row_codec import initial_rows

CASE = Case(
    tables=(table("a", 8), table("b", 5, tc.optim.Adam(learning_rate=0.05)), table("c", 8, dtype="bfloat16")),
    specs=(
        Spec(name="f", table="a", hotness="ragged"), Spec(name="g", table="b"),
        Spec(name="h", table="c", hotness="multi_hot"),
    ),
    num_keys=300,
)  # fmt: skip
MOMENTS = [(0, 0), (1, 3), (3, 1), (4, 0), (6, 2), (7, 3)]
Rows = dict[str, dict[int, "NDArray[np.float32]"]]


@pytest.fixture
def others(tmp_path: Path) -> tc.PassDataset:
    return replace(CASE, num_keys=700, data_seed=5, num_samples=96, pass_rows=48).cut(tmp_path / "others")


def initial(spec: tc.Table, key: int) -> NDArray[np.float32]:
    return initial_rows(spec, np.array([key]))[0][0]


def resident_rows(passes: tc.PassDataset, others: tc.PassDataset, device: Any) -> dict[tuple[int, int], Rows]:
    """Train in memory and copy all rows at `MOMENTS`, and at the end under (-1, -1); evaluations have these rows."""
    cache, found = resident(passes, device=device), {}

    def copy(*moment: int) -> None:
        if moment in (*MOMENTS, (-1, -1)):
            found[moment] = {
                t.name: dict(zip(cache.keys(t.name).tolist(), cache.fields(t.name)[0].copy(), strict=True))
                for t in cache.tables
            }
            assert_rows_as_of(cache, others, found[moment])

    train(cache, CASE, each_batch=copy)
    copy(-1, -1)
    return found


def assert_rows_as_of(cache: Any, others: tc.PassDataset, now: Rows) -> None:
    vectors, bag, samples = tc.EmbeddingCollection(cache.schema), tc.EmbeddingBagCollection(cache.schema), 0
    tables = {t.name: t for t in others.tables}
    for piece in cache.evaluate(others):
        source = others.passes[piece.sub_dataset]
        for batch in piece.batches(20):
            with torch.no_grad():
                found, pooled = vectors(batch), dict(zip(bag.features, bag.split(bag(batch)), strict=True))
            for feature in others.schema.features:
                keys = source.keys(feature.table)[batch.ids[feature.name].ids].tolist()
                wanted = [now[feature.table].get(key, initial(tables[feature.table], key)) for key in keys]
                rows = found[feature.name].reshape(-1, tables[feature.table].dim).cpu().numpy()
                np.testing.assert_array_equal(rows, np.array(wanted, np.float32).reshape(rows.shape))
                if feature.hotness == "one_hot":
                    np.testing.assert_array_equal(pooled[feature.name].cpu().numpy(), rows)
            samples += batch.num_samples
    assert samples == others.samples


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("engine", "commit_every", "device"), [("memory", 1, "cpu"), ("lmdb", 3, "cpu"), ("lmdb", 1, "cuda")]
)
def test_evaluation_sees_rows_as_of_now_and_changes_no_bit(
    tmp_path: Path, passes: tc.PassDataset, others: tc.PassDataset, engine: str, commit_every: int, device: str
) -> None:
    """At any moment of a run with a tight host: rows of this pass, of earlier ones and of none; the run ends equal.

    Before the first commit any key has its initial row; a reopened store has the final rows of the run.
    """
    expected = resident_rows(passes, others, DEVICES[device]())
    with open_store(tmp_path / "model.tc", CASE, engine) as store:
        options: dict[str, Any] = {"device_budget": "1MiB", "commit_every": commit_every, "eval_budget": 4000}
        options["device"] = DEVICES[device]()
        options["host_budget"] = smallest_host_budget(store, passes, **options)
        with tiered(store, passes, **options) as cache:
            asked = []
            assert_rows_as_of(cache, others, {t.name: {} for t in CASE.tables})
            assert store.commit is None

            def evaluate(pass_index: int, batch: int) -> None:
                if (pass_index, batch) in MOMENTS:
                    assert_rows_as_of(cache, others, expected[pass_index, batch])
                    asked.append((pass_index, batch))

            model = train(cache, CASE, each_batch=evaluate)
            assert asked == MOMENTS
            assert any(report.rows_read for report in cache.reports), "no row ever left host memory"
            assert_rows_as_of(cache, others, expected[-1, -1])
        assert_bits_of_memory(store, passes, model, CASE, device=DEVICES[device]())
    if engine == "memory":
        return
    with tc.Store.open(tmp_path / "model.tc") as store, tiered(store, passes, device=DEVICES[device]()) as cache:
        assert_rows_as_of(cache, others, expected[-1, -1])


def written(store: tc.Store) -> tuple[object, ...]:
    counts = {name: n for name in dir(store.counters) if "writ" in name or name == "commits"
              if isinstance(n := getattr(store.counters, name), int)}  # fmt: skip
    assert len(counts) > 2
    return counts, [(store.path / name).read_bytes() for name in ("data.mdb", "blocks.bin")], store.commit


def test_evaluation_writes_nothing(tmp_path: Path, passes: tc.PassDataset, others: tc.PassDataset) -> None:
    with tc.Store.open(tmp_path / "model.tc", tables=CASE.tables) as store, tiered(store, passes) as cache:
        model = Net(cache, CASE).to(cache.device)
        for p in cache.passes(epochs=1):
            if p.index == 2:
                next(p.batches(16))
                cache._rows.transfer.drain()
                before, state = written(store), torch.get_rng_state()
                for piece in cache.evaluate(others):
                    for samples in piece.batches(16):
                        model(samples).sum().backward()
                assert not cache.optimizer.rows.pending
                assert written(store) == before
                assert torch.equal(torch.get_rng_state(), state)
            p.skip()


def test_slices_of_evaluation_fit_their_budget(tmp_path: Path, passes: tc.PassDataset, others: tc.PassDataset) -> None:
    counts = {}
    for budget in (1500, 6000, 1 << 20):
        store = tc.Store.open(tmp_path / f"{budget}.tc", tables=CASE.tables)
        with store, tiered(store, passes, eval_budget=budget) as cache:
            pieces = [
                (piece.num_samples, sum(rows.vectors.values.nbytes for rows in piece._rows.groups))
                for piece in cache.evaluate(others)
            ]
        counts[budget] = len(pieces)
        assert sum(samples for samples, _ in pieces) == others.samples
        assert max(num_bytes for _, num_bytes in pieces) <= budget
    assert counts[1500] > counts[6000] > counts[1 << 20] == len(others.passes)


def test_a_training_without_evaluation_gives_its_share_to_rows(passes: tc.PassDataset, others: tc.PassDataset) -> None:
    with open_store(passes.path, CASE, "memory") as store:
        options: dict[str, Any] = {"device_budget": "1MiB", "commit_every": 1}
        least = smallest_host_budget(store, passes, **options, eval_budget=0)
        assert least < smallest_host_budget(store, passes, **options)
        with tiered(store, passes, **options, eval_budget=0, host_budget=least) as cache:
            model = train(cache, CASE)
            with pytest.raises(BudgetError, match="eval_budget is 0 bytes: raise eval_budget"):
                next(cache.evaluate(others))
        assert_bits_of_memory(store, passes, model, CASE)


def test_the_evaluation_budget_of_an_error_is_the_smallest(passes: tc.PassDataset, others: tc.PassDataset) -> None:
    """To the byte, for a sample of a dataset and for raw keys; a rounded number may be less."""

    def refused(budget: int, *, raw: bool) -> int:
        with open_store(passes.path, CASE, "memory") as store, tiered(store, passes, eval_budget=budget) as cache:
            cache.restore()
            try:
                cache.evaluate_batch({"g": np.arange(30)}) if raw else next(cache.evaluate(others))
            except BudgetError as error:
                return int(re.findall(r"raise eval_budget to (\d+) bytes", str(error))[0])
        return 0

    for raw in (False, True):
        least = refused(0, raw=raw)
        assert refused(least - 1, raw=raw) == least
        assert refused(least, raw=raw) == 0


def test_keys_never_trained_share_the_out_of_vocabulary_row(tmp_path: Path) -> None:
    """Also of an earlier dataset: the store has the row, although no key of the later dataset is rare."""
    schema = tc.Schema(features=(tc.Feature(name="f", table="a"),), tables=(table("a", 4),), label="y")

    def extracted(name: str, keys: list[int], min_count: int) -> tc.PassDataset:
        data = [{"f": np.array(keys), "y": np.ones(len(keys), np.float32)}]
        options = {"device_budget": "1MiB", "batch_multiple": 1, "progress": False}
        return tc.extract(data, schema, tmp_path / name, min_count=min_count, **options)

    unknown, others = np.array([50, 99]), extracted("others", [50, 99], 1)
    for day, keys in enumerate(([1, 1, 2, 2, 50, 51, 3, 3], [1, 1, 2, 2, 4, 4, 3, 3])):
        passes, module = extracted(f"day-{day}", keys, 2), tc.Embedding(schema, "f")
        with tiered(tmp_path / "model.tc", passes, model=module, reorganize=True) as cache:
            for p in cache.passes(epochs=1):
                for batch in p.batches(8):
                    descend(module(batch).square().sum(), cache.optimizer)
                with torch.no_grad():
                    before = module(torch.from_numpy(unknown))
            found = module(cache.evaluate_batch({"f": unknown}))
            row = torch.from_numpy(cache.store.lookup("a", np.array([OOV_KEY]))["vector"])
            assert not np.array_equal(row[0], initial(schema.tables[0], OOV_KEY))
            assert torch.equal(found, row.expand(2, 4))
            assert torch.equal(before, found)
            assert torch.equal(module(next(next(cache.evaluate(others)).batches(2))), found)
            assert torch.equal(tc.to_torch(module, cache.store)(torch.from_numpy(unknown)), found)
    assert OOV_KEY not in passes.passes[0].keys("a")


def test_an_evaluation_that_goes_on_after_a_step_is_refused_or_current(tmp_path: Path) -> None:
    """A slice has copies of rows, which a step makes old; the next slice has current rows, also in a later pass."""
    case = Case(tables=(table("a", 16),), specs=(Spec(name="f", table="a"),), num_samples=600, pass_rows=150)
    passes, others = case.cut(tmp_path / "train"), replace(case, data_seed=5).cut(tmp_path / "test")
    for make in (resident, partial(tiered, tmp_path / "m.tc", eval_budget="8KiB")):
        module = tc.Embedding(case.schema, "f")
        with make(passes, model=module) as cache:
            cache.restore()
            parts, num_parts = cache.evaluate(others), 0
            for p in cache.passes(epochs=1):
                for part in itertools.islice(parts, 1):
                    held = cache.evaluate_batch({"f": np.arange(9)})
                    for batch in part.batches(25):
                        keys = others.passes[part.sub_dataset].keys("a")[batch.ids["f"].ids]
                        with torch.no_grad():
                            assert torch.equal(module(batch), module(torch.from_numpy(keys.astype(np.int64))))
                            module(held)
                    num_parts += 1
                for trained in p.batches(75):
                    descend(module(trained).square().sum(), cache.optimizer)
                for old in (batch, held):
                    with pytest.raises(StateError, match="were read before the last step and are not current"):
                        module(old)
            assert num_parts == len(passes)
