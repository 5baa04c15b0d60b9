"""A cache frees its memory when it is closed or deleted, and a batch when its last reference is gone."""

import contextlib
import gc
import importlib
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.train.cases import SPECS, Case, change_reads, gone_from, open_store, registered, table, tiered, train
from tests.train.devices import DEVICE, DEVICES, shim
from tests.train.loops import first_pass
from tests.train.raw import batch_arguments, key_sets
from tests.train.shim_gpu import ShimRuntime
from tests.train.test_bad_input import one_sentence
from tiercache.data.sub_dataset import EncodedBatch, SampleBlock
from tiercache.errors import BudgetError, DatasetError, StateError
from tiercache.rows.backends.cpu import HostUpload
from tiercache.rows.backends.cuda import CudaBackend
from tiercache.rows.backends.cuda_runtime import PinnedUpload
from tiercache.rows.backends.host_arrays import POOL
from tiercache.train.missing_rows import _GatheredRows, _RawRows
from tiercache.train.table_lookup import Collated, TableLookup
from tiercache.values.batch import Batch
from tiercache.values.ids import FeatureIds, FoundIds
from tiercache.values.lookups import LookedUp, LookupIds, SavedGradient

CASE = Case(
    tables=(table("a", 8), table("b", 3, dtype="float16")), specs=SPECS, num_samples=96, pass_rows=32, shuffle=False
)


class SmallGpu(ShimRuntime):
    @property
    def held(self) -> int:
        return sum(num_bytes for *_, num_bytes in self.kernels.memory._blocks)

    def memory_info(self) -> tuple[int, int]:
        return self.free_bytes - self.held, self.free_bytes


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    importlib.import_module("torch._dynamo")  # by the first optimizer of a process, and keeps the frames that asked
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def make(kind: str, passes: tc.PassDataset, gpu: Any, **options: Any) -> Any:
    device = gpu if isinstance(gpu, str) else CudaBackend(gpu)
    if kind == "resident":
        return tc.InMemoryCache(passes, device=device)
    return tiered(open_store(passes.path, CASE, "memory"), passes, device=device, **options)


def need(kind: str, passes: tc.PassDataset) -> int:
    gpu = SmallGpu()
    with make(kind, passes, gpu):
        return gpu.held


KINDS = pytest.mark.parametrize("kind", ["tiered", "resident"])


@KINDS
def test_a_closed_cache_leaves_nothing_on_the_device(passes: tc.PassDataset, kind: str) -> None:
    gpu = SmallGpu()
    cache = make(kind, passes, gpu)
    model, optimizer = registered(cache, CASE)
    loop = cache.passes(epochs=1)
    for _ in range(2):
        p = next(loop)
        keys, others = batch_arguments(passes, p.sub_dataset, 0, 8)
        keys["f"][0] = 10**9
        batch = p.batch(keys, **others, missing="init")
        model(batch).sum().backward()
        optimizer.step()
    rows = batch.rows
    assert cache._raw.index_bytes > 0
    assert cache._backend.scratch_bytes > 0
    assert gpu.held > need(kind, passes)
    cache.close()
    cache.close()
    del batch, keys, others
    added = sum(
        one._request[0].nbytes + one._view.vectors.values.nbytes + one.slots_R.nbytes + one._view.slot_of_local.nbytes
        for one in rows.groups._added.values()
    )
    assert gpu.held == added, "besides the batch's own memory"
    assert not gpu.pinned_pages
    if kind == "tiered":
        assert (cache.device_bytes, cache._rows.memory.resident_bytes, cache.scratch_bytes) == (0, 0, 0)


@KINDS
def test_a_cache_has_the_memory_of_one_that_was_closed_or_is_garbage(passes: tc.PassDataset, kind: str) -> None:
    """The GPU has room for one. A cache in a reference cycle lives until a collection, which runs if needed."""
    gpu = SmallGpu(free_bytes=int(1.5 * need(kind, passes)))
    first = make(kind, passes, gpu)
    with pytest.raises(BudgetError, match="on the shim, which has"):
        make(kind, passes, gpu)
    first.close()
    second = make(kind, passes, gpu)
    cycle: list[Any] = [second]
    cycle.append(cycle)
    del second, cycle
    assert gpu.held
    make(kind, passes, gpu).close()


