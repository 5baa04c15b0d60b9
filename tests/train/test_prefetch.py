"""Batches made ahead equal those of the training thread; surplus ones are dropped."""

import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.apart import ran
from tests.train.ahead import CASE, one_pass, threads, wait_for
from tests.train.cases import (
    SPECS,
    Case,
    assert_same_bits,
    change_reads,
    gone_from,
    open_store,
    resident,
    result_of,
    result_of_resident,
    tiered,
    train,
)
from tests.train.devices import DEVICES, shim
from tests.train.shim_gpu import ShimRuntime
from tiercache.errors import DatasetError, StateError
from tiercache.rows.backends.cuda import CudaBackend
from tiercache.train.batches import sample_order


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    wait_for(lambda: not threads())


# -- the same batches ----------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_the_same_however_early_they_are_made(passes: tc.PassDataset, device: str, shuffle: bool) -> None:
    loop, p = one_pass(passes, device)
    order = np.arange(p.num_samples)
    if shuffle:
        order = sample_order(p.num_samples, seed=0, epoch=0, sub_dataset=0, shuffle=True)(0, p.num_samples)
    for ahead in (0, 1, 3, 50):
        p.samples_done, seen = 0, 0
        for batch in p.batches(30, shuffle=shuffle, prefetch=ahead):
            expected = p.source.read(order[seen : seen + 30])
            seen += batch.num_samples
            assert batch.num_samples == expected.num_samples
            assert p.samples_done == seen
            assert np.array_equal(batch.label.cpu().numpy(), expected.label)
            assert np.array_equal(batch.dense.cpu().numpy(), expected.dense)
            for name, ids in expected.ids.items():
                for part in ("ids", "offsets", "weights"):
                    np.testing.assert_equal(getattr(batch.ids[name], part), getattr(ids, part))
        assert seen == p.num_samples
    loop.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_a_training_has_the_same_bits_however_far_ahead_batches_are_made(passes: tc.PassDataset, device: str) -> None:
    results = []
    for ahead in (0, 3):
        case = replace(CASE, prefetch=ahead)
        cache = resident(passes, device=DEVICES[device]())
        results.append(result_of_resident(cache, train(cache, case)))
        with open_store(Path(), case, "memory") as store:
            with tiered(store, passes, device=DEVICES[device]()) as tiers:
                model = train(tiers, case, each_batch=lambda v, b, c=tiers: c.commit() if (v + b) % 3 == 1 else None)
            results.append(result_of(store, passes, model))
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_after_the_first_batches_the_training_thread_brings_nothing(passes: tc.PassDataset) -> None:
    """Two copies brought columns and ids, from one of a few blocks of pinned memory, kept until the cache is closed."""

    class Noting(ShimRuntime):
        def copy(self, host: torch.Tensor, there: torch.Tensor, *, lasting: bool = False) -> None:
            if getattr(self._thread, "uploading", False):
                copies.append(host.data_ptr())
            super().copy(host, there, lasting=lasting)

        def upload(self, pinned: torch.Tensor) -> torch.Tensor:
            if pinned.numel() >= CASE.batch // 2:  # what is less has nothing of the samples
                uploads.append(threading.current_thread() is threading.main_thread())
            return super().upload(pinned)

    uploads: list[bool] = []
    copies: list[int] = []
    cache, seen = resident(passes, device=CudaBackend(Noting())), []
    train(cache, replace(CASE, prefetch=2), each_batch=lambda *_: seen.append(sum(uploads)))
    assert seen[0] > 0
    assert seen[3:] == [seen[3]] * (len(seen) - 3)
    assert len(uploads) == sum(uploads)
    assert len(copies) == 2 * len(seen) - 3  # the first were made before a module had looked up ids
    assert len(set(copies[8:])) <= 2 * 5
    assert 0 < cache.pinned_batch_bytes <= 2 * 5 * 8192
    cache.close()
    assert cache.pinned_batch_bytes == 0


def test_ids_of_a_group_that_were_sorted_together_are_not_sorted_in_the_step(passes: tc.PassDataset) -> None:
    """A step of some of the lookups sorts them itself. Both have the same bits."""
    results = []
    for ahead in (False, True):
        cache = resident(passes, device=(backend := shim()))
        launches: list[str] = backend._runtime.kernels.launches
        one, two = tc.EmbeddingBagCollection(cache.schema), tc.EmbeddingBagCollection(cache.schema, ["f", "g"])
        loop, sorts = cache.passes(epochs=1), []
        for p in loop:
            for made in p.batches(10, prefetch=2):
                batch = made if ahead else replace(made, collations=None)
                both = p.index and batch.end % 20  # the second module is known from the second pass on
                out = one(batch).sum() + (two(batch).square().sum() if both else 0.0)
                out.backward()
                launches.clear()
                cache.optimizer.step()
                sorts.append((bool(both), launches.count("sorting.make_keys")))
        results.append([cache.fields(name)[0].copy() for name in ("a", "b")])
        assert {number for _, number in sorts} == ({0, 1} if ahead else {1})
        if ahead:
            assert [number for _, number in sorts[4:10]] == [0] * 6
    assert all(map(np.array_equal, *results))


