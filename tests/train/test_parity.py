"""Tiered training equals training in memory, bit for bit."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.train.cases import (
    SPECS,
    Case,
    Net,
    Result,
    Spec,
    assert_close,
    assert_same_bits,
    open_store,
    resident,
    resident_result,
    result_of,
    result_of_resident,
    smallest_host_budget,
    table,
    tiered,
    train,
)
from tests.train.devices import DEVICE, DEVICES, cuda_device, device_of_tests
from tiercache.errors import StateError
from tiercache.store.bits import nearest
from tiercache.store.row_codec import initial_rows

OPTIMIZERS = [
    tc.optim.SGD(learning_rate=0.1, decay=0.01),
    tc.optim.Adagrad(learning_rate=0.1, initial_accumulator=0.1),
    tc.optim.RowWiseAdagrad(learning_rate=0.1, decay=0.02),
    tc.optim.Adam(learning_rate=0.01),
    tc.optim.SGD(learning_rate=0.05, momentum=0.9, nesterov=True),
    tc.optim.Adam(learning_rate=0.01, decay=0.5, decoupled=True),
    tc.optim.RowWiseAdam(learning_rate=0.01, decay=0.02),
    tc.optim.RowWiseRMSprop(learning_rate=0.01),
]
INITIALIZERS = [
    tc.init.Uniform(low=-0.2, high=0.3),
    tc.init.Normal(mean=0.0, std=0.1),
    tc.init.Zeros(),
    tc.init.Constant(value=0.25),
]
DTYPES = ("float32", "float32", "bfloat16", "float16")


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("device", "engine"), [("cpu", "memory"), ("cuda", "lmdb")])
@pytest.mark.parametrize(("optimizer", "initializer"), list(zip(OPTIMIZERS, cycle(INITIALIZERS))))
def test_tiers_end_as_memory_does(tmp_path: Path, device: str, engine: str, optimizer: Any, initializer: Any) -> None:
    """On the shim, whose dense layers are the CPU's, to its last bit: no row has more than 256 entries in a step."""
    case = Case(
        tables=(table("a", 8, optimizer, initializer), table("b", 3, optimizer, initializer)), specs=SPECS,
        num_samples=128, pass_rows=32,
    )  # fmt: skip
    passes, gpu = case.cut(tmp_path / "passes"), DEVICES[device]("random")
    with open_store(tmp_path / "model.tc", case, engine) as store:
        with tiered(store, passes, device=gpu) as cache:
            model = train(cache, case)
            assert all(report.planned_equals_measured for report in cache.reports)
        ended = result_of(store, passes, model)
    assert_same_bits(ended, resident_result(case, passes, device=DEVICES[device]()))
    cpu = resident_result(case, passes, device="cpu")
    assert_close(ended, cpu)
    if not isinstance(gpu, str):
        assert_same_bits(ended, cpu)
        launched = {kernel.split(".")[0] for kernel in gpu._runtime.kernels.launches}
        assert launched == {"rows", "initial", "pooling", "sorting", "update"}
        assert not gpu._runtime.pinned_pages, "the cache is closed and pages are still pinned"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("device", "engine", "dtype", "optimizer", "compression"),
    [
        ("cpu", "memory", "bfloat16", OPTIMIZERS[3], None),
        ("cpu", "lmdb", "float16", OPTIMIZERS[2], None),
        ("cpu", "zarr", "bfloat16", OPTIMIZERS[3], "zstd"),
        ("cpu", "zarr", "float16", OPTIMIZERS[1], "blosc"),
        ("cuda", "lmdb", "bfloat16", OPTIMIZERS[0], None),
        ("cuda", "memory", "float16", OPTIMIZERS[1], None),
        ("cuda", "lmdb", "bfloat16", OPTIMIZERS[2], None),
        ("cuda", "memory", "float16", OPTIMIZERS[3], None),
    ],
)
def test_rows_of_16_bits_end_with_the_bits_of_training_in_memory(
    tmp_path: Path, device: str, engine: str, dtype: str, optimizer: Any, compression: str | None
) -> None:
    """Next to a float32 group, compressed or not, for any slots and engine, with the least host memory.

    New rows are made by the device and by the reader. The run resumes from inside a pass: steps continue to be counted,
    so rounding continues too. On the shim it ends with the CPU's bits; on a GPU, whose dense layers have different
    bits, with the bits of training in memory on it.
    """
    case = Case(
        tables=(
            table("a", 8, optimizer, dtype=dtype), table("b", 3, optimizer),
            table("c", 5, optimizer, tc.init.Normal(mean=0.0, std=0.1), dtype=dtype),
        ),
        specs=(*SPECS, Spec(name="j", table="c", hotness="ragged", mode="max"), Spec(name="k", table="c")),
        num_samples=128, pass_rows=32,
    )  # fmt: skip
    passes = case.cut(tmp_path / "passes")  # their schema says nothing of compression
    stored = replace(case, tables=tuple(replace(one, compression=compression) for one in case.tables))
    options: dict[str, Any] = {"device_budget": "64MiB"}

    def each_batch(pass_index: int, batch: int) -> None:
        if (pass_index, batch) == (2, 0):
            cache.commit()
        if (pass_index, batch) == (2, 1):
            raise InterruptedError

    with open_store(tmp_path / "model.tc", stored, engine) as store:
        options["host_budget"] = smallest_host_budget(store, passes, device=DEVICES[device](), **options)
        with (
            pytest.raises(InterruptedError),
            tiered(store, passes, device=DEVICES[device]("random"), **options) as cache,
        ):
            train(cache, case, each_batch=each_batch)
        with tiered(store, passes, device=DEVICES[device](), **options) as cache:
            model = train(cache, case)
            assert all(report.planned_equals_measured for report in cache.reports)
            assert store.counters.row_bytes_read > 0
        ended = result_of(store, passes, model)
    memory = resident(passes, device=DEVICES[device]())
    for one in memory.tables:
        np.testing.assert_array_equal(memory.fields(one.name)[0], initial_rows(one, memory.keys(one.name))[0])
    assert_same_bits(ended, result_of_resident(memory, train(memory, case)))
    for name in ("a", "c"):
        vectors, *state = ended.rows[name][1]
        assert np.array_equal(vectors, nearest(vectors, dtype))
        assert not any(np.array_equal(one, nearest(one, dtype)) for one in state)
    if DEVICE != "cuda":
        assert_same_bits(ended, resident_result(case, passes, device="cpu"))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, dict[str, Any]]:
    num_tables = draw(st.integers(1, 3))
    dims = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 64, 65, 127, 128, 130]))
    tables = tuple(
        table(
            f"t{i}", draw(dims), draw(st.sampled_from(OPTIMIZERS)), draw(st.sampled_from(INITIALIZERS)),
            draw(st.integers(0, 3)), draw(st.sampled_from(DTYPES)),
        )
        for i in range(num_tables)
    )  # fmt: skip
    specs = []
    for i in range(draw(st.integers(1, 4))):
        hotness = draw(st.sampled_from(["one_hot", "one_hot", "multi_hot", "ragged"]))
        mode = draw(st.sampled_from(["sum", "mean", "max"]))
        weighted = hotness == "ragged" and mode != "max" and draw(st.booleans())
        of = f"t{draw(st.integers(0, num_tables - 1))}"
        specs.append(Spec(name=f"f{i}", table=of, hotness=hotness, mode=mode, weighted=weighted))
    used = {spec.table for spec in specs}
    case = Case(
        tables=tuple(t for t in tables if t.name in used),
        specs=tuple(specs),
        num_samples=draw(st.integers(1, 12)) * 16,
        pass_rows=draw(st.sampled_from([16, 32, 48, 64])),
        num_keys=draw(st.sampled_from([1, 10, 100, 1000])),
        data_seed=draw(st.integers(0, 1000)),
        batch=draw(st.sampled_from([5, 16, 64])),
        epochs=draw(st.integers(1, 3)),
        shuffle=draw(st.booleans()),
        accumulate=draw(st.integers(1, 3)),
        order_seed=draw(st.sampled_from([None, None, 3])),
        prefetch=draw(st.sampled_from([None, None, 1, 3])),
    )
    return case, {
        "engine": draw(st.sampled_from(["memory", "memory", "lmdb"])),
        "commit_every": draw(st.integers(1, 4)),
        "tight": draw(st.booleans()),
        "commits": draw(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=2)),
        "stop_after": draw(st.one_of(st.none(), st.tuples(st.integers(0, 6), st.integers(0, 3)))),
    }


