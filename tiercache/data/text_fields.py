"""The bytes and fields of text files: checks before the CSV parser, and conversions of text to numbers and lists."""

from __future__ import annotations

import atexit
import io
import re
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiercache.data.columns import as_64_bits
from tiercache.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


UNIT_SEPARATOR = b"\x1f"
"""Replaces a delimiter of several characters: the parser supports single ones only."""
_LINE_ENDS = (0x0A, 0x0D)
_MOST_DIGITS = 16
"""Hexadecimal digits of 64 bits."""
_HEX_BYTES = 3 + _MOST_DIGITS
"""Bytes of the longest hexadecimal number, and the byte before it."""
_CHECKED_TOGETHER = 1 << 14
_IS_HEX = np.isin(np.arange(256), [*b"0123456789abcdefABCDEF"])
_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_DECOMPRESS = "decompress it"
_BINARY = {
    b"\x1f\x8b": ("compressed with gzip", f"{_DECOMPRESS}, or let its name end with .csv.gz or .tsv.gz"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", f"{_DECOMPRESS}, or let its name end with .csv.zst or .tsv.zst"),
    b"\xfd7zXZ\0": ("compressed with xz", _DECOMPRESS),
    b"PK\x03\x04": ("a ZIP archive or an Excel workbook", "unpack it, or save the sheet as CSV"),
    b"PAR1\x15": ("a Parquet file", "let its name end with .parquet, or set its format to parquet"),
    b"ARROW1\0\0": ("an Arrow IPC file", "let its name end with .arrow, or set its format to ipc"),
}
"""First bytes of files that are often named like text, their content and the remedy."""


class TextStream(io.RawIOBase):
    """A readable stream of the same text. Reading it raises SourceError for text that the parser would misread.

    delimiter: as the file has it. quote: one byte, or empty if quotes are plain characters.
    """

    has_hex = False
    """True if numbers such as 0x1f were read: the parser takes them for integers, and wraps those from 2^63 on."""

    def __init__(self, path: Path | str, source: Any, delimiter: bytes, quote: bytes) -> None:
        self._path, self._source, self._delimiter = path, source, delimiter
        self._quotes = _Quotes(path, delimiter, quote) if quote else None
        self._is_first, self._partial, self._last = True, b"", b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the file too."""
        self._source.close()
        super().close()

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; none at the end."""
        data: bytes = self._source.read(size)
        if 0 < len(data) < size and data[-1] not in _LINE_ENDS:  # the parser calls one line without an end empty
            data += self._source.read(size - len(data)) or b"\n"
        if self._is_first:
            self._is_first = False
            self._check_encoding(data[:64])
        if self._quotes is not None:
            self._quotes.feed(data)
        if not self.has_hex:
            self._note_hex(data)
        return self._single(data, size) if len(self._delimiter) > 1 else data

    def _check_encoding(self, head: bytes) -> None:
        for magic, (content, remedy) in _BINARY.items():
            if head.startswith(magic):
                raise SourceError(f"{self._path} is {content}, expected text in UTF-8: {remedy}")
        num_zeros = head.count(b"\0")
        if 0 < 4 * num_zeros < len(head) and head[:2] not in _BOMS:
            raise SourceError(
                f"{self._path} begins with zero bytes between others, expected text in UTF-8: if it is text in another "
                "encoding, such as UTF-16, convert it with iconv; else remove them"
            )
        found = _BOMS.get(head[:2]) or ("UTF-16 or UTF-32" if num_zeros else None)
        if found is not None:
            raise SourceError(
                f"{self._path} is text in {found}, expected UTF-8: convert it, for example with "
                f"iconv -f {found.split()[0]} -t UTF-8"
            )

    def _note_hex(self, data: bytes) -> None:
        """Look for hexadecimal numbers of up to 64 bits. One that may continue waits for the next read."""
        before = b"1" if len(self._last) == _HEX_BYTES else b"\n"  # a number at the start was checked last time
        text = self._last + data
        self._last = text[-_HEX_BYTES:]
        if b"x" not in text and b"X" not in text:  # quicker than to search for two bytes
            return
        after = b"a" if data else b"\n"  # as if a number at the end continued
        bytes_N = np.frombuffer(before + text + after * _HEX_BYTES, np.uint8)
        at = np.flatnonzero((bytes_N[:-1] == ord("0")) & ((bytes_N[1:] | 0x20) == ord("x")))
        at = at[(bytes_N[at - 1] < ord("0")) | (bytes_N[at - 1] > ord("9"))]
        for low in range(0, at.size, _CHECKED_TOGETHER):
            places = at[low : low + _CHECKED_TOGETHER, None] + np.arange(2, 3 + _MOST_DIGITS)
            is_digit = _IS_HEX[bytes_N[places]]
            if (is_digit[:, 0] & ~is_digit.all(axis=1)).any():
                self.has_hex = True
                return

    def _single(self, data: bytes, size: int) -> bytes:
        """Replace the delimiter. The start of one at the end of the data is kept for the next read."""
        if UNIT_SEPARATOR in data:
            raise SourceError(
                f"{self._path} contains the character 0x1f, which rules out a delimiter of several characters: use "
                "a delimiter of one character"
            )
        is_end = not data
        data = (self._partial + data).replace(self._delimiter, UNIT_SEPARATOR)
        keep = next((n for n in range(len(self._delimiter) - 1, 0, -1) if data.endswith(self._delimiter[:n])), 0)
        keep = 0 if is_end else keep
        data, self._partial = data[: len(data) - keep], data[len(data) - keep :]
        return data or (b"" if is_end else self.read(size))


_EXIT_SECONDS = 5.0
"""The most that the end of a process waits."""
_POLL_SECONDS = 0.001


class LentFile(io.RawIOBase):
    """A readable file that only an Arrow reader refers to: it exists until Arrow frees the reader.

    That may happen on one of Arrow's threads, after the reader has ended or failed. A thread that needs Python while
    the interpreter shuts down is killed, which aborts the process: so the process waits for it before it ends.
    """

    def __init__(self, file: Any) -> None:
        """file: stays open."""
        self._file = file
        _LENT.add(self)

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; none at the end."""
        return self._file.read(size)  # type: ignore[no-any-return]


_LENT: WeakSet[LentFile] = WeakSet()


@atexit.register
def _wait() -> None:
    end = time.monotonic() + _EXIT_SECONDS
    while _LENT and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)


class _Quotes:
    """The quoted fields of a text, block by block. One that ends in the middle of a field of a later line is an error:
    its quote was a plain character, and the lines after it would be part of the field.
    """

    def __init__(self, path: Path | str, delimiter: bytes, quote: bytes) -> None:
        self._path, self._quote = path, quote[0]
        self._ends = np.zeros(256, bool)
        self._ends[[*_LINE_ENDS, delimiter[0]]] = True
        self._tail, self._before = b"", 0x0A
        self._inside, self._spans_lines = False, False
        self._lines, self._began = 1, 1

    def feed(self, data: bytes) -> None:
        """Check the next block; an empty one is the end. The last byte waits for the next block."""
        block, self._tail = self._tail + data[:-1] if data else self._tail, data[-1:]
        if not block:
            return
        if self._quote in block:
            self._check(np.frombuffer(block, np.uint8), self._tail[0] if self._tail else 0x0A)
        elif self._inside and b"\n" in block:
            self._spans_lines = True
        self._lines += block.count(b"\n")
        self._before = block[-1]

    def _check(self, block: NDArray[np.uint8], after: int) -> None:
        at = np.flatnonzero(block == self._quote)
        before = np.where(at > 0, block[at - 1], self._before)
        following = np.where(at < block.size - 1, block[np.minimum(at + 1, block.size - 1)], after)
        opens = self._ends[before] | (before == self._quote)
        closes = self._ends[following] | (following == self._quote)
        first = int(self._inside)  # quotes that open a field or end an escaped pair have this parity
        if not (opens[first::2].all() and closes[1 - first :: 2].all()):
            self._walk(block, at, before, following)
        elif (at.size + first) % 2 == 0:
            self._inside = False
        else:
            last = at.size - 1  # or the opening quote before the escaped pairs that end here
            while last >= 0 and before[last] == self._quote:
                last -= 2
            start = 0 if last < 0 else int(at[last])
            if last >= 0:
                self._began, self._spans_lines = self._line_of(block, start), False
            self._inside = True
            self._spans_lines |= bool((block[start:] == 0x0A).any())

    def _line_of(self, block: NDArray[np.uint8], position: int) -> int:
        return self._lines + int(np.count_nonzero(block[:position] == 0x0A))

    def _walk(self, block: NDArray[np.uint8], at: NDArray[np.int64], before: Any, following: Any) -> None:
        """Do the same quote by quote, for text with quotes that are plain characters."""
        number, start = 0, 0
        while number < at.size:
            position = int(at[number])
            if not self._inside:
                if self._ends[before[number]]:
                    self._inside, self._spans_lines, start = True, False, position
                    self._began = self._line_of(block, position)
            elif following[number] == self._quote:
                number += 1
            else:
                spans = self._spans_lines or bool((block[start:position] == 0x0A).any())
                if spans and not self._ends[following[number]]:
                    raise SourceError(
                        f"{self._path}, line {self._began}: a quoted field continues to line "
                        f"{self._line_of(block, position)} and ends in the middle of a "
                        'field there: double the quotes within a field, or set quote = "" in [csv] if quotes are '
                        "plain characters"
                    )
                self._inside = False
            number += 1
        if self._inside:
            self._spans_lines |= bool((block[start:] == 0x0A).any())


_HEX_INTEGER = "^[+-]?0[xX]"
_INTEGER = r"^[+-]?[0-9]+$"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|nan|[+-]?inf(inity)?", re.IGNORECASE)
_PYTHON_LIST = r"""^\[\s*(['"].*['"]|)\s*\]$"""
_PYTHON_NUMBERS = r"^\[\s*-?[0-9][-0-9.,\s]*\]$"
_WHOLE = 1 << 53
"""Floats hold all whole numbers below it."""


HEX_EXPECTED = "an integer in decimal digits"
"""What InvalidTextError says for hexadecimal text."""


class InvalidTextError(ValueError):
    """A field is not a value of its column's type."""

    def __init__(self, at: int, value: str, expected: str) -> None:
        super().__init__(f"invalid value {value!r}, expected {expected}")
        self.at, self.expected = at, expected


def without_nulls(texts: Any, null_words: Sequence[str]) -> Any:
    """Return trimmed texts, with null words replaced by null."""
    texts = pc.utf8_trim_whitespace(texts)
    return pc.if_else(pc.is_in(texts, value_set=pa.array(list(null_words), pa.string())), None, texts)


def integers(texts: Any, null_words: Sequence[str]) -> Any:
    """Return texts as int64, or as uint64 if a number is above 2^63 - 1; as float64 if one has a fraction.

    A whole number below 2^53 may be written as a float, such as 5.0. Raises InvalidTextError, also for 0x10.
    """
    texts = without_nulls(texts, null_words)
    is_hex = pc.fill_null(pc.match_substring_regex(texts, _HEX_INTEGER), fill_value=False)
    if pc.any(is_hex).as_py():  # Arrow would read some of them, and wrap those from 2^63 on
        at = is_hex.index(True).as_py()
        raise InvalidTextError(at, texts[at].as_py(), HEX_EXPECTED)
    if (found := as_64_bits(texts)) is not None:
        return found
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
    if (found := as_64_bits(digits)) is not None:
        return found
    known = [None if text is None else int(text) for text in digits.to_pylist()]
    least = next((n for n, value in enumerate(known) if value is not None and value < 0), None)
    for at, value in enumerate(known):
        if value is not None and not -(1 << 63) <= value < 1 << 64:
            raise InvalidTextError(at, str(value), "an integer of 64 bits")
        if value is not None and value >= 1 << 63 and least is not None:
            raise InvalidTextError(at, str(value), "no integer above 2^63 in a column that also has negative ones")
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
