"""The conformance list, by name: trainings that must end on several ranks as on one process.

The first half are the behaviors that sharded embeddings of other projects are tested for; the second half are others.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tiercache as tc
from tests.dist.conformance import WAYS, Entry, in_turn
from tests.train.cases import Spec, table
from tiercache.planning.sharding_planner import TableStats, plan_sharding, sliced
from tiercache.store.sharding import ShardingPlan, TableSharding

UNIFORM = tc.init.Uniform(low=-1.0, high=1.0)
FAST = tc.optim.SGD(learning_rate=1.5)


def tables_of(sizes: Sequence[tuple[int, int]], *optimizers: Any, **options: Any) -> dict[str, Any]:
    """Return tables of these (rows, dim), with optimizers in turn and a different initializer each."""
    chosen = optimizers or (FAST,)
    return {
        "tables": tuple(
            table(f"t{i}", dim, chosen[i % len(chosen)], UNIFORM, seed=i, **options) for i, (_, dim) in enumerate(sizes)
        ),
        "rows": tuple(rows for rows, _ in sizes),
    }


def a_feature_each(count: int, *specs: dict[str, Any]) -> tuple[Spec, ...]:
    """Return a feature of each table, of these kinds in turn: single ids by default."""
    kinds = specs or ({},)
    return tuple(Spec(name=f"f{i}", table=f"t{i}", **kinds[i % len(kinds)]) for i in range(count))


def strategy(name: str, **thresholds: int) -> Callable[[Entry, int], ShardingPlan]:
    """Return a placer by a strategy, for tables that have all their rows; thresholds in numbers of the vectors."""

    def planned(entry: Entry, size: int) -> ShardingPlan:
        loads = {
            one.name: TableStats(rows=rows, samples=entry.pass_samples)
            for one, rows in zip(entry.tables, entry.rows, strict=True)
        }
        rules = tc.ShardingRules(strategy=name, **{what: 4 * count for what, count in thresholds.items()})
        return plan_sharding(entry.tables, loads, size, rules)

    return planned


RAGGED: dict[str, Any] = {"hotness": "ragged"}
MEAN: dict[str, Any] = {"hotness": "ragged", "mode": "mean"}
LIST: dict[str, Any] = {"hotness": "multi_hot"}
SIX = ((40, 2), (7, 3), (60, 4), (30, 5), (50, 8), (20, 16))
FOUR = ((40, 8), (30, 5), (50, 12), (20, 8))
RULES = (
    tc.optim.SGD(learning_rate=0.5, decay=0.02), tc.optim.Adagrad(learning_rate=0.1, decay=0.02),
    tc.optim.RowWiseAdagrad(learning_rate=0.1, decay=0.02), tc.optim.Adam(learning_rate=0.02, decay=0.02),
)  # fmt: skip
NEWER = (
    tc.optim.SGD(learning_rate=0.1, momentum=0.9, nesterov=True), tc.optim.RowWiseAdam(learning_rate=0.02, decay=0.02),
    tc.optim.RowWiseAdam(learning_rate=0.02, decay=0.5, decoupled=True), tc.optim.RowWiseRMSprop(learning_rate=0.02),
)  # fmt: skip
ALL = in_turn(*WAYS)
SHARED = (
    *a_feature_each(4),
    *(Spec(name=f"g{i}", table=f"t{i}", hotness="ragged", mode=mode) for i, mode in enumerate(["sum", "mean"] * 2)),
    *(Spec(name=f"h{i}", table=f"t{i}", hotness="multi_hot", length=2) for i in range(4)),
)


def of_four(*rules: Any, **options: Any) -> Entry:
    """Return an entry of four tables by these optimizers: shared, and in every sharding, unless told otherwise."""
    return Entry(**tables_of(FOUR, *rules), **{"specs": SHARED, "sharding": ALL} | options)


def of_six(sharding: Callable[[Entry, int], ShardingPlan]) -> Entry:
    """Return an entry of six tables with a feature each."""
    return Entry(**tables_of(SIX), specs=a_feature_each(6), sharding=sharding)


EVERYTHING = Entry(
    **tables_of((*FOUR, (9, 1), (33, 7), (44, 15), (25, 16)), *RULES, tc.optim.Adagrad(learning_rate=0.05)),
    specs=(
        Spec(name="one", table="t0"), Spec(name="ragged", table="t0", hotness="ragged", weighted=True),
        Spec(name="mean", table="t1", hotness="ragged", mode="mean", weighted=True), Spec(name="list", table="t1"),
        Spec(name="max", table="t2", hotness="ragged", mode="max"), Spec(name="wide", table="t3", hotness="multi_hot"),
        Spec(name="thin", table="t4", hotness="ragged"),
        Spec(name="seven", table="t5", hotness="multi_hot", mode="mean"),
        Spec(name="odd", table="t6", hotness="ragged", mode="mean"), Spec(name="last", table="t7"),
    ),
    sharding=ALL, accumulate=2, singles=("list", "last"),
)  # fmt: skip

POOLED = Entry(
    **tables_of(((3000, 5), (3000, 15), (3000, 16), (3000, 16)), *RULES),
    specs=(
        Spec(name="one", table="t0"), Spec(name="mean", table="t0", hotness="ragged", mode="mean"),
        Spec(name="weighted", table="t1", hotness="ragged", weighted=True),
        Spec(name="list", table="t1", hotness="multi_hot", length=6, mode="mean"),
        Spec(name="ragged", table="t2", hotness="ragged"), Spec(name="other", table="t2"),
        Spec(name="max", table="t3", hotness="multi_hot", length=4, mode="max"),
        Spec(name="sum", table="t3", hotness="multi_hot", length=4),
    ),
    sharding=in_turn("table_wise"), num_samples=113, pass_samples=60, accumulate=2, epochs=2, twice=True,
)  # fmt: skip
"""Enough keys that nearly all rows of a batch are unique; the last batch of a pass leaves ranks without samples."""

MERLIN = {
    "basic": of_six(strategy("basic")),
    "row slices": of_six(in_turn("row_wise")),
    "all replicated": of_six(in_turn("data_parallel")),
    "memory balanced": of_six(strategy("memory_balanced")),
    "memory optimized": of_six(strategy("memory_optimized")),
    "by cost": of_six(strategy("cost")),
    "shared tables": of_four(
        specs=(*a_feature_each(4), *(Spec(name=f"g{i}", table=f"t{i // 2}") for i in range(4))),
        sharding=strategy("basic"),
    ),
    "column slices merged on a rank": Entry(
        **tables_of(((100, 8), (5, 8), (10, 8), (25, 4))), specs=a_feature_each(4),
        sharding=strategy("basic", column_threshold=45),
    ),
    "column slices of small tables": Entry(
        **tables_of(((10, 4), (11, 2), (4, 2), (4, 2))), specs=a_feature_each(4),
        sharding=strategy("memory_balanced", column_threshold=10),
    ),
    "eight tables of width 2 are one array": Entry(
        **tables_of([(10 + i, 2) for i in range(8)]), specs=a_feature_each(8), sharding=strategy("basic")
    ),
    "one table in uneven slices": Entry(
        **tables_of(((30, 15),)), specs=a_feature_each(1, RAGGED),
        sharding=lambda entry, size: ShardingPlan(size, {"t0": sliced(15, range(size))}),
    ),
    "slices on other ranks than the first": Entry(
        **tables_of(((30, 15), (20, 6))), specs=a_feature_each(2),
        sharding=lambda entry, size: ShardingPlan(
            size, {"t0": sliced(15, [size - 1, *range(size - 1), size - 1]), "t1": TableSharding("row_wise")}
        ),
    ),
    "all ways at once": Entry(
        **tables_of(((5, 4), (200, 8), (60, 8), (30, 4), (400, 16))), specs=a_feature_each(5, {}, RAGGED),
        sharding=strategy("basic", replicate_threshold=25, column_threshold=250, row_threshold=2000),
    ),
    "more rows than memory": Entry(
        **tables_of(((400, 8), (300, 8)), *RULES[1:3]), specs=a_feature_each(2, RAGGED, {}), pass_samples=16,
        num_samples=128, epochs=3, sharding=in_turn("row_wise", "column_wise"), options={"host_budget": "smallest"},
    ),
    "ragged lists and more ranks than tables": Entry(
        **tables_of(((30, 8),)), specs=a_feature_each(1, RAGGED), sharding=lambda entry, size: "auto"
    ),
    "two tables on more ranks, each on one": Entry(
        **tables_of(((30, 8), (20, 8))), specs=a_feature_each(2, RAGGED), sharding=in_turn("table_wise")
    ),
}  # fmt: skip
MERLIN |= {
    f"{name}, read by owner": replace(MERLIN[name], read_by="owner")
    for name in ("shared tables", "column slices merged on a rank", "two tables on more ranks, each on one")
}
"""Its "weights set before the model is built" and "a batch that ranks do not divide" are errors there: see
test_conformance.py for what is refused here; a batch that ranks do not divide trains."""

BEYOND = {
    "means": of_four(specs=a_feature_each(4, MEAN, LIST | {"mode": "mean"})),
    "largest of a bag": of_four(specs=a_feature_each(4, MEAN | {"mode": "max"})),
    "row slices of lists": of_four(specs=a_feature_each(4, LIST, RAGGED), sharding=in_turn("row_wise")),
    "shared tables in every sharding": of_four(),
    "shared tables in column slices": of_four(sharding=in_turn("column_wise")),
    "replicated tables of ragged lists": of_four(
        specs=a_feature_each(4, RAGGED, MEAN), sharding=in_turn("data_parallel"),
    ),
    "empty bags": of_four(specs=a_feature_each(4, RAGGED, MEAN), empty=0.9),
    "sgd with decay": of_four(RULES[0]),
    "adagrad with decay": of_four(RULES[1]),
    "row-wise adagrad with decay": of_four(RULES[2]),
    "row-wise adagrad in column slices": of_four(RULES[2], sharding=in_turn("column_wise"), accumulate=2),
    "momentum and row-wise adam in column slices": of_four(*NEWER, sharding=in_turn("column_wise"), accumulate=2),
    "momentum and row-wise adam": of_four(*NEWER),
    "adam with decay": of_four(RULES[3]),
    "duplicates in a bag and between ranks": Entry(
        **tables_of(((3, 8), (2, 5), (1, 12), (2, 8)), *RULES), specs=a_feature_each(4, LIST | {"length": 5}, RAGGED),
        sharding=ALL,
    ),
    "a last batch of one sample": of_four(*RULES, num_samples=50, pass_samples=33),
    "batches of one sample": of_four(*RULES, num_samples=5, pass_samples=3, batch=1),
    "weights with gradients": of_four(
        *RULES, specs=a_feature_each(4, RAGGED | {"weighted": True}, MEAN | {"weighted": True}),
    ),
    "single vectors": of_four(
        *RULES, specs=(*SHARED, Spec(name="pooled", table="t1", hotness="ragged")),
        singles=tuple(spec.name for spec in SHARED),
    ),
    "two modules": of_four(*RULES, twice=True),
    "gradients of several batches": of_four(*RULES, accumulate=3, num_samples=200, pass_samples=100),
    "changed learning rates": of_four(*RULES, rates={1: (0.3, None), 3: (0.01, ("t1", "t2"))}),
    "rows without a gradient": of_four(*RULES, idle=("f0", "g1", "h2", "h3"), accumulate=2),
    "dropped gradients": of_four(*RULES, discarded=(1, 4)),
    "a commit every third pass": of_four(*RULES, pass_samples=16, options={"commit_every": 3}),
    "a commit after every step": of_four(*RULES, commits=True),
    "a shuffled order of passes": of_four(*RULES, pass_samples=16, epochs=2, options={"order_seed": 5}),
    "passes in the order of their overlap": of_four(*RULES, pass_samples=16, epochs=2, options={"order": "overlap"}),
    "dims from 1 to 130": Entry(
        **tables_of([(20, dim) for dim in (1, 2, 3, 7, 31, 64, 127, 128, 130)], *RULES),
        specs=a_feature_each(9, RAGGED, {}),
        sharding=in_turn("row_wise", "column_wise", "data_parallel", "table_wise", "column_wise"),
    ),
    "everything at once": EVERYTHING,
    "pooled by owners": POOLED,
    "pooled by owners of column slices": replace(POOLED, sharding=in_turn("column_wise")),
}  # fmt: skip
BEYOND |= {
    f"{name}, read by owner": replace(BEYOND[name], read_by="owner")
    for name in (
        "empty bags", "shared tables in column slices", "batches of one sample", "everything at once",
        "pooled by owners", "pooled by owners of column slices",
    )
}  # fmt: skip

EXACT = Entry(
    **tables_of(
        [(20, dim) for dim in (8, 8, 12, 16)], tc.optim.SGD(learning_rate=0.25), tc.optim.Adagrad(learning_rate=0.5)
    ),
    specs=(
        *a_feature_each(4), *(Spec(name=f"g{i}", table=f"t{i}", hotness="ragged") for i in range(4)),
        *(Spec(name=f"h{i}", table=f"t{i}", hotness="multi_hot", length=2, mode="mean") for i in range(4)),
    ),
    sharding=ALL, exact=True, num_samples=80, pass_samples=48,
)  # fmt: skip
EXACT = replace(EXACT, tables=tuple(replace(one, initializer=tc.init.Constant(value=0.5)) for one in EXACT.tables))
OTHERS = {
    "no sum is rounded": EXACT,
    "no sum is rounded, bfloat16 rows": replace(
        EXACT, tables=tuple(replace(one, dtype="bfloat16") for one in EXACT.tables),
        sharding=in_turn("row_wise", "data_parallel", "row_wise", "table_wise"),
    ),
    "no sum is rounded, float16 rows": replace(
        EXACT, tables=tuple(replace(one, dtype="float16") for one in EXACT.tables),
        sharding=in_turn("table_wise", "row_wise", "data_parallel", "row_wise"),
    ),
    "many steps": replace(EVERYTHING, num_samples=640, pass_samples=160, epochs=5, singles=()),
    "pooled nowhere": replace(POOLED, by_rows=True),
    "keys of 32 and of 64 bits": Entry(
        **tables_of(((40, 8), (30, 4))), sharding=in_turn("row_wise", "column_wise"), pass_samples=32,
        specs=(Spec(name="narrow", table="t0"), Spec(name="wide", table="t0"), Spec(name="list", table="t1", **RAGGED)),
    ),
    "evaluated": of_four(*RULES, pass_samples=16, options={"eval_budget": 6000}),
    "evaluated, with rows for unknown keys": of_four(
        *RULES, sharding=in_turn("row_wise", "table_wise", "column_wise", "data_parallel"),
        pass_samples=16, unknown=0.1,
    ),
}  # fmt: skip
ENTRIES = MERLIN | BEYOND | OTHERS

STEADY = (
    tc.optim.SGD(learning_rate=0.1, decay=0.01), tc.optim.Adagrad(learning_rate=0.1, initial_accumulator=0.1),
    tc.optim.RowWiseAdagrad(learning_rate=0.1, eps=1e-2, decay=0.02), tc.optim.Adam(learning_rate=0.01, eps=1e-3),
)  # fmt: skip
"""Rules that do not turn rounding errors in a gradient into a large step."""


def random_entry(record: dict[str, Any]) -> Entry:
    """Return the entry of plain values that Hypothesis drew."""
    drawn = dict(record)
    tables, specs = drawn.pop("tables"), drawn.pop("specs")
    used = sorted({spec["table"] for spec in specs})
    return Entry(
        tables=tuple(table(f"t{i}", tables[i]["dim"], STEADY[tables[i]["rule"]], UNIFORM, seed=i) for i in used),
        rows=tuple(tables[i]["rows"] for i in used),
        specs=tuple(
            Spec(name=f"f{n}", **spec | {"table": f"t{spec['table']}"}) for n, spec in enumerate(specs)
        ),
        sharding=in_turn(*(tables[i]["way"] for i in used)),
        **drawn,
    )  # fmt: skip
