"""LiveRows: rows of any keys as of now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.data.raw_batch import OOV_KEY
from tiercache.kernels.cpu.next_use import search_keys
from tiercache.store.vectors import from_words
from tiercache.training.missing_rows import unseen_vectors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.data.view import DatasetView
    from tiercache.planning.positions import Positions
    from tiercache.store import Store
    from tiercache.store.table import Group
    from tiercache.tiers.device_tier import DeviceTier, SlotAssignment
    from tiercache.training.missing_rows import Unseen

_CHUNK_BYTES = 1 << 20  # rows on their way, with all their fields


class LiveRows:
    """Reads rows as of now: device, then host, then store, then the initial row. Writes nothing."""

    def __init__(
        self,
        *,
        store: Store,
        positions: Positions,
        device: DeviceTier | None = None,
        assignments: list[SlotAssignment] | None = None,
        sub_dataset: int | None = None,
        keys_of: Callable[[int, int], NDArray[np.int64]],
        after: int,
        cached: Callable[[int, int, int], NDArray[np.uint8] | None] | None = None,
        trained: DatasetView | None = None,
        unknown: Mapping[str, Sequence[NDArray[np.float32]]] | None = None,
    ) -> None:
        """``unknown``: by table the fields, (1, width) each, of an out-of-vocabulary row that stands elsewhere."""
        self._store, self._positions, self._device = store, positions, device
        self._assignments, self._sub_dataset = assignments or [], sub_dataset
        self._keys_of, self._after, self._cached, self._trained = keys_of, after, cached, trained
        self._shared: dict[str, bool] = {}
        self._unknown = unknown or {}
        self.unseen: Unseen = "initial"
        """What keys are read as that were never trained."""
        self._place = {
            table.name: (g, positions.first_table(g) + i, i)
            for g, group in enumerate(positions.groups)
            for i, table in enumerate(group.tables)
        }

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the store."""
        return self._positions.groups

    def fields(self, table_name: str, keys: NDArray[np.int64]) -> tuple[NDArray[np.float32], ...]:
        """Return the vector and every optimizer state of ``keys``: arrays (n, width), in the order asked for.

        Keys may be any int64, trained or not, each once.
        """
        group = self._positions.groups[self._place[table_name][0]]
        out = tuple(np.empty((keys.size, field.width), dtype=np.float32) for field in group.fields)
        self.fill(table_name, keys, out)
        return out

    def fill(self, table_name: str, keys: NDArray[np.int64], out: tuple[NDArray[np.float32], ...]) -> None:
        """Do what ``fields`` does into the first ``len(out)`` fields, with little memory beside them."""
        g, table, i = self._place[table_name]
        spec = self._positions.tables[table]
        missing = np.ones(keys.size, dtype=bool)
        if self._device is not None and self._sub_dataset is not None:
            places = np.empty(keys.size, dtype=np.int64)
            mine = self._keys_of(self._sub_dataset, table)
            search_keys(np.asarray(mine), spec.table_id, keys, places)
            found = np.nonzero(places >= 0)[0]
            first = int(self._positions.table_starts(self._sub_dataset, g)[i])
            slots = self._assignments[g].slots_K[places[found] + first]
            for f, (field, to) in enumerate(zip(spec.fields, out, strict=False)):
                for part in _chunks(found.size, 4 * field.width):
                    (to[found[part]],) = from_words((field,), (self._device.read(g, f, slots[part]),))
            missing[found] = False
        self._from_store(table_name, g, keys, out, missing)
        rest = np.nonzero(missing)[0]
        if rest.size:
            self._untrained(table_name, keys, rest, out)

    def _from_store(
        self,
        name: str,
        group: int,
        keys: NDArray[np.int64],
        out: tuple[NDArray[np.float32], ...],
        missing: NDArray[np.bool_],
    ) -> None:
        ask = np.nonzero(missing)[0]
        if ask.size == 0:
            return
        segment_ids, rows = self._store.locate(name, keys[ask], after=self._after)
        by_id = {segment.id: segment for segment in self._store.segments}
        for segment_id in np.unique(segment_ids[segment_ids >= 0]):
            mine = np.nonzero(segment_ids == segment_id)[0]
            mine = mine[np.argsort(rows[mine])]  # so that a page is read once
            for chunk in _chunks(mine.size, self._positions.groups[group].row_bytes):
                part = mine[chunk]
                fields = self._store.read_rows(by_id[int(segment_id)], group, rows[part], cached=self._cached)
                for to, have in zip(out, fields, strict=False):
                    to[ask[part]] = have
            missing[ask[mine]] = False

    def _untrained(
        self,
        name: str,
        keys: NDArray[np.int64],
        rest: NDArray[np.int64],
        out: tuple[NDArray[np.float32], ...],
    ) -> None:
        g, table, _ = self._place[name]
        stand_in, is_alone = keys[rest], not self._shares_unknown(name)
        if name in self._unknown:
            for to, have in zip(out, self._unknown[name], strict=False):
                to[rest] = have
            return
        if not is_alone:
            if OOV_KEY not in stand_in:
                shared = self.fields(name, np.array([OOV_KEY], dtype=np.int64))
                for to, have in zip(out, shared, strict=False):
                    to[rest] = have
                return
            stand_in = np.full(rest.size, OOV_KEY, dtype=np.int64)
        table_spec = self._positions.tables[table]
        for part in _chunks(rest.size, 4 * table_spec.dim):
            out[0][rest[part]] = unseen_vectors(table_spec, stand_in[part], self.unseen if is_alone else "initial")
        for to, field in zip(out[1:], self._positions.groups[g].fields[1:], strict=False):
            to[rest] = field.initial

    def _shares_unknown(self, name: str) -> bool:
        """Whether the table was trained with an out-of-vocabulary row."""
        if name not in self._shared:
            table = self._place[name][1]
            place = np.empty(1, dtype=np.int64)
            unknown = np.array([OOV_KEY], dtype=np.int64)
            found = False
            for p in range(len(self._trained.passes) if self._trained is not None else 0):
                search_keys(np.asarray(self._keys_of(p, table)), self._positions.tables[table].table_id, unknown, place)
                found = found or place[0] >= 0
            self._shared[name] = found
        return self._shared[name]


def _chunks(count: int, item_bytes: int) -> Iterator[slice]:
    """Cut ``count`` items into stretches of at most ``_CHUNK_BYTES``."""
    step = max(1, _CHUNK_BYTES // max(1, item_bytes))
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))
