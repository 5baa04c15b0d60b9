"""What must be alike on all ranks before they train together."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import tiercache
from tiercache.errors import RankError
from tiercache.dist.communicator import rank_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiercache.dist.communicator import AnyCommunicator

MOST_LETTERS = 48
"""Longer values are told as their digest: tables and sharding plans of a thousand ranks would be many megabytes."""


def check_same(ranks: AnyCommunicator, facts: Mapping[str, Any]) -> None:
    """Check that every fact (words for users: a value that JSON can say) is the same on all ranks. Collective.

    The version of tiercache is a fact of its own, checked always. Facts that only some ranks bring differ.

    Raises:
        RankError: on every rank, with one sentence that names what differs, its values and on which ranks.
    """
    mine = {"the version of tiercache": tiercache.__version__, **facts}
    told = ranks.all_gather_object({name: _short(value) for name, value in mine.items()}, "comparing what must be the same")
    names = dict.fromkeys(name for each in told for name in each)
    said = {name: _difference([each.get(name, "nothing") for each in told]) for name in names}
    if differing := "; ".join(f"{name} ({words})" for name, words in said.items() if words):
        raise RankError(f"ranks differ in {differing}: give all ranks the same, then start them again")


def _difference(values: list[str]) -> str | None:
    """Return each value with its ranks where they are not all the same; ``values`` by rank."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) == 1:
        return None
    return ", ".join(f"{value} on {rank_names(ranks)}" for value, ranks in ranks_of.items())


def _short(value: Any) -> str:
    words = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    if len(words) <= MOST_LETTERS:
        return words
    return f"digest {hashlib.sha256(words.encode()).hexdigest()[:16]}"
