"""Rows exchanged among ranks train as in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.ranks.exchanged import CASES, train_alone, whole_outputs, whole_rows

if TYPE_CHECKING:
    import tiercache as tc
    from tests.ranks.pool import RanksPool

BODY = "tests.ranks.exchanged:train"


@pytest.fixture(scope="module")
def passes_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tc.PassSet]:
    """The passes of every case."""
    return {name: case.cut(tmp_path_factory.mktemp("passes")) for name, case in CASES.items()}


def run(pool: RanksPool, size: int, passes: tc.PassSet, case: str, kind: str, **options: Any) -> list[dict[str, Any]]:
    """Train on ranks."""
    return pool.run(size, BODY, folder=str(passes.path), case=case, kind=kind, **options)


def assert_close(parts: list[dict[str, Any]], alone: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Compare rows and optimizer state."""
    rows = whole_rows(parts)
    for name, (keys, fields) in alone["rows"].items():
        np.testing.assert_array_equal(rows[name][0], keys)
        for mine, theirs in zip(rows[name][1], fields, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["row", "table", "column", "replicate", "all"])
def test_ranks_train_as_one_process(
    ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet], kind: str, size: int
) -> None:
    """Every optimizer with decay; shared tables; fixed, ragged and empty bags; sum, mean, max, weights, single rows."""
    passes = passes_of["mixed"]
    alone = train_alone(passes, "mixed", single=True)
    parts = run(ranks_pool, size, passes, "mixed", kind, single=True)
    assert_close(parts, alone)
    np.testing.assert_allclose(whole_outputs(parts)[0], alone["outputs"][0], rtol=0, atol=1e-6)
    for mine, theirs in zip(whole_outputs(parts), alone["outputs"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    for i, theirs in enumerate(alone["weights"]):
        mine = np.concatenate([part["weights"][i]["ragged"] for part in parts])
        np.testing.assert_allclose(mine, theirs["ragged"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("only", [[], ["one", "max"]])
def test_rows_of_gpus_are_exchanged_alike(
    ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet], only: list[str]
) -> None:
    """By the CUDA kernels, on the shim: tables placed in all ways, with and without rows that have no gradient."""
    passes = passes_of["mixed"]
    options = {"only": only, "accumulate": 2, "batch": 25}
    parts = run(ranks_pool, 2, passes, "mixed", "all", shim=True, **options)
    assert_close(parts, train_alone(passes, "mixed", **options))


@pytest.mark.parametrize("shim", [False, True])
@pytest.mark.parametrize("kind", ["table", "column"])
def test_owners_pool_features_where_that_is_fewer_bytes(
    ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet], kind: str, shim: bool
) -> None:
    """On a CPU, and by the CUDA kernels on the shim; a feature that is pooled and has no gradient is among them."""
    passes = passes_of["mixed"]
    options = {"accumulate": 2, "batch": 25, "pooled": True, "only": ["fixed", "ragged", "max", "plain"]}
    parts = run(ranks_pool, 2, passes, "mixed", kind, shim=shim, **options)
    assert [part["pooled"] for part in parts] == [["fixed", "mean", "plain", "ragged", "wide"]] * 2
    assert_close(parts, train_alone(passes, "mixed", **options))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["row", "table", "column", "replicate"])
def test_sums_that_are_exact_have_the_bits_of_one_process(
    ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet], kind: str, size: int
) -> None:
    """Weights, gradients and rates are such that the order of addition cannot matter; so a wrong sum would show."""
    passes = passes_of["one group"]
    options = {"batch": 32, "epochs": 2, "pooled": size == 2}
    parts = run(ranks_pool, size, passes, "one group", kind, **options)
    alone = train_alone(passes, "one group", **options)
    assert_close(parts, alone, tolerance=0)
    for mine, theirs in zip(whole_outputs(parts), alone["outputs"], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_two_runs_end_with_the_same_bits(
    ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet], wire_dtype: str
) -> None:
    """On three ranks, with tables placed in all ways."""
    first, second = (
        run(ranks_pool, 3, passes_of["mixed"], "mixed", "all", wire_dtype=wire_dtype, epochs=2) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        for name, (_, _, fields) in one["rows"].items():
            for mine, theirs in zip(fields, other["rows"][name][2], strict=True):
                np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("kind", ["row", "all"])
@pytest.mark.parametrize("only", [["one", "max"], ["mean"]])
def test_rows_without_a_gradient_are_not_stepped(
    ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet], kind: str, only: list[str]
) -> None:
    """Decay would change every row that is stepped: a module that looks up some features steps their rows alone."""
    passes = passes_of["mixed"]
    assert_close(
        run(ranks_pool, 3, passes, "mixed", kind, only=only, accumulate=2),
        train_alone(passes, "mixed", only=only, accumulate=2),
    )


