"""Which columns a sub-dataset has and in what order, as an Arrow schema."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tiercache.store.table import group_tables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.schema import Feature, Schema

__all__ = ["BATCH_SAMPLES", "BATCH_SHIFT", "SampleColumn", "SampleLayout"]

BATCH_SHIFT = 16
BATCH_SAMPLES = 1 << BATCH_SHIFT
"""Samples of every record batch but the last: part of the format."""


@dataclass(frozen=True, slots=True)
class SampleColumn:
    """One column of a sub-dataset."""

    name: str
    dtype: type[np.int32] | type[np.float32]
    width: int | None
    """Numbers per sample, side by side; None: any number, with offsets."""
    feature: str | None = None
    """The feature whose ids or weights it holds; None for label, dense and the single ids."""
    is_scalar: bool = False
    """Whether a sample has a plain number here, not a list of one."""


@dataclass(frozen=True)
class SampleLayout:
    """The sub-dataset's columns.

    label: float32. dense: a list of D float32. ids: a list of S int32, the features with one id in the schema's order;
    they lie side by side so that a shuffled sample costs one place of memory and not S. Then for each feature with
    lists ``ids:NAME``, and for each feature with weights ``weights:NAME``.
    """

    schema: Schema

    @cached_property
    def columns(self) -> tuple[SampleColumn, ...]:
        """All columns, in the order of the file."""
        columns = []
        if self.schema.label is not None:
            columns.append(SampleColumn("label", np.float32, 1, is_scalar=True))
        if self.schema.dense:
            columns.append(SampleColumn("dense", np.float32, len(self.schema.dense)))
        if self.schema.singles:
            columns.append(SampleColumn("ids", np.int32, len(self.schema.singles)))
        columns += [SampleColumn(f"ids:{f.name}", np.int32, f.length, f.name) for f in self.schema.lists]
        for f in self.schema.features:
            if f.weights is not None:
                is_single = f.hotness == "one_hot"
                width = 1 if is_single else f.length
                columns.append(SampleColumn(f"weights:{f.name}", np.float32, width, f.name, is_scalar=is_single))
        return tuple(columns)

    @cached_property
    def singles(self) -> tuple[Feature, ...]:
        """The features with one id as they are read: group by group, in each in the schema's order."""
        group_of = {t.name: g.index for g in group_tables(self.schema.tables) for t in g.tables}
        return tuple(sorted(self.schema.singles, key=lambda f: group_of[f.table]))

    @cached_property
    def single_columns(self) -> NDArray[np.int64]:
        """(S,): for each of ``singles``, its place in the file's order."""
        places = {f.name: i for i, f in enumerate(self.schema.singles)}
        return np.array([places[f.name] for f in self.singles], dtype=np.int64)

    @cached_property
    def arrow_schema(self) -> Any:
        """The Arrow schema of the file; nothing in it can be null."""
        fields = []
        names = {"ids": [f.name for f in self.schema.singles], "dense": [d.column for d in self.schema.dense]}
        for column in self.columns:
            item = pa.field("item", pa.from_numpy_dtype(column.dtype), nullable=False)
            if column.is_scalar:
                kind = item.type
            else:
                kind = pa.large_list(item) if column.width is None else pa.list_(item, column.width)
            metadata = {"columns": json.dumps(names[column.name])} if column.name in names else None
            fields.append(pa.field(column.name, kind, nullable=False, metadata=metadata))
        return pa.schema(fields, metadata={"tiercache": "samples 1"})
