"""The one rule for fields of text files: which are null, which are empty, and what the others are (docs/schema.md)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Sequence

_INTEGER = r"^[+-]?[0-9]+$"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|nan|[+-]?inf(inity)?", re.IGNORECASE)
_PYTHON_LIST = r"""^\[\s*(['"].*['"]|)\s*\]$"""
_PYTHON_NUMBERS = r"^\[\s*-?[0-9][-0-9.,\s]*\]$"
_WHOLE = 1 << 53
"""Floats hold all whole numbers below it."""


class InvalidTextError(ValueError):
    """A field that is no value of its column's type."""

    def __init__(self, at: int, value: str, expected: str) -> None:
        super().__init__(f"invalid value {value!r}, expected {expected}")
        self.at = at


def without_nulls(texts: Any, null_words: Sequence[str]) -> Any:
    """Return trimmed texts, with null in place of the words that say it."""
    texts = pc.utf8_trim_whitespace(texts)
    return pc.if_else(pc.is_in(texts, value_set=pa.array(list(null_words), pa.string())), None, texts)


def integers(texts: Any, null_words: Sequence[str]) -> Any:
    """Return texts as int64, or as uint64 if a number is above 2^63 - 1; as float64 if one has a fraction.

    A whole number may be written as a float below 2^53, such as 5.0. Raises InvalidTextError.
    """
    texts = without_nulls(texts, null_words)
    for kind in (pa.int64(), pa.uint64()):
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            continue
    is_integer = pc.fill_null(pc.match_substring_regex(texts, _INTEGER), fill_value=False)
    floats = _floats(pc.if_else(is_integer, None, texts))
    numbers = floats.to_numpy(zero_copy_only=False)
    is_float = ~np.isnan(numbers)
    digits = pc.replace_substring(pc.if_else(is_integer, texts, None), "+", "")
    if not np.array_equal(np.floor(numbers[is_float]), numbers[is_float]):
        return _floats(texts)
    exact = _exact(digits)
    too_large = is_float & ((np.abs(numbers) >= _WHOLE) | ((numbers < 0) & (exact.type == pa.uint64())))
    if too_large.any():
        at = int(too_large.argmax())
        raise InvalidTextError(at, texts[at].as_py(), "whole numbers written as floats only below 2^53")
    values = np.array(exact.fill_null(0))
    values[is_float] = numbers[is_float].astype(values.dtype)
    return pa.array(values, mask=np.asarray(texts.is_null()) | np.isnan(numbers) & ~np.asarray(is_integer))


def _exact(digits: Any) -> Any:
    """Return integers, all of them signed or all unsigned."""
    for kind in (pa.int64(), pa.uint64()):
        try:
            return digits.cast(kind)
        except pa.ArrowInvalid:
            continue
    known = [None if text is None else int(text) for text in digits.to_pylist()]
    least = next((n for n, value in enumerate(known) if value is not None and value < 0), None)
    for at, value in enumerate(known):
        if value is not None and not -(1 << 63) <= value < 1 << 64:
            raise InvalidTextError(at, str(value), "an integer of 64 bits")
        if value is not None and value >= 1 << 63 and least is not None:
            raise InvalidTextError(at, str(value), "no integer above 2^63 in a column that has negative ones too")
    raise AssertionError("integers of 64 bits are signed or unsigned")


def reals(texts: Any, null_words: Sequence[str]) -> Any:
    """Return texts as float64; true and false are 1 and 0. Raises InvalidTextError."""
    texts = without_nulls(texts, null_words)
    lower = pc.utf8_lower(texts)
    words = pc.if_else(pc.equal(lower, "true"), "1", pc.if_else(pc.equal(lower, "false"), "0", texts))
    return _floats(words)


def _floats(texts: Any) -> Any:
    try:
        return texts.cast(pa.float64())
    except pa.ArrowInvalid:
        known = texts.to_pylist()
        at = next(n for n, text in enumerate(known) if text is not None and not _NUMBER.fullmatch(text))
        raise InvalidTextError(at, known[at], "a number") from None


def split(texts: Any, separator: str, null_words: Sequence[str], *, numbers: bool) -> tuple[Any, Any]:
    """Return the list lengths (n,) of fields, and the trimmed texts of their elements.

    A null field has no elements. An empty field is an empty list, and a separator at the end of a field ends its last
    element. An element that is empty or a null word is null. Raises InvalidTextError for a list that Python printed,
    except for one of ``numbers``, whose elements are refused when they are converted.
    """
    texts = pc.utf8_trim_whitespace(texts)
    pattern = _PYTHON_LIST if numbers else f"{_PYTHON_LIST}|{_PYTHON_NUMBERS}"
    printed = pc.fill_null(pc.match_substring_regex(texts, pattern), fill_value=False)
    if pc.any(printed).as_py():
        at = printed.index(True).as_py()
        raise InvalidTextError(
            at, texts[at].as_py(), f"values with {separator!r} between them, not a list as Python prints it"
        )
    lists = pc.split_pattern(texts, separator)
    lengths = np.array(pc.fill_null(pc.list_value_length(lists), 0), np.int64)
    values = pc.utf8_trim_whitespace(lists.flatten())
    is_last = np.asarray(pc.fill_null(pc.or_(pc.equal(texts, ""), pc.ends_with(texts, separator)), fill_value=False))
    if is_last.any():
        stays = np.ones(len(values), bool)
        stays[np.cumsum(lengths)[is_last] - 1] = False
        values, lengths = values.filter(pa.array(stays)), lengths - is_last
    return lengths, without_nulls(values, ("", *null_words))