def resumed_in_a_seeded_order() -> tuple[Case, dict[str, Any]]:
    """Return a run that began with the smallest budget, and was refused when it resumed at another position."""
    rule = tc.optim.SGD(learning_rate=0.1, decay=0.01)
    case = Case(
        tables=(table("t0", 1, rule),), specs=(Spec(name="f0", table="t0"),), num_samples=80, pass_rows=32,
        num_keys=10, data_seed=1, batch=5, epochs=1, shuffle=False, order_seed=3,
    )  # fmt: skip
    how = {"engine": "memory", "commit_every": 1, "tight": True, "commits": set(), "stop_after": (2, 0)}
    return case, how


def interrupted(
    case: Case, how: dict[str, Any], passes: tc.PassDataset, folder: Path, *,
    device: Callable[[], Any] = device_of_tests, train: Callable[..., Net] = train,
) -> Result:  # fmt: skip
    """Train over tiers as drawn, for any budgets, engine, commits and a restart in the middle."""
    with open_store(folder / "model.tc", case, how["engine"]) as store:
        options: dict[str, Any] = {"commit_every": how["commit_every"], "order_seed": case.order_seed}
        options["device_budget"] = "64MiB"
        if how["tight"]:
            options["host_budget"] = smallest_host_budget(store, passes, device=device(), **options)

        def each_batch(pass_index: int, batch: int) -> None:
            if (pass_index, batch) in how["commits"]:
                cache.commit()
            if (pass_index, batch) == how["stop_after"]:
                raise InterruptedError

        with tiered(store, passes, device=device(), **options) as cache:
            try:
                model = train(cache, case, each_batch=each_batch)
            except InterruptedError:
                how["stop_after"] = None
                with tiered(store, passes, device=device(), **options) as cache:  # noqa: PLW2901 - the run goes on
                    model = train(cache, case, seed=99, each_batch=each_batch)
            assert all(report.planned_equals_measured for report in cache.reports)
            assert cache.host_bytes_peak <= cache._rows.budget.rows
        return result_of(store, passes, model)


