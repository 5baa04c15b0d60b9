"""Raw keys: training with them equals training with local ids, bit for bit; a device looks them up itself."""

import tempfile
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray

import tiercache as tc
from tests.apart import ran
from tests.train.cases import (
    Case,
    Spec,
    assert_same_bits,
    open_store,
    resident,
    resident_result,
    result_of,
    result_of_resident,
    table,
    tiered,
)
from tests.train.devices import DEVICE, DEVICES, cuda_device, device_of_tests
from tests.train.oracle import initial_row
from tests.train.raw import (
    HIGH,
    LOW,
    PASS_KEYS,
    SCHEMA,
    TABLES,
    Rows,
    batch_arguments,
    key_sets,
    own_keys,
    train_raw,
    write_passes,
)
from tests.train.shim_gpu import ShimRuntime
from tests.train.test_parity import cases, interrupted
from tiercache.data.pass_builder import RowBudget
from tiercache.errors import KeyNotInPassError, StateError
from tiercache.rows.backends import cuda_runtime
from tiercache.rows.backends.cuda import CudaBackend
from tiercache.rows.backends.open_backend import open_backend

CASE = Case(
    tables=(table("a", 8), table("b", 5, tc.optim.Adam(learning_rate=0.05)), table("c", 8, dtype="bfloat16")),
    specs=(
        Spec(name="f", table="a", hotness="ragged", weighted=True, mode="mean"),
        Spec(name="g", table="b"),
        Spec(name="h", table="c", hotness="multi_hot", mode="max"),
        Spec(name="i", table="a"),
    ),
    shuffle=False,
)


