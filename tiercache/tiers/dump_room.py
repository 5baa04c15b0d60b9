"""Room for a dump: made on the writer thread while the pass is trained, so that the switch has but rows to move."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tiercache.planning.host_plan import Held

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.planning.pass_plan import PassPlan
    from tiercache.store.segment_layout import SegmentLayout
    from tiercache.tiers.device_tier import SlotAssignment
    from tiercache.tiers.host_tier import HostTier
    from tiercache.tiers.packing import Packer, Part, Unpacker
    from tiercache.tiers.pinned_region import PinnedRegion


class DumpRoom(NamedTuple):
    """For the rows of one group."""

    layout: SegmentLayout
    order: NDArray[np.int32]
    """Their positions."""
    regions: list[PinnedRegion]
    """Their blocks."""
    target: list[Part]


class Room(NamedTuple):
    """What a switch needs to know of the host."""

    dumps: list[DumpRoom]
    """Where the pass that ends goes, by group."""
    held_G: list[list[Part]]
    """What the pass that begins takes from blocks of earlier dumps."""


def make_room(
    host: HostTier, packer: Packer, unpacker: Unpacker, plan: PassPlan, assignments: Sequence[SlotAssignment],
    upcoming: PassPlan | None,
) -> Room:  # fmt: skip
    """Make room for the dump of ``plan``; of the dumps before it the host keeps what the pass after it wants."""
    host.keep({} if upcoming is None else _wanted(upcoming), not_before=plan.pass_index)
    dumps = []
    for g, layout in enumerate(plan.dumps):
        order = assignments[g].dump_order_K
        order = order[order.size - layout.rows :]  # without the kept rows where they are not written
        regions = host.enter(plan.pass_index, g, layout)
        target = packer.target(layout, 0, [region.data for region in regions])
        dumps.append(DumpRoom(layout, order, regions, target))
    return Room(dumps, unpacker.lay_out_held(upcoming))


def _wanted(upcoming: PassPlan) -> dict[tuple[int, int], Held]:
    """Return what the host holds until the load of a pass is done: what it takes, and what stays beyond it."""
    wanted = dict(upcoming.retained)
    for load in upcoming.loads:
        if load.host.first < load.host.last:
            key = load.pass_index, load.group
            last = max(wanted[key].last, load.host.last) if key in wanted else load.host.last
            wanted[key] = Held(load.host.first, last)
    return wanted
