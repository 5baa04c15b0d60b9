"""A batch and all that it brought are gone when nobody refers to them any more: no collector has to look for them."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.training.cases import SPECS, Case, resident, table
from tests.training.devices import DEVICE, cuda_device, shim
from tests.training.raw import batch_arguments, key_sets
from tests.training.shim_gpu import ShimRuntime
from tiercache.backends.jagged import FoundIds, LookupIds, SavedGradient
from tiercache.backends.pinned_upload import PinnedUpload
from tiercache.backends.upload import HostUpload
from tiercache.data.dataset import SubDataset
from tiercache.data.encoded_batch import EncodedBatch, FeatureIds, SampleBuffers
from tiercache.errors import DatasetError
from tiercache.training.batch import Batch
from tiercache.training.joining import Joined
from tiercache.training.lookup import PooledLookup, RowLookup
from tiercache.training.missing_rows import _GatheredRows, _RawRows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CASE = Case(
    tables=(table("a", 8), table("b", 3, dtype="bfloat16")), specs=SPECS, num_samples=200, pass_rows=200, batch=10
)
DEVICES = {"cpu": lambda: "cpu", "cuda": cuda_device}
OF_A_BATCH = (
    Batch, FeatureIds, FoundIds, SampleBuffers, EncodedBatch, HostUpload, PinnedUpload, LookupIds, SavedGradient,
    Joined, PooledLookup, RowLookup, _GatheredRows, _RawRows,
)  # fmt: skip


@pytest.fixture
def passes(tmp_path: Path) -> tc.PassDataset:
    """One pass of the case."""
    return CASE.cut(tmp_path / "passes")


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Nothing looks for cycles, and what was there before is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def left() -> dict[str, int]:
    """Count all objects that the test made and that are still there, of those that a batch makes."""
    kinds = [type(one).__name__ for one in gc.get_objects() if type(one) in OF_A_BATCH]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


class Lookups:
    """Modules of all kinds over one cache, each looked up and gone back through."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.bag = tc.EmbeddingBagCollection(cache.schema, ["f", "g", "h"], mode={"g": "max", "h": "mean"})
        self.weighted, self.single = (
            tc.EmbeddingBagCollection(cache.schema, ["i"]),
            tc.EmbeddingCollection(cache.schema),
        )

    def step(self, batch: tc.Batch) -> None:
        """Train a batch."""
        weights = torch.ones(batch.ids["i"].num_ids, device=self.cache.device, requires_grad=True)
        loss = self.bag(batch).sum() + self.weighted(batch, weights={"i": weights}).square().sum()
        (loss + sum(one.sum() for one in self.single(batch).values())).backward()
        assert weights.grad is not None
        self.cache.optimizer.step()


def bytes_of_batches(gpu: ShimRuntime, backend: Any) -> tuple[int, int]:
    """Return the bytes of the device beside scratch, and those of pinned memory."""
    gpu.receive(gpu.uploaded(), ())  # copies of what was made ahead and dropped
    held = sum(num_bytes for *_, num_bytes in gpu.kernels.memory._blocks)
    return held - backend.scratch_bytes, sum(gpu._pinned.values())


def test_a_delivery_is_gone_with_the_last_that_refers_to_it() -> None:
    """With its pinned memory, what it brought from there and what it copied to pinned memory first."""
    backend = shim()
    gpu = backend._runtime
    upload = backend.upload()
    read = upload.buffers.array("ids", (3, 4), np.int32)
    read[...] = 1
    there = [upload.to_device(read), upload.to_device(np.ones(5, np.float32)), upload.join([read[0], read[2]])[1]]
    upload.send()
    upload.receive()
    assert [int(one.sum()) for one in there] == [12, 5, 8]
    gone = weakref.ref(upload)
    del upload
    assert gone() is None
    assert gpu._pinned, "an array still lies in pinned memory"
    del read, there
    assert not gpu._pinned
    assert not gpu.kernels.memory._blocks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_batch_that_was_trained_is_gone_when_it_is_dropped(passes: tc.PassDataset, device: str, ahead: int) -> None:
    """Lookups of every kind, with weights of one's own, backward and a step: while the next batch is still to come."""
    backend = DEVICES[device]()
    cache = resident(passes, device=backend)
    lookups, before = Lookups(cache), left()
    loop = cache.passes(epochs=1)
    p = next(loop)
    held = []
    for rest in (3, 9):
        batches = p.batches(10, prefetch=ahead)
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
    loop.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_an_evaluation_is_gone_when_it_is_dropped(passes: tc.PassDataset, device: str) -> None:
    """So are the rows of its slice, though somebody keeps a batch of it."""
    cache, before = resident(passes, device=DEVICES[device]()), left()
    bag = tc.EmbeddingBagCollection(cache.schema, ["f", "g"])
    with (
        tc.Store.open(None, tables=CASE.tables, engine=tc.store.MemoryEngine()) as store,
        tc.TierCache(
            store, passes, device=DEVICES[device](), device_budget="1MiB", host_budget="16MiB", eval_budget=4000
        ) as tiers,
    ):
        slices = tiers.evaluate(passes)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("missing", ["error", "zero", "load"])