@settings(max_examples=8 if DEVICE != "shim" else 6, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_training_by_raw_keys_ends_with_the_bits_of_training_from_local_ids(drawn: tuple[Case, dict[str, Any]]) -> None:
    case, how = replace(drawn[0], shuffle=False), drawn[1]
    with tempfile.TemporaryDirectory() as folder:
        samples = case.cut(Path(folder) / "samples")
        passes = key_sets(Path(folder) / "keys", samples)
        expected = resident_result(case, samples)
        memory = resident(passes, order_seed=case.order_seed)
        assert_same_bits(result_of_resident(memory, train_raw(memory, case, samples)), expected)
        by_raw_keys = partial(train_raw, samples=samples)
        assert_same_bits(interrupted(case, how, passes, Path(folder), train=by_raw_keys), expected)


KILLED = """
import os, signal, sys
from pathlib import Path
import tiercache as tc
from tests.train.cases import tiered
from tests.train.devices import DEVICES
from tests.train.raw import train_raw
from tests.train.test_raw_keys import CASE, KILLS

def each_batch(pass_index, batch):
    if (pass_index, batch) == (5, 1):
        cache.commit()
    if (pass_index, batch) == (5, 2):
        os.kill(os.getpid(), signal.SIGKILL)

place = Path(sys.argv[1])
for engine, device in KILLS:
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        continue
    samples = tc.PassDataset.open(place / "samples")
    with tc.Store.open(place / f"{engine}-{device}.tc", tables=CASE.tables, engine=engine) as store:
        with tiered(store, tc.PassDataset.open(place / "keys"), device=DEVICES[device]()) as cache:
            train_raw(cache, CASE, samples, each_batch=each_batch)
    os._exit(1)
"""
"""Starts no thread before it forks, and imports everything slow."""
KILLS = [("lmdb", "cpu"), ("zarr", "cpu"), ("lmdb", "cuda")]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the samples, their key sets, and a store for each training that was killed."""
    place = tmp_path_factory.mktemp("killed")
    key_sets(place / "keys", CASE.cut(place / "samples"))
    done = ran(KILLED, place)
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.parametrize(("engine", "device"), KILLS)
def test_a_training_killed_inside_a_pass_goes_on_where_the_pass_says(killed: Path, engine: str, device: str) -> None:
    """The bits equal an uninterrupted run from local ids, on CUDA with keys that are looked up there."""
    samples, passes = (tc.PassDataset.open(killed / name) for name in ("samples", "keys"))
    begun: list[tuple[int, ...]] = []

    def each_pass(p: tc.Pass) -> None:
        begun.append((p.index, p.start_sample, p.samples_done, p.start_batch, p.batches_done))

    with tc.Store.open(killed / f"{engine}-{device}.tc", tables=CASE.tables, engine=engine) as store:
        gpu = DEVICES[device]()
        with tiered(store, passes, device=gpu) as cache:
            model = train_raw(cache, CASE, samples, seed=9, each_pass=each_pass)
        assert begun == [(5, 32, 32, 2, 2), (6, 0, 0, 0, 0), (7, 0, 0, 0, 0)]
        assert CASE.batch == 16
        assert_same_bits(result_of(store, passes, model), resident_result(CASE, samples, device=DEVICES[device]()))
        if not isinstance(gpu, str):
            assert {"key_index.clear", "key_index.insert", "key_index.find"} <= set(gpu._runtime.kernels.launches)


def test_tables_without_a_schema_take_any_form(tmp_path: Path) -> None:
    passes = tc.write_key_sets(tmp_path / "keys", (TABLES[0],), [{"a": [1, 2, 3]}])
    cache = resident(passes)
    loop = cache.passes(epochs=1)
    p = next(loop)
    bag = tc.EmbeddingBagCollection(cache.schema)
    rows = {key: initial_row(TABLES[0], key) for key in (1, 2, 3)}
    for form, bags in (
        (np.array([1, 3], np.int32), [[1], [3]]),
        (torch.tensor([[1, 2], [3, 3]]), [[1, 2], [3, 3]]),
        (([2, 2], [0, 0, 2]), [[], [2, 2]]),
        ((3, 1), [[3], [1]]),
        ((torch.tensor(3), torch.tensor(1)), [[3], [1]]),
        ([], []),
    ):
        expected = [sum((rows[key] for key in keys), np.zeros(5, np.float32)) for keys in bags]
        out = bag(p.batch({"a": form}, label=np.zeros(len(bags)))).detach().cpu().numpy()
        np.testing.assert_array_equal(out, np.array(expected, np.float32).reshape(-1, 5))


def test_a_pass_takes_its_samples_one_way(tmp_path: Path) -> None:
    """Its own batches or a loader's: both would count samples twice, and so would a resume the other way."""
    samples = CASE.cut(tmp_path / "samples")
    keys, others = batch_arguments(samples, 0, 0, 16)
    with tc.Store.open(tmp_path / "model.tc", tables=CASE.tables) as store:
        with tiered(store, samples) as cache:
            p = next(_loop := cache.passes(epochs=1))
            next(p.batches(16))
            with pytest.raises(StateError, match="takes its samples from batches"):
                p.batch(keys, **others)
            p = next(_loop := cache.passes(epochs=1))
            p.batch(keys, **others)
            cache.commit()
        with tiered(store, samples) as cache:
            p = next(passes := cache.passes(epochs=1))
            assert p.start_sample == 16
            with pytest.raises(StateError, match="is after 16 samples in the order"):
                next(p.batches(16))
            p.batch(keys, **others)
            next(passes)
            with pytest.raises(RuntimeError, match="has ended"):
                p.batch(keys, **others)


TWO = (table("a", 4), table("b", 4))


def passes_of(folder: Path, *sizes: int) -> tuple[tc.PassDataset, list[NDArray[np.int64]]]:
    """Write passes with the given numbers of keys in table a, and every third of them plus one in table b."""
    rng = np.random.default_rng(0)
    keys = [np.unique(rng.integers(-(1 << 62), 1 << 62, size)) for size in sizes]
    return tc.write_key_sets(folder, TWO, [{"a": k, "b": k[::3] + 1} for k in keys]), keys


def test_an_index_of_keys_is_built_where_the_device_budget_leaves_room_and_changes_no_id(tmp_path: Path) -> None:
    """Within the budget, index included; without space keys are searched, many at once on several threads."""
    passes, keys = passes_of(tmp_path / "keys", 3000, 5000, 1000)
    budget, rng = RowBudget(TWO, 0), np.random.default_rng(1)
    for p in passes:
        budget.close([p.rows(t.name) for t in passes.tables])
    least = budget.needed([0, 0])
    full = open_backend(device_of_tests(), TWO).index_bytes(5000 + 1667, 2)
    assert DEVICE != "cpu" or full == (16 << 14) + 16
    for room, indexed in ((0, False), (full, True), (full - 1, False)):
        with tiered(tmp_path / f"{room}.tc", passes, device_budget=least + room) as cache:
            for current in cache.passes(epochs=1):
                pool = keys[current.sub_dataset]
                for asked in (rng.choice(pool, 50_000), pool[:0], pool[-2:]):
                    others = np.full(asked.size, pool[0] + 1)
                    batch = current.batch({"a": asked, "b": others})
                    a, b = (passes.passes[current.sub_dataset].keys(t)[batch.ids[t].ids] for t in "ab")
                    np.testing.assert_array_equal(a, asked)
                    np.testing.assert_array_equal(b, others)
                    assert cache.device_bytes <= least + room
                if current.sub_dataset == 1:
                    assert cache.device_bytes == least + (full if indexed else 0)
                current.skip()


@pytest.mark.parametrize(("engine", "device"), [("memory", "cuda"), ("lmdb", "cpu")])
def test_raw_keys_are_evaluated_as_of_now_within_the_budget(tmp_path: Path, engine: str, device: str) -> None:
    """Before, inside and after passes; rows of this pass, of others and of none, without a gradient."""
    passes = write_passes(tmp_path / "keys")
    case = replace(CASE, tables=TABLES)
    asked = np.array([1, -2, 3, 4, 5, 77, LOW + 2, HIGH])
    ones = asked, np.arange(asked.size + 1)
    keys = {"one": asked, "bag": ones, "pair": np.stack([asked, asked], 1), "c": ones}
    gpu = DEVICES[device]
    with open_store(tmp_path / "model.tc", case, engine) as store, tiered(store, passes, device=gpu()) as cache:

        def check(now: Rows) -> None:
            found = tc.EmbeddingCollection(cache.schema)(cache.evaluate_batch(keys))
            for feature in SCHEMA.features:
                spec = next(t for t in TABLES if t.name == feature.table)
                expected = [now[spec.name].get(key, initial_row(spec, key)) for key in asked.tolist()]
                got = found[feature.name].detach().cpu().numpy().reshape(asked.size, -1, spec.dim)[:, 0]
                np.testing.assert_array_equal(got, np.array(expected))
            found["one"].sum().backward()
            assert not cache.optimizer.rows.pending

        check({t.name: {} for t in TABLES})
        memory = resident(passes, device=gpu())
        bags = [tc.EmbeddingBagCollection(cache.schema), tc.EmbeddingBagCollection(memory.schema)]
        cache.register(model=bags[0])
        for both in zip(cache.passes(epochs=2), memory.passes(epochs=2), strict=True):
            for kind, bag, p in zip((cache, memory), bags, both, strict=True):
                bag(p.batch(own_keys(p.sub_dataset))).sum().backward()
                kind.optimizer.step()
            check({t.name: dict(zip(memory.keys(t.name).tolist(), memory.fields(t.name)[0], strict=True))
                   for t in TABLES})  # fmt: skip
    options: dict[str, Any] = {"device": gpu(), "eval_budget": 700}
    with open_store(tmp_path / "small.tc", case, engine) as store, tiered(store, passes, **options) as cache:
        made = cache.evaluate_batch({"one": [1], "bag": ([], [0, 0]), "pair": [[1, 1]], "c": ([], [0, 0])})
        assert not tc.EmbeddingBagCollection(cache.schema, ["bag"], mode="max")(made).any()
        with pytest.raises(tc.TierCacheError, match="use smaller batches"):
            cache.evaluate_batch(keys)


class WatchedGpu(ShimRuntime):
    """Records copies to the host, and refuses searches on other streams than the stream of searches."""

    def __init__(self) -> None:
        super().__init__("random")
        self.came_back: list[int] = []
        self.handed_over: list[int] = []
        launch, read = self.kernels.launch, self.kernels.read

        def watched_launch(kernel: str, *arguments: Any) -> None:
            assert self.kernels.deferring or not kernel.startswith("key_index"), kernel
            launch(kernel, *arguments)

        def watched_read(array: NDArray[Any]) -> NDArray[Any]:
            self.came_back.append(array.nbytes)
            return read(array)

        self.kernels.launch, self.kernels.read = watched_launch, watched_read  # type: ignore[method-assign]

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        self.came_back.append(tensor.numel() * tensor.element_size())
        return super().download(tensor)

    def record_use(self, tensor: torch.Tensor) -> None:
        assert not self.kernels.deferring, "it is handed to the stream of searches itself"
        self.handed_over.append(tensor.data_ptr())


def check_ids(passes: tc.PassDataset, p: tc.Pass, pool: NDArray[np.int64]) -> None:
    keys = {"a": pool, "b": np.resize(pool[::3] + 1, pool.size)}
    batch = p.batch(keys)
    for name, asked in keys.items():
        np.testing.assert_array_equal(passes.passes[p.sub_dataset].keys(name)[batch.ids[name].ids], asked)


def test_of_a_batch_only_the_count_of_missing_keys_comes_back(tmp_path: Path) -> None:
    """16 bytes when it is made, nothing for lookups and the step; ids when they are read, once, read-only."""
    passes, gpu = write_passes(tmp_path / "keys"), WatchedGpu()
    cache = tc.InMemoryCache(passes, device=CudaBackend(gpu))
    bag, single = tc.EmbeddingBagCollection(cache.schema), tc.EmbeddingCollection(cache.schema, ["pair", "c"])
    for p in cache.passes(epochs=1):
        for _ in range(2):
            gpu.came_back.clear()
            batch = p.batch(own_keys(p.sub_dataset))
            (bag(batch).sum() + sum(part.sum() for part in single(batch).values())).backward()
            cache.optimizer.step()
            assert gpu.came_back == [16]
        ids = {name: one.ids for name, one in batch.ids.items()}
        assert gpu.came_back == [16, 4 * sum(one.size for one in ids.values())]
        assert not any(one.flags.writeable for one in ids.values())
        pairs = passes.passes[p.sub_dataset].keys("b")[ids["pair"]]
        np.testing.assert_array_equal(pairs, np.repeat(PASS_KEYS[p.sub_dataset], 2))
        there = batch.ids["one"].device_ids
        assert there.data_ptr() == gpu.handed_over[-1]


@pytest.mark.parametrize("slice_keys", [1 << 20, 700, 1])
def test_an_index_takes_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_keys: int) -> None:
    monkeypatch.setattr(cuda_runtime, "SLICE_KEYS", slice_keys)
    sizes = (30, 2000, 500) if slice_keys > 1 else (3, 40, 9)
    passes, keys = passes_of(tmp_path / "keys", *sizes)
    device = cuda_device("random")
    with tiered(tmp_path / "m.tc", passes, device=device) as cache:
        rows, indexes = cache.device_bytes, []
        for current in cache.passes(epochs=1):
            check_ids(passes, current, keys[current.sub_dataset])
            index = cache._raw._index
            assert isinstance(index, cuda_runtime.CudaKeyIndex)
            held = index._index._memory, index._index._oov_memory, index._buffer
            planned = cache._backend.index_bytes(max(p.rows("a") + p.rows("b") for p in passes.passes), 2)
            assert cache.index_bytes == planned == index.num_bytes == sum(part.nbytes for part in held)
            assert cache.device_bytes == rows + planned
            indexes.append(weakref.ref(index))
            del index
            if current.sub_dataset:
                with pytest.raises(KeyNotInPassError):  # of the pass before
                    current.batch({"a": keys[current.sub_dataset - 1][:1], "b": keys[current.sub_dataset][:1] + 1})
            current.skip()
        assert indexes[0]() is indexes[1]() is indexes[2]() is not None


