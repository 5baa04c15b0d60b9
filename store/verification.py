"""The process that ``verify`` starts: reads everything, and writes JSON lines to its standard output."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.errors import CorruptStoreError, StoreError
from tiercache.store.hashing import hash_keys
from tiercache.store.life import Life
from tiercache.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tiercache.store.segment import Segment
    from tiercache.store.table import Group

SLICE_ROWS = 1 << 24
_MOST_PROBLEMS = 100


class Verification:
    """One reading of all that a store holds."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.problems: list[str] = []
        self.counts = {"segments": 0, "blocks": 0, "pieces": 0, "rows": 0, "bytes": 0}
        self.total = sum(
            int(stream.block_bytes_B[self._first_block(segment, group) :].sum())
            for segment in store.segments
            for group, stream in enumerate(segment.streams)
        )

    def run(self) -> dict[str, Any]:
        """Check everything and return the report."""
        begun = time.perf_counter()
        for segment in self.store.segments:
            self.counts["segments"] += 1
            for group in self.store.groups:
                self._check_stream(segment, group)
        for group in self.store.groups:
            for place in range(len(group.tables)):
                self._check_one_row_a_key(group, place)
        if self.store.commit is not None:
            self._try(self.store.state)
        commit = self.store.commit
        return {
            **self.counts,
            "commit": None if commit is None else commit.id,
            "seconds": time.perf_counter() - begun,
            "problems": self.problems[:_MOST_PROBLEMS],
        }

    def _first_block(self, segment: Segment, group: int) -> int:
        assert self.store.commit is not None
        return Life.at(self.store.commit.cursor, self.store.segments).first_block(segment, group)

    def _check_stream(self, segment: Segment, group: Group) -> None:
        stream = segment.streams[group.index]
        for block in range(self._first_block(segment, group.index), stream.num_blocks):
            low, high = int(stream.block_piece_B[block]), int(stream.block_piece_B[block + 1])
            data = np.empty(int(stream.block_bytes_B[block]), dtype=np.uint8)
            self._try(self.store.read, segment, group.index, low, high, data)
            self.counts["blocks"] += 1
            self.counts["pieces"] += high - low
            self.counts["rows"] += data.size // stream.row_bytes
            self.counts["bytes"] += data.size
            _say(kind="progress", done=self.counts["bytes"], total=self.total)
        for place, table in enumerate(group.tables):
            last: tuple[int, int] | None = None
            for index, hashes in self._hashes(segment, group, place):
                before = np.uint64(last[1]) if last is not None and last[0] == index else None
                if np.any(hashes[1:] <= hashes[:-1]) or (before is not None and hashes[0] <= before):
                    self._report(
                        f"segment {segment.id} of {self.store.label} has keys of table {table.name!r} that are not "
                        "in hash order: restore the store from a copy"
                    )
                    break
                last = index, int(hashes[-1])

    def _hashes(self, segment: Segment, group: Group, place: int) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Yield the hashes of live keys of one table, block by block: (range, hashes in stored order)."""
        stream, table = segment.streams[group.index], group.tables[place]
        for index in range(self.store.first_range(segment, group.index), len(stream.ranges)):
            rows = stream.ranges[index].table_rows
            low = int(stream.range_first_row_R[index]) + sum(rows[:place])
            high = low + rows[place]
            while low < high:
                block = low // stream.block_rows
                start = int(stream.block_first_row_B[block])
                end = min(high, int(stream.block_first_row_B[block + 1]))
                keys = self._try(self.store.read_keys, segment, group.index, block)
                if keys is not None:
                    yield index, hash_keys(keys[low - start : end - start], table.table_id)
                low = end

    def _check_one_row_a_key(self, group: Group, place: int) -> None:
        """Check, one slice of hashes at a time, that no key of a table has two live rows."""
        known = len(self.problems)
        rows = sum(
            ranges.table_rows[place]
            for segment in self.store.segments
            for ranges in segment.streams[group.index].ranges[self.store.first_range(segment, group.index) :]
        )
        slices = -(-rows // SLICE_ROWS)
        for i in range(slices):
            low, high = (i << 64) // slices, ((i + 1) << 64) // slices - 1
            found = [
                hashes[(hashes >= np.uint64(low)) & (hashes <= np.uint64(high))]
                for segment in self.store.segments
                for _, hashes in self._hashes(segment, group, place)
            ]
            if not found:  # every block of keys is damaged, which was reported
                continue
            ordered = np.sort(np.concatenate(found))
            twice = int(np.count_nonzero(ordered[1:] == ordered[:-1]))
            if twice and len(self.problems) == known:
                self._report(
                    f"{twice} keys of table {group.tables[place].name!r} of {self.store.label} have two live rows: "
                    "restore the store from a copy"
                )

    def _try(self, call: Any, *arguments: Any) -> Any:
        """Return what ``call`` returns, or note what is corrupt and return None."""
        try:
            return call(*arguments)
        except CorruptStoreError as error:
            self._report(str(error))
            return None

    def _report(self, sentence: str) -> None:
        if sentence not in self.problems:
            self.problems.append(sentence)


def _say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(path: str) -> None:
    """Verify the store at ``path``."""
    try:
        with Store.open(path, mode="r") as store:
            _say(kind="report", report=Verification(store).run())
    except CorruptStoreError as error:
        _say(kind="report", report={"problems": [str(error)]})
    except StoreError as error:
        _say(kind="error", type=type(error).__name__, text=str(error))


if __name__ == "__main__":
    main(sys.argv[1])
