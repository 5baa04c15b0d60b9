"""The bytes of a text file on their way to the CSV parser: its encoding, its delimiter and its quotes are checked."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

UNIT_SEPARATOR = b"\x1f"
"""What a delimiter of several characters becomes: the parser knows single ones."""
_LINE_ENDS = (0x0A, 0x0D)
_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


class TextStream(io.RawIOBase):
    """A readable stream of the same text. Reading it raises SourceError for text that the parser would misread.

    delimiter: as the file has it. quote: one byte, or empty if quotes are plain characters.
    """

    def __init__(self, path: Path | str, source: Any, delimiter: bytes, quote: bytes) -> None:
        self._path, self._source, self._delimiter = path, source, delimiter
        self._quotes = _Quotes(path, delimiter, quote) if quote else None
        self._is_first, self._held = True, b""

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
        if self._is_first:
            self._is_first = False
            self._check_encoding(data[:64])
        if self._quotes is not None:
            self._quotes.take(data)
        return self._single(data, size) if len(self._delimiter) > 1 else data

    def _check_encoding(self, head: bytes) -> None:
        found = _BOMS.get(head[:2]) or ("UTF-16 or UTF-32" if b"\0" in head else None)
        if found is not None:
            raise SourceError(
                f"{self._path} is text in {found}, expected UTF-8: convert it, for example with "
                f"iconv -f {found.split()[0]} -t UTF-8"
            )

    def _single(self, data: bytes, size: int) -> bytes:
        """Replace the delimiter; the start of one at the end of the data waits for the rest."""
        if UNIT_SEPARATOR in data:
            raise SourceError(
                f"{self._path} contains the character 0x1f, which a delimiter of several characters cannot be read "
                "with: give it a delimiter of one character"
            )
        is_end = not data
        data = (self._held + data).replace(self._delimiter, UNIT_SEPARATOR)
        keep = next((n for n in range(len(self._delimiter) - 1, 0, -1) if data.endswith(self._delimiter[:n])), 0)
        keep = 0 if is_end else keep
        data, self._held = data[: len(data) - keep], data[len(data) - keep :]
        return data or (b"" if is_end else self.read(size))


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

    def take(self, data: bytes) -> None:
        """Check the next block; an empty one is the end. The last byte waits, as what follows it decides."""
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
        behind = np.where(at < block.size - 1, block[np.minimum(at + 1, block.size - 1)], after)
        opens = self._ends[before] | (before == self._quote)
        closes = self._ends[behind] | (behind == self._quote)
        first = int(self._inside)  # quotes that open a field or end an escaped pair have this parity
        if not (opens[first::2].all() and closes[1 - first :: 2].all()):
            self._walk(block, at, before, behind)
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

    def _line_of(self, block: NDArray[np.uint8], place: int) -> int:
        return self._lines + int(np.count_nonzero(block[:place] == 0x0A))

    def _walk(self, block: NDArray[np.uint8], at: NDArray[np.int64], before: Any, behind: Any) -> None:
        """Do the same quote by quote, where some are plain characters."""
        number, start = 0, 0
        while number < at.size:
            place = int(at[number])
            if not self._inside:
                if self._ends[before[number]]:
                    self._inside, self._spans_lines, start = True, False, place
                    self._began = self._line_of(block, place)
            elif behind[number] == self._quote:
                number += 1
            else:
                spans = self._spans_lines or bool((block[start:place] == 0x0A).any())
                if spans and not self._ends[behind[number]]:
                    raise SourceError(
                        f"{self._path}, line {self._began}: a quoted field goes on to line "
                        f"{self._line_of(block, place)} and ends in the middle of a "
                        'field there: double the quotes within a field, or say quote = "" in [csv] if quotes are '
                        "plain characters"
                    )
                self._inside = False
            number += 1
        if self._inside:
            self._spans_lines |= bool((block[start:] == 0x0A).any())