@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))
@example(resumed_in_a_seeded_order())
@given(cases())
def test_budgets_engines_commits_and_restarts_change_no_bit(drawn: tuple[Case, dict[str, Any]]) -> None:
    case, how = drawn
    with tempfile.TemporaryDirectory() as folder:
        passes = case.cut(Path(folder) / "passes")
        assert_same_bits(interrupted(case, how, passes, Path(folder)), resident_result(case, passes))


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.sampled_from(("forward", "reversed", "random")))
def test_budgets_commits_and_restarts_on_cuda_change_no_bit(drawn: tuple[Case, dict[str, Any]], order: str) -> None:
    case, how = replace(drawn[0], num_samples=64, pass_rows=16), drawn[1]
    with tempfile.TemporaryDirectory() as folder:
        passes = case.cut(Path(folder) / "passes")
        ended = interrupted(case, how, passes, Path(folder), device=partial(cuda_device, order))
        assert_same_bits(ended, resident_result(case, passes, device=cuda_device(order)))
        if DEVICE != "cuda" or all(one.dtype == "float32" for one in case.tables):  # rounding makes a last bit a step
            assert_close(ended, resident_result(case, passes, device="cpu"))


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.lists(st.integers(1, 6), min_size=2, max_size=2, unique=True))
def test_aligned_cuts_of_the_same_samples_end_with_the_same_bits(drawn: tuple[Case, Any], cuts: list[int]) -> None:
    """Steps end where passes may."""
    case = replace(drawn[0], shuffle=False, order_seed=None)
    with tempfile.TemporaryDirectory() as folder:
        results, place = [], Path(folder)
        for steps in cuts:
            passes = replace(case, pass_rows=case.batch * case.accumulate * steps).cut(place / f"passes-{steps}")
            with open_store(place / f"{steps}.tc", case, drawn[1]["engine"]) as store:
                with tiered(store, passes, commit_every=drawn[1]["commit_every"]) as cache:
                    model = train(cache, case)
                results.append(result_of(store, passes, model))
        assert_same_bits(*results)


