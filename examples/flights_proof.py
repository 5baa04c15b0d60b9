"""Whether two trainings ended with the same bits: every number of every row, optimizer states, dense weights."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import tiercache as tc
from examples.flights_training import Settings, Training

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training left."""

    fields: Callable[[str, NDArray[np.int64]], tuple[NDArray[np.float32], ...]]
    """The vectors and every optimizer state of a table's keys."""
    dense: dict[str, torch.Tensor]
    """Weights of the dense layers and the state of their optimizer."""

    @classmethod
    def tiered(cls, training: Training) -> Trained:
        """Read rows from device, host and store."""
        return cls(training.cache.live_rows().fields, _dense(training))

    @classmethod
    def resident(cls, training: Training) -> Trained:
        """Read rows from memory."""

        def fields(name: str, keys: NDArray[np.int64]) -> tuple[NDArray[np.float32], ...]:
            known = training.cache.keys(name)
            order = np.argsort(known)
            places = order[np.searchsorted(known, keys, sorter=order)]
            assert np.array_equal(known[places], keys)
            return tuple(field[places] for field in training.cache.fields(name))

        return cls(fields, _dense(training))


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far two trainings agree."""

    rows: int
    row_numbers: int
    """Numbers of vectors and optimizer states."""
    dense_numbers: int
    """Numbers of dense weights and of their optimizer's state."""
    different: tuple[str, ...]
    """What differs, with how many numbers; empty where every bit is the same."""

    def __str__(self) -> str:
        more = len(self.different) - 3
        return ", ".join(self.different[:3]) + (f" and in {more} more tables and weights" if more > 0 else "")


def compare(passes: tc.PassDataset, ours: Trained, theirs: Trained) -> Comparison:
    """Compare every key of every table, and everything dense, bit by bit."""
    rows = row_numbers = 0
    different: list[str] = []
    for table in passes.tables:
        keys = np.unique(np.concatenate([p.keys(table.name) for p in passes.passes]))
        wrong = 0
        for mine, other in zip(ours.fields(table.name, keys), theirs.fields(table.name, keys), strict=True):
            wrong += int(np.count_nonzero(_bits(mine) != _bits(other)))
            row_numbers += mine.size
        rows += keys.size
        if wrong:
            different.append(f"{wrong:,} numbers of table {table.name}")
    if ours.dense.keys() != theirs.dense.keys():
        different.append("the names of dense weights")
    for name in sorted(ours.dense.keys() & theirs.dense.keys()):
        wrong = int(np.count_nonzero(_bits(ours.dense[name].numpy()) != _bits(theirs.dense[name].numpy())))
        if wrong:
            different.append(f"{wrong:,} numbers of {name}")
    return Comparison(rows, row_numbers, sum(t.numel() for t in ours.dense.values()), tuple(different))


def train_in_a_child(folder: Path, store: Path, *, die_in_pass: int | None = None) -> None:
    """Train a store in a process of its own, which kills itself in ``die_in_pass``.

    Raises RuntimeError, with what it said, where it ends in any other way than it should.
    """
    command = [sys.executable, "-m", "examples.flights_training", str(folder), str(store)]
    if die_in_pass is not None:
        command += ["--die-in-pass", str(die_in_pass)]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    expected = 0 if die_in_pass is None else -signal.SIGKILL
    if ended.returncode != expected:
        raise RuntimeError(f"the child process ended with {ended.returncode}, not {expected}:\n{ended.stderr}")


def last_commit(path: Path) -> tuple[int, int]:
    """Return the number of the newest commit of a store, and the pass it goes on with."""
    with tc.Store.open(path, mode="r") as store:
        assert store.commit is not None
        return store.commit.id, store.commit.cursor.pass_index


def at_the_end(cache: tc.TierCache, settings: Settings) -> Training:
    """Return the training whose last pass a store has committed. Raises RuntimeError where passes are left."""
    training = Training.begin(cache, settings)
    for p in cache.passes(epochs=settings.epochs):
        raise RuntimeError(f"{p} is still to be trained")
    return training


def _bits(numbers: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(numbers).reshape(-1).view(f"u{numbers.dtype.itemsize}")


def _dense(training: Training) -> dict[str, torch.Tensor]:
    tensors = {f"weights {name}": t for name, t in training.model.state_dict().items()}
    for index, (weights, parameter) in enumerate(training.model.named_parameters()):
        if not weights.endswith(".handle"):  # its state means nothing, and is not committed
            state = training.optimizer.state.get(parameter, {})
            tensors |= {f"state {name} of weights {index}": t for name, t in state.items()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
