"""An independent oracle: torch's own embedding functions over whole tables, and row optimizers written out by hand."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import tiercache as tc
from tests.kernels.stochastic import row_words
from tests.train.cases import Case, all_keys


def initial_row(table: tc.Table, key: int) -> NDArray[np.float32]:
    """Return the documented initial row, number by number in NumPy; uniform, zeros or constant."""
    match table.initializer:
        case tc.init.Uniform(low=low, high=high):
            low, high = np.float32(low), np.float32(high)
            units = [
                np.float32(word >> 8) * np.float32(2.0**-24)
                for word in row_words(key, table.table_id, table.seed, table.dim)
            ]
            return np.array([low + unit * np.float32(high - low) for unit in units], np.float32)
        case tc.init.Constant(value=value):
            return np.full(table.dim, value, np.float32)
        case tc.init.Zeros():
            return np.zeros(table.dim, np.float32)
    raise AssertionError(f"{table.initializer} has no documented bits")


class Oracle:
    """All rows of a case in one parameter per table, looked up by torch and stepped by torch or by hand."""

    def __init__(self, case: Case, passes: tc.PassDataset, device: torch.device) -> None:
        self.case, self.passes, self.device = case, passes, device
        self.tables = {t.name: t for t in case.tables}
        self.keys = {name: all_keys(passes, name) for name in self.tables}
        self.weights = {
            name: nn.Parameter(self._there(np.stack([initial_row(table, int(k)) for k in self.keys[name]])))
            for name, table in self.tables.items()
        }
        self.touched = {name: self._there(np.zeros(keys.size, bool)) for name, keys in self.keys.items()}
        self.states = {
            name: [
                self._there(np.full((self.keys[name].size, one.width), one.initial, np.float32))
                for one in table.optimizer.state_fields(table.dim)
            ]
            for name, table in self.tables.items()
        }
        self.steps = dict.fromkeys(self.tables, 0)
        self.rates = {name: table.optimizer.learning_rate for name, table in self.tables.items()}
        self.optimizers = {name: self._optimizer(name) for name in self.tables}

    def _there(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self.device)

    def _optimizer(self, name: str) -> Any:
        """Return torch's optimizer for a table, or None for decay of touched rows, momentum and row-wise rules."""
        match self.tables[name].optimizer:
            case tc.optim.SGD(learning_rate=rate, decay=0.0, momentum=0.0):
                return torch.optim.SGD([self.weights[name]], lr=rate)
            case tc.optim.Adagrad(learning_rate=rate, eps=eps, initial_accumulator=first, decay=0.0):
                return torch.optim.Adagrad([self.weights[name]], lr=rate, eps=eps, initial_accumulator_value=first)
            case tc.optim.Adam(learning_rate=rate, beta1=one, beta2=two, eps=eps, decay=0.0, corrected_eps=False):
                return torch.optim.SparseAdam([self.weights[name]], lr=rate, betas=(one, two), eps=eps)
        return None

    def _rows(self, batch: tc.Batch, sub_dataset: int, feature: str, table: str) -> torch.Tensor:
        keys = self.passes.passes[sub_dataset].keys(table)[batch.ids[feature].ids]
        rows = self._there(np.searchsorted(self.keys[table], keys))
        self.touched[table][rows] = True
        return rows

    def bags(
        self,
        batch: tc.Batch,
        sub_dataset: int,
        weights: Mapping[str, torch.Tensor] | None = None,
        features: Sequence[str] | None = None,
    ) -> torch.Tensor:
        """Pool features, by default all: (N, sum of dims)."""
        outs = []
        for spec in (spec for spec in self.case.specs if features is None or spec.name in features):
            ids, rows = batch.ids[spec.name], self._rows(batch, sub_dataset, spec.name, spec.table)
            ends = self._there(np.arange(batch.num_samples + 1) if ids.offsets is None else ids.offsets)
            given, mode = (weights or {}).get(spec.name), spec.mode
            if given is None and ids.weights is not None:
                given = self._there(ids.weights)
            if given is not None and mode == "mean":  # torch weights sums only
                lengths = ends.diff()
                given, mode = given / lengths.repeat_interleave(lengths), "sum"
            outs.append(
                nn.functional.embedding_bag(
                    rows, self.weights[spec.table], ends, mode=mode, include_last_offset=True, per_sample_weights=given
                )
            )
        return torch.cat(outs, dim=1)

    def vectors(self, batch: tc.Batch, sub_dataset: int) -> dict[str, torch.Tensor]:
        return {
            spec.name: nn.functional.embedding(
                self._rows(batch, sub_dataset, spec.name, spec.table), self.weights[spec.table]
            )
            for spec in self.case.specs
        }

    def set_learning_rate(self, rate: float) -> None:
        for name, optimizer in self.optimizers.items():
            self.rates[name] = rate
            if optimizer is not None:
                optimizer.param_groups[0]["lr"] = rate

    def step(self, tables: Iterable[str] | None = None) -> None:
        """Step tables, by default all, and drop all gradients. SparseAdam steps only rows that were looked up."""
        for name, optimizer in self.optimizers.items():
            weight, touched = self.weights[name], self.touched[name]
            if weight.grad is not None and (tables is None or name in tables):
                if optimizer is None:
                    self._step_by_hand(name)
                else:
                    if isinstance(optimizer, torch.optim.SparseAdam):
                        rows = torch.nonzero(touched)[:, 0]
                        weight.grad = torch.sparse_coo_tensor(
                            rows[None], weight.grad[rows], weight.shape, check_invariants=True
                        )
                    optimizer.step()
            weight.grad = None
            touched[:] = False

    def difference(self, cache: Any) -> float:
        """Return the largest difference of a number of any row from those of a cache in memory."""
        found = []
        for name, weight in self.weights.items():
            rows = cache.fields(name)[0][np.argsort(cache.keys(name))].copy()
            found.append(float((torch.from_numpy(rows) - weight.detach().cpu()).abs().max()))
        return max(found)

    @torch.no_grad()
    def _step_by_hand(self, name: str) -> None:
        spec, weight, touched = self.tables[name].optimizer, self.weights[name], self.touched[name]
        self.steps[name] += 1
        rows, states = weight[touched], [state[touched] for state in self.states[name]]
        match spec:
            case tc.optim.SGD(momentum=momentum, nesterov=nesterov) if momentum:
                torchs = torch.optim.SGD([rows], momentum=momentum, nesterov=nesterov, weight_decay=spec.decay)
                rows = self._step_of_torch(name, torchs, {"momentum_buffer": states[0]})
            case tc.optim.Adam(decoupled=True):
                root = (1 - spec.beta2 ** self.steps[name]) ** 0.5  # torch adds eps after this correction
                torchs = torch.optim.AdamW(
                    [rows], betas=(spec.beta1, spec.beta2), eps=spec.eps / root, weight_decay=spec.decay
                )
                step = torch.tensor(self.steps[name] - 1.0)
                rows = self._step_of_torch(name, torchs, {"step": step, "exp_avg": states[0], "exp_avg_sq": states[1]})
            case _:
                rows = self._stepped(name, rows, weight.grad[touched], states)
        weight[touched] = rows
        for state, new in zip(self.states[name], states, strict=True):
            state[touched] = new

    def _step_of_torch(self, name: str, optimizer: Any, state: dict[str, torch.Tensor]) -> torch.Tensor:
        """Step only touched rows with a torch optimizer, which changes their state in place; return them."""
        (group,) = optimizer.param_groups
        (rows,) = group["params"]
        group["lr"], optimizer.state[rows] = self.rates[name], state
        rows.grad = self.weights[name].grad[self.touched[name]]
        optimizer.step()
        return rows

    def _stepped(self, name: str, rows: Any, gradient: Any, states: list[torch.Tensor]) -> torch.Tensor:
        """Return touched rows after a step written by hand; their states change in place."""
        spec, rate, step = self.tables[name].optimizer, self.rates[name], self.steps[name]
        if getattr(spec, "decoupled", False):
            rows = rows * (1 - rate * spec.decay)
        else:
            gradient = gradient + spec.decay * rows
        squares = gradient * gradient
        if spec.row_wise:
            squares = squares.mean(dim=1, keepdim=True)
        match spec:
            case tc.optim.SGD():
                return rows - rate * gradient
            case tc.optim.Adagrad(eps=eps) | tc.optim.RowWiseAdagrad(eps=eps):
                states[0] += squares
                return rows - rate * gradient / (states[0].sqrt() + eps)
            case tc.optim.Adam(beta1=one, beta2=two, eps=eps) | tc.optim.RowWiseAdam(beta1=one, beta2=two, eps=eps):
                states[0] += (gradient - states[0]) * (1 - one)
                states[1] += (squares - states[1]) * (1 - two)
                rate = rate * (1 - two**step) ** 0.5 / (1 - one**step)
                eps = eps * (1 - two**step) ** 0.5 if getattr(spec, "corrected_eps", False) else eps
                return rows - rate * states[0] / (states[1].sqrt() + eps)
            case tc.optim.RowWiseRMSprop(alpha=alpha, eps=eps):
                states[0].mul_(alpha).add_(squares, alpha=1 - alpha)
                return rows - rate * gradient / (states[0].sqrt() + eps)
        raise AssertionError(f"{spec} is not written out")