def test_other_ids_than_those_that_were_joined_are_joined_anew(passes: tc.PassDataset) -> None:
    for device in DEVICES.values():
        cache = resident(passes, device=device())
        bag = tc.EmbeddingBagCollection(cache.schema, mode={spec.name: spec.mode for spec in SPECS})
        loop = cache.passes(epochs=1)
        batches = list(next(loop).batches(20, prefetch=2))
        again = [bag(batch).detach().clone() for batch in batches]
        other = replace(batches[4], ids=batches[3].ids)
        assert torch.equal(bag(other), again[3])
        ids = batches[4].ids["i"]
        twice = bag(batches[4], weights={"i": 2 * torch.from_numpy(ids.weights.copy()).to(cache.device)}).detach()
        assert torch.equal(bag.split(twice)[3], 2 * bag.split(again[4])[3])
        loop.close()


def test_two_iterators_and_an_evaluation_take_turns(passes: tc.PassDataset, tmp_path: Path) -> None:
    others = Case(tables=CASE.tables, specs=SPECS, num_samples=60, data_seed=4).cut(tmp_path / "others")
    for device in DEVICES.values():
        found = []
        for ahead in (0, 2):
            with open_store(tmp_path, CASE, "memory") as store, tiered(store, passes, device=device()) as cache:
                bag = tc.EmbeddingBagCollection(cache.schema)
                cache.register(bag=bag)
                loop = cache.passes(epochs=1)
                p, outs = next(loop), []
                one, two = (p.batches(25, prefetch=ahead) for _ in range(2))
                next(two)  # it began at the first sample, and the other one begins after it
                for both in zip(one, two, strict=True):
                    for batch in both:
                        out = bag(batch)
                        out.sum().backward()
                        cache.optimizer.step()
                        outs.append(out.detach().clone())
                    for part in cache.evaluate(others):
                        outs += [bag(batch).clone() for batch in part.batches(16, prefetch=2 * ahead)]  # more threads
                loop.close()
            found.append(outs)
        assert len(found[0]) == len(found[1]) == 6 + 3 * 4
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_was_made_and_not_handed_out_is_in_no_commit(passes: tc.PassDataset, tmp_path: Path) -> None:
    with open_store(tmp_path / "x", CASE, "memory") as store:
        with tiered(store, passes) as cache:
            p = next(loop := cache.passes(epochs=1))
            batches = p.batches(16, shuffle=True, prefetch=4)
            made = [next(batches) for _ in range(3)]
            for batch in made[:2]:
                tc.EmbeddingBagCollection(passes.schema).requires_grad_(False)(batch)
            first = [batch.label.clone() for batch in made[:2]]
            wait_for(lambda: cache.scratch_bytes > 0)
            cache.commit()
            loop.close()
        assert store.commit is not None
        assert store.commit.cursor.sample == 32
        with tiered(store, passes) as cache:
            p = next(loop := cache.passes(epochs=1))
            rest = [batch.label.clone() for batch in p.batches(16, shuffle=True, prefetch=4)]
            loop.close()
    order = sample_order(p.num_samples, seed=0, epoch=0, sub_dataset=0, shuffle=True)
    assert np.array_equal(torch.cat(first + rest).cpu().numpy(), p.source.read(order(0, p.num_samples)).label)


def test_no_random_generator_is_drawn_from(passes: tc.PassDataset) -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()  # noqa: NPY002 - seen

    before = states()
    loop, p = one_pass(passes)
    list(p.batches(10, shuffle=True, prefetch=3))
    loop.close()
    assert states() == before