@pytest.mark.parametrize("kind", ["row", "column", "all"])
def test_gradients_of_several_batches_are_summed_for_one_step(
    ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet], kind: str
) -> None:
    """Every batch's rows are as before the step, and each is updated once."""
    passes = passes_of["mixed"]
    options = {"accumulate": 3, "batch": 10}
    assert_close(run(ranks_pool, 2, passes, "mixed", kind, **options), train_alone(passes, "mixed", **options))


def test_batches_with_fewer_samples_than_ranks_train_as_in_one_process(
    ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet]
) -> None:
    """A rank without samples takes part with one that weighs nothing."""
    passes = passes_of["mixed"]
    parts = run(ranks_pool, 4, passes, "mixed", "all", batch=3)
    assert_close(parts, train_alone(passes, "mixed", batch=3), tolerance=3e-5)


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
def test_a_wire_of_16_bits_costs_precision_and_halves_bytes(
    ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet], wire_dtype: str
) -> None:
    """Rows are within what the dtype loses; those of the own rank lose nothing."""
    passes = passes_of["mixed"]
    alone = train_alone(passes, "mixed")
    wide = run(ranks_pool, 2, passes, "mixed", "row")
    parts = run(ranks_pool, 2, passes, "mixed", "row", wire_dtype=wire_dtype)
    assert_close(parts, alone, tolerance=0.05)
    with pytest.raises(AssertionError):
        assert_close(parts, alone, tolerance=1e-6)
    for half, whole in zip(parts, wide, strict=True):
        assert 0.5 < half["bytes"] / whole["bytes"] < 0.6  # addresses stay 4 bytes each


@pytest.mark.parametrize("kind", ["row", "replicate"])
def test_rows_of_16_bits_travel_as_they_are_looked_up(
    ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet], kind: str
) -> None:
    """In float32: nothing is lost on the way."""
    passes = passes_of["narrow"]
    parts = run(ranks_pool, 2, passes, "narrow", kind)
    for mine, theirs in zip(whole_outputs(parts), train_alone(passes, "narrow")["outputs"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


def test_replicated_tables_may_be_looked_up_at_their_owners(
    ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet]
) -> None:
    """As an evaluation does, which would use a mirror once: more travels, and the result is the same."""
    passes = passes_of["mixed"]
    alone = train_alone(passes, "mixed")
    with_mirrors, without = (
        run(ranks_pool, 2, passes, "mixed", "replicate", mirrored=mirrored) for mirrored in (True, False)
    )
    assert_close(with_mirrors, alone)
    assert_close(without, alone)
    dims = {one.name: one.dim for one in passes.tables}
    most = sum(4 * dims[name] * passes.passes[-1].rows(name) for name in dims)
    for one, other in zip(with_mirrors, without, strict=True):
        assert one["mirror_bytes"] == most
        assert other["mirror_bytes"] == 0
        assert one["bytes"] < 0.7 * other["bytes"]


@pytest.mark.parametrize(("kind", "id_"), [("row", 10_000), ("column", -1)])
def test_an_id_outside_its_pass_ends_the_batch_on_every_rank(
    ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet], kind: str, id_: int
) -> None:
    """The rank that has it says which; the others say whose it is. Nobody waits."""
    passes = passes_of["mixed"]
    told = ranks_pool.errors(
        3, "tests.ranks.exchanged:ask_for", folder=str(passes.path), bad_rank=1, id_=id_, kind=kind
    )
    last = passes.passes[0].rows("adagrad") - 1
    sentence = (
        f"feature 'fixed' has local id {id_} at entry 5 of the batch, and table 'adagrad' has local ids 0 to {last} in "
        "batch 7 of visit 0: use batches of the pass that is being trained"
    )
    assert told[1] == ("IndexError", sentence)
    for other in (told[0], told[2]):
        assert other is not None
        assert other[0] == "RankError"
        assert other[1] == f"rank 1 failed while making a batch of batch 7 of visit 0: IndexError: {sentence}"


def test_what_went_wrong_before_a_batch_is_told_to_every_rank(
    ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet]
) -> None:
    """A rank that could not read its samples brings its error along."""
    told = ranks_pool.errors(2, "tests.ranks.exchanged:fail_before", folder=str(passes_of["mixed"].path), bad_rank=0)
    assert told[0] == ("OSError", "the disk is gone")
    assert told[1] is not None
    assert "rank 0 failed while making a batch of batch 0 of visit 0: OSError: the disk is gone" in told[1][1]


def test_ranks_without_any_id_take_part(ranks_pool: RanksPool, passes_of: dict[str, tc.PassSet]) -> None:
    """Their output has no rows, and their step waits for nobody."""
    told = ranks_pool.run(4, "tests.ranks.exchanged:ask_for_nothing", folder=str(passes_of["mixed"].path))
    assert told == [[8, 21], [0, 21], [8, 21], [0, 21]]
