"""Trainings that run on every rank of a run, and their results."""

import gc
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tiercache as tc
from tests.cache_options import gathered
from tests.dist.pool import RanksPool
from tests.train.cases import Case, Net, Result, Spec, table
from tests.train.devices import shim
from tiercache.dist.communicator import AnyCommunicator

ONE = Case(
    tables=(table("users", 8), table("items", 8)),
    specs=(Spec(name="user", table="users"), Spec(name="item", table="items")),
)
BAGS = Case(
    tables=(
        table("users", 5, tc.optim.SGD(learning_rate=0.1)),
        table("items", 16, tc.optim.Adagrad(learning_rate=0.05)),
        table("words", 12, tc.optim.RowWiseAdagrad(learning_rate=0.05, decay=0.01)),
        table("tags", 16, tc.optim.Adam(learning_rate=0.01)),
    ),
    specs=(
        Spec(name="user", table="users"),
        Spec(name="friend", table="users", hotness="ragged", mode="mean"),
        Spec(name="item", table="items", hotness="multi_hot", mode="max"),
        Spec(name="word", table="words", hotness="ragged", weighted=True),
        Spec(name="title", table="words", hotness="multi_hot", mode="mean"),
        Spec(name="tag", table="tags", hotness="ragged", mode="sum"),
    ),
)
SHORT = Case(tables=ONE.tables, specs=ONE.specs, num_samples=131, pass_rows=40, batch=13, shuffle=False)
"""Passes and batches that no number of ranks divides; the last batch of a pass has a sample, so ranks have none."""
OTHER_OPTIMIZERS = replace(
    BAGS,
    tables=(
        table("users", 5, tc.optim.Adagrad(learning_rate=0.05)),
        table("items", 16, tc.optim.Adam(learning_rate=0.02)),
        table("words", 12, tc.optim.RowWiseAdagrad(learning_rate=0.01, decay=0.01)),
        table("tags", 16, tc.optim.SGD(learning_rate=0.1)),
    ),
)
CASES = {"one": ONE, "bags": BAGS, "short": SHORT, "other optimizers": OTHER_OPTIMIZERS}
OPTIONS: dict[str, Any] = {"device_budget": "4MiB", "host_budget": "32MiB"}
Rows = dict[str, tuple[NDArray[np.int64], tuple[NDArray[np.float32], ...]]]
"""Keys and fields by table."""


def open_sharded(case: Case, folder: str, *, queued: bool = False, **options: Any) -> tc.TierCache:
    """Open the store of a test. queued: the rows are a GPU's, whose kernels run on the shim."""
    passes = tc.PassDataset.open(Path(folder) / "passes")
    if queued:
        options["device"] = shim()
    return tc.TierCache(Path(folder) / "model.tc", passes, **gathered(OPTIONS | options))


def model_of(cache: tc.TierCache, case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the tracked model of a case and its optimizer."""
    torch.manual_seed(1)
    model: nn.Module = Net(cache, case)
    if cache.communicator.size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.dense_lr, momentum=0.5)
    cache.register(model=model, optimizer=optimizer)
    optimizer = cache.optimizer
    return model, optimizer


def step(batches: Iterable[tc.Batch], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step after the loss of a batch, which may come as several micro-batches."""
    for batch in batches:
        (nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label) * batch.weight).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(
    cache: tc.TierCache, case: Case, tracked: tuple[nn.Module, torch.optim.Optimizer] | None = None
) -> Iterator[tuple[tc.Pass, int]]:
    """Train a case to its end, and yield the pass and the number of each batch after its step."""
    model, optimizer = tracked or model_of(cache, case)
    for p in cache.passes(epochs=case.epochs):
        for number, batch in enumerate(p.batches(case.batch, shuffle=case.shuffle)):
            step([batch], model, optimizer)
            yield p, number


