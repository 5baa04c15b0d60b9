"""Arguments of caches, for tests that pass all of them on."""

from dataclasses import fields
from typing import Any

import tiercache as tc


def gathered(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a cache, with those that are fields of its options gathered in ``options``."""
    names = {field.name for field in fields(tc.TierCacheOptions)} & arguments.keys()
    if not names:
        return arguments
    others = {name: value for name, value in arguments.items() if name not in names}
    return others | {"options": tc.TierCacheOptions(**{name: arguments[name] for name in names})}
