"""A damaged dataset raises an error: neither training nor evaluation crashes, or continues with other keys.

python -m tests.train.test_damaged_passes FOLDER FLIPS

Flips one byte after the other in a copy of the passes in FOLDER, and writes a line of JSON for each: the results of
training and evaluation. It is a program, because damaged data may end its process. Flip 0 changes nothing.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.store.damage import assert_sentence, generator_of
from tests.train.cases import SPECS, Case, Net, open_store, result_of, table, tiered, train
from tests.train.loops import train_store
from tiercache.errors import DatasetError

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
    with open_store(folder, CASE, "memory") as store:
        train_store(store, passes, CASE)
        for keys, fields in result_of(store, whole, None).rows.values():
            yield keys
            yield from fields


def evaluated(folder: Path, cache: Any, model: Net) -> Iterable[Any]:
    with torch.no_grad():
        for piece in cache.evaluate(tc.PassDataset.open(folder)):
            for batch in piece.batches(CASE.batch):
                yield model(batch).cpu().numpy()


def main(folder: Path, flips: int) -> None:
    whole, copy = tc.PassDataset.open(folder), folder.with_name("copy")
    shutil.copytree(folder, copy, copy_function=os.link)
    with open_store(folder, CASE, "memory") as store, tiered(store, whole) as cache:
        model = train(cache, CASE)
        for number in range(flips):
            name, at, bits = flip(whole, number)
            line = {"number": number, "file": name, "at": at, "bits": bits}
            data = bytearray((folder / name).read_bytes())
            data[at] ^= bits
            (copy / name).unlink()  # not written in place: an earlier open may still map it
            (copy / name).write_bytes(data)
            line["trained"] = outcome(lambda: trained(copy, whole))
            line["evaluated"] = outcome(lambda: evaluated(copy, cache, model))
            print(json.dumps(line), flush=True)  # noqa: T201
            (copy / name).unlink()
            os.link(folder / name, copy / name)


@pytest.mark.parametrize("flips", [120, pytest.param(2000, marks=pytest.mark.long)])
def test_a_flipped_byte_is_refused_or_means_nothing(tmp_path: Path, flips: int) -> None:
    CASE.cut(tmp_path / "passes")
    command = [sys.executable, "-W", "ignore", "-m", "tests.train.test_damaged_passes", str(tmp_path / "passes")]
    root, variables = Path(__file__).parents[2], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(flips)], cwd=root, env=variables, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, len(lines)) == (0, flips), f"flip {len(lines)} ended the process:\n{done.stderr}"
    problems = Counter[str]()
    refused = dict.fromkeys(["the checksum of MiB", "its header does", "its checksums do"], 0)
    for line in lines:
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
    assert lines[0]["bits"] == 0
    assert not lines[0]["trained"].startswith(REFUSED)
    assert all(refused.values()), refused


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