def train(
    ranks: AnyCommunicator,
    case: str,
    folder: str,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    micro_batches: int | None = None,
    prefetch: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a case, for ``steps`` steps if given, and return this rank's part and the dense part at the end."""
    one, done = CASES[case], 0
    with open_sharded(one, folder, **options) as cache:
        model, optimizer = model_of(cache, one)
        for p in cache.passes(epochs=one.epochs if epochs is None else epochs):
            if micro_batches is None:
                each = ([batch] for batch in p.batches(one.batch, shuffle=one.shuffle, prefetch=prefetch))
            else:
                each = p.steps(one.batch, micro_batches=micro_batches, shuffle=one.shuffle)
            for batches in each:
                if done == steps:
                    continue
                step(batches, model, optimizer)
                assert cache.pinned_batch_bytes == 0 <= cache.scratch_bytes
                done += 1
            if steps is not None:
                p.skip()
        found = {"commit": list(cache.store.commit.cursor), "planned": len(cache.plan(passes=3))}
    return found | dense_of(model)


def on_ranks(
    pool: RanksPool, size: int, folder: Path, case: str = "one", body: str = "train", **options: Any
) -> list[Any]:
    """Run a case on ranks in a folder, cutting its passes if needed."""
    if not (folder / "passes").exists():
        CASES[case].cut(folder / "passes")
    return pool.run(size, f"{__name__}:{body}", case=case, folder=str(folder), **options)


def dense_of(model: nn.Module) -> dict[str, Any]:
    """Return the dense weights by their names without DistributedDataParallel's."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {f"dense.{name}": value.numpy().copy() for name, value in inner.state_dict().items()}


def stored(folder: Path, name: str = "model.tc") -> Rows:
    """Return all rows of a store by table, keys ascending."""
    rows = {}
    with tc.Store.open(folder / name, mode="r") as store:
        for one in store.tables:
            none = np.empty(0, np.int64), tuple(np.empty((0, field.width), np.float32) for field in one.fields)
            chunks = [none, *((keys, tuple(fields)) for keys, fields in store.scan(one.name))]
            keys = np.concatenate([chunk[0] for chunk in chunks])
            order = np.argsort(keys)
            fields = [np.concatenate([chunk[1][f] for chunk in chunks]) for f in range(len(one.fields))]
            rows[one.name] = keys[order], tuple(field[order] for field in fields)
    return rows


def assert_same_rows(ours: Rows, theirs: Rows, tolerance: float = 0.0) -> None:
    """Compare all rows that ``stored`` returned, bit for bit or within a tolerance."""
    assert ours.keys() == theirs.keys()
    for name, (keys, fields) in ours.items():
        np.testing.assert_array_equal(keys, theirs[name][0], err_msg=name)
        for one, other in zip(fields, theirs[name][1], strict=True):
            if tolerance:
                np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance, err_msg=name)
            else:
                np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32), err_msg=name)


def assert_as_alone(ours: Rows, dense: dict[str, Any], theirs: Result, *, tolerance: float = 1e-5) -> None:
    """Compare all rows that ``stored`` returned, and dense weights, with one process."""
    assert_same_rows(ours, theirs.rows, tolerance)
    for name, weight in theirs.dense.items():
        np.testing.assert_allclose(dense[f"dense.{name}"], weight.numpy(), atol=tolerance, rtol=tolerance, err_msg=name)


def resident(case: Case, passes: tc.PassDataset, *, steps: int | None = None) -> Result:
    """Train the same batches on one process, all in memory."""
    from tests.train.cases import result_of_resident

    cache: Any = tc.InMemoryCache(passes)
    torch.manual_seed(1)
    model = Net(cache, case)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.dense_lr, momentum=0.5)
    cache.register(model=model, optimizer=optimizer)
    optimizer = cache.optimizer
    done = 0
    for p in cache.passes(epochs=case.epochs):
        for batch in p.batches(case.batch, shuffle=case.shuffle):
            if done != steps:
                step([batch], model, optimizer)
                done += 1
        if steps is not None:
            p.skip()
    return result_of_resident(cache, model)


def train_and_stop(
    ranks: AnyCommunicator, case: str, folder: str, *, passes: int, batches: int, within: bool, **options: Any
) -> int:
    """Train ``passes`` passes and ``batches`` batches, commit inside the pass if ``within``, and leave silently."""
    with open_sharded(CASES[case], folder, **options) as cache:
        for p, number in trained(cache, CASES[case]):
            if p.index == passes and number == batches:
                if within:
                    cache.commit()
                return int(cache.store.commit.id)
    raise AssertionError("there was nothing left to leave out")


def misuse(ranks: AnyCommunicator, case: str, folder: str, *, what: str) -> None:
    """Misuse a cache, on all ranks or on one."""
    one = CASES[case]
    criterion = nn.BCEWithLogitsLoss()
    with open_sharded(one, folder, **({"seed": ranks.rank} if what == "seeds" else {})) as cache:
        model, _ = model_of(cache, one)
        for p in cache.passes(epochs=1):
            batches = p.batches(one.batch)
            first = next(batches)
            if what == "no step":
                criterion(model(first), first.label).backward()
                continue
            if what == "another batch":
                model([first, next(batches)][ranks.rank])
            if what == "a step of one":
                model.module(first).sum().backward()  # without torch's reduction, which would meet it first
                if ranks.rank == 1:
                    cache.optimizer.step()
                model.module(next(batches))
            if what == "size":
                next(p.batches(0))
            if what == "sizes":
                next(p.batches(one.batch + ranks.rank))
            if what == "one rank's micro-batch":
                if ranks.rank == 1:
                    p._before_batch = _broken
                for batches in p.steps(one.batch, micro_batches=4):
                    list(batches)
            if what == "one rank's samples":
                if ranks.rank == 1:
                    p.source.whole.read = _broken  # type: ignore[method-assign]
                list(batches)


def _broken(*_: Any, **__: Any) -> Any:
    raise OSError("the disk of rank 1 is gone")


def noting_rows(rows: Any, events: list[str], check: Callable[[], None] = lambda: None) -> list[threading.Event]:
    """Have the exchange of rows record "rows 0", "rows 1" and so on; return events that are set in order."""
    serve, arrived = rows.serve, [threading.Event() for _ in range(5)]

    def answered(*arguments: Any, **options: Any) -> Any:
        check()
        number = sum(event.is_set() for event in arrived)
        found = serve(*arguments, **options)
        events.append(f"rows {number}")
        arrived[number].set()
        return found

    rows.serve = answered
    return arrived


def note_dense(number: int, events: list[str], arrived: list[threading.Event], schedule: str) -> None:
    """Record "dense" of a batch, after the next one's rows have arrived if the schedule says so."""
    if schedule == "interleaved" and number < 3:
        assert arrived[number + 1].wait(30), "the next rows never come while this one is in the dense part"
    events.append(f"dense {number}")


def overlapped(ranks: AnyCommunicator, case: str, folder: str, *, schedule: str, queued: bool = False) -> list[str]:
    """Train one batch of 4 micro-batches, whose dense parts wait for earlier events; return the order.

    queued: the training thread brings rows, and another one only asks for them.
    """
    one, events = CASES[case], list[str]()
    with open_sharded(one, folder, queued=queued) as cache:
        model, optimizer = model_of(cache, one)
        ask = cache._exchange.input_dist.exchange

        def asked(*arguments: Any, **options: Any) -> Any:
            assert threading.current_thread().name.startswith("tiercache-input")
            return ask(*arguments, **options)

        def check() -> None:
            assert (threading.current_thread() is threading.main_thread()) == (queued or schedule == "simple")

        cache._exchange.input_dist.exchange = asked  # type: ignore[method-assign]
        arrived = noting_rows(cache._exchange.rows, events, check)
        passes = cache.passes(epochs=1)
        for batches in next(passes).steps(one.batch, micro_batches=4, schedule=schedule):
            for number, batch in enumerate(batches):
                out = model(batch)
                note_dense(number, events, arrived, schedule)
                (nn.functional.binary_cross_entropy_with_logits(out, batch.label) * batch.weight).backward()
            optimizer.step()
            events.append("step")
            break
    return events


def asked_ahead(ranks: AnyCommunicator, case: str, folder: str, *, queued: bool) -> list[str]:
    """Train a pass, each batch of which waits for the next one's request; return the calls in order.

    Each by the names of its thread, its communicator and its operation.
    """
    one, events = CASES[case], list[str]()
    with open_sharded(one, folder, queued=queued) as cache:
        model, optimizer = model_of(cache, one)
        done = threading.Condition()

        def noted(name: str, call: Any) -> Any:
            def made(*arguments: Any, **options: Any) -> Any:
                found = call(*arguments, **options)
                with done:
                    events.append(f"{name} {threading.current_thread().name.split('_')[0]}")
                    done.notify_all()
                return found

            return made

        for name in ("input", "exchange"):
            there = getattr(cache._parts.communicators, name)
            for method in ("exchange_splits", "all_to_all"):
                setattr(there, method, noted(f"{name} {method}", getattr(there, method)))
        passes = cache.passes(epochs=1)
        first = next(passes)
        for number, batch in enumerate(first.batches(one.batch)):
            events.append("train")
            following = number + 1 < -(-first.num_samples // one.batch)
            with done:
                wanted = number + 1 + following
                assert done.wait_for(lambda: _count(events, "input all_to_all") >= wanted, 30), events  # noqa: B023
                ahead = max(cache._backend.ahead, cache._exchange.least_ahead)
                assert _count(events, "input all_to_all") <= number + 1 + ahead, events
            step([batch], model, optimizer)
            events.append("step")
    return events


def _count(events: list[str], begin: str) -> int:
    return sum(event.startswith(begin) for event in events)


WAITING = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "index", "repeat_interleave"}
"""Torch operators that read from a GPU: an index if it is a mask."""


def waits(ranks: AnyCommunicator, case: str, folder: str, *, sharding: dict[str, str]) -> list[str]:
    """Train on the shim; return the operations in later steps for which the host would have waited."""
    from torch.utils._python_dispatch import TorchDispatchMode

    one, found = CASES[case], list[str]()

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            is_mask = name != "index" or any(i is not None and i.dtype in {torch.bool, torch.uint8} for i in args[1])
            if name in WAITING and is_mask:
                found.append(name)
            return func(*args, **kwargs or {})

    with open_sharded(one, folder, queued=True, sharding=sharding) as cache:
        model, optimizer = model_of(cache, one)
        backend, runtime = cache._backend, cache._backend._runtime

        def noted(name: str, call: Any) -> Any:
            def made(*arguments: Any, **options: Any) -> Any:
                if threading.current_thread() is threading.main_thread():
                    found.append(name)
                return call(*arguments, **options)

            return made

        for there, name in ((backend, "slot_mask"), (runtime, "download"), (runtime, "synchronize")):
            setattr(there, name, noted(name, getattr(there, name)))
        passes = cache.passes(epochs=1)
        for number, batch in enumerate(next(passes).batches(one.batch)):
            if number == 1:
                found.clear()
            with Noting():
                step([batch], model, optimizer)
        assert number > 1
        return [*found]


def overlapped_evaluation(ranks: AnyCommunicator, case: str, folder: str, *, schedule: str) -> list[str]:
    """Evaluate 4 batches, each of which is read after its predecessors' events; return the order."""
    one, events, arrived = CASES[case], list[str](), list[threading.Event]()
    with open_sharded(one, folder) as cache:
        model, _ = model_of(cache, one)
        evaluating = cache._exchange.evaluating

        def noted(passes: Any) -> Any:
            exchange = evaluating(passes)
            arrived.extend(noting_rows(exchange.rows, events))
            return exchange

        cache._exchange.evaluating = noted  # type: ignore[method-assign]
        some = next(iter(cache.evaluate(cache.dataset)))
        with torch.no_grad():
            for number, batch in enumerate(some.batches(-(-some.num_samples // 4), schedule=schedule)):
                model(batch)
                note_dense(number, events, arrived, schedule)
    return events


def resumed_late(ranks: AnyCommunicator, case: str, folder: str, *, queued: bool) -> str:
    """Leave the micro-batches of a pass, continue with them in the next one, and look one up."""
    one = CASES[case]
    with open_sharded(one, folder, queued=queued) as cache:
        model, _ = model_of(cache, one)
        passes = cache.passes(epochs=1)
        p = next(passes)
        kept = next(p.steps(one.batch, micro_batches=4))
        next(kept)
        p.skip()
        next(passes)
        try:
            for batch in kept:
                model(batch)
        except RuntimeError as error:
            return str(error)
    return "nothing was said"


def commit_twice(ranks: AnyCommunicator, case: str, folder: str) -> list[Any]:
    """Commit twice in a row inside a pass and leave; commit before the first batch after that; train to the end."""
    one, found = CASES[case], []
    with open_sharded(one, folder) as cache:
        for p, number in trained(cache, one):
            if p.index == 1 and number == 1:
                cache.commit()
                cache.commit()
                break
    with open_sharded(one, folder) as cache:
        model, optimizer = model_of(cache, one)
        for p in cache.passes(epochs=one.epochs):
            if not found:
                cache.commit()
                found.append(list(cache.store.commit.cursor))
            for batch in p.batches(one.batch, shuffle=one.shuffle):
                step([batch], model, optimizer)
    return found


def go_on_after_a_failure(ranks: AnyCommunicator, case: str, folder: str, *, what: str) -> str:
    """Have a rank fail once in one step of a commit; all ranks raise; then train to the end with the same cache."""
    one, said = CASES[case], ""
    with open_sharded(one, folder) as cache:
        tracked = model_of(cache, one)
        shards = cache._parts.training_store._shards
        assert shards is not None
        victim, step, there = {
            "prepare": (1, "publish", cache.store),
            "publish": (0, "publish_prepared", shards.writer),
            "hear": (1, "take", shards.writer),
        }[what]
        plain: Callable[..., Any] = getattr(there, step)

        def broken(*given: Any, **options: Any) -> Any:
            prepared = shards.writer.prepared
            at = given[0] if what == "prepare" else None if prepared is None else prepared.commit.cursor
            if at is not None and at[0] == 2:
                setattr(there, step, plain)
                raise OSError("the disk of one rank is gone")
            return plain(*given, **options)

        if ranks.rank == victim:
            setattr(there, step, broken)
        for _ in range(2):
            try:
                for _ in trained(cache, one, tracked):
                    pass
            except (OSError, tc.TierCacheError) as error:
                said = str(error)
            else:
                return said
    raise AssertionError("it failed twice")


def leave_and_train(ranks: AnyCommunicator, case: str, folder: str, *, engine: str) -> None:
    """Leave a cache unclosed in the middle of a pass, and train to the end with another one."""
    one = CASES[case]

    def leave() -> None:
        cache = open_sharded(one, folder, engine=engine)
        for p, number in trained(cache, one):
            if (p.index, number) == (3, 1):
                break

    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        leave()
        gc.collect()
    ranks.barrier()
    train(ranks, case, folder)
