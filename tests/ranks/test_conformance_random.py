"""Random trainings on random ranks are those of one process."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ranks.conformance import WAYS, known
from tests.ranks.pool import RanksPool
from tests.ranks.test_conformance import BODY, assert_as_alone, train_alone

ANY = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a training as plain values, for ``random_entry``: at most five steps, whatever else."""
    dims = st.one_of(st.integers(1, 20), st.sampled_from([31, 64, 65, 128]))
    tables = draw(
        st.lists(
            st.fixed_dictionaries(
                {"dim": dims, "rows": st.integers(1, 100), "rule": st.integers(0, 3), "way": st.sampled_from(WAYS)}
            ),
            min_size=1, max_size=6,
        )
    )  # fmt: skip
    specs, singles = [], []
    for i in range(draw(st.integers(1, 7))):
        hotness = draw(st.sampled_from(["one_hot", "multi_hot", "ragged", "ragged"]))
        mode = draw(st.sampled_from(["sum", "mean", "max"]))
        specs.append(
            {
                "table": draw(st.integers(0, len(tables) - 1)), "hotness": hotness, "mode": mode,
                "length": draw(st.integers(1, 5)),
                "weighted": hotness != "one_hot" and mode != "max" and draw(st.booleans()),
            }
        )  # fmt: skip
        if i and draw(st.integers(0, 4)) == 0:
            singles.append(f"f{i}")
    batch = draw(st.integers(1, 40))
    num_samples = draw(st.integers(1, 5 * batch))
    return {
        "tables": tables, "specs": specs, "singles": singles, "batch": batch, "num_samples": num_samples,
        "pass_samples": draw(st.sampled_from([num_samples, -(-num_samples // 2)])),
        "longest": draw(st.sampled_from([1, 4, 20])), "empty": draw(st.sampled_from([0.0, 0.0, 0.8])),
        "seed": draw(st.integers(0, 1000)), "shuffle": draw(st.booleans()), "accumulate": draw(st.integers(1, 3)),
        "read_by": draw(st.sampled_from(["rank", "owner"])),
        "twice": draw(st.booleans()), "options": {"commit_every": draw(st.integers(1, 2))},
    }  # fmt: skip


def compare(pool: RanksPool, record: dict[str, Any], size: int) -> None:
    """Train a record on ranks and alone."""
    with tempfile.TemporaryDirectory() as folder:
        entry = known(record)
        passes = entry.cut(Path(folder) / "passes")
        parts = pool.run(size, BODY, name=record, folder=folder)
        assert_as_alone(parts, Path(folder), train_alone(entry, passes))


@settings(max_examples=15, deadline=None, suppress_health_check=ANY)
@given(record=records(), size=st.integers(2, 4))
def test_random_trainings_are_those_of_one_process(ranks_pool: RanksPool, record: dict[str, Any], size: int) -> None:
    """Any tables, features, sharding plans, batches, accumulation and commits on 2 to 4 ranks."""
    compare(ranks_pool, record, size)


@pytest.mark.long
@settings(max_examples=300, deadline=None, suppress_health_check=ANY)
@given(record=records(), size=st.integers(1, 4))
def test_many_random_trainings_are_those_of_one_process(
    ranks_pool: RanksPool, record: dict[str, Any], size: int
) -> None:
    """The same at greater length."""
    compare(ranks_pool, record, size)
