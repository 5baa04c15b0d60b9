"""Checks before training that all ranks have the same arguments, versions and paths."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.dist.communicator import rank_names
from tiercache.errors import RankError
from tiercache.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiercache.dist.communicator import AnyCommunicator

_RESTART = "pass the same values on all ranks and restart them"
MOST_LETTERS = 48
"""Longer values are sent as digests: tables and sharding plans of a thousand ranks would be many megabytes."""


def check_same(ranks: AnyCommunicator, facts: Mapping[str, Any], remedy: str = _RESTART) -> None:
    """Check that every fact (a name shown to users: a JSON serializable value, or a Path) is the same on all ranks.

    The version of tiercache is always checked too. A fact that only some ranks pass differs. Paths match if they are
    equal when made absolute, or if links or mounts of one machine lead to the same folder; a path that does not exist
    is identified by its nearest existing parent. ``remedy`` ends the error. Collective.

    Raises:
        RankError: on every rank; its message names each difference, the values, and the ranks.
    """
    own = {name: _identified(value) for name, value in {"the version of tiercache": __version__, **facts}.items()}
    facts_W = ranks.all_gather_object(own, "comparing what must be the same")
    differences = []
    for name in dict.fromkeys(name for each in facts_W for name in each):
        words, identity = next(each[name] for each in facts_W if name in each)
        ranks_of: dict[str, list[int]] = {}
        for rank, each in enumerate(facts_W):
            value, other = each.get(name, ["nothing", None])
            ranks_of.setdefault(words if other == identity else value, []).append(rank)
        if len(ranks_of) > 1:
            by_value = (f"{value} on {rank_names(some)}" for value, some in ranks_of.items())
            differences.append(f"{name} ({', '.join(by_value)})")
    if differences:
        raise RankError(f"ranks differ in {'; '.join(differences)}: {remedy}")


def _identified(value: Any) -> tuple[str, list[str | int]]:
    """Return the words for a value, and what it has in common with equal ones."""
    if isinstance(value, Path):
        return str(value.absolute()), _identity(value.absolute())
    words = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    if len(words) > MOST_LETTERS:
        words = f"digest {hashlib.sha256(words.encode()).hexdigest()[:16]}"
    return words, [words]


def _identity(path: Path) -> list[str | int]:
    """Return a unique identity: the machine, the nearest existing folder, and the names below it."""
    for above in (path, *path.parents):
        try:
            found = above.stat()
        except (OSError, ValueError):  # missing, or not a path
            continue
        return [socket.gethostname(), found.st_dev, found.st_ino, *path.relative_to(above).parts]
    return [str(path)]