@KINDS
def test_a_cache_that_nobody_refers_to_is_gone_though_it_was_not_closed(passes: tc.PassDataset, kind: str) -> None:
    gpu = SmallGpu()
    cache = make(kind, passes, gpu)
    model, optimizer = registered(cache, CASE)
    for p in cache.passes(epochs=1):
        for batch in p.batches(16):
            model(batch).sum().backward()
            optimizer.step()
        del batch
    gone, scratch, dense = weakref.ref(cache), cache._backend.scratch_bytes, cache.optimizer.dense
    del cache, optimizer
    assert gone() is None
    assert gpu.held == scratch, "a pass keeps the scratch of its backend, and nothing else"
    del p
    assert gpu.held == 0
    assert not gpu.pinned_pages
    dense[0].step()  # and steps no rows


@pytest.mark.sampled(2)
@KINDS
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_asks_a_closed_cache_for_rows_gets_one_sentence(passes: tc.PassDataset, kind: str, device: str) -> None:
    cache: Any = make(kind, passes, "cpu" if device == "cpu" else SmallGpu())
    model = train(cache, CASE, epochs=1)
    loop = cache.passes(epochs=2)
    p = next(loop)
    batches = p.batches(8)
    batch = next(batches)
    asked: list[Any] = [
        partial(next, loop), cache.live_rows, cache.optimizer.step, partial(cache.register, model=model),
        lambda: next(cache.passes(epochs=3)),
    ]  # fmt: skip
    if kind == "tiered":
        slices, now = cache.evaluate(passes), cache.live_rows()
        next(slices)
        keys, some = batch_arguments(passes, 0, 1, 1)[0], passes.passes[p.sub_dataset].keys("a")[:3]
        asked += [
            partial(next, slices), cache.commit, partial(now.fields, "a", some),
            partial(cache.evaluate_batch, keys), lambda: next(cache.evaluate(passes)),
        ]  # fmt: skip
    else:
        asked.append(partial(cache.fields, "a"))
    cache.close()
    for ask in asked:
        with one_sentence(StateError, ""):
            ask()
    for lookup in (lambda: model(batch), lambda: next(batches)):
        with one_sentence(RuntimeError, "has ended"):
            lookup()
    assert cache.plan() if kind == "tiered" else True
    assert not running()


def running() -> list[str]:
    """Return the threads that move rows."""
    return [t.name for t in threading.enumerate() if t.name.startswith(("tiercache-reader", "tiercache-writer"))]


