"""Plants faults and reports those that no test sees.

python -m tests.mutants [--only NAME]... [--unchanged]

Each fault of `faults.toml` names the ordinary tests that should fail. They run in a copy of the checkout: first without
a fault, where they must pass, then with one at a time. Exit status 1 if a fault survives, 2 if a fault no longer
applies or a test fails without one. About 20 minutes.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.checkout import ROOT, Checkout
from tests.mutants.fault import Fault, FaultError, read_faults, tests_of

UNCHANGED_SECONDS, FAULT_SECONDS = 3600, 600


def check_unchanged(copy: Checkout, faults: Sequence[Fault]) -> None:
    """Run the tests of faults without any. Raises FaultError if one fails."""
    done = copy.run(tests_of(faults), seconds=UNCHANGED_SECONDS)
    if done.code != 0:
        raise FaultError(f"{done.first} fails without a fault, so no catch would count: fix it first\n{done.output}")
    print(f"{'passed':10}{done.seconds:7.1f} s  without a fault: {done.first}", flush=True)


def survives(fault: Fault, copy: Checkout) -> bool:
    """Return True if the tests of a fault pass in spite of it. Raises FaultError if none could run."""
    with fault.planted(copy.root):
        done = copy.run(fault.tests, seconds=FAULT_SECONDS)
    if done.code != 0 and not done.failed:
        raise FaultError(f"no test of fault {fault.name!r} could run: change it\n{done.output}")
    word = "caught" if done.failed else "SURVIVED"
    print(f"{word:10}{done.seconds:7.1f} s  {fault.name}: {'by ' * done.failed}{done.first}", flush=True)
    return not done.failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a fault; may be repeated")
    parser.add_argument("--unchanged", action="store_true", help="run the tests without faults alone")
    options = parser.parse_args()
    try:
        faults = read_faults(options.only)
        for fault in faults:
            fault.check(ROOT)
        with tempfile.TemporaryDirectory(prefix="tiercache-mutants-") as folder:
            copy = Checkout(Path(folder) / "copy")
            check_unchanged(copy, faults)
            survivors = [] if options.unchanged else [fault for fault in faults if survives(fault, copy)]
    except FaultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for one in survivors:
        print(f"survived: {one.name}: {one.fault} ({one.file})")
    if not options.unchanged:
        print(f"survivors: {len(survivors)} of {len(faults)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
