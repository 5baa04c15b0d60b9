"""The first batches of the next pass are made while a pass trains, and do not commit it to anything."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.train import ahead
from tests.train.ahead import threads, wait_for
from tests.train.cases import SPECS, Case, Spec, resident, table
from tests.train.devices import DEVICES, shim
from tiercache.data.sub_dataset import SubDataset
from tiercache.errors import DatasetError
from tiercache.train.batches import sample_order

CASE = ahead.CASE


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    wait_for(lambda: not threads())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [0, 2])
def test_batches_begun_for_the_next_pass_bind_it_to_nothing(tmp_path: Path, device: str, ahead: int) -> None:
    """An evaluation between the passes has more threads; a pass may then use keys of the loop, or another order."""
    case = Case(tables=(table("f", 8),), specs=(Spec(name="f", table="f"),), num_samples=200, pass_rows=60, batch=16)
    data = case.cut(tmp_path / "passes")
    assert len(data) > 2
    cache = resident(data, device=DEVICES[device]())
    bag = tc.EmbeddingBagCollection(cache.schema)
    cache.register(bag=bag)

    def step(batch: tc.Batch) -> None:
        bag(batch).sum().backward()
        cache.optimizer.step()

    for p in cache.passes(epochs=2):
        if p.index % 3 == 1:
            for _ in range(2):
                step(p.batch({"f": data.passes[p.sub_dataset].keys("f")[:9]}))
        else:
            for batch in p.batches(16, prefetch=ahead, shuffle=p.index % 3 == 2):
                step(batch)
        with torch.no_grad():
            for part in cache.evaluate(data):
                for batch in part.batches(16, prefetch=2 * ahead):
                    bag(batch)
    assert cache.optimizer.rows.steps > 20
    cache.close()


def read_by(patch: pytest.MonkeyPatch, change: Any = None) -> list[tuple[int, int, str]]:
    """Record sub-dataset, first sample and thread of each read; ``change`` is called with them first."""
    seen, read = list[tuple[int, int, str]](), SubDataset.read

    def noted(self: SubDataset, indices: Any, *others: Any, **named: Any) -> Any:
        if change is not None:
            change(self.index, int(indices[0]))
        seen.append((self.index, int(indices[0]), threading.current_thread().name))
        return read(self, indices, *others, **named)

    patch.setattr(SubDataset, "read", noted)
    return seen


@pytest.mark.parametrize("device", DEVICES)
def test_next_batches_are_made_early(passes: tc.PassDataset, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that are made ahead, with the ids of modules in place; each batch is made once, on the same threads."""
    seen = read_by(monkeypatch)
    cache = resident(passes, device=DEVICES[device]())
    bag = tc.EmbeddingBagCollection(cache.schema, mode={spec.name: spec.mode for spec in SPECS})
    loop = cache.passes(epochs=2)
    for p in loop:
        is_last = p.index + 1 == 2 * len(passes.passes)
        for batch in p.batches(10, prefetch=2):
            bag(batch).sum().backward()
            cache.optimizer.step()
            assert p.index == 0 or batch.collations._made, "the ids of modules were not brought"
            if p.samples_done == p.num_samples and not is_last:
                following = (p.sub_dataset + 1) % len(passes.passes)
                wanted = {(following, 0), (following, 10)}
                wait_for(lambda: {at[:2] for at in seen[-2:]} == wanted)  # noqa: B023 - called here
    expected = sorted((p.index, first) for p in passes.passes for first in range(0, p.samples, 10) for _ in range(2))
    assert sorted(at[:2] for at in seen) == expected
    assert len({name for *_, name in seen}) <= 2


def test_batches_that_were_begun_are_dropped_if_others_are_asked_for(passes: tc.PassDataset) -> None:
    cache = resident(passes, device=shim())
    loop = cache.passes(epochs=3)
    asked = [(10, False), (10, True), (16, True), (16, True)]
    for (size, shuffle), p in zip(asked, loop, strict=False):
        order = sample_order(
            p.num_samples, seed=0, epoch=p.epoch, sub_dataset=p.sub_dataset, shuffle=shuffle
        )(0, p.num_samples)  # fmt: skip
        labels = [batch.label.clone() for batch in p.batches(size, shuffle=shuffle, prefetch=2)]
        assert [len(one) for one in labels[:2]] == [size, size]
        assert np.array_equal(torch.cat(labels).numpy(), p.source.read(order).label)
        p.skip()
    loop.close()
    assert not any(queue.pending for queue in cache._pipeline.queues)
    cache.close()


def test_an_error_in_the_next_pass_is_raised_there(passes: tc.PassDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous pass trains to its end, though the batch was already made."""

    def refuse(index: int, _: int) -> None:
        if index == 1:
            raise DatasetError("the samples are gone: extract the dataset again")

    read_by(monkeypatch, refuse)
    loop = resident(passes, device=shim()).passes(epochs=1)
    p = next(loop)
    assert sum(batch.num_samples for batch in p.batches(10, prefetch=2)) == p.num_samples
    p.skip()
    batches = next(loop).batches(10, prefetch=2)
    with pytest.raises(DatasetError, match="the samples are gone"):
        next(batches)
    loop.close()