def test_a_device_that_failed_gives_back_what_it_can(passes: tc.PassDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SmallGpu()
    with open_store(passes.path, CASE, "memory") as store:
        cache = tiered(store, passes, device=CudaBackend(gpu))
        next(cache.passes(epochs=1))
        failed = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered"))
        with monkeypatch.context() as patched:
            patched.setattr(cache._rows.transfer._backend.streams, "synchronize", failed)
            with pytest.raises(RuntimeError, match="illegal memory access"):
                cache.close()
        assert cache.device_bytes == 0
        assert not gpu.pinned_pages
        assert not running()


ONE_PASS = Case(
    tables=(table("a", 8), table("b", 3, dtype="bfloat16")), specs=SPECS, num_samples=200, pass_rows=200, batch=10
)
OF_A_BATCH = (
    Batch, FeatureIds, FoundIds, EncodedBatch, SampleBlock, HostUpload, PinnedUpload, LookupIds, LookedUp,
    SavedGradient, Collated, TableLookup, _GatheredRows, _RawRows,
)  # fmt: skip


@pytest.fixture
def one_pass(tmp_path: Path) -> tc.PassDataset:
    return ONE_PASS.cut(tmp_path / "passes")


def left() -> dict[str, int]:
    """Count the test's live objects of the types that a batch creates."""
    kinds = [type(one).__name__ for one in gc.get_objects() if type(one) in OF_A_BATCH]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


class Lookups:
    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.bag = tc.EmbeddingBagCollection(cache.schema, ["f", "g", "h"], mode={"g": "max", "h": "mean"})
        self.weighted = tc.EmbeddingBagCollection(cache.schema, ["i"])
        self.single = tc.EmbeddingCollection(cache.schema)

    def step(self, batch: tc.Batch) -> None:
        weights = torch.ones(batch.ids["i"].num_ids, device=self.cache.device, requires_grad=True)
        loss = self.bag(batch).sum() + self.weighted(batch, weights={"i": weights}).square().sum()
        (loss + sum(one.sum() for one in self.single(batch).values())).backward()
        assert weights.grad is not None
        self.cache.optimizer.step()


def bytes_of_batches(gpu: ShimRuntime, backend: Any) -> tuple[int, int]:
    """Return the bytes of the device besides scratch, and of pinned memory."""
    gpu.receive(gpu.uploaded(), ())  # copies of what was made ahead and dropped
    held = sum(num_bytes for *_, num_bytes in gpu.kernels.memory._blocks)
    return held - backend.scratch_bytes, sum(gpu._pinned.values()) - backend.pinned_bytes


def test_a_delivery_is_gone_with_the_last_that_refers_to_it() -> None:
    """The next batch reuses its block, but not while an array refers to it."""
    backend = shim()
    gpu = backend._runtime
    upload = backend.upload()
    read = upload.take(400)
    read[:48].view(np.int32)[:] = 1
    upload.send(0, 48, None)
    upload.receive()
    there = upload.array(16, 8, np.int32)
    assert there.tolist() == [1] * 8
    gone = weakref.ref(upload)
    del upload
    assert gone() is None
    other = backend.upload()
    assert other.take(400).ctypes.data != read.ctypes.data, "an array still refers to the block"
    assert len(gpu._pinned) == 2
    del other
    at = read.ctypes.data
    del read, there
    assert not gpu.kernels.memory._blocks
    third, fourth = backend.upload(), backend.upload()
    assert at in {third.take(100).ctypes.data, fourth.take(512).ctypes.data}, "a block is used again"
    assert len(gpu._pinned) == 2
    larger = backend.upload().take(513)
    del third, fourth
    assert backend.pinned_bytes == sum(gpu._pinned.values()) == 1024, "blocks that are too small are freed"
    backend.drop_scratch()
    del larger
    assert not gpu._pinned
    assert backend.pinned_bytes == 0


def test_a_block_is_not_written_to_before_its_copy() -> None:
    """A batch that is dropped at once may not have been copied yet."""
    backend = shim()
    first, second = backend.upload(), backend.upload()
    first.take(64)[:] = 7
    first.send(0, 64, None)
    second.take(64)[:] = 9
    assert first.array(0, 64, np.uint8).tolist() == [7] * 64


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [0, 2])
def test_labels_that_are_kept_keep_no_ids(one_pass: tc.PassDataset, device: str, ahead: int) -> None:
    """Labels of many batches, for a metric, take the memory of columns alone."""
    cache = tc.InMemoryCache(one_pass, device=DEVICES[device]())
    backend, bag = cache._backend, tc.EmbeddingBagCollection(cache.schema)
    labels, seen = [], []
    with torch.no_grad(), first_pass(cache) as p:
        for batch in p.batches(2, prefetch=ahead):
            bag(batch)
            labels.append(batch.label)
            del batch
            if len(labels) in (10, 90):
                seen.append([POOL.num_bytes, backend.pinned_bytes])
                if isinstance(getattr(backend, "_runtime", None), ShimRuntime):
                    kernels = backend._runtime.kernels
                    seen[-1][0] = sum(num_bytes for *_, num_bytes in kernels.memory._blocks)
                    seen[-1][0] -= sum(array.nbytes for array in kernels._to_upload)  # the shim's own
        p.skip()
    assert seen[1][0] - seen[0][0] <= 80 * 256 + (16 << 10)  # and batches that are being made; whole ones take 78 KiB
    assert seen[1][1] == seen[0][1]


def batches_of(p: Any, passes: tc.PassDataset, how: int | str) -> Iterator[Any]:
    """Yield batches made some batches ahead, or of raw keys, some of which are missing."""
    if isinstance(how, int):
        yield from p.batches(10, prefetch=how)
        return
    for first in range(0, 200, 10):
        keys, others = batch_arguments(passes, 0, first, 10)
        if how != "error":
            keys["f"] = keys["f"].clone()
            keys["f"][:3] = 10**9
        yield p.batch(keys, **others, missing=how)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", [0, 2, "error", "zero", "load"])
