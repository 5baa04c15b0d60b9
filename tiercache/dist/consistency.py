"""Checks before training that all ranks have the same arguments, versions and paths."""

from __future__ import annotations

import hashlib
import json
import socket
from typing import TYPE_CHECKING, Any

from tiercache.dist.communicator import rank_names
from tiercache.errors import RankError
from tiercache.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tiercache.dist.communicator import AnyCommunicator

_COMPARING = "comparing what must be the same"
_RESTART = "pass the same values on all ranks and restart them"
MOST_LETTERS = 48
"""Longer values are sent as digests: tables and sharding plans of a thousand ranks would be many megabytes."""


def check_same(ranks: AnyCommunicator, facts: Mapping[str, Any], remedy: str = _RESTART) -> None:
    """Check that every fact (a name shown to users: a JSON serializable value) is the same on all ranks. Collective.

    The version of tiercache is always checked too. A fact that only some ranks pass differs. ``remedy`` ends the error.

    Raises:
        RankError: on every rank; its message names each difference, the values, and the ranks.
    """
    own = {"the version of tiercache": __version__, **facts}
    facts_W = ranks.all_gather_object({name: _short(value) for name, value in own.items()}, _COMPARING)
    names = dict.fromkeys(name for each in facts_W for name in each)
    _refuse({name: _difference([each.get(name, "nothing") for each in facts_W]) for name in names}, remedy)


def check_same_places(ranks: AnyCommunicator, places: Mapping[str, Path]) -> None:
    """Check that each named path, which may be relative, leads to the same place on all ranks. Collective.

    Paths match if they are equal when made absolute, or if links or mounts of one machine lead to the same folder. A
    path that does not exist is identified by its nearest existing parent.

    Raises:
        RankError: as ``check_same``.
    """
    own = {name: [str(path.absolute()), _identity(path.absolute())] for name, path in places.items()}
    facts_W = ranks.all_gather_object(own, _COMPARING)
    differences = {}
    for name in dict.fromkeys(name for each in facts_W for name in each):
        path, identity = next(each[name] for each in facts_W if name in each)
        values = [each.get(name, ["nothing", None]) for each in facts_W]
        differences[name] = _difference([path if other == identity else place for place, other in values])
    _refuse(differences)


def _identity(path: Path) -> list[str | int]:
    """Return a unique identity: the machine, the nearest existing folder, and the names below it."""
    for above in (path, *path.parents):
        try:
            found = above.stat()
        except (OSError, ValueError):  # missing, or not a path
            continue
        return [socket.gethostname(), found.st_dev, found.st_ino, *path.relative_to(above).parts]
    return [str(path)]


def _refuse(differences: Mapping[str, str | None], remedy: str = _RESTART) -> None:
    if differing := "; ".join(f"{name} ({words})" for name, words in differences.items() if words):
        raise RankError(f"ranks differ in {differing}: {remedy}")


def _difference(values: list[str]) -> str | None:
    """Return each value with its ranks, or None if all are equal; ``values`` is by rank."""
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
