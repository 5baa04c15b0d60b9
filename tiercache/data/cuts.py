"""Where one pass ends and the next begins, as far as the data decides it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from tiercache.errors import ExtractionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiercache.data.raw_batch import RawBatch
    from tiercache.data.source import SourceBatch


@dataclass(frozen=True, slots=True)
class Cut:
    """The rule for cutting passes."""

    kind: Literal["budget", "rows", "file", "column"]
    rows: int = 0
    """Samples of a pass, for "rows"."""
    column: str | None = None
    """The column whose changes of value begin passes, for "column"."""

    @classmethod
    def parse(cls, text: str, batch_multiple: int) -> Cut:
        """Read ``budget``, ``rows=N``, ``file`` or ``column=NAME``. Raises ExtractionError."""
        name, _, value = text.partition("=") if isinstance(text, str) else ("", "", "")
        if text in ("budget", "file"):
            return cls("budget" if text == "budget" else "file")
        if name == "rows" and value.replace("_", "").isdigit() and int(value) > 0:
            rows = int(value)
            if rows % batch_multiple:
                better = -(-rows // batch_multiple) * batch_multiple
                raise ExtractionError(
                    f"split_by rows={rows} is no multiple of batch_multiple={batch_multiple}: take rows={better} or "
                    "another batch_multiple"
                )
            return cls("rows", rows=rows)
        if name == "column" and value:
            return cls("column", column=value)
        raise ExtractionError(f"split_by is {text!r}: one of budget, rows=N, file, column=NAME")


class Cutter:
    """Cuts batches where the data begins another pass. It starts at the beginning of a pass."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._samples = 0
        self._file: int | None = None
        self._last: list[Any] = []

    def pieces(self, batch: SourceBatch, keys: RawBatch) -> Iterator[tuple[bool, RawBatch]]:
        """Cut the samples of a batch: give (whether a pass begins before it, piece) for each piece."""
        places = set(self._places(batch))
        for low, high in pairwise(sorted({0, *places, keys.num_samples})):
            yield low in places, keys.slice(low, high)

    def _places(self, batch: SourceBatch) -> list[int]:
        rows = batch.columns.num_rows
        if self._cut.kind == "rows":
            # A cut stands before the next sample, so that no pass begins where the data ends.
            first = -(-max(1, self._samples) // self._cut.rows) * self._cut.rows
            places = list(range(first - self._samples, rows, self._cut.rows))
            self._samples += rows
            return places
        if self._cut.kind == "file":
            begins = self._file is not None and self._file != batch.file_index
            self._file = batch.file_index
            return [0] if begins else []
        if self._cut.column is not None:
            array = batch.columns.column(self._cut.column)
            if hasattr(array, "dictionary_decode"):
                array = array.dictionary_decode()
            places = []
            if not pa.types.is_null(array.type):
                changed = pc.fill_null(pc.not_equal(array.slice(1), array.slice(0, rows - 1)), True)
                both_null = pc.and_(array.slice(1).is_null(), array.slice(0, rows - 1).is_null())
                places = [int(i) + 1 for i in pc.indices_nonzero(pc.and_not(changed, both_null)).to_pylist()]
            first_value, last_value = array[0].as_py(), array[rows - 1].as_py()
            if self._last and self._last[0] != first_value:
                places.insert(0, 0)
            self._last = [last_value]
            return places
        return []
