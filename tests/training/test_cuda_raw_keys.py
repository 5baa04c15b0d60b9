"""Raw keys found on the device: by an index within the budget, and with ids that stay there."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.training.cases import (
    table,
    tiered,
)
from tests.training.devices import cuda_device
from tests.training.raw import PASS_KEYS, own_keys, write_passes
from tests.training.shim_gpu import ShimRuntime
from tiercache.backends import cuda_key_index
from tiercache.backends.cuda import CudaBackend
from tiercache.errors import KeyNotInPassError
from tiercache.store import MemoryEngine

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

TWO = (table("a", 4), table("b", 4))


class WatchedGpu(ShimRuntime):
    """Notes what comes back to the host, and refuses to search elsewhere than on the stream of searches."""

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
        """Note it."""
        self.came_back.append(tensor.numel() * tensor.element_size())
        return super().download(tensor)

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Note it."""
        assert not self.kernels.deferring, "it is handed to the stream of searches itself"
        self.handed_over.append(tensor.data_ptr())


def passes_of(folder: Path, *sizes: int) -> tuple[tc.PassDataset, list[NDArray[np.int64]]]:
    """Write passes with so many keys in table a, and every third of them, and one more, in table b."""
    rng = np.random.default_rng(0)
    keys = [np.unique(rng.integers(-(1 << 62), 1 << 62, size)) for size in sizes]
    return tc.write_key_sets(folder, TWO, [{"a": k, "b": k[::3] + 1} for k in keys]), keys


def check_ids(passes: tc.PassDataset, p: tc.Pass, pool: NDArray[np.int64]) -> None:
    """Look for every key of a pass, and for some of the other table."""
    batch = p.batch({"a": pool, "b": np.resize(pool[::3] + 1, pool.size)})
    for name, asked in (("a", pool), ("b", np.resize(pool[::3] + 1, pool.size))):
        np.testing.assert_array_equal(passes.passes[p.sub_dataset].keys(name)[batch.ids[name].ids], asked)


def test_of_a_batch_only_the_count_of_missing_keys_comes_back(tmp_path: Path) -> None:
    """16 bytes at its making, nothing for lookups and the step; ids when somebody reads them, once, read-only."""
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
        np.testing.assert_array_equal(passes.passes[p.sub_dataset].keys("b")[ids["pair"]],
                                      np.repeat(PASS_KEYS[p.sub_dataset], 2))  # fmt: skip
        there = batch.ids["one"].there
        assert there.data_ptr() == gpu.handed_over[-1]


@pytest.mark.parametrize("slice_keys", [1 << 20, 700, 1])
def test_an_index_on_the_device_takes_what_is_planned_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_keys: int
) -> None:
    """To the byte; a pass with more keys gets a new one, which comes when the old one has gone; others fit in."""
    monkeypatch.setattr(cuda_key_index, "SLICE_KEYS", slice_keys)
    sizes = (30, 2000, 500) if slice_keys > 1 else (3, 40, 9)
    passes, keys = passes_of(tmp_path / "keys", *sizes)
    device = cuda_device("random")
    store = tc.Store.open(None, tables=TWO, engine=MemoryEngine())
    with store, tiered(store, passes, device=device) as cache:
        rows, indexes = cache.device_bytes, []
        for current in cache.passes(epochs=1):
            check_ids(passes, current, keys[current.sub_dataset])
            index = cache._raw._reader._finder._index
            assert isinstance(index, cuda_key_index.CudaKeyIndex)
            held = index._index._held, index._index._apart_held, index._coming
            largest = max(p.rows("a") + p.rows("b") for p in passes.passes[: current.sub_dataset + 1])
            planned = cache._backend.index_bytes(largest, 2)
            assert planned == index.num_bytes == sum(part.nbytes for part in held)
            assert cache.device_bytes == rows + planned
            indexes.append(weakref.ref(index))
            del index
            if current.sub_dataset:
                with pytest.raises(KeyNotInPassError):  # of the pass before
                    current.batch({"a": keys[current.sub_dataset - 1][:1], "b": keys[current.sub_dataset][:1] + 1})
        assert indexes[0]() is None
        assert indexes[1]() is indexes[2]() is not None


def test_without_room_on_the_device_keys_are_searched_on_the_host(tmp_path: Path) -> None:
    """A byte too little in the budget, or on the device when a pass begins, or when it is taken: the same ids."""
    passes, keys = passes_of(tmp_path / "keys", 900)
    full = CudaBackend(ShimRuntime()).index_bytes(1200, 2)
    store = tc.Store.open(None, tables=TWO, engine=MemoryEngine())
    with store, tiered(store, passes, device=cuda_device()) as cache:
        rows = cache.device_bytes
    for spare, free, taken, indexed in (
        (0, 1 << 30, False, True), (1, 1 << 30, False, False), (0, full - 1, False, False), (0, 1 << 30, True, False),
    ):  # fmt: skip
        gpu = WatchedGpu()
        store = tc.Store.open(None, tables=TWO, engine=MemoryEngine())
        with store, tiered(store, passes, device=CudaBackend(gpu), device_budget=rows + full - spare) as cache:
            for p in cache.passes(epochs=1):
                gpu.free_bytes = free
                if taken:
                    refuse_memory(gpu)
                gpu.kernels.launches.clear()
                for _ in range(2):
                    check_ids(passes, p, keys[0])
                assert ("key_index.find" in gpu.kernels.launches) == indexed
                assert cache.device_bytes == rows + full * indexed
                out = tc.EmbeddingBagCollection(cache.schema)(p.batch({"a": keys[0][:9], "b": keys[0][:27:3] + 1}))
                expected = np.concatenate([cache.live_rows().fields("a", keys[0][:9])[0],
                                           cache.live_rows().fields("b", keys[0][:27:3] + 1)[0]], 1)  # fmt: skip
                np.testing.assert_array_equal(out.detach().numpy(), expected)


def refuse_memory(gpu: ShimRuntime) -> None:
    """Have searches find no memory, as another process may have taken it."""
    empty = gpu.kernels.empty

    def refused(size: int, dtype: Any) -> NDArray[Any]:
        if gpu.kernels.deferring:
            raise torch.OutOfMemoryError("out of memory")
        return empty(size, dtype)

    gpu.kernels.empty = refused  # type: ignore[method-assign]
