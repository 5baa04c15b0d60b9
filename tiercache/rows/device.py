"""The device tier: rows in device memory, their slots, and the memory they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import BudgetError, StateError
from tiercache.kernels.arrays import NONE_I4, NONE_U8
from tiercache.kernels.cpu.slots import assign_slots, stable_order_by_distance, take
from tiercache.planning.budgets import MOST_SLOTS, reserved_rows
from tiercache.rows.backends.base import Layout
from tiercache.rows.backends.optimizer_step import vectors_of
from tiercache.sizes import distinct_sizes, format_bytes, option_bytes
from tiercache.values.lookups import GroupRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.planning.next_use import NextUses
    from tiercache.planning.pass_plan import PassPlan
    from tiercache.planning.row_offsets import KeysOf, RowOffsets
    from tiercache.rows.backends.base import Backend
    from tiercache.store.table import Group
    from tiercache.values.ids import Array


def group_rows(
    group: Group,
    fields: tuple[Array, ...],
    slots: Array,
    table_starts: NDArray[np.int64],
    *,
    streams: Array = NONE_U8,
    dtype: str | None = None,
) -> GroupRows:
    """Build the rows of a group from the words of each field and the starts of the group's tables.

    ``dtype``: of the vectors, if it differs from the group's.
    """
    names, starts = [table.name for table in group.tables], table_starts.tolist()
    first, sizes = dict(zip(names, starts, strict=False)), np.diff(table_starts).tolist()
    vectors = vectors_of(fields[0], group.dim, dtype or group.dtype)
    return GroupRows(vectors, fields[1:], slots, first, dict(zip(names, sizes, strict=True)), streams)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemoryPlan:
    """The memory of each group's largest pass."""

    groups: tuple[Group, ...]
    layouts: tuple[Layout, ...]
    """The arrays of each group: positions for its largest pass, and rows also for those of the next pass that arrive
    during training."""
    num_bytes: int

    @classmethod
    def of(
        cls, positions: RowOffsets, backend: Backend, device_budget: int = 0, *, index_bytes: int = 0
    ) -> DeviceMemoryPlan:
        """Return the plan of these passes on the device of ``backend``.

        On a GPU, at most a tenth of ``device_budget`` is a reserve, and only what rows and, if it fits, an index leave.
        """
        groups = positions.groups
        rows_G = [max(positions.num_rows(p, g) for p in range(positions.num_passes)) for g in range(len(groups))]
        layouts = tuple(
            Layout(rows, tuple(field.words for field in group.fields), rows, group.dtype != "float32")
            for rows, group in zip(rows_G, groups, strict=True)
        )
        left = device_budget - backend.bytes_of(layouts)
        left -= index_bytes if index_bytes <= left else 0
        spare = min(device_budget // 10, left) if backend.queues and positions.num_passes > 1 else 0
        reserve_G = reserved_rows(rows_G, [4 * sum(n.widths) + 8 * n.rounded for n in layouts], spare)
        layouts = tuple(n._replace(rows=n.rows + more) for n, more in zip(layouts, reserve_G, strict=True))
        return cls(groups=groups, layouts=layouts, num_bytes=backend.bytes_of(layouts))

    def check(
        self, device_budget: int, *, num_ranks: int = 1, replicas: int = 0, advice: str = "", cut: str = ""
    ) -> None:
        """Raise BudgetError if the passes, with ``replicas`` bytes, exceed ``device_budget``, or have too many rows.

        num_ranks: the number of devices that share them. advice: another remedy. cut: the call that makes the dataset
        with smaller passes; default: an extraction.
        """
        total = self.num_bytes + replicas
        if total > device_budget:
            need, allowed = distinct_sizes(total, device_budget)
            parts = [
                f"{n.positions:,} rows of dim {group.fields[0].width}"
                for n, group in zip(self.layouts, self.groups, strict=True)
            ]
            parts += [f"{format_bytes(replicas)} of replicated vectors"] if replicas else []
            each, devices, of_devices = "", "", ""
            if num_ranks > 1:
                each, devices, of_devices = (
                    f" on each of {num_ranks} ranks", f" --devices {num_ranks}", f" and devices={num_ranks}",
                )  # fmt: skip
            budget = option_bytes(device_budget)
            smaller = (
                f", or make the dataset again with {cut} for device_budget={budget!r}{of_devices}"
                if cut
                else f", extract again with --device-budget {budget}{devices}, or cut the passes with "
                f"tiercache.repartition for this budget{of_devices}"
            )
            raise BudgetError(
                f"the passes need {need} on the device ({', '.join(parts)}) but device_budget is {allowed}{each}: "
                f"raise it to {option_bytes(total)}{smaller}{advice}"
            )
        for layout in self.layouts:
            if (rows := layout.positions) > MOST_SLOTS:
                raise BudgetError(f"a group has {rows:,} rows in one pass, but slots are int32: cut smaller passes")


_CHUNK_KEYS = 1 << 17  # a mebibyte of keys is copied at once
_KEY_AND_SLOT_BYTES = 12


@dataclass(slots=True)
class SlotAssignment:
    """The slots of the rows of one pass and group."""

    slots_K: NDArray[np.int32]
    """The slot of each position."""
    dump_order_K: NDArray[np.int32]
    """Positions in dump order: by next use, kept rows first."""
    load_K: NDArray[np.int32]
    """In the order of loading (kept rows, then segment by segment, then generated rows): positions, then, after
    ``resolve``, their slots; empty after the load."""
    free: int
    """Rows, first in the order of loading, whose slots are kept or free. The others take slots of departing rows of the
    previous pass, in dump order."""
    departing: int
    """Rows of the previous pass that are not kept."""
    loaded_K: NDArray[np.uint8]
    """A bit for each position, highest first: 1 if its row is loaded. Empty if rows have no streams."""

    def loaded_in(self, chunk: slice) -> NDArray[np.int64]:
        """Return the loaded rows in a slice of positions, as indices in the slice."""
        first_byte = chunk.start // 8
        bits = np.unpackbits(self.loaded_K[first_byte : -(-chunk.stop // 8)])
        return np.flatnonzero(bits[chunk.start - 8 * first_byte :][: chunk.stop - chunk.start])

    def resolve(self) -> None:
        """Replace the positions of ``load_K`` by their slots, in place."""
        take(self.slots_K, self.load_K, self.load_K)


class DeviceTier:
    """Arrays within the device budget. Slots of kept rows never change while they are kept.

    ``place`` runs on the reader thread ahead of time, everything else on the training thread.
    """

    def __init__(self, positions: RowOffsets, device_budget: int, backend: Backend, *, index_bytes: int = 0) -> None:
        """Allocate the arrays: each group's largest pass and the reserve.

        Raises BudgetError if they exceed ``device_budget`` or the memory of the device.
        """
        self._positions, self._backend = positions, backend
        plan = DeviceMemoryPlan.of(positions, backend, device_budget, index_bytes=index_bytes)
        plan.check(device_budget)
        self.capacity_G, self.num_bytes = tuple(layout.rows for layout in plan.layouts), plan.num_bytes
        self.arrays_G = backend.reserve(plan.layouts, "device_budget holds passes that")
        """The memory of each group's rows."""
        self.slots_G: list[Array] = []
        """The slots of the current pass, on the device."""
        self._free_G: list[NDArray[np.int32]] = []
        self._closed = False
        self.clear()

    def close(self) -> None:
        """Free the device's memory, even if this tier is still referenced; no pass may begin afterwards."""
        self._closed = True
        self.arrays_G, self.slots_G, self._free_G, self.num_bytes = [], [], [], 0

    def clear(self) -> None:
        """Forget all rows: every slot is free."""
        self._free_G, self.slots_G = [], []
        for rows in [] if self._closed else self.capacity_G:
            free = np.arange(rows, -1, -1, dtype=np.int32)
            free[:rows] -= 1  # slot 0 is on top
            free[-1] = rows
            self._free_G.append(free)

    def place(
        self, plan: PassPlan, uses: NextUses, previous: tuple[int, list[SlotAssignment], NextUses] | None
    ) -> list[SlotAssignment]:
        """Assign slots to the rows of the next pass, given the previous pass's sub-dataset, slots and uses, if any."""
        assignments = []
        for g in range(len(self.capacity_G)):
            span = self._positions.span(plan.sub_dataset, g)
            prev_distance = uses.prev_distance[plan.sub_dataset][span]
            rows = span.stop - span.start
            slots, order, dump_order = (self._backend.scratch(4 * rows).view(np.int32) for _ in range(3))
            if plan.within:
                order[:] = np.arange(rows, dtype=np.int32)
            else:
                limit = min(plan.max_distance + 1, uses.longest)
                stable_order_by_distance(prev_distance, limit, order)
            num_free = int(self._free_G[g][-1])
            if previous is None:
                departing, known = 0, (NONE_I4, NONE_I4, NONE_I4, np.zeros(rows, dtype=np.int32))
            else:
                sub_dataset, before_G, before_uses = previous
                old = before_uses.next_distance[sub_dataset][self._positions.span(sub_dataset, g)]
                departing = old.size - plan.kept_G[g]
                known = before_G[g].slots_K, old, before_G[g].dump_order_K, prev_distance
            kept = assign_slots(*known, order, self._free_G[g], slots)
            assert kept == plan.kept_G[g], f"pass {plan.pass_index} keeps {kept} rows, planned {plan.kept_G[g]}"
            stable_order_by_distance(uses.next_distance[plan.sub_dataset][span], uses.longest, dump_order)
            loaded = np.zeros(0, dtype=np.uint8)
            if self._positions.groups[g].dtype != "float32":
                is_loaded = np.ones(rows, dtype=np.bool_)
                is_loaded[order[:kept]] = False
                loaded = np.packbits(is_loaded)
            assignments.append(SlotAssignment(slots, dump_order, order, min(rows, kept + num_free), departing, loaded))
        return assignments

    def activate(self, assignments: list[SlotAssignment]) -> None:
        """Make the rows in these slots visible to lookups."""
        self.slots_G = [
            self._backend.place(assignment.slots_K, arrays.slots)
            for assignment, arrays in zip(assignments, self.arrays_G, strict=True)
        ]

    def read(self, group: int, field: int, slots: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the words of a field in some slots. Raises StateError if the tier is closed."""
        if self._closed:
            raise StateError("rows of a closed cache were requested: read them before close()")
        return self._backend.read(self.arrays_G[group].fields[field], slots)

    def write_streams(self, sub_dataset: int, assignments: list[SlotAssignment], keys_of: KeysOf) -> None:
        """Write the random streams of the active rows, from their keys, for groups whose vectors are rounded.

        Kept rows have theirs. The keys of loaded rows are copied to the device with their slots; if most rows of a
        chunk are loaded, all of its keys are copied, because the slots are already on the device.
        """
        for g, group in enumerate(self._positions.groups):
            if group.dtype == "float32":
                continue
            starts, slots, arrays = self._positions.table_starts(sub_dataset, g), self.slots_G[g], self.arrays_G[g]
            for i, table in enumerate(group.tables):
                keys = keys_of(sub_dataset, self._positions.first_table(g) + i)
                for first in range(0, keys.size, _CHUNK_KEYS):
                    chunk_keys, begin = keys[first : first + _CHUNK_KEYS], int(starts[i]) + first
                    chunk = slice(begin, begin + chunk_keys.size)
                    loaded = assignments[g].loaded_in(chunk)
                    if not loaded.size:
                        continue
                    chunk_slots = slots[chunk]
                    if loaded.size * _KEY_AND_SLOT_BYTES < chunk_keys.nbytes:
                        chunk_keys = chunk_keys[loaded]
                        chunk_slots = self._backend.place(assignments[g].slots_K[chunk][loaded], arrays.load_slots)
                    self._backend.write_streams(table, chunk_keys, arrays.streams, chunk_slots, arrays.keys)

    def rows_of(self, sub_dataset: int) -> list[GroupRows]:
        """Return the rows that lookups see, by group."""
        return [
            group_rows(
                group, arrays.fields, slots, self._positions.table_starts(sub_dataset, g), streams=arrays.streams
            )
            for g, (group, arrays, slots) in enumerate(
                zip(self._positions.groups, self.arrays_G, self.slots_G, strict=True)
            )
        ]


def initial_values(group: Group) -> tuple[float, ...]:
    """Return the value that each optimizer state of a new row begins with."""
    return tuple(field.initial for field in group.fields[1:])
