"""Opening a sharded store for a training: where tables stand, and parts that stand so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.ranks.parts import Parts
from tiercache.ranks.placement import Placement
from tiercache.ranks.placing import placement_of
from tiercache.ranks.record import Record
from tiercache.ranks.resharding import place_of, reshard, work_together
from tiercache.training.reorganise import reorganise

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from tiercache.passes.passset import PassSet
    from tiercache.processors.processor import Processor
    from tiercache.ranks.group import Ranks
    from tiercache.ranks.shares import Share
    from tiercache.store import Store


def choose_device(ranks: Ranks, asked: str | Processor | None) -> str | Processor:
    """Return the device of this rank's rows: that of the ranks, since what travels between them is on it.

    Raises ValueError where another one is asked for; "cuda" is that GPU on which the ranks joined. A processor, as the
    tests have their own, is taken as it is.
    """
    device = str(ranks.device)
    if asked is not None and not isinstance(asked, str):
        return asked
    if asked is not None and asked not in {device, ranks.device.type}:
        raise ValueError(
            f"device is {asked!r}, but rank {ranks.rank} joined on {device!r}, where its rows have to be: "
            f"join with Ranks.join(device={asked!r}), or leave device out here"
        )
    return device


def choose_placement(
    path: str | os.PathLike[str], passes: PassSet, ranks: Ranks, asked: Placement | str | Mapping[str, str]
) -> Placement:
    """Return the placement asked for; "auto" that of the store where it is for as many ranks. Collective.

    Raises ValueError for one that makes no sense.
    """
    chosen: dict[str, Any] | None = None
    with ranks.together("placing the tables"):
        if ranks.rank == 0:  # it reads counts of keys, and computes with them what need not be the same on all CPUs
            found = Record.read(Path(path)) if asked == "auto" else None
            kept = found is not None and found.num_ranks == ranks.size
            chosen = found.placement if kept and found else placement_of(passes, ranks.size, asked).to_record()
    return Placement.from_record(ranks.values(chosen)[0])


def mirror_bytes(passes: PassSet, placement: Placement) -> int:
    """Return the bytes that the vectors of replicated tables take on every device."""
    copied = [table for table in passes.tables if placement.tables[table.name].kind == "replicate"]
    return max((sum(4 * table.dim * p.rows(table.name) for table in copied) for p in passes.passes), default=0)


def open_parts(
    path: str | os.PathLike[str],
    share: Share,
    ranks: Ranks,
    *,
    engine: str | None,
    parts: Sequence[str | os.PathLike[str]] | None,
    retention: int | None = None,
    reorganised: bool,
    order_seed: int | None,
    store_budget: int | None = None,
) -> Parts:
    """Open the parts of a sharded store, or make them; those of other ranks or another placement are written anew.

    Passes that were split from the ones trained so far go on where these stand.

    Raises what `Parts.open` and `reshard` raise.
    """
    found: Record | None = None
    with ranks.together("reading the record of the sharded store"):
        if ranks.rank == 0:
            found = Record.read(Path(path))
    stands = None if found is None or found.cursor is None else [found.num_ranks, found.placement]
    stands = ranks.values(stands)[0]
    placement = share.placement.to_record()
    if stands is not None and stands != [ranks.size, placement]:
        return reshard(
            path, share, ranks,
            engine=engine, parts=parts, retention=retention, order_seed=order_seed, reorganised=reorganised,
            store_budget=store_budget,
        )  # fmt: skip
    opened = Parts.open(
        path, share.whole.tables, share.tables, placement, ranks, engine=engine, parts=parts, retention=retention
    )
    if opened.store.commit is not None:
        try:
            work_together(
                lambda _: _follow(opened.store, share, order_seed, reorganised, store_budget),
                ranks,
                "putting rows into another order",
            )
            assert opened.store.commit is not None
            opened.publish(opened.store.commit.cursor)
        except BaseException:
            opened.close()
            raise
    return opened


def _follow(store: Store, share: Share, order_seed: int | None, reorganised: bool, store_budget: int | None) -> None:
    """Put the rows of a part into the order of parts of its passes, or, where that is wanted, of other passes."""
    assert store.commit is not None
    start = place_of(store.commit, share.placement, share.rank, share, order_seed)
    if start is not None or reorganised:
        reorganise(
            store,
            share,  # type: ignore[arg-type]
            order_seed=order_seed, start=start, store_budget=store_budget, progress=False,
        )  # fmt: skip