# -- what goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_id_is_an_error_at_the_lookup_of_its_batch(passes: tc.PassDataset, device: str) -> None:
    """With the same message as without threads: data ids are checked when they are read, all others there."""
    said = []
    for ahead in (0, 2):
        loop, p = one_pass(passes, device)
        cache = iter(loop).gi_frame.f_locals["self"]
        bag = tc.EmbeddingBagCollection(cache.schema, ["g", "h"], mode="mean")
        for batch in p.batches(10, prefetch=ahead):
            bag(batch)
            if p.samples_done == 50:
                one = batch.ids["h"]
                wrong = replace(one, ids=np.where(np.arange(one.num_ids) == 5, np.int32(10**6), one.ids))
                with pytest.raises(IndexError) as caught:
                    bag(replace(batch, ids={**batch.ids, "h": wrong}))
                said.append(str(caught.value))
        loop.close()
    assert said[0] == said[1]
    assert "feature 'h' has local id 1000000 at entry 5 of the batch, but table 'b' has local ids 0 to" in said[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_an_unreadable_batch_is_an_error(passes: tc.PassDataset, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier batches are yielded and counted, but not this one; raised on the training thread."""
    change_reads(monkeypatch, gone_from(40))
    loop, p = one_pass(passes)
    batches = p.batches(20, prefetch=ahead)
    assert [next(batches).num_samples for _ in range(2)] == [20, 20]
    with pytest.raises(DatasetError, match="the samples are gone"):
        next(batches)
    assert p.samples_done == 40
    loop.close()


def test_a_number_of_batches_that_is_none_is_refused(passes: tc.PassDataset) -> None:
    loop, p = one_pass(passes)
    with pytest.raises(ValueError, match="invalid prefetch -1: expected at least 0 batches"):
        next(p.batches(10, prefetch=-1))
    for size, ahead in ((0, 2), (0, 0), (-1, 0)):
        with pytest.raises(ValueError, match=f"invalid batch size {size}: expected at least 1"):
            next(p.batches(size, prefetch=ahead))
    loop.close()


def test_arrays_that_nobody_waits_for_are_not_there(passes: tc.PassDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the shim copies are done as late as a GPU may do them: without the wait a batch is garbage."""
    monkeypatch.setattr(ShimRuntime, "receive", lambda *_: None)
    p = next(loop := resident(passes, device=shim()).passes(epochs=1))
    assert not np.array_equal(next(p.batches(10)).label.cpu().numpy(), p.source.read(np.arange(10)).label)
    loop.close()


# -- threads and memory --------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["exhausted", "break", "error", "next pass", "close"])
def test_threads_make_nothing_after_whatever_ends_first(
    passes: tc.PassDataset, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    making = set[int]()

    def slow(first: int, _: Any) -> None:
        making.add(first)
        time.sleep(0.02)
        making.remove(first)

    change_reads(monkeypatch, slow)
    with open_store(tmp_path, CASE, "memory") as store, tiered(store, passes) as cache:
        loop = cache.passes(epochs=1)
        p = next(loop)
        batches = p.batches(10, prefetch=2)
        next(batches)
        assert 1 <= len(threads()) <= 2
        if how == "exhausted":
            list(batches)
            p.skip()
            list(next(loop).batches(10, prefetch=1))
        elif how == "break":
            for _ in batches:
                break
            batches.close()
        elif how == "error":
            with pytest.raises(KeyError):
                iter(batches).throw(KeyError)
        elif how == "next pass":
            p.skip()
            next(loop)
        else:
            cache.close()
        assert not making
        assert len(threads()) <= (0 if how == "close" else 2)
        if how in ("next pass", "close"):
            with pytest.raises(RuntimeError, match="pass 0, which has ended"):
                next(batches)
        loop.close()
    assert not threads()


# -- across passes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_memory_of_batches_that_wait_is_reported(passes: tc.PassDataset, tmp_path: Path, device: str) -> None:
    """Besides other memory: on the device labels, dense, ids, bags and weights; on a GPU pinned memory too."""
    with open_store(tmp_path, CASE, "memory") as store, tiered(store, passes, device=DEVICES[device]()) as cache:
        loop = cache.passes(epochs=1)
        p, kept = next(loop), cache._backend.scratch_bytes
        assert cache.scratch_bytes - kept == cache.pinned_batch_bytes == 0
        batches = p.batches(10, prefetch=2)
        next(batches)
        wait_for(lambda: all(future.done() for queue in cache._pipeline.queues for future in queue.pending))
        samples = [p.source.read(np.arange(low, low + 10)) for low in (10, 20)]
        columns = sum(s.label.nbytes + s.dense.nbytes for s in samples)
        read = columns + sum(one.ids.nbytes for s in samples for one in s.ids.values())
        if device == "cuda":
            assert columns <= cache.scratch_bytes - kept <= columns + 4 * 128  # no module has looked up ids
            assert cache.pinned_batch_bytes >= read
        else:
            assert cache.scratch_bytes >= read
            assert cache.pinned_batch_bytes == 0
        list(batches)
        loop.close()
        assert cache._pipeline.device_bytes == 0
    assert cache.pinned_batch_bytes == 0


def test_a_fork_is_told_that_the_threads_are_elsewhere(passes: tc.PassDataset) -> None:
    loop, p = one_pass(passes)
    batches = p.batches(10, prefetch=2)
    next(batches)
    child = os.fork()
    if not child:
        try:
            next(batches)
        except StateError as error:
            os._exit(0 if f"is its fork {os.getpid()}" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(batches)) == 9
    loop.close()


LEFT = """
import os, signal, sys, threading, time
from pathlib import Path
import tiercache as tc
from tiercache.data.sub_dataset import SubDataset
passes = tc.PassDataset.open(Path(sys.argv[1]))
read = SubDataset.read
def slow(self, indices, *others, **named):
    time.sleep(0.3)
    return read(self, indices, *others, **named)
SubDataset.read = slow
cache = tc.InMemoryCache(passes)
passes = cache.passes(epochs=1)
p = next(passes)
batches = p.batches(10, prefetch=2)
next(batches)
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    list(batches)
except KeyboardInterrupt:
    print(sum(len(queue.pending) for queue in cache._pipeline.queues))
batches = p.batches(10, prefetch=2)
next(batches)
"""


def test_an_interrupted_and_a_left_iterator_let_the_process_end(passes: tc.PassDataset) -> None:
    done = ran(LEFT, passes.path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
