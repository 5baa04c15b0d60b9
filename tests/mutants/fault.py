"""Faults: one small change of a source file each, and the tests that must fail with it."""

import os
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("faults.toml")


class FaultError(Exception):
    """The list of faults does not fit the sources any more; the message says what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    name: str
    file: str  # relative to the root of the checkout
    fault: str  # the wrong behavior, in one line
    old: str  # a piece of the file's text; it occurs once
    new: str
    tests: tuple[str, ...]  # files and node ids of the ordinary suite, at least one of which must fail

    def check(self, root: Path) -> None:
        """Raise FaultError if the fault or its tests do not fit a checkout."""
        path = root / self.file
        count = path.read_text().count(self.old) if path.is_file() else 0
        if count != 1 or self.old == self.new:
            raise FaultError(
                f"fault {self.name!r} no longer applies: {self.old!r} occurs {count} times in {self.file}, expected "
                f"once: change it in {LIST.name}"
            )
        for test in self.tests:
            file, *names = test.split("::")
            path = root / file
            function = names[-1].partition("[")[0] if names else ""
            if not path.is_file() or f"def {function}" not in path.read_text():
                raise FaultError(f"fault {self.name!r} names the test {test}, which does not exist: change it")

    @contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        """Change the file in a checkout, and put the old text and times back: caches of the old file stay valid."""
        path = root / self.file
        before, status = path.read_bytes(), path.stat()
        try:
            path.write_text(before.decode().replace(self.old, self.new))
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def read_faults(only: Sequence[str] = ()) -> list[Fault]:
    """Return the faults of the list, or those of some names. Raises FaultError for an unknown or repeated name."""
    records = tomllib.loads(LIST.read_text())["fault"]
    faults = [Fault(**{**one, "tests": tuple(one["tests"])}) for one in records]
    names = [one.name for one in faults]
    if wrong := {name for name in names if names.count(name) > 1}:
        raise FaultError(f"two faults are named {min(wrong)!r}: rename one")
    if wrong := {*only} - {*names}:
        raise FaultError(f"no fault is named {min(wrong)!r}: faults.toml has the names")
    return [one for one in faults if not only or one.name in only]


def tests_of(faults: Sequence[Fault]) -> list[str]:
    """Return the tests of faults, each once: no node of a file that is there as a whole."""
    tests = dict.fromkeys(test for one in faults for test in one.tests)
    return [test for test in tests if "::" not in test or test.partition("::")[0] not in tests]
