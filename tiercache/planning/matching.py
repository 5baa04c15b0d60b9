"""Checks that a store, the passes to train and the passes to evaluate match."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.errors import DatasetError
from tiercache.schema_parts import difference

if TYPE_CHECKING:
    from tiercache.data.dataset import DatasetView
    from tiercache.planning.schedule import Schedule
    from tiercache.store import Store


def check_tables(store: Store, passes: DatasetView) -> None:
    """Raise DatasetError unless ``passes`` was extracted for the tables of ``store``."""
    other_tables = {table.name: table for table in passes.tables}
    ours = {table.name: table for table in store.tables}
    advice = "extract again with the store's schema, or open another store"
    for name in sorted(other_tables.keys() | ours.keys()):
        if name not in ours or name not in other_tables:
            has, lacks = (f"the dataset {passes.path}", store.label)[:: 1 if name in other_tables else -1]
            raise DatasetError(f"{has} has a table {name!r} that {lacks} lacks: {advice}")
        if found := difference(other_tables[name], ours[name]):
            field, extracted, stored = found
            raise DatasetError(
                f"table {name!r} of the dataset {passes.path} has {field} {extracted!r}, but {store.label} "
                f"has {stored!r}: {advice}"
            )


def check_features(trained: DatasetView, passes: DatasetView) -> None:
    """Raise DatasetError unless ``passes`` has the features of ``trained``; labels and dense columns may differ."""
    other_features = {feature.name: feature for feature in passes.schema.features}
    advice = "extract it with the features of the schema that was trained"
    for feature in trained.schema.features:
        if feature.name not in other_features:
            raise DatasetError(
                f"feature {feature.name!r} is trained from {trained.path}, but the dataset {passes.path} lacks it: "
                f"{advice}"
            )
        if found := difference(feature, other_features[feature.name]):
            field, ours, other = found
            raise DatasetError(
                f"feature {feature.name!r} is trained from {trained.path} with {field} {ours!r}, and the dataset "
                f"{passes.path} has {field} {other!r}: {advice}"
            )


def check_schedule(store: Store, passes: DatasetView, schedule: Schedule) -> None:
    """Raise DatasetError if the store's rows are not in the order of ``schedule``."""
    commit = store.commit
    empty = commit is not None and not commit.segment_ids and not commit.schedule_digest and not any(commit.cursor)
    if commit is None or empty or commit.schedule_digest == schedule.digest:
        return
    if commit.schedule_digest:
        raise DatasetError(
            f"the dataset {passes.path} in this order is not the one that {store.label} was trained "
            f"with up to commit {commit.id} (schedule {schedule.digest[:12]}, the commit's is "
            f"{commit.schedule_digest[:12]}): open the dataset it was trained with, call "
            "tiercache.reorganize(store, passes) to continue with this one, or start a new store"
        )
    raise DatasetError(
        f"{store.label} has no training schedule at commit {commit.id} (it was compacted or altered, or rows were "
        "imported or forgotten): call tiercache.reorganize(store, passes) first, or open the cache without "
        "reorganize=False"
    )
