"""What `benchmarks.scale` trains: sizes, passes that walk over all rows of a table, and a child that is watched."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import tiercache as tc
from benchmarks.drawn_passes import permuted_power_law
from tiercache.data.raw_batch import RawBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tiercache.store.segment import Segment

TABLE = "items"
WATCHED = ("RssAnon", "RssShmem", "RssFile", "VmData")
WATCH_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is trained."""

    passes: int
    samples: int
    """Of each pass; each has one row that no other sample has, and one that is drawn."""
    limit_bytes: int | None
    """Of the training process; None: a tenth of the rows beyond what it takes without them."""
    memory_passes: int
    """Of the model that fits in memory."""
    dim: int = 128
    batch: int = 4096
    width: int = 64
    """Of the dense part."""
    epochs: int = 2

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.passes * self.samples


FULL = Size(passes=324, samples=65_000, limit_bytes=2 << 30, memory_passes=16)
QUICK = Size(passes=40, samples=2000, limit_bytes=None, memory_passes=4, batch=500)
TINY = replace(QUICK, passes=12, samples=500, batch=250)


@dataclass(frozen=True, slots=True)
class Walk:
    """Passes that walk once over all rows of a table, and draw as many again by a power law."""

    size: Size

    def schema(self) -> tc.Schema:
        """Return the schema: two features look into one table."""
        table = tc.Table(
            name=TABLE, dim=self.size.dim, optimizer=tc.optim.Adagrad(learning_rate=0.05),
            initializer=tc.init.Uniform(low=-0.05, high=0.05),
        )  # fmt: skip
        features = tuple(tc.Feature(name=name, table=TABLE) for name in ("walked", "drawn"))
        return tc.Schema(label="label", dense=(), features=features, tables=(table,))

    def draw(self, index: int) -> RawBatch:
        """Return a pass."""
        rows, samples = self.size.rows, self.size.samples
        rng = np.random.default_rng((7, index))
        factor = int(0.382 * rows)
        while math.gcd(factor, rows) > 1:
            factor += 1
        walked = (np.arange(index * samples, (index + 1) * samples, dtype=np.int64) * factor) % rows
        keys = {"walked": walked, "drawn": permuted_power_law(rng, rows, samples)}
        return RawBatch.of(self.schema(), keys, label=rng.integers(0, 2, samples).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Child:
    """What a child process did."""

    returned: int
    peaks: Mapping[str, int]
    """The most of each that was seen, in bytes; Resident: memory that is no file's."""
    found: dict[str, Any]
    """What it wrote at its end; empty where it was killed."""
    said: str


def watched(work: Mapping[str, Any], out: Path) -> Child:
    """Run `benchmarks.scale_worker` in a process of its own and watch its memory until it ends."""
    out.unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.scale_worker", json.dumps({**work, "out": str(out)})]
    errors = out.with_suffix(".err")
    peaks = dict.fromkeys((*WATCHED, "Resident"), 0)
    with errors.open("wb") as stderr, subprocess.Popen(command, stderr=stderr, cwd=Path(__file__).parents[1]) as child:
        status = Path(f"/proc/{child.pid}/status")
        while child.poll() is None:
            seen = _status(status)
            for name, value in seen.items():
                peaks[name] = max(peaks[name], value)
            peaks["Resident"] = max(peaks["Resident"], seen.get("RssAnon", 0) + seen.get("RssShmem", 0))
            time.sleep(WATCH_SECONDS)
    said = errors.read_text(errors="replace")
    return Child(child.returncode, peaks, json.loads(out.read_text()) if out.exists() else {}, said)


def _status(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    pairs = (line.split(":") for line in lines)
    return {name: 1024 * int(value.split()[0]) for name, value in pairs if name in WATCHED}


def compared(first: Path, second: Path) -> tuple[int, int]:
    """Return the rows of a store, and how many are in pages that another one of the same training has otherwise.

    Segment by segment, as passes wrote them, so that nothing is sorted: a disk has no room for these rows once more.
    Raises RuntimeError for stores that do not have the same segments.
    """
    with tc.Store.open(first, mode="r") as one, tc.Store.open(second, mode="r") as other:
        mine, theirs = one.snapshot, other.snapshot
        pairs = list(zip(_by_pass(mine.segments), _by_pass(theirs.segments), strict=False))
        if len(mine.segments) != len(theirs.segments) or any(a.layouts != b.layouts for a, b in pairs):
            raise RuntimeError(f"{one.label} and {other.label} have not the same segments")
        different = 0
        for a, b in pairs:
            for group, layout in enumerate(a.layouts):
                rooms = np.zeros((2, layout.bytes_of_block(0)), np.uint8)
                for block in range(mine.first_blocks[a.id][group], layout.num_blocks):
                    low, high = layout.pages_of_block(block)
                    for store, segment, room in ((one, a, rooms[0]), (other, b, rooms[1])):
                        store.read(segment, group, low, high, room[: layout.bytes_of_block(block)])
                    keys = np.array_equal(one.read_keys(a, group, block), other.read_keys(b, group, block))
                    if not keys or not np.array_equal(rooms[0], rooms[1]):
                        different += layout.row_of_page(high) - layout.row_of_page(low)
        return one.live_rows(TABLE), different


def _by_pass(segments: Iterable[Segment]) -> list[Segment]:
    return sorted(segments, key=lambda segment: segment.pass_index)
