"""Sizes in bytes, counts and names, as text."""

from __future__ import annotations

import math
import operator
import re
from fractions import Fraction

from tiercache.errors import BudgetError

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_bytes(size: int | str, *, least: int = 1) -> int:
    """Return the bytes of a ``size``: a number, or text such as ``"64MiB"``, ``"8 GB"``, ``"512"``.

    KiB, MiB, GiB and TiB are powers of 1024; KB, MB, GB and TB, and K, M, G and T alone, are powers of 1000.
    Fractions of a unit are rounded down to a byte, so "17.9GiB" is a size, as it is printed. Raises BudgetError for
    anything else, for less than ``least`` bytes, and for a fraction without a unit.
    """
    if isinstance(size, bool) or not (isinstance(size, str) or hasattr(size, "__index__")):
        raise BudgetError(f"invalid size {size!r}: expected a number of bytes or a string such as '64MiB'")
    if not isinstance(size, str):
        num_bytes = Fraction(operator.index(size))
    else:
        match = _SIZE.fullmatch(size)
        if match is None or (match[3] and not match[2]):
            raise BudgetError(f"invalid size {size!r}: expected a number of bytes or a string such as '64MiB' or '8GB'")
        power = _UNITS[match[2].lower()]
        factor = 1 << power if match[3] else 1000 ** (power // 10)
        num_bytes = Fraction(match[1]) * factor  # a float of 4.02 x 1000 is not whole
        if match[2]:
            num_bytes = Fraction(math.floor(num_bytes))
    if num_bytes < least or num_bytes.denominator != 1:
        raise BudgetError(f"invalid size {size!r}: expected whole bytes, at least {least}")
    return int(num_bytes)


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun: ``1 row``, ``2,000 rows``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def format_bytes(num_bytes: float) -> str:
    """Return ``num_bytes`` for people: three digits and a unit that is a power of 1024."""
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1000 or unit == "TiB":
            digits = f"{value:,.0f}" if unit == "bytes" or abs(value) >= 100 else f"{value:.3g}"
            return f"{digits} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def distinct_sizes(one: int, other: int) -> tuple[str, str]:
    """Return two numbers of bytes for people, to the byte if both would look the same."""
    texts = format_bytes(one), format_bytes(other)
    return texts if one == other or texts[0] != texts[1] else (f"{one:,} bytes", f"{other:,} bytes")


def option_bytes(num_bytes: int) -> str:
    """Return ``num_bytes`` exactly, as an option of a command: in the largest unit that divides them."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes % (1 << power) == 0:
            return f"{num_bytes >> power}{unit}"
    return str(num_bytes)


def printable(text: str) -> str:
    """Return text with all control characters but line breaks as Python's escapes."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
