"""What the kernel benchmark compares: a step by our kernels and by torch, and rows that go over the link of a GPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from benchmarks.kernel_cases import PIECE_BYTES, RATE, RULES, gradients_of
from tiercache.kernels.pieces import Memory
from tiercache.kernels.step import Step, Vectors

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.kernel_cases import Batch
    from benchmarks.kernel_machines import CudaMachine, Machine


def our_step(machine: Machine, batch: Batch, dim: int, optimizer: str) -> Callable[[], None]:
    """Return a step of the skewed batch: one id for each sample and table, Adagrad or Adam."""
    size = batch.size
    cols = np.arange(size.num_features) * dim
    vectors = Vectors(machine.place(np.full((size.num_slots, dim), 0.01, np.float32)), dim)
    num_states = 1 if optimizer == "adagrad" else 2
    states: list[Any] = [machine.empty((size.num_slots, dim), np.float32) for _ in range(num_states)]
    out, slots = (
        machine.empty((size.num_samples, cols.size * dim), np.float32),
        machine.empty((size.num_entries,), np.int32),
    )
    described, kernels = gradients_of(machine, size, dim), machine.kernels

    def step() -> None:
        kernels.pool_one(vectors, batch.slot_of_local, batch.skewed_ids, batch.bases, cols, out, slots)
        kernels.step(Step(vectors, states, kernels.sort(slots, size.num_slots), described, RULES[optimizer]))

    return step


def torch_step(batch: Batch, dim: int, optimizer: str) -> Callable[[], None]:
    """Return the step of a user of torch alone: ``nn.EmbeddingBag`` for each table, and Adagrad or SparseAdam."""
    size = batch.size
    bags = [
        nn.EmbeddingBag(
            size.rows, dim, mode="sum", sparse=True, _weight=torch.full((size.rows, dim), 0.01, device="cuda")
        )
        for _ in range(size.num_features)
    ]
    weights = [bag.weight for bag in bags]
    rule: torch.optim.Optimizer = (
        torch.optim.Adagrad(weights, lr=RATE) if optimizer == "adagrad" else torch.optim.SparseAdam(weights, lr=RATE)
    )
    ids = [torch.from_numpy(mine.astype(np.int64)).cuda() for mine in batch.skewed_FN]
    grads = [torch.full((size.num_samples, dim), 1e-3, device="cuda") for _ in bags]
    offsets = torch.arange(size.num_samples, device="cuda")

    def step() -> None:
        outs = [bag(mine, offsets) for bag, mine in zip(bags, ids, strict=True)]
        torch.autograd.backward(outs, grads)
        rule.step()
        rule.zero_grad()

    return step


def over_link(machine: CudaMachine, batch: Batch, dim: int) -> dict[str, Any]:
    """Pack straight into pinned host memory and unpack from it, as a switch does, with few blocks.

    Returns times of each way and of both at once, and their shares of copies of as many bytes, one at a time.
    """
    samples, moved = batch.size.samples, batch.moved
    vectors = machine.place(np.full((batch.size.num_slots, dim), 0.01, np.float32))
    num_floats = moved * dim
    staging = machine.empty((num_floats,), np.float32)
    rows = PIECE_BYTES // (4 * dim)
    first_row = np.append(np.arange(0, moved, rows), moved)
    memory, pieces = {}, {}
    for way in ("to_host", "from_host"):
        memory[way], pieces[way] = machine.pinned(4 * num_floats), machine.kernels.pieces(dim)
        there = Memory(memory[way].ptr, num_floats, memory[way])
        pieces[way].add(0, np.diff(first_row), first_row[:-1] * dim, there)

    def pack() -> None:
        machine.kernels.pack((vectors,), batch.slot_of_local, batch.order, pieces["to_host"], over_link=True)

    def unpack() -> None:
        machine.kernels.unpack((vectors,), batch.order, pieces["from_host"], over_link=True)

    record: dict[str, Any] = {}
    copies = 0.0
    for way, call in (("to_host", pack), ("from_host", unpack)):
        copied = machine.times(partial(machine.copy_over_link, memory[way], staging, way), samples).seconds
        seconds = machine.times(call, samples).seconds
        copies += copied
        record |= {
            f"ms_rows_{way}_{dim}": seconds * 1e3,
            f"link_bytes_per_second_{way}_{dim}": 4 * num_floats / copied,
            f"link_share_rows_{way}_{dim}": copied / seconds,
        }
    seconds = machine.times(partial(machine.beside, pack, unpack), samples).seconds
    return record | {
        f"ms_rows_both_ways_{dim}": seconds * 1e3,
        f"link_share_rows_both_ways_{dim}": copies / seconds,
    }
