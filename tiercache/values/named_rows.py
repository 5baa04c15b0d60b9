"""The names of rows in states of models, as error messages show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def both_named(state: Mapping[str, object], now: Mapping[str, object]) -> tuple[str, str]:
    """Return the commits of a state and of the current rows in words; both are of ``TrainingStore.named_commit``."""
    at, own = (f"commit {one.get('commit')} of {one.get('store') or 'the store'}" for one in (state, now))
    return (f"{at} of another run" if at == own else at), own