ONE_TABLE = Case(tables=(table("a", 16),), specs=(Spec(name="f", table="a"),))


def test_nothing_moves_after_draining(tmp_path: Path) -> None:
    passes = ONE_TABLE.cut(tmp_path / "passes")
    with open_store(tmp_path / "model.tc", ONE_TABLE, "lmdb") as store, tiered(store, passes) as cache:
        loop = cache.passes(epochs=2)
        for _ in range(2):
            next(loop).skip()
        next(loop)
        cache.drain()
        assert cache.reports[1].durable.is_set()
        before = store.counters.rows_read, store.counters.rows_written
        time.sleep(0.05)
        assert (store.counters.rows_read, store.counters.rows_written) == before
        assert before[1] == sum(r.rows_written for r in cache.reports[:2]) > 0


def test_a_pass_goes_on_in_the_order_of_its_commit_or_not_at_all(tmp_path: Path) -> None:
    """With another seed or without shuffling, samples would be trained twice or never."""
    passes = ONE_TABLE.cut(tmp_path / "passes")
    with open_store(tmp_path / "model.tc", ONE_TABLE, "lmdb") as store:
        with tiered(store, passes, seed=3) as cache:
            p = next(_loop := cache.passes(epochs=1))
            tc.EmbeddingBagCollection(passes.schema).requires_grad_(False)(next(p.batches(16, shuffle=True)))
            cache.commit()
        for seed, shuffle in ((3, False), (4, True)):
            with tiered(store, passes, seed=seed) as cache:
                p = next(_loop := cache.passes(epochs=1))
                with pytest.raises(StateError, match=r"is after 16 samples in the order .*'seed': 3"):
                    next(p.batches(16, shuffle=shuffle))
        with tiered(store, passes, seed=3) as cache:
            p = next(_loop := cache.passes(epochs=1))
            assert sum(batch.num_samples for batch in p.batches(8, shuffle=True)) == ONE_TABLE.pass_rows - 16


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("join", ["add", "cat"])
def test_two_modules_in_one_step_add_their_gradients(tmp_path: Path, mode: str, join: str) -> None:
    specs = (Spec(name="f", table="a", hotness="ragged", mode=mode), Spec(name="g", table="a", mode=mode))
    case = Case(tables=(table("a", 16, tc.optim.SGD(learning_rate=0.5)),), specs=specs, shuffle=False)
    passes = case.cut(tmp_path / "passes")
    results = []
    for modules in (1, 2):
        cache = resident(passes)
        one, two = (tc.EmbeddingBagCollection(cache.schema, mode=mode) for _ in range(2))
        for p in cache.passes(epochs=1):
            for batch in p.batches(16):
                if modules == 1:
                    loss = 2 * one(batch).square().sum()
                elif join == "add":
                    loss = (one(batch) + two(batch)).square().sum() / 2
                else:
                    loss = torch.cat([one(batch), two(batch)]).square().sum()
                loss.backward()
                cache.optimizer.step()
        results.append(cache.fields("a")[0].copy())
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_an_order_that_differs_keeps_the_uses_of_few_epochs(tmp_path: Path) -> None:
    """Eight bytes for each key of each pass and epoch would add up."""
    case = Case(tables=(table("a", 4),), specs=(Spec(name="f", table="a"),), order_seed=1, epochs=8)
    passes = case.cut(tmp_path / "passes")
    with tc.Store.open(tmp_path / "model.tc", tables=case.tables) as store:
        with tiered(store, passes, order_seed=1) as cache:
            train(cache, case)
        assert 0 < len(list((tmp_path / "model.tc" / "schedule").glob("*.gaps"))) <= 4
