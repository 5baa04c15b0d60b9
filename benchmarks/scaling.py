"""What travels on many devices, by formula: python -m benchmarks.scaling [--json FILE].

No measurement: it evaluates the formulas of docs/scaling.md for machines that are not at hand, and prints the table
that stands there. Change a `Machine` or a `Load` to see your own.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.zipf import EXPONENT

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_LOCAL_IDS = 1 << 31
"""Keys that a table may have in one pass: a local id is an int32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One device and what it reaches, in bytes per second."""

    device_budget: float = 60e9
    in_node: float = 400e9
    """Of the link to each of the 8 devices of a node, together."""
    between_nodes: float = 50e9
    store: float = 6e9
    """Of this device's share of the disks, read and written bytes together."""
    latency: float = 10e-6
    """Seconds for a message to one peer."""
    node: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One table by row, looked up by every sample."""

    samples: int = 4096
    """Of a batch, for each device."""
    lookups: int = 26
    """Ids of a sample."""
    dim: int = 64
    state: int = 64
    """Numbers of optimizer state of a row."""
    wire: int = 4
    """Bytes of a number on the wire."""
    dense: float = 10e6
    """Parameters of the dense part."""
    epoch: float = 4e9
    """Samples of an epoch."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its state."""
        return 4 * (self.dim + self.state)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What a number of devices moves. Times are seconds for one batch."""

    devices: int
    table_bytes: float
    pass_rows: float
    passes: float
    unique: float
    wire_bytes: float
    """Sent by one rank for one batch: ids, rows it serves, gradients."""
    message_bytes: float
    """Of rows, to one peer."""
    wire: float
    messages: float
    dense: float
    store: float

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(("wire", "messages", "dense", "store"), key=lambda name: float(getattr(self, name)))


def distinct(draws: float, rows: float) -> float:
    """Return the distinct rows that so many draws are expected to find: sum over k of 1 - exp(-draws * p_k)."""
    single = min(rows, 4096)  # ranks one by one, the others in stretches
    edges = np.unique(np.concatenate([np.arange(single + 1), np.geomspace(single, rows, 20_000)])) + 0.5
    widths, middles = np.diff(edges), (edges[:-1] + edges[1:]) / 2
    shares = middles**-EXPONENT
    shares /= (shares * widths).sum()
    return float((-np.expm1(-draws * shares) * widths).sum())


def samples_for(pass_rows: float, rows: float, load: Load) -> float:
    """Return after how many samples a pass has so many rows."""
    low, high = 1.0, load.epoch
    for _ in range(60):
        middle = np.sqrt(low * high)
        low, high = (middle, high) if distinct(load.lookups * middle, rows) < pass_rows else (low, middle)
    return float(high)


def traffic(devices: int, table_bytes: float, machine: Machine, load: Load) -> Traffic:
    """Evaluate the formulas."""
    rows = table_bytes / load.row_bytes
    used = min(rows, distinct(load.lookups * load.epoch, rows))
    pass_rows = min(devices * machine.device_budget / load.row_bytes, used, MOST_LOCAL_IDS)
    pass_samples = load.epoch if pass_rows == used else samples_for(pass_rows, rows, load)
    steps = pass_samples / (load.samples * devices)
    away = (devices - 1) / devices
    unique = distinct(load.samples * load.lookups, rows)
    wire_bytes = unique * away * (4 + 2 * load.dim * load.wire)
    peers_away = max(0, devices - machine.node)
    speed = machine.in_node if devices <= machine.node else machine.between_nodes * (devices - 1) / peers_away
    once = pass_rows == used
    return Traffic(
        devices=devices,
        table_bytes=table_bytes,
        pass_rows=pass_rows,
        passes=load.epoch / pass_samples,
        unique=unique,
        wire_bytes=wire_bytes,
        message_bytes=0 if devices == 1 else unique * load.dim * load.wire / devices,
        wire=wire_bytes / speed,
        messages=5 * (devices - 1) * machine.latency,
        dense=2 * away * 4 * load.dense / speed,
        store=0 if once else 2 * pass_rows * load.row_bytes / devices / machine.store / steps,
    )


def table(machine: Machine = Machine(), load: Load = Load()) -> list[Traffic]:
    """Return the rows of the table in docs/scaling.md."""
    return [traffic(w, size, machine, load) for size in (100e9, 10e12, 1e15) for w in (1, 8, 64, 1024)]


def markdown(lines: Sequence[Traffic]) -> str:
    """Return the table as it stands in docs/scaling.md."""
    head = (
        "| rows | devices | rows of a pass | passes an epoch | unique ids of a rank's batch | sent, MB | a message, kB "
        "| wire, ms | messages, ms | dense, ms | store, ms | bound |"
    )
    found = [head, "|---" * 12 + "|"]
    for line in lines:
        size = next(f"{line.table_bytes / unit:g} {name}" for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"))
                    if line.table_bytes >= unit)  # fmt: skip
        numbers = [
            f"{line.pass_rows / 1e6:,.0f} M", f"{line.passes:,.0f}", f"{line.unique:,.0f}",
            f"{line.wire_bytes / 1e6:.1f}", f"{line.message_bytes / 1e3:,.1f}",
            *(f"{1e3 * float(getattr(line, name)):.2f}" for name in ("wire", "messages", "dense", "store")),
        ]  # fmt: skip
        found.append(f"| {size} | {line.devices:,} | " + " | ".join([*numbers, line.bound]) + " |")
    return "\n".join(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it takes a second")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    lines = table()
    print(markdown(lines))
    if options.json:
        names = ("pass_rows", "passes", "unique", "wire_bytes", "message_bytes", "wire", "messages", "dense", "store")
        record = {
            f"{name}_{line.devices}x{line.table_bytes:.0e}": getattr(line, name) for line in lines for name in names
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