def test_without_room_on_the_device_keys_are_searched_on_the_host(tmp_path: Path) -> None:
    """A byte too little in the budget, or on the device when a pass begins, or when it is allocated: the same ids."""
    passes, keys = passes_of(tmp_path / "keys", 900)
    full = CudaBackend(ShimRuntime()).index_bytes(1200, 2)
    with tiered(tmp_path / "m.tc", passes, device=cuda_device()) as cache:
        rows = cache.device_bytes
    for spare, free, taken, indexed in (
        (0, 1 << 30, False, True), (1, 1 << 30, False, False), (0, full - 1, False, False), (0, 1 << 30, True, False),
    ):  # fmt: skip
        gpu = WatchedGpu()
        budget, path = rows + full - spare, tmp_path / f"{spare}-{free}-{taken}.tc"
        with tiered(path, passes, device=CudaBackend(gpu), device_budget=budget) as cache:
            for p in cache.passes(epochs=1):
                gpu.free_bytes = free
                if taken:
                    refuse_memory(gpu)
                gpu.kernels.launches.clear()
                for _ in range(2):
                    check_ids(passes, p, keys[0])
                assert ("key_index.find" in gpu.kernels.launches) == indexed
                assert cache.device_bytes == rows + full * indexed
                with torch.no_grad():
                    out = tc.EmbeddingBagCollection(cache.schema)(p.batch({"a": keys[0][:9], "b": keys[0][:27:3] + 1}))
                p.skip()
                found = (cache.live_rows().fields(*of) for of in (("a", keys[0][:9]), ("b", keys[0][:27:3] + 1)))
                expected = np.concatenate([fields[0] for fields in found], 1)
                np.testing.assert_array_equal(out.detach().numpy(), expected)


def refuse_memory(gpu: ShimRuntime) -> None:
    """Make searches fail to allocate, as if another process had taken the memory."""
    empty = gpu.kernels.empty

    def refused(size: int, dtype: Any) -> NDArray[Any]:
        if gpu.kernels.deferring:
            raise torch.OutOfMemoryError("out of memory")
        return empty(size, dtype)

    gpu.kernels.empty = refused  # type: ignore[method-assign]
