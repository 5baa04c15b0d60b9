"""Plants faults and reports those that no test sees.

python -m tests.mutants [--only NAME]... [--list | --unchanged] [--jobs N] [--json FILE]

Each fault of `faults.toml` names the ordinary tests that should fail. They run in a copy of the checkout: first without
a fault, where they must pass, then with one at a time. Exit status 1 if a fault survives, 2 if a fault no longer
applies or a test fails without one. About 20 minutes.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.mutants.checkout import ROOT, Checkout
from tests.mutants.fault import Fault, FaultError, read_faults, tests_of

UNCHANGED_SECONDS, FAULT_SECONDS = 3600, 600


def check_unchanged(copy: Checkout, faults: Sequence[Fault]) -> float:
    """Run the tests of faults without any; return the seconds. Raises FaultError if one fails."""
    done = copy.run(tests_of(faults), seconds=UNCHANGED_SECONDS)
    if done.code != 0:
        raise FaultError(f"{done.first} fails without a fault, so no catch would count: fix it first\n{done.output}")
    print(f"{'passed':10}{done.seconds:7.1f} s  without a fault: {done.first}", flush=True)
    return done.seconds


def try_fault(fault: Fault, copies: SimpleQueue[Checkout]) -> dict[str, Any]:
    """Run the tests of a fault in one of the copies; return its record. Raises FaultError if none could run."""
    copy = copies.get()
    try:
        with fault.planted(copy.root):
            done = copy.run(fault.tests, seconds=FAULT_SECONDS)
    finally:
        copies.put(copy)
    if done.code != 0 and not done.failed:
        raise FaultError(f"no test of fault {fault.name!r} could run: change it\n{done.output}")
    word = "caught" if done.failed else "SURVIVED"
    print(f"{word:10}{done.seconds:7.1f} s  {fault.name}: {'by ' * done.failed}{done.first}", flush=True)
    record = {"name": fault.name, "file": fault.file, "fault": fault.fault, "seconds": round(done.seconds, 1)}
    return record | {"caught_by": done.first if done.failed else None}


def run(faults: Sequence[Fault], jobs: int, *, only_unchanged: bool) -> dict[str, Any]:
    """Run the tests without faults, then with each; return the record of all. Raises FaultError."""
    for fault in faults:
        fault.check(ROOT)
    with tempfile.TemporaryDirectory(prefix="tiercache-mutants-") as folder:
        copies: SimpleQueue[Checkout] = SimpleQueue()
        first = Checkout(Path(folder) / "0")
        record: dict[str, Any] = {"unchanged_seconds": round(check_unchanged(first, faults), 1), "faults": []}
        if only_unchanged:
            return record
        copies.put(first)
        for number in range(1, min(jobs, len(faults))):
            copies.put(Checkout(Path(folder) / str(number)))
        with ThreadPoolExecutor(jobs) as threads:
            record["faults"] = list(threads.map(lambda fault: try_fault(fault, copies), faults))
    return record


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a fault; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the faults and their tests, and run nothing")
    parser.add_argument("--unchanged", action="store_true", help="run the tests without faults alone")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time, in a copy each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    options = parser.parse_args()
    try:
        faults = read_faults(options.only)
        if options.list:
            for fault in faults:
                print(f"{fault.name}: {fault.fault} ({fault.file}); {', '.join(fault.tests)}")
            return 0
        record = run(faults, max(1, options.jobs), only_unchanged=options.unchanged)
    except FaultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.unchanged:
        return 0
    survivors = [one for one in record["faults"] if one["caught_by"] is None]
    for one in survivors:
        print(f"survived: {one['name']}: {one['fault']} ({one['file']})")
    print(f"survivors: {len(survivors)} of {len(faults)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
