"""Loops with a length: over passes, over the batches of a pass, and flat over the batches of all passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.train import recorded
from tests.train.cases import assert_same_bits, result_of, result_of_resident
from tests.train.recorded import BATCH, Clicks
from tests.train.test_fetch_ahead import CASE, STEPS, Plain, Training, opened, plain_on, store_of
from tiercache.errors import BudgetError, DatasetError, StateError
from tiercache.train.training_batches import TrainingBatches

PASSES, BATCHES = 8, 4


@pytest.fixture(scope="module")
def plain(passes: tc.PassDataset) -> Plain:
    return plain_on(passes, "cpu")


class Flat(Training):
    """A training in a flat loop."""

    loader: TrainingBatches

    def __init__(self, cache: Any, size: int = CASE.batch, epochs: int = 2) -> None:
        super().__init__(cache)
        self.loader = cache.batches(size, epochs=epochs, shuffle=True)

    @property
    def current(self) -> tc.Pass:
        assert self.loader.current_pass is not None
        return self.loader.current_pass

    def train(self, batch: tc.Batch) -> None:
        self.step(self.current, batch.end, batch)

    def run_flat(self, steps: int | None = None, *, commits: bool = False) -> None:
        """Train at most ``steps`` batches, then leave the loop. commits: commit before."""
        for count, batch in enumerate(self.loader, 1):
            self.train(batch)
            if count == steps:
                if commits:
                    self.cache.commit()
                break


@contextmanager
def flat(passes: tc.PassDataset, store: tc.Store, size: int = CASE.batch, epochs: int = 2) -> Iterator[Flat]:
    with opened(passes, store) as cache:
        yield Flat(cache, size, epochs)


def cursor_of(store: tc.Store) -> tuple[int, int]:
    """Return pass and sample of the last commit."""
    if store.commit is None:
        return 0, 0
    return store.commit.cursor.pass_index, store.commit.cursor.sample


# -- lengths -------------------------------------------------------------------------------------------------


def test_loops_have_the_lengths_of_what_they_yield(passes: tc.PassDataset) -> None:
    """Before a loop begins and while it runs; the length is fixed once it has begun."""
    with store_of(passes) as store, opened(passes, store) as cache:
        training = Training(cache)
        for epochs in (0, 1, 3):
            assert len(cache.passes(epochs)) == 4 * epochs
            assert len(cache.batches(7, epochs=epochs)) == epochs * sum(-(-p.samples // 7) for p in passes)
        loop, seen = cache.passes(epochs=2), list[int]()
        for p in loop:
            batches = p.batches(CASE.batch, shuffle=True)
            for count, batch in enumerate(batches, 1):
                training.step(p, batch.end, batch)
                assert len(batches) == BATCHES
                assert len(p.batches(CASE.batch)) == BATCHES - count
                seen.append(p.index)
            assert len(loop) == PASSES
        assert [seen.count(index) for index in range(PASSES)] == [BATCHES] * PASSES
        assert len(cache.passes(2)) == len(cache.batches(16, epochs=2)) == 0
        assert len(cache.passes(3)) == 4


@pytest.mark.sampled(8)
@pytest.mark.parametrize("size", [16, 7, 64, 1000])
@pytest.mark.parametrize("stop", [0, 1, 6, 15, 31])
def test_the_length_of_a_resumed_loop_is_what_is_left(passes: tc.PassDataset, stop: int, size: int) -> None:
    with store_of(passes) as store:
        if stop:
            with flat(passes, store) as training:
                training.run_flat(stop, commits=True)
        with flat(passes, store, size) as training:
            expected = len(training.loader)
            assert len(training.cache.passes(2)) == PASSES - cursor_of(store)[0]
            count = 0
            for batch in training.loader:
                training.train(batch)
                assert len(training.loader) == expected
                count += 1
            assert count == expected
            assert len(training.loader) == 0


@pytest.mark.parametrize(("size", "epochs", "message"), [(0, 1, "invalid batch size 0"), (8, -1, "epochs is -1")])
def test_a_flat_loop_of_no_size_is_refused(passes: tc.PassDataset, size: int, epochs: int, message: str) -> None:
    with tc.InMemoryCache(passes) as cache, pytest.raises(ValueError, match=message):
        cache.batches(size, epochs=epochs)


def test_a_finished_run_says_that_nothing_is_left(passes: tc.PassDataset) -> None:
    with store_of(passes) as store, flat(passes, store, epochs=1) as training:
        training.run_flat()
        with pytest.warns(UserWarning, match=r"nothing is left to train: 4 passes are trained, 1 epochs, and epochs=1"):
            assert not [*training.cache.passes(epochs=1)]
        with pytest.warns(UserWarning, match="request more epochs, or pass the path of a new store"):
            assert not [*training.cache.batches(8, epochs=1)]
        assert not [*training.cache.passes(epochs=0)]


# -- the flat loop -------------------------------------------------------------------------------------------


def test_a_flat_loop_ends_with_the_bits_of_a_loop_over_passes(passes: tc.PassDataset, plain: Plain) -> None:
    with store_of(passes) as store, flat(passes, store) as training:
        for count, batch in enumerate(training.loader):
            training.train(batch)
            assert training.current.index == count // BATCHES
        assert training.losses == plain[1]
        assert cursor_of(store) == (PASSES, 0)
        assert len(training.cache.reports) == PASSES
        assert_same_bits(result_of(store, passes, training.net), plain[0])


@pytest.mark.parametrize("end", ["close", "commit", "another loop", "collected"])
def test_a_trainer_that_takes_len_batches_trains_all_passes(passes: tc.PassDataset, plain: Plain, end: str) -> None:
    """It never requests one more, so a later call commits the last pass."""
    with store_of(passes) as store:
        with flat(passes, store) as training:
            batches = iter(training.loader)
            for _ in range(len(training.loader)):
                training.train(next(batches))
            training.cache.drain(staged=False)
            assert cursor_of(store) == (PASSES - 1, 0)
            if end == "commit":
                training.cache.commit()
            elif end == "another loop":
                with pytest.warns(UserWarning, match="nothing is left"):
                    assert not [*training.cache.batches(8, epochs=2)]
            elif end == "collected":
                del batches
            assert end in {"close", "collected"} or cursor_of(store) == (PASSES, 0)
        assert training.losses == plain[1]
        assert cursor_of(store) == (PASSES, 0)
        assert_same_bits(result_of(store, passes, training.net), plain[0])


def test_a_flat_loop_of_a_cache_in_memory_ends_with_the_same_bits(passes: tc.PassDataset, plain: Plain) -> None:
    with tc.InMemoryCache(passes) as cache:
        training = Flat(cache)
        training.run_flat()
        assert training.losses == plain[1]
        assert_same_bits(result_of_resident(cache, training.net), plain[0])


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("steps", "commits"), [(2, True), (7, True), (STEPS - 1, True), *((n, False) for n in range(1, STEPS + 1, 3))]
)
def test_a_flat_loop_resumes_from_a_commit(passes: tc.PassDataset, plain: Plain, steps: int, commits: bool) -> None:
    """Leaving it commits nothing more; the remaining batches of a pass with a commit inside come first."""
    with store_of(passes) as store:
        with flat(passes, store) as training:
            training.run_flat(steps, commits=commits)
            training.cache.drain(staged=False)
            losses = training.losses
        inside = steps % BATCHES * CASE.batch if commits else 0
        assert cursor_of(store) == ((steps - 1) // BATCHES, inside)
        with flat(passes, store) as training:
            training.run_flat()
        assert losses | training.losses == plain[1]
        assert_same_bits(result_of(store, passes, training.net), plain[0])


# -- what counts as trained ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "words"), [(0, "pass 0 ended with 0 of its 4"), (STEPS - 1, "pass 7 ended with 3 of its 4")]
)
def test_an_untrained_pass_of_a_flat_loop_is_refused(passes: tc.PassDataset, trained: int, words: str) -> None:
    """The last batch of all too, if the loop requests one more; a loop that is left there commits nothing more."""
    with store_of(passes) as store:
        for is_left in (True, False):
            with flat(passes, store) as training:
                done = STEPS - len(training.loader)
                batches = iter(training.loader)
                for _ in range(trained - done):
                    training.train(next(batches))
                assert next(batches).num_samples == CASE.batch
                if is_left:
                    del batches
                else:
                    with pytest.raises(StateError, match=f"{words} batches looked up"):
                        [*islice(batches, 2 * BATCHES)]
            assert not is_left or cursor_of(store) == (trained // BATCHES, 0)


def test_a_pass_is_skipped_or_stopped_in_a_flat_loop(passes: tc.PassDataset) -> None:
    """A skipped pass counts as trained, also the last one; a stopped one ends the loop and is not committed."""
    with store_of(passes) as store:
        with flat(passes, store) as training:
            seen = list[int]()
            for batch in training.loader:
                seen.append(training.current.index)
                if training.current.index in {1, 7}:
                    training.current.skip()
                else:
                    training.train(batch)
        assert [seen.count(index) for index in range(PASSES)] == [4, 1, 4, 4, 4, 4, 4, 1]
        assert cursor_of(store) == (PASSES, 0)


@pytest.mark.parametrize(("epochs", "stopped"), [(1, 3), (1, 2), (2, 5)])
def test_a_pass_stopped_at_its_last_batch_is_not_committed(passes: tc.PassDataset, epochs: int, stopped: int) -> None:
    """Nor is the last pass of a loop, whose end came before its last batch."""
    with store_of(passes) as store:
        with flat(passes, store, epochs=epochs) as training:
            for batch in training.loader:
                training.train(batch)
                if batch.end == training.current.num_samples and training.current.index == stopped:
                    training.current.stop()
        assert cursor_of(store) == (stopped, 0)


# -- state ---------------------------------------------------------------------------------------------------


def test_the_state_of_a_flat_loop_is_that_of_the_last_commit(passes: tc.PassDataset) -> None:
    """It loads at that commit, also in a new process, and is refused at another."""
    with store_of(passes) as store:
        with flat(passes, store) as training:
            first = training.loader.state_dict()
            for count, batch in enumerate(training.loader, 1):
                training.train(batch)
                if count == 6:
                    training.cache.commit()
                    state = training.loader.state_dict()
                    break
            assert (state["pass"], state["sample"]) == (1, 2 * CASE.batch)
            assert (first["pass"], first["sample"]) == (0, 0)
        with flat(passes, store) as training:
            loader = training.loader
            loader.load_state_dict(state)
            assert state["batches"] == 6
            assert len(loader) == STEPS  # as StatefulDataLoader's: with those before the state
            assert len([*islice(loader, 3)]) == 3
            assert len(loader) == STEPS - 6
            with pytest.raises(StateError, match="requested the number of batches before it loaded"):
                loader.load_state_dict(state)
            with pytest.raises(StateError, match=r"the checkpoint was made at commit -1 of .* but the cache is at"):
                loader.load_state_dict(first)


# -- evaluation ----------------------------------------------------------------------------------------------


def test_evaluation_batches_have_a_length_and_rows_of_each_iteration(passes: tc.PassDataset, tmp_path: Path) -> None:
    """Their vectors equal a lookup of raw keys; a cache that was not restored is restored first."""
    others = replace(CASE, num_keys=700, data_seed=5, num_samples=90, pass_rows=48).cut(tmp_path / "others")
    with store_of(passes) as store:
        with flat(passes, store) as training:
            cache = training.cache
            batches = cache.evaluation_batches(others, 20)
            assert len(batches) == 3 + 3
            for count, batch in enumerate(training.loader):
                training.train(batch)
                if count in {0, 5}:
                    with torch.no_grad():
                        found = [training.net(one) for one in batches]
                        parts = [training.net(one) for part in cache.evaluate(others) for one in part.batches(20)]
                    assert [len(one) for one in found] == [20, 20, 8, 20, 20, 2]
                    assert all(torch.equal(a, b) for a, b in zip(found, parts, strict=True))
        with flat(passes, store) as restored:
            assert not restored.cache.is_restored
            with torch.no_grad():
                again = [restored.net(one) for one in restored.cache.evaluation_batches(others, 20)]
            assert torch.equal(restored.net.top.weight, training.net.top.weight)
            assert len(again) == len(found)


def test_slices_of_evaluation_batches_end_at_whole_batches(passes: tc.PassDataset, tmp_path: Path) -> None:
    others = replace(CASE, num_keys=700, data_seed=5, num_samples=90, pass_rows=90).cut(tmp_path / "others")
    with store_of(passes) as store, opened(passes, store, eval_budget="8KiB") as cache:
        training = Training(cache)
        cache.restore()
        sizes = [part.num_samples for part in cache.evaluate(others, batch_size=6)]
        assert len(sizes) > 1
        assert sum(sizes) == 90
        assert not any(size % 6 for size in sizes[:-1])
        with torch.no_grad():
            assert [len(training.net(batch)) for batch in cache.evaluation_batches(others, 6)] == [6] * 15
        with pytest.raises(BudgetError, match="the rows of a batch of 90 samples from sample 0 of evaluation sub-da"):
            list(cache.evaluation_batches(others, 90))


# -- one's own dataset ---------------------------------------------------------------------------------------


def clicks_of(folder: Path, data: tc.PassDataset, stop: int | None = None, *, is_flat: bool = True) -> dict[str, Any]:
    """Train out of the dataset itself, to its end or to a commit; return rows and weights."""
    torch.manual_seed(9)
    cache, step = recorded.opened(folder, data)
    with cache:
        batches: Any
        if is_flat:
            batches = cache.batches(BATCH, epochs=2, shuffle=True, dataset=Clicks())
            batches = islice(batches, len(batches))
        else:
            batches = (one for p in cache.passes(epochs=2) for one in p.loader(Clicks(), BATCH, shuffle=True))
        for count, batch in enumerate(batches, 1):
            step(batch)
            if count == stop:
                cache.commit()
                return {}
        if is_flat:  # it has not requested one more batch
            cache.commit()
        assert cursor_of(cache.store) == (2 * len(data), 0)
        return recorded.result(cache, step)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stop", [None, 1, 7, 20])
def test_a_flat_loop_takes_its_batches_out_of_ones_own_dataset(tmp_path: Path, stop: int | None) -> None:
    """A trainer that takes ``len`` batches ends with the bits of a loop over loaders, also after a resume."""
    data = recorded.record(tmp_path / "keys")
    expected = clicks_of(tmp_path / "passes.tc", data, is_flat=False)
    if stop is not None:
        clicks_of(tmp_path / "flat.tc", data, stop)
    assert clicks_of(tmp_path / "flat.tc", data) == expected


def test_a_flat_loop_without_samples_is_refused(tmp_path: Path, passes: tc.PassDataset) -> None:
    keys = tc.write_key_sets(tmp_path / "keys", CASE.tables, [{"a": np.arange(4), "b": np.arange(4)}])
    with tc.InMemoryCache(keys) as cache:
        with pytest.raises(DatasetError, match="has a key set but no samples: pass the keys"):
            cache.batches(8, epochs=1)
        with pytest.raises(DatasetError, match=r"make the dataset with tc.record_key_sets, or train"):
            cache.batches(8, epochs=1, dataset=Clicks())
    with tc.InMemoryCache(passes) as cache, pytest.raises(DatasetError, match=r"make the dataset with tc.record_key_"):
        cache.batches(8, epochs=1, dataset=Clicks())
