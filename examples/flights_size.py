"""How large the demo is, and what its rows take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from examples.flights_training import Settings
from tiercache.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    import tiercache as tc


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How large a demo is."""

    first: int | None
    """So many of the earliest flights; None: all."""
    device_budget: str
    host_budget: str
    eval_budget: str
    batch: int
    batch_multiple: int
    """Passes end at multiples of so many samples."""

    @property
    def settings(self) -> Settings:
        """What every process of the demo trains with."""
        return Settings(
            device_budget=parse_bytes(self.device_budget),
            host_budget=parse_bytes(self.host_budget),
            eval_budget=parse_bytes(self.eval_budget),
            batch=self.batch,
        )


FULL = Size(
    first=None, device_budget="4.25MiB", host_budget="16MiB", eval_budget="2MiB", batch=2048, batch_multiple=1024
)
QUICK = Size(
    first=60_000, device_budget="1MiB", host_budget="6.5MiB", eval_budget="256KiB", batch=512, batch_multiple=512
)


def rows_table(passes: tc.PassDataset) -> tuple[Table, int]:
    """Return a table of what the rows of each table take, for people, and the bytes of all."""
    shown = Table(title=f"rows of {len(passes)} passes", title_justify="left")
    for name in ("table", "optimizer", "rows", "bytes a row", "bytes", "most rows of a pass"):
        shown.add_column(name, justify="left" if name in {"table", "optimizer"} else "right")
    all_rows = all_bytes = 0
    for spec in sorted(passes.tables, key=lambda table: table.name):
        rows = np.unique(np.concatenate([p.keys(spec.name) for p in passes.passes])).size
        all_rows, all_bytes = all_rows + rows, all_bytes + rows * spec.row_bytes
        shown.add_row(
            spec.name, type(spec.optimizer).__name__, f"{rows:,}", str(spec.row_bytes),
            format_bytes(rows * spec.row_bytes), f"{max(p.rows(spec.name) for p in passes.passes):,}",
        )  # fmt: skip
    largest = max(sum(p.rows(spec.name) for spec in passes.tables) for p in passes.passes)
    shown.add_section()
    shown.add_row("all", "", f"{all_rows:,}", "", format_bytes(all_bytes), f"{largest:,}")
    return shown, all_bytes
