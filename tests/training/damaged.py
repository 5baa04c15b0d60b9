"""Training and evaluation of passes with one flipped byte: a program, because what is damaged may end its process.

    python -m tests.training.damaged FOLDER FIRST LAST

Flips one byte after the other in a copy of the passes in FOLDER, and writes a line of JSON before each and one behind
it: what training and evaluation ended with. Flip 0 changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import tiercache as tc
from tests.store.damage import assert_sentence, generator_of
from tests.training.cases import SPECS, Case, Net, result_of, table, tiered, train
from tiercache.errors import DatasetError
from tiercache.store import MemoryEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CASE = Case(
    tables=(table("a", 4), table("b", 4)), specs=SPECS, num_samples=80, pass_rows=40, num_keys=60, batch=40, epochs=1
)
REFUSED = "refused: "
BARE = "bare: "


def flip(passes: tc.PassDataset, number: int) -> tuple[str, int, int]:
    """Return the file, the byte and the bits of one flip."""
    generator = generator_of(number)
    one = passes.passes[int(generator.integers(len(passes)))]
    bits = int(generator.integers(1, 256)) if generator.random() < 0.5 else 1 << int(generator.integers(8))
    return one.path.name, int(generator.integers(one.num_bytes())), bits if number else 0


def outcome(what: Callable[[], Iterable[Any]]) -> str:
    """Do it and return the digest of the arrays that it yields, or how it was refused."""
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
    """Train the passes in ``folder`` and yield the rows of the keys of ``whole``."""
    passes = tc.PassDataset.open(folder)
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        with tiered(store, passes) as cache:
            train(cache, CASE)
        for keys, fields in result_of(store, whole, None).rows.values():
            yield keys
            yield from fields


def evaluated(folder: Path, cache: Any, model: Net) -> Iterable[Any]:
    """Evaluate the passes in ``folder`` and yield the model's outputs."""
    with torch.no_grad():
        for piece in cache.evaluate(tc.PassDataset.open(folder)):
            for batch in piece.batches(CASE.batch):
                yield model(batch).cpu().numpy()


def say(line: dict[str, Any]) -> None:
    """Write a line that is read even if the process ends."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(folder: Path, first: int, last: int) -> None:
    """Flip bytes ``first`` to ``last``."""
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
            (copy / name).unlink()  # not written in place: what was opened before may be mapped still
            (copy / name).write_bytes(data)
            line["trained"] = outcome(lambda: trained(copy, whole))
            line["evaluated"] = outcome(lambda: evaluated(copy, cache, model))
            say(line)
            (copy / name).unlink()
            os.link(folder / name, copy / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
