"""SettingsCheck: settings of torch's optimizers that were changed after tc.convert, and did not reach the rows."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from tiercache.dist.consistency import check_same
from tiercache.errors import StateError
from tiercache.train.torch_optimizers import (
    REFUSED,
    SETTINGS,
    check_defaults,
    check_owned_once,
    check_state,
    settings_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.train.dense_state import DenseState
    from tiercache.train.row_optimizer import RowOptimizer


_IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable"}
_REMEDY = (
    "set the same value on all ranks (a scheduler that takes a loss needs the mean of all ranks), and resume from the "
    "last commit"
)


class SettingsCheck:
    """Compares the settings of dense optimizers with those of the rows that tc.convert made step alike.

    Warns once of each that was changed for a dense optimizer only. Raises StateError for one that rows do not have.
    """

    def __init__(self) -> None:
        self._seen: list[list[Any]] = []  # the settings of all groups at the previous step
        self._dense: dict[int, dict[str, Any]] = {}  # the settings of modules, by the id of their anchor
        self._rows: dict[str, dict[str, Any]] = {}  # the settings of tables
        self._warned = set[str]()
        self._num_known = -1  # the number of settings of all tables if none of them has any that rows lack

    def follow(self, rows: RowOptimizer) -> None:
        """Check modules newly in an optimizer: it must be the only one, step as rows do, and have no table's state."""
        owned = _owned(rows)
        new = [one for one in rows.anchors.readers if id(one.anchor) in owned and id(one.anchor) not in self._dense]
        check_defaults(new, rows.dense)
        anchors = [(one.anchor, one.features[0]) for one in rows.anchors.readers if one.features]
        check_owned_once(rows.dense, anchors)
        check_state(rows.dense, anchors)
        for one in new:
            if one.has_default_optimizer or one.stepped_as is not None:
                _, group = owned[id(one.anchor)]
                self._dense[id(one.anchor)] = settings_of(group) if one.stepped_as is None else one.stepped_as

    def begin(self, rows: RowOptimizer) -> None:
        """Compare settings at the start of a loop, after a restore, with those that were compared last."""
        self._compare(rows, with_rates=True)
        self._seen = self._now(rows)

    def step(self, rows: RowOptimizer) -> None:
        """Compare settings before a step, except for learning rates."""
        if sum(map(len, rows.param_groups)) != self._num_known:
            self._check_refused(rows)
        now = self._now(rows)
        if now != self._seen:
            self._compare(rows, with_rates=False)
            self._seen = now

    def _check_refused(self, rows: RowOptimizer) -> None:
        """Raise StateError if a table has a setting that rows lack, which the loop must have added."""
        for group in rows.param_groups:
            for name in rows.lacked_by(group):
                if group.get(name):
                    raise StateError(
                        f"{name} of table {group['table']!r} is {group[name]!r}, but rows have no such setting: leave "
                        "it unset in cache.optimizer.param_groups, and choose an optimizer of rows that needs none"
                    )
        is_without = all(group.keys().isdisjoint(rows.lacked_by(group)) for group in rows.param_groups)
        self._num_known = sum(map(len, rows.param_groups)) if is_without else -1

    @staticmethod
    def _now(rows: RowOptimizer) -> list[list[Any]]:
        groups = [group for one in rows.dense for group in one.param_groups]
        return [[len(group["params"]), *map(group.get, SETTINGS)] for group in groups]

    def _compare(self, rows: RowOptimizer, *, with_rates: bool) -> None:
        self.follow(rows)
        tables, owned = {group["table"]: settings_of(group) for group in rows.param_groups}, _owned(rows)
        for module in rows.anchors.readers:
            number = id(module.anchor)
            if number not in self._dense or number not in owned:
                continue
            optimizer, group = owned[number]
            now, before = settings_of(group), self._dense[number]
            for table in module.tables:
                first = self._rows.get(table) or settings_of(module.table_specs[table].optimizer.settings())
                for name in now:
                    if now[name] != before.get(name) and (with_rates or name != "lr"):
                        self._report(type(optimizer).__name__, name, table, now, first, tables[table])
                self._rows[table] = tables[table] if with_rates else tables[table] | {"lr": first["lr"]}
            self._dense[number] = now if with_rates else now | {"lr": before["lr"]}

    def _report(
        self,
        kind: str,
        name: str,
        table: str,
        now: Mapping[str, Any],
        first: Mapping[str, Any],
        rows: Mapping[str, Any],
    ) -> None:
        """Warn of a changed setting unless the table's was changed too. Raises StateError if it has none."""
        if name in REFUSED and now[name]:
            raise StateError(
                f"{name} of {kind} was changed to {now[name]!r} after tc.convert, but rows of {table!r}, which step "
                "with it, have no such setting: set it back, or choose the optimizer of rows in tc.convert"
            )
        is_same = name not in rows or rows[name] == now[name] or rows[name] != first.get(name)
        if is_same or name in self._warned:
            return
        self._warned.add(name)
        warnings.warn(
            f"{name} of {kind} was changed to {now[name]!r} after tc.convert, but rows of {table!r} keep "
            f"{rows[name]!r}: change it in all groups of cache.optimizer.param_groups, or before tc.convert",
            stacklevel=5,
        )


def check_same_settings(rows: RowOptimizer, dense: DenseState, ranks: AnyCommunicator) -> None:
    """Raise RankError on all ranks if their rows, or parameters of which rank 0 stores all, step by other settings.

    Collective: one exchange of two numbers. Raises StateError if a module got a ``max_norm`` after its registration.
    """
    if ranks.size == 1:
        return
    limits = {f"max_norm of {one.features}": one.max_norm for one in rows.anchors.readers if one.max_norm is not None}
    facts = rows.facts | dict(sorted(limits.items())) | _facts_of(dense)
    digest = crc32(repr(facts).encode())
    low, high = ranks.all_reduce_min([digest, -digest], "comparing the settings of optimizers")
    if low != -high:
        check_same(ranks, facts, _REMEDY)
    if limits:
        rows.check_one_rank("max_norm")


def _facts_of(dense: DenseState) -> dict[str, Any]:
    """Return the settings of the optimizers that rank 0 stores, by names for users."""
    return {
        f"{setting} of group {i} of register({name}=...)": number
        for name in sorted(dense.same)
        if isinstance(one := dense.objects[name], torch.optim.Optimizer)
        for i, group in enumerate(one.param_groups)
        for setting, value in group.items()
        if setting not in _IMPLEMENTATION and (number := _number(value)) is not None
    }


def _number(value: Any) -> float | list[Any] | None:
    """Return a number, a pair of numbers as a list, or None for other settings."""
    if isinstance(value, list | tuple):
        parts = [_number(one) for one in value]
        return None if None in parts else parts
    is_number = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return float(value) if is_number else None


def _owned(rows: RowOptimizer) -> dict[int, tuple[torch.optim.Optimizer, dict[str, Any]]]:
    return {id(p): (one, group) for one in rows.dense for group in one.param_groups for p in group["params"]}