def test_a_batch_that_was_trained_is_gone_when_it_is_dropped(
    one_pass: tc.PassDataset, tmp_path: Path, device: str, how: int | str
) -> None:
    backend = DEVICES[device]()
    cache = tc.InMemoryCache(
        one_pass if isinstance(how, int) else key_sets(tmp_path / "keys", one_pass), device=backend
    )
    lookups, before, held = Lookups(cache), left(), []
    with first_pass(cache) as p:
        for rest in (3, 9):
            batches = batches_of(p, one_pass, how)
            for _ in range(rest):
                batch = next(batches)
                lookups.step(batch)
                label = weakref.ref(batch.label)
                del batch
                assert label() is None, "the iterator keeps a batch"
            batches.close()
            assert left() == before
            if isinstance(getattr(backend, "_runtime", None), ShimRuntime):
                held.append(bytes_of_batches(backend._runtime, backend))
        assert held[1:] == held[:1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_an_evaluation_is_gone_when_it_is_dropped(one_pass: tc.PassDataset, device: str) -> None:
    cache, before = tc.InMemoryCache(one_pass, device=DEVICES[device]()), left()
    bag = tc.EmbeddingBagCollection(cache.schema, ["f", "g"])
    with (
        open_store(one_pass.path, ONE_PASS, "memory") as store,
        tiered(store, one_pass, device=DEVICES[device](), eval_budget=4000) as tiers,
    ):
        slices = tiers.evaluate(one_pass)
        part = next(slices)
        for ahead in (0, 2):
            batches = part.batches(1, prefetch=ahead)
            batch = next(batches)
            bag(batch)
            rows = weakref.ref(batch.rows.groups[0].vectors.values)
            label = weakref.ref(batch.label)
            kept, batch = batch.rows, None
            assert label() is None
            batches.close()
        next(slices)
        assert rows() is None
        assert not kept.groups
        del part, slices, tiers
    assert left() == before


def test_a_batch_that_failed_keeps_no_memory(one_pass: tc.PassDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    change_reads(monkeypatch, gone_from(20))
    cache, before = tc.InMemoryCache(one_pass, device=shim()), left()
    with first_pass(cache) as p:
        batches = p.batches(20, prefetch=1)
        next(batches)
        with contextlib.suppress(DatasetError):  # pytest.raises would keep its frames
            next(batches)
            pytest.fail("a batch was read")
        del batches
        assert left() == before


@pytest.mark.parametrize("device", DEVICES)
def test_an_output_may_be_changed_in_place(one_pass: tc.PassDataset, device: str) -> None:
    cache = tc.InMemoryCache(one_pass, device=DEVICES[device]())
    bag, single = tc.EmbeddingBagCollection(cache.schema, ["f", "h"]), tc.EmbeddingCollection(cache.schema, ["f"])
    rows, sums = cache.optimizer.rows, []
    with first_pass(cache) as p:
        batch = next(p.batches(20))
        for relu in (torch.relu, torch.relu_):
            (relu(bag(batch)).square().sum() + relu(single(batch)["f"]).square().sum()).backward()
            pending = rows.gradients.preview(rows.ready(None), cache._backend.array)
            parts = [one for group in pending for part in group for one in part.by_feature()]
            sums.append([cache._backend.tensor(one.gradient).clone() for one in parts])
            cache.optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))
    assert any(one.abs().sum() > 0 for one in sums[0])


if DEVICE == "cuda":

    def test_memory_of_batches_on_a_gpu_stays_what_it_is(one_pass: tc.PassDataset) -> None:
        cache = tc.InMemoryCache(one_pass, device="cuda")
        lookups, seen = Lookups(cache), []
        with first_pass(cache) as p:
            for batch in p.batches(10, prefetch=2):
                lookups.step(batch)
                seen.append(torch.cuda.memory_allocated())
        assert max(seen[8:]) <= max(seen[:8]) + (1 << 20)
