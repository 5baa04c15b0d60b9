"""A damaged dataset raises an error: neither training nor evaluation crashes, or continues with other keys.

python -m tests.train.test_damaged_passes FOLDER FIRST LAST

Flips one byte after the other in a copy of the passes in FOLDER, and writes a line of JSON before and after each: the
results of training and evaluation. It is a program, because damaged data may end its process. Flip 0 changes nothing.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.store.damage import assert_sentence, generator_of
from tests.train.cases import SPECS, Case, Net, result_of, table, tiered, train
from tiercache.errors import DatasetError
from tiercache.store import MemoryEngine

CASE = Case(
    tables=(table("a", 4), table("b", 4)), specs=SPECS, num_samples=80, pass_rows=40, num_keys=60, batch=40, epochs=1
)
REFUSED = "refused: "
BARE = "bare: "


def flip(passes: tc.PassDataset, number: int) -> tuple[str, int, int]:
    generator = generator_of(number)
    one = passes.passes[int(generator.integers(len(passes)))]
    bits = int(generator.integers(1, 256)) if generator.random() < 0.5 else 1 << int(generator.integers(8))
    return one.path.name, int(generator.integers(one.num_bytes())), bits if number else 0


def outcome(what: Callable[[], Iterable[Any]]) -> str:
    """Run it and return the digest of the arrays that it yields, or the error."""
    digest = hashlib.sha256()
    try:
        for array in what():
            digest.update(np.ascontiguousarray(array).tobytes())
    except DatasetError as error:
        assert_sentence(error)
        return REFUSED + str(error)
    except Exception:
        return BARE + traceback.format_exc()
    return digest.hexdigest()


def trained(folder: Path, whole: tc.PassDataset) -> Iterable[Any]:
    passes = tc.PassDataset.open(folder)
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        with tiered(store, passes) as cache:
            train(cache, CASE)
        for keys, fields in result_of(store, whole, None).rows.values():
            yield keys
            yield from fields


def evaluated(folder: Path, cache: Any, model: Net) -> Iterable[Any]:
    with torch.no_grad():
        for piece in cache.evaluate(tc.PassDataset.open(folder)):
            for batch in piece.batches(CASE.batch):
                yield model(batch).cpu().numpy()


def say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(folder: Path, first: int, last: int) -> None:
    whole, copy = tc.PassDataset.open(folder), folder.with_name(f"{folder.name}-{first}")
    shutil.copytree(folder, copy, copy_function=os.link)
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store, tiered(store, whole) as cache:
        model = train(cache, CASE)
        for number in range(first, last):
            name, at, bits = flip(whole, number)
            line = {"number": number, "file": name, "at": at, "bits": bits}
            say(line)
            data = bytearray((folder / name).read_bytes())
            data[at] ^= bits
            (copy / name).unlink()  # not written in place: an earlier open may still map it
            (copy / name).write_bytes(data)
            line["trained"] = outcome(lambda: trained(copy, whole))
            line["evaluated"] = outcome(lambda: evaluated(copy, cache, model))
            say(line)
            (copy / name).unlink()
            os.link(folder / name, copy / name)


def flipped(folder: Path, flips: int) -> Iterator[dict[str, Any]]:
    """Flip bytes of the passes in ``folder`` and yield each result; a process that dies is replaced."""
    first = 0
    while first < flips:
        program = [sys.executable, "-W", "ignore", "-m", "tests.train.test_damaged_passes"]
        command = [*program, str(folder), str(first), str(flips)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False
        )
        assert done.stdout, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        yield from (line for line in lines if "trained" in line)
        if done.returncode:
            yield lines[-1] | {"died": done.returncode}
        first = lines[-1]["number"] + 1


@pytest.mark.parametrize("flips", [120, pytest.param(2000, marks=pytest.mark.long)])
def test_a_flipped_byte_is_refused_or_means_nothing(tmp_path: Path, flips: int) -> None:
    CASE.cut(tmp_path / "passes")
    whole: dict[str, Any] = {}
    problems = Counter[str]()
    refused = dict.fromkeys(["the checksum of MiB", "its header does", "its checksums do"], 0)
    for line in flipped(tmp_path / "passes", flips):
        whole = whole or line
        if "died" in line:
            problems[f"died of {-line['died']}"] += 1
            continue
        for what in ("trained", "evaluated"):
            found: str = line[what]
            if found.startswith(BARE):
                problems[f"{what}, {found.splitlines()[-1].split(':')[0]}"] += 1
            elif not found.startswith(REFUSED):
                problems[f"{what} with other bytes"] += bool(line["bits"])
            else:
                problems["refused without a name"] += "sub-dataset " not in found or line["file"] not in found
                for kind in refused:
                    refused[kind] += kind in found
    assert not +problems, problems
    assert whole["bits"] == 0
    assert not whole["trained"].startswith(REFUSED)
    assert all(refused.values()), refused


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
