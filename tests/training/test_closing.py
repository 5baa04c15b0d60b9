"""A cache that is closed, or that nobody refers to any more, gives all memory back and says what it is."""

from __future__ import annotations

import gc
import importlib
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tiercache as tc
from tests.training.cases import SPECS, Case, Net, open_store, table, tiered, train
from tests.training.raw import batch_arguments
from tests.training.shim_gpu import ShimRuntime
from tests.training.test_bad_input import one_sentence
from tiercache.backends.cuda import CudaBackend
from tiercache.errors import BudgetError, StateError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CASE = Case(
    tables=(table("a", 8), table("b", 3, dtype="float16")), specs=SPECS, num_samples=96, pass_rows=32, shuffle=False
)


class SmallGpu(ShimRuntime):
    """A GPU whose memory is taken by what there is on it."""

    @property
    def held(self) -> int:
        """Bytes of all tensors."""
        return sum(num_bytes for *_, num_bytes in self.kernels.memory._blocks)

    def room(self) -> tuple[int, int]:
        """What is left of ``free_bytes``."""
        return self.free_bytes - self.held, self.free_bytes


@pytest.fixture
def passes(tmp_path: Path) -> tc.PassDataset:
    """The passes of the case."""
    return CASE.cut(tmp_path / "passes")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing looks for cycles but who asks for it."""
    importlib.import_module("torch._dynamo")  # by the first optimizer of a process, and keeps the frames that asked
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def make(kind: str, passes: tc.PassDataset, gpu: Any, **options: Any) -> Any:
    """Return a cache of a kind on a GPU, with a store of its own."""
    device = gpu if isinstance(gpu, str) else CudaBackend(gpu)
    if kind == "resident":
        return tc.InMemoryCache(passes, device=device)
    return tiered(open_store(passes.path, CASE, "memory"), passes, device=device, **options)


def followed(cache: Any) -> tuple[Net, torch.optim.Optimizer]:
    """Return a model that looks up in a cache and an optimizer whose steps the rows follow."""
    model = Net(cache, CASE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cache.register(model=model, optimizer=optimizer)
    return model, optimizer


def need(kind: str, passes: tc.PassDataset) -> int:
    """Return the bytes that a cache of a kind takes of a GPU."""
    gpu = SmallGpu()
    with make(kind, passes, gpu):
        return gpu.held


KINDS = pytest.mark.parametrize("kind", ["tiered", "resident"])


@KINDS
@pytest.mark.usefixtures("no_collector")
def test_a_closed_cache_leaves_nothing_on_the_device_whoever_still_refers_to_it(
    passes: tc.PassDataset, kind: str
) -> None:
    """Rows, slots, the index of raw keys and scratch; held: cache, model, optimizer, pass and the loop over passes."""
    gpu = SmallGpu()
    cache = make(kind, passes, gpu)
    model, optimizer = followed(cache)
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
        one._held[0].nbytes + one._view.vectors.values.nbytes + one.slots_R.nbytes + one._view.slot_of_local.nbytes
        for one in rows.groups._added.values()
    )
    assert gpu.held == added, "beside what the batch brought itself"
    assert not gpu.pinned_pages
    if kind == "tiered":
        assert (cache.device_bytes, cache._rows.memory.resident_bytes, cache.scratch_bytes) == (0, 0, 0)


@KINDS
@pytest.mark.usefixtures("no_collector")
def test_a_second_cache_has_the_memory_of_the_first_that_was_closed(passes: tc.PassDataset, kind: str) -> None:
    """Where the GPU has room for one at a time; while the first is open the second is refused."""
    gpu = SmallGpu(free_bytes=int(1.5 * need(kind, passes)))
    first = make(kind, passes, gpu)
    with pytest.raises(BudgetError, match="on the shim, which has"):
        make(kind, passes, gpu)
    first.close()
    make(kind, passes, gpu).close()


@KINDS
@pytest.mark.usefixtures("no_collector")
def test_a_cache_that_nobody_refers_to_is_gone_though_it_was_not_closed(passes: tc.PassDataset, kind: str) -> None:
    """After a training, with the optimizer that it followed alive: device memory, locked pages and threads."""
    gpu = SmallGpu()
    cache = make(kind, passes, gpu)
    model, optimizer = followed(cache)
    for p in cache.passes(epochs=1):
        for batch in p.batches(16):
            model(batch).sum().backward()
            optimizer.step()
        del batch
    gone, scratch = weakref.ref(cache), cache._backend.scratch_bytes
    del cache
    assert gone() is None
    assert gpu.held == scratch, "a pass keeps the scratch of its backend, and nothing else"
    del p
    assert gpu.held == 0
    assert not gpu.pinned_pages
    optimizer.step()  # and steps no rows


@KINDS
@pytest.mark.usefixtures("no_collector")
def test_memory_is_refused_only_when_garbage_was_looked_for(passes: tc.PassDataset, kind: str) -> None:
    """A cache in somebody's cycle is there until a collector comes; whoever needs its memory calls one."""
    gpu = SmallGpu(free_bytes=int(1.5 * need(kind, passes)))
    first = make(kind, passes, gpu)
    cycle: list[Any] = [first]
    cycle.append(cycle)
    del first, cycle
    assert gpu.held
    make(kind, passes, gpu).close()


@KINDS
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_whatever_asks_a_closed_cache_for_rows_gets_one_sentence(
    passes: tc.PassDataset, kind: str, device: str
) -> None:
    """Loops, evaluations, rows, and loops and slices that were begun before."""
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
    assert not [t for t in threading.enumerate() if t.name.startswith(("tiercache-reader", "tiercache-writer"))]


def test_a_device_that_failed_still_gives_back_what_it_can(
    passes: tc.PassDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is raised; threads end, and rows and locked pages are let go all the same."""
    gpu = SmallGpu()
    with open_store(passes.path, CASE, "memory") as store:
        cache = tiered(store, passes, device=CudaBackend(gpu))
        next(cache.passes(epochs=1))

        def failed() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        with monkeypatch.context() as patched:
            patched.setattr(cache._rows.transfer._backend.streams, "synchronize", failed)
            with pytest.raises(RuntimeError, match="illegal memory access"):
                cache.close()
        assert cache.device_bytes == 0
        assert not gpu.pinned_pages
        assert not [t for t in threading.enumerate() if t.name.startswith(("tiercache-reader", "tiercache-writer"))]
