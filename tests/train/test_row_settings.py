"""Settings of row optimizers that change between steps: they apply from the next step, as in torch, or are refused."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import tiercache as tc

KEYS, DIM, BATCH, STEPS = 4, 5, 8, 8


def changes(name: str, *values: Any) -> Callable[[dict[str, Any], int], None]:
    """Return a function that sets the next value of a group's setting after each step."""

    def change(group: dict[str, Any], step: int) -> None:
        group[name] = values[step % len(values)]

    return change


SGD, ADAM = tc.optim.SGD(learning_rate=0.1, momentum=0.9), tc.optim.Adam(learning_rate=0.1, eps=1e-30)
ADAMW = tc.optim.Adam(learning_rate=0.1, eps=1e-30, decay=0.5, decoupled=True)
OF_TORCH = tc.optim.Adam(learning_rate=0.1, eps=0.5, corrected_eps=True)
CASES = {
    "momentum": (SGD, changes("momentum", 0.5, 0.0, 0.0, 0.75)),
    "nesterov": (SGD, changes("nesterov", True, False)),
    "decay of SGD": (SGD, changes("weight_decay", 0.1, 0.0)),
    "rate of SGD": (SGD, changes("lr", 0.2, 0.05)),
    "decay of AdamW": (ADAMW, changes("weight_decay", 0.1, 0.0)),
    "rate of AdamW": (ADAMW, changes("lr", 0.2, 0.05)),
    "decoupled decay": (ADAMW, changes("decoupled_weight_decay", False, True)),
    "alpha": (tc.optim.RowWiseRMSprop(learning_rate=0.1), changes("alpha", 0.5, 0.9)),
    "eps of torch's Adam": (OF_TORCH, changes("eps", 0.1, 0.01)),
    "eps of torch's AdamW": (dataclasses.replace(OF_TORCH, decoupled=True), changes("eps", 0.1, 0.01)),
    "betas of torch's Adam": (OF_TORCH, changes("betas", (0.5, 0.9), (0.8, 0.99))),
    "betas": (ADAM, changes("betas", (0.5, 0.9), (0.8, 0.99))),
}


def torchs(optimizer: Any, rows: torch.Tensor) -> torch.optim.Optimizer:
    if isinstance(optimizer, tc.optim.RowWiseRMSprop):
        return torch.optim.RMSprop([rows], 0.1)
    if isinstance(optimizer, tc.optim.SGD):
        return torch.optim.SGD([rows], 0.1, momentum=optimizer.momentum)
    kind = torch.optim.AdamW if optimizer.decoupled else torch.optim.Adam
    return kind([rows], 0.1, eps=optimizer.eps, weight_decay=optimizer.decay)


def train(folder: Path, optimizer: Any, begin: Callable[[Any], Callable[[], None]]) -> list[torch.Tensor]:
    """Train rows that every step touches, and torch's parameter of the same rows; return both.

    Rows of row-wise optimizers have one number: torch has none that are row-wise.

    begin: takes an optimizer of the one or the other, and returns what to do after each of its steps.
    """
    start, dim = tc.init.Uniform(low=-1, high=1), 1 if optimizer.row_wise else DIM
    schema = tc.Schema(
        features=(tc.Feature(name="f"),), tables=(tc.Table(name="f", dim=dim, optimizer=optimizer, initializer=start),)
    )
    keys = np.arange(BATCH * STEPS) % KEYS
    data = tc.extract([{"f": keys}], schema, folder / "passes", device_budget="1MiB", progress=False)
    model, weight = (
        tc.Embedding(schema, "f"),
        torch.randn(STEPS, BATCH, DIM, generator=torch.Generator().manual_seed(0)),
    )
    with tc.InMemoryCache(data, model=model) as cache:
        order = np.argsort(cache.keys("f"))
        rows = torch.from_numpy(cache.fields("f")[0][order].copy()).requires_grad_()
        other = torchs(optimizer, rows)
        after = [begin(cache.optimizer.rows), begin(other)]
        for p in cache.passes(epochs=1):
            for step, batch in enumerate(p.batches(BATCH)):
                for vectors in (model(batch), rows[keys[step * BATCH :][:BATCH]]):
                    (vectors * weight[step]).sum().backward()
                for one, change in zip((cache.optimizer, other), after, strict=True):
                    one.step()
                    one.zero_grad()
                    change()
        return [torch.from_numpy(cache.fields("f")[0][order].copy()), rows.detach()]


@pytest.mark.parametrize("what", CASES)
def test_a_setting_counts_from_the_next_step_on(tmp_path: Path, what: str) -> None:
    """Within torch's rounding, with the same values; momentum 0 does not change the buffer."""
    optimizer, change = CASES[what]

    def begin(one: torch.optim.Optimizer) -> Callable[[], None]:
        steps = iter(range(STEPS))
        return lambda: change(one.param_groups[0], next(steps))

    mine, torchs_own = train(tmp_path, optimizer, begin)
    torch.testing.assert_close(mine, torchs_own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_a_cycle_of_rates_and_momentum_is_that_of_torch(tmp_path: Path, optimizer: Any) -> None:
    """OneCycleLR changes momentum or the first beta with the rate."""
    mine, torchs_own = train(tmp_path, optimizer, lambda one: OneCycleLR(one, 0.5, total_steps=STEPS + 1).step)
    torch.testing.assert_close(mine, torchs_own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{"momentum": 0.5}, {"momentum": 0.5, "nesterov": True}])
def test_momentum_of_rows_without_a_buffer_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    """It would do nothing."""
    with pytest.raises(ValueError, match=r"momentum of table 'f' is 0.5.* no momentum_buffer: use SGD"):
        train(tmp_path, tc.optim.SGD(), lambda one: lambda: one.param_groups[0].update(settings))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("momentum", {"momentum": 1.0}),
        ("nesterov", {"nesterov": True, "momentum": 0.0}),
        ("decay", {"weight_decay": -1}),
    ],
)
def test_settings_that_no_optimizer_takes_are_refused(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    def begin(one: torch.optim.Optimizer) -> Callable[[], None]:
        mine = settings if "table" in one.param_groups[0] else {}
        return lambda: one.param_groups[0].update(mine)

    with pytest.raises(ValueError, match=f"{name} of SGD is"):
        train(tmp_path, SGD, begin)
