"""Compares trainings with the committed digests: ``python -m tests.digests``; ``--write`` updates them.

Update them only in a change that is meant to change bits, and say why in its commit.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.digests.trainings import PATH, TRAININGS, digests, prepare, train


def now(given: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), given)
        dense, _ = train(Path(folder), given, "lmdb")
        return digests(Path(folder), dense)


def main() -> None:
    found = {given: now(given) for given in TRAININGS}
    before = json.loads(PATH.read_text()) if PATH.exists() else {}
    changed = [
        f"{given}: {name}"
        for given in TRAININGS
        for name, value in found[given].items()
        if before.get(given, {}).get(name) != value
    ]
    if "--write" in sys.argv:
        PATH.write_text(json.dumps(found, indent=2) + "\n")
    sys.stdout.write("\n".join([f"{len(changed)} digests differ", *changed]) + "\n")
    sys.exit(bool(changed) and "--write" not in sys.argv)


if __name__ == "__main__":
    main()
