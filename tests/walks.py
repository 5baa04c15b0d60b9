"""Walks: the files and functions that one budget, batch, key and row enter, from a trace of a tiny training.

``python -m tests.walks`` prints them. Functions are counted once however often they are called; lambdas,
comprehensions and code outside the package are not counted.
"""

import dataclasses
import gc
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

import tiercache as tc
from tests.datasets import raw_batch, write_dataset
from tiercache.store import NEVER, Cursor, Range, SegmentLayout, Store, Table, hash_keys
from tiercache.store.files import huge_pages

PACKAGE = Path(tc.__file__).parent
DEVICE_BUDGET = 41_943_049  # a number of bytes that is unique in the training
KEYS = 64


class Call(NamedTuple):
    """A function of the package that was entered."""

    file: str  # relative to the package
    function: str
    caller: str  # the file of the package that called it, other code in between left out; empty if none did


@dataclass
class Walk:
    name: str
    calls: list[Call] = field(default_factory=list)

    @property
    def functions(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys((call.file, call.function) for call in self.calls))

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(call.file for call in self.calls))

    def entries(self, file: str) -> list[str]:
        """Return the functions of a file that others call, once for each call."""
        return [call.function for call in self.calls if call.file == file != call.caller]

    def __str__(self) -> str:
        return f"{self.name}: {len(self.calls)} calls, {len(self.functions)} functions, {len(self.files)} files"


def traced(
    name: str, run: Callable[[], Any], keep: Callable[[FrameType], bool] = lambda _: True, *, threads: bool = False
) -> Walk:
    """Run a function and return its walk: the calls to ``keep``; with ``threads`` on those that it starts, too."""
    walk = Walk(name)

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)) or code.co_name.startswith("<"):
            return
        if keep(frame):
            walk.calls.append(Call(file_of(frame), code.co_qualname, caller_of(frame)))

    gc.collect()  # other tests' garbage is closed now, not during the walk
    gc.disable()
    if threads:
        threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()
    return walk


def file_of(frame: FrameType) -> str:
    return Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()


def caller_of(frame: FrameType) -> str:
    """Return the file of the package that called a function, or nothing."""
    above = frame.f_back
    while above is not None and not above.f_code.co_filename.startswith(str(PACKAGE)):
        above = above.f_back
    return "" if above is None else file_of(above)


def carries(value: object, number: int, depth: int = 0) -> bool:
    """Return True if a value is a number, as an int or as text, or has it in a field or element, two levels deep."""
    if isinstance(value, int | str) and not isinstance(value, bool):
        return value in {number, str(number)}
    if depth > 1:
        return False
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in dataclasses.fields(value)]
        return any(carries(getattr(value, name, None), number, depth + 1) for name in names)
    several = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return any(carries(one, number, depth + 1) for one in several)


def arguments_carry(frame: FrameType, number: int) -> bool:
    """At a call, locals are its arguments."""
    return any(carries(frame.f_locals[name], number) for name in frame.f_locals if name in frame.f_code.co_varnames)


def walk_training(folder: Path) -> tuple[Walk, Walk, Walk]:
    table = tc.Table(name="item", dim=4, optimizer=tc.optim.Adagrad(learning_rate=0.1))
    schema = tc.Schema(label="label", features=(tc.Feature(name="item", table="item"),), tables=(table,))
    parts = [np.arange(start, start + KEYS) for start in (0, KEYS // 2)]
    batches = [raw_batch(schema, {"item": keys}, label=keys % 2) for keys in parts]
    passes = write_dataset(folder / "passes", schema, batches)
    model = tc.EmbeddingBagCollection(schema)
    opened: list[tc.TierCache] = []

    def open_cache() -> None:
        budgets: dict[str, Any] = {"device_budget": DEVICE_BUDGET, "host_budget": "64MiB"}
        opened.append(tc.TierCache(folder / "model.tc", passes, model=model, progress=False, **budgets))

    budget = traced("device_budget", open_cache, lambda frame: arguments_carry(frame, DEVICE_BUDGET), threads=True)
    batch = step = Walk("none")
    with opened[0] as cache:
        optimizer = cache.optimizer
        for p in cache.passes(epochs=1):
            iterator = iter(p.batches(KEYS // 2))
            made: list[Any] = []

            def train(iterator: Any = iterator, made: list[Any] = made) -> None:
                made.append(next(iterator))
                model(made[-1]).sum().backward()

            batch = traced("one batch, forward and backward", train)
            step = traced("one step", optimizer.step)
            optimizer.zero_grad()
            for rest in iterator:
                model(rest).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return budget, batch, step


def walk_store(folder: Path) -> dict[str, Walk]:
    """Rows begin at a page of memory, as those of a training do: elsewhere they are written through a copy."""
    table = Table(name="user", dim=16)
    count, half = 40_000, 20_000
    keys = np.arange(count, dtype=np.int64)
    keys = keys[np.argsort(hash_keys(keys, table.table_id))]
    ranges = [Range(1, (half,)), Range(NEVER, (count - half,))]
    layout = SegmentLayout.of(ranges, row_bytes=table.row_bytes, page_rows=320, block_bytes=4 << 20)
    path, stores = folder / "walk.tc", list[Store]()

    def blocks() -> Any:
        for block in range(layout.num_blocks):
            part = keys[block * layout.block_rows :][: layout.block_rows]
            yield 0, block, huge_pages(part.size * table.row_bytes)[: part.size * table.row_bytes], part

    def publish() -> None:
        stores[0].publish(Cursor(1, 0), state=b"x" * 100, schedule_digest="", settings={}, environment={})

    def walk(name: str, run: Callable[[], Any]) -> None:
        whole = traced(name, run, threads=True)
        walks[name] = Walk(name, [call for call in whole.calls if call.file.startswith("store/")])

    walks: dict[str, Walk] = {}
    walk("open a new store", lambda: stores.append(Store.open(path, tables=[table])))
    walk("append one segment", lambda: stores[0].append(0, [layout], blocks()))
    walk("publish a commit", publish)
    stores.pop().close()
    walk("open to read", lambda: stores.append(Store.open(path, mode="r")))
    walk("describe a segment", lambda: stores[0].segments[0].meta)
    stores[0].lookup("user", np.array([18]))
    walk("look one key up", lambda: stores[0].lookup("user", np.array([17])))
    stores.pop().close()
    return walks


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        walks = [*walk_training(Path(folder)), *walk_store(Path(folder)).values()]
    for walk in walks:
        functions = "".join(f"   {file}: {function}\n" for file, function in walk.functions)
        sys.stdout.write(f"== {walk}\n{functions}")


if __name__ == "__main__":
    main()