def test_a_batch_of_raw_keys_is_gone_when_it_is_dropped(
    passes: tc.PassDataset, tmp_path: Path, device: str, missing: Any
) -> None:
    """With rows of its own for missing keys, too."""
    cache = tc.InMemoryCache(key_sets(tmp_path / "keys", passes), device=DEVICES[device]())
    lookups, before = Lookups(cache), left()
    p = next(loop := cache.passes(epochs=1))
    for first in range(0, 60, 10):
        keys, others = batch_arguments(passes, 0, first, 10)
        if missing != "error":
            keys["f"] = keys["f"].clone() if isinstance(keys["f"], torch.Tensor) else keys["f"].copy()
            keys["f"][:3] = 10**9
        batch = p.batch(keys, **others, missing=missing)
        lookups.step(batch)
        del batch
    del keys, others
    assert left() == before
    loop.close()


def test_what_went_wrong_in_making_a_batch_keeps_no_memory_of_it(
    passes: tc.PassDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the error is handled: what was read and brought before is gone."""
    read = SubDataset.read

    def fails(self: SubDataset, indices: Any, *others: Any, **named: Any) -> EncodedBatch:
        samples = read(self, indices, *others, **named)
        if indices[0] >= 20:
            raise DatasetError("the samples are gone: extract the dataset again")
        return samples

    monkeypatch.setattr(SubDataset, "read", fails)
    cache, before = resident(passes, device=shim()), left()
    loop = cache.passes(epochs=1)
    batches = next(loop).batches(20, prefetch=1)
    next(batches)
    try:
        next(batches)
    except DatasetError:
        wrong = True
    del batches
    assert wrong
    assert left() == before
    loop.close()


@pytest.mark.parametrize("device", DEVICES)
def test_an_output_may_be_changed_in_place(passes: tc.PassDataset, device: str) -> None:
    """As a ReLU with ``inplace=True`` does behind a module of ours; gradients are those of another output."""
    cache = resident(passes, device=DEVICES[device]())
    bag, single = tc.EmbeddingBagCollection(cache.schema, ["f", "h"]), tc.EmbeddingCollection(cache.schema, ["f"])
    loop = cache.passes(epochs=1)
    batch = next(next(loop).batches(20))
    sums = []
    for in_place in (False, True):
        out, one = bag(batch), single(batch)["f"]
        out, one = (out.relu_(), one.relu_()) if in_place else (out.relu(), one.relu())
        (out.square().sum() + one.square().sum()).backward()
        pending = cache.optimizer.gradients.applied(
            cache.optimizer.tracers.factors(cache.optimizer.gradients.marks, None)
        )
        sums.append([cache._backend.tensor(p.gradient).clone() for g in pending for p in g])
        cache.optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))
    assert any(one.abs().sum() > 0 for one in sums[0])
    loop.close()


if DEVICE == "cuda":

    def test_memory_of_batches_on_a_gpu_stays_what_it_is(passes: tc.PassDataset) -> None:
        """As torch counts it, step after step."""
        cache = resident(passes, device="cuda")
        lookups, seen = Lookups(cache), []
        loop = cache.passes(epochs=1)
        for batch in (p := next(loop)).batches(10, prefetch=2):
            lookups.step(batch)
            seen.append(torch.cuda.memory_allocated())
        assert max(seen[8:]) <= max(seen[:8]) + (1 << 20), p
        loop.close()
