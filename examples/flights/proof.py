"""Bitwise comparison of two trainings: rows, optimizer states and dense weights."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tiercache as tc
    from examples.flights.training import Training

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a training."""

    rows: dict[str, tuple[Any, ...]]
    """The vectors and every optimizer state of each table, (rows, width) each, in key order."""
    dense: dict[str, Any]
    """Weights of the dense layers and the state of their optimizer."""

    @classmethod
    def of(cls, training: Training, passes: tc.PassDataset) -> Trained:
        """Read every row, from device, host, store or memory."""
        rows = {}
        for table in passes.tables:
            keys = np.unique(np.concatenate([p.keys(table.name) for p in passes.passes]))
            rows[table.name] = tuple(np.empty((keys.size, field.width), field.dtype) for field in table.fields)
            training.cache.live_rows().fill(table.name, keys, rows[table.name])
        dense = {f"weights {name}": tensor for name, tensor in training.model.state_dict().items()}
        for name, parameter in training.model.named_parameters():
            if not name.endswith(".anchor"):  # meaningless state that is not committed
                state = training.optimizer.state.get(parameter, {})
                dense |= {f"{kind} of {name}": tensor for kind, tensor in state.items()}
        return cls(rows, {name: tensor.detach().clone().numpy() for name, tensor in dense.items()})

    @property
    def size(self) -> str:
        """Describe the amount of data to compare."""
        rows = sum(len(fields[0]) for fields in self.rows.values())
        numbers = sum(field.size for fields in self.rows.values() for field in fields)
        return (
            f"{rows:,} rows with {numbers:,} numbers (vectors and optimizer states) and "
            f"{sum(one.size for one in self.dense.values()):,} numbers of dense layers and their optimizer"
        )

    def differences(self, other: Trained) -> list[str]:
        """Compare bit by bit; return the differing parts with the number of differing values."""
        found = []
        for name, fields in self.rows.items():
            if wrong := sum(map(_count_other_bits, fields, other.rows[name])):
                found.append(f"{wrong:,} numbers of table {name}")
        if self.dense.keys() != other.dense.keys():
            found.append("the names of dense weights")
        both = {
            name: _count_other_bits(self.dense[name], other.dense[name]) for name in self.dense if name in other.dense
        }
        return found + [f"{wrong:,} numbers of {name}" for name, wrong in both.items() if wrong]


def _count_other_bits(mine: Any, other: Any) -> int:
    mine, other = (np.ascontiguousarray(one).reshape(-1).view(f"u{one.dtype.itemsize}") for one in (mine, other))
    return int(np.count_nonzero(mine != other))


def train_in_a_child(folder: Path, store: str, *options: str, dies: bool = False) -> None:
    """Train a store in a separate process.

    Raises RuntimeError with its output if it does not end as expected.
    """
    command = [sys.executable, "-m", "examples.flights.training", "--folder", str(folder), "--store", store, *options]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    expected = -signal.SIGKILL if dies else 0
    if ended.returncode != expected:
        raise RuntimeError(f"the child process ended with {ended.returncode}, not {expected}:\n{ended.stderr}")
