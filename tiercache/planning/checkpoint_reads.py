"""Planned reads of checkpoints: bytes, requests and order of the first uses of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tiercache.store.tensor_file import CHUNK_BYTES, GAP_BYTES, READ_BYTES, Reads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiercache.planning.pass_plan import PassPlan
    from tiercache.planning.row_offsets import RowOffsets


class TensorSize(NamedTuple):
    """The size of a tensor that rows start from."""

    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointReads:
    """The reads of a schedule of which some or all tables start from checkpoints."""

    positions: RowOffsets
    tensors: Mapping[str, TensorSize]
    """By table that starts from a checkpoint."""

    def of(self, plan: PassPlan) -> Reads:
        """Return the reads of a pass, at most: rows of one table are spread evenly over its tensor."""
        total = Reads()
        for group, spec in enumerate(self.positions.groups):
            rows_T = np.diff(self.positions.table_starts(plan.sub_dataset, group))
            for table, rows in zip(spec.tables, rows_T.tolist(), strict=True):
                if (tensor := self.tensors.get(table.name)) is not None and plan.generated_G[group]:
                    new = rows * plan.generated_G[group] // max(1, plan.rows_G[group])
                    total = total.plus(expected_reads(tensor, new))
        return total

    def rows(self, plan: PassPlan) -> int:
        """Return the new rows of a pass in groups with tables that start from checkpoints."""
        return sum(
            rows
            for rows, spec in zip(plan.generated_G, self.positions.groups, strict=True)
            if any(table.name in self.tensors for table in spec.tables)
        )

    def how(self, reads: Reads) -> Literal["nothing", "in order", "row by row"]:
        """Return how a pass reads: most of the tensors from end to end, or rows with gaps between them."""
        whole = sum(one.rows * one.row_bytes for one in self.tensors.values())
        if not reads.num_bytes:
            return "nothing"
        return "in order" if 2 * reads.num_bytes > whole else "row by row"


def expected_reads(tensor: TensorSize, rows: int) -> Reads:
    """Return the approximate cost of reading ``rows`` of a tensor that are spread evenly; close neighbors cost less.

    With a share s of the chunks in use, gaps between them have lengths of a geometric distribution. Those of up to
    GAP_BYTES are read along, so that from about a fifth of the chunks on the tensor is read from end to end.
    """
    if rows <= 0:
        return Reads()
    chunks, most = max(1, -(-tensor.rows * tensor.row_bytes // CHUNK_BYTES)), GAP_BYTES // CHUNK_BYTES
    in_chunk = CHUNK_BYTES / tensor.row_bytes + 1  # a row may be in two chunks
    s = float(-np.expm1(in_chunk * np.log1p(-min(rows / max(1, tensor.rows), 1 - 1e-12))))
    share = min(1.0, s + sum(length * s * s * (1 - s) ** length for length in range(1, most + 1)))
    num_bytes = int(share * chunks) * CHUNK_BYTES
    return Reads(num_bytes, int(chunks * s * (1 - s) ** (most + 1)) + -(-num_bytes // READ_BYTES))
