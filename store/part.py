"""Parts: stores that several processes write together, each its own, so that a mark beside each says whose it is.

What makes parts of one whole is not here: a store only knows the mark, and that nobody alone may write beside it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

__all__ = ["MARK_BYTES", "PART_FORMAT", "is_part", "mark_of", "refuse_part"]

PART_FORMAT = "tiercache part"
"""The ``format`` of a mark, which is a JSON object."""
MARK_BYTES = 4096
"""More than a mark has."""
_NAME = re.compile(r"part-[0-9]+-[0-9]+")


def mark_of(folder: Path) -> Path:
    """Return the file that marks the store in ``folder`` as a part: that of ``part-0-1`` is ``part-0-1.json``."""
    return folder.with_name(folder.name + ".json")


def is_part(folder: Path) -> bool:
    """Return whether ``folder``, which need not be there, is marked as a part, by the name given or by its own.

    A mark that is damaged counts where the folder has the name of a part.
    """
    return any(_is_marked(place) for place in {folder.absolute(), Path(os.path.realpath(folder))} if place.name)


def refuse_part(folder: Path) -> None:
    """Raise ValueError where ``folder`` is a part, which its own rank alone may write to."""
    if is_part(folder):
        raise ValueError(
            f"the store at {folder} is a part of a sharded store, whose ranks make commits together: open it with "
            "mode='r', or train on the sharded store"
        )


def _is_marked(folder: Path) -> bool:
    try:
        values: Any = json.loads(mark_of(folder).read_bytes()[:MARK_BYTES])
    except OSError:
        return False
    except (ValueError, RecursionError):
        values = None
    if isinstance(values, dict) and values.get("format") == PART_FORMAT:
        return True
    return _NAME.fullmatch(folder.name) is not None  # else it is somebody's own file
