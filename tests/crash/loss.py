"""The possible states of a recorded run after a loss of power, given its syncs."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.crash.image import PAGE_BYTES, ROOT, SECTOR_BYTES, File, put
from tests.crash.recording import Recording

KINDS = ("suffix", "torn", "pages", "sectors", "names")
"""The granularity of unsynced data that survived.

suffix    everything up to a call, nothing after it
torn      the same, and some sectors written by that call
pages     some pages of each file, each from some moment, and some length; names up to a call
sectors   the same for sectors of 512 bytes
names     the same for sectors, and each name of a directory from some moment
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """One loss of power: just after a moment of a recording; ``seed`` determines the unsynced data that survived."""

    kind: str
    moment: int
    seed: int

    def build(self, recording: Recording, folder: Path) -> None:
        """Create ``folder``, which must not exist, in the state after the loss."""
        _Rest(self, recording).build(folder)


class _Rest:
    """Chooses the data that survived. Every file and directory is in a state at or after its newest sync."""

    def __init__(self, loss: Loss, recording: Recording) -> None:
        self._kind, self._moment, self._recording = loss.kind, loss.moment, recording
        self._random = random.Random(f"{loss.kind} {loss.moment} {loss.seed}")
        self._cut = max(0, loss.moment - int(self._random.expovariate(0.1)))
        """The moment up to which everything survived; near the loss, because a distant one only shows the syncs
        again.
        """

    def build(self, folder: Path) -> None:
        """Choose the names of directories, and the content of their files."""
        directories: dict[int, dict[str, int]] = {}
        files: dict[int, bytes] = {}
        waiting = [ROOT]
        while waiting:
            directory = waiting.pop()
            directories[directory] = self._names(directory)
            for number in directories[directory].values():
                if number in self._recording.directories:
                    waiting.append(number)
                elif number not in files:
                    files[number] = self._content(number)
        put(folder, directories, files)

    def _names(self, directory: int) -> dict[str, int]:
        versions = [(m, names or {}) for m, names in self._versions(directory)]
        if self._kind != "names":
            return next((names for m, names in reversed(versions) if m <= self._cut), versions[0][1])
        known = sorted({name for _, names in versions for name in names})
        chosen = {name: self._random.choice(versions)[1].get(name) for name in known}
        return {name: number for name, number in chosen.items() if number is not None}

    def _content(self, number: int) -> bytes:
        versions = [(m, file) for m, file in self._versions(number) if file is not None]
        at = max((i for i, (m, _) in enumerate(versions) if m <= self._cut), default=0)
        choices: list[File] = [file for _, file in versions]
        if self._kind == "suffix":
            choices = choices[at : at + 1]
        elif self._kind == "torn":
            later = versions[at + 1][0] if at + 1 < len(versions) else 0
            choices = choices[at : at + 2] if later == self._cut + 1 else choices[at : at + 1]
        length = self._random.choice(choices).size
        return b"".join(self._page(i, choices) for i in range(-(-length // PAGE_BYTES)))[:length]

    def _page(self, index: int, choices: list[File]) -> bytes:
        pages = list({id(page): page for page in (file.page(index) for file in choices)}.values())
        if len(pages) == 1 or self._kind == "pages":
            return self._random.choice(pages)
        return b"".join(self._random.choice(pages)[at : at + SECTOR_BYTES] for at in range(0, PAGE_BYTES, SECTOR_BYTES))

    def _versions(self, number: int) -> list[tuple[int, Any]]:
        """Return the possible states of a file or directory: the synced one, and each change since, with its moment."""
        return self._recording.between(number, self._recording.durable(number, self._moment), self._moment)
