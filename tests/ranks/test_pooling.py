"""Features that are pooled by the rank that owns their table train as those whose rows travel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.ranks.pooled import CASE, POOLED
from tests.ranks.trainings import stored

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks.pool import RanksPool

BODIES = "tests.ranks.pooled:"


def train(pool: RanksPool, size: int, folder: Path, name: str, kind: str, **options: Any) -> list[dict[str, Any]]:
    """Train on ranks."""
    if not (folder / "passes").exists():
        CASE.cut(folder / "passes")
    return pool.run(size, BODIES + "train", folder=str(folder), name=name, kind=kind, **options)


def vectors_of(told: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """Return what an evaluation found, in the order of samples."""
    most = max(len(one["vectors"]) for one in told)
    return np.concatenate([one["vectors"][i] for i in range(most) for one in told if i < len(one["vectors"])])


def assert_equal(
    folder: Path, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float = 1e-5
) -> None:
    """Compare rows, states, dense weights and the vectors of an evaluation; stores are "ours" and "theirs"."""
    mine, other = stored(folder, "ours"), stored(folder, "theirs")
    assert mine.keys() == other.keys()
    for name, (keys, fields) in mine.items():
        np.testing.assert_array_equal(keys, other[name][0])
        for one, another in zip(fields, other[name][1], strict=True):
            np.testing.assert_allclose(one, another, rtol=tolerance, atol=tolerance, err_msg=name)
    for name in ("dense.top.weight", "dense.top.bias"):
        np.testing.assert_allclose(ours[0][name], theirs[0][name], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(vectors_of(ours), vectors_of(theirs), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("size", "kind", "options"),
    [
        (2, "table", {}),
        (3, "column", {}),
        (4, "table", {"micro_batches": 3}),
        (2, "column", {"accumulate": 2}),
    ],
)
def test_features_pooled_by_their_owners_train_as_on_one_rank(
    ranks_pool: RanksPool, tmp_path: Path, size: int, kind: str, options: dict[str, Any]
) -> None:
    """Sum, mean, weights, shared tables, empty bags; two lookups of a batch, and features without a gradient.

    Rows without a gradient keep row and state, in spite of Adam and decay.
    """
    theirs = train(ranks_pool, 1, tmp_path, "theirs", "row", **options)
    ours = train(ranks_pool, size, tmp_path, "ours", kind, **options)

    assert all(one["pooled"] == POOLED for one in ours)
    assert theirs[0]["pooled"] == []
    assert_equal(tmp_path, ours, theirs)


@pytest.mark.parametrize("read_by", ["rank", "owner"])
def test_two_runs_with_pooled_features_end_with_the_same_bits(
    ranks_pool: RanksPool, tmp_path: Path, read_by: str
) -> None:
    """Gradients are added in the order of ranks and features."""
    options = {"read_by": read_by, "comm_dtype": "bfloat16", "micro_batches": 2}
    ours = train(ranks_pool, 3, tmp_path, "ours", "column", **options)
    theirs = train(ranks_pool, 3, tmp_path, "theirs", "column", **options)

    assert_equal(tmp_path, ours, theirs, tolerance=0)


@pytest.mark.parametrize(("size", "kind"), [(3, "table"), (2, "column")])
def test_reading_by_owner_ends_the_same_and_sends_fewer_bytes(
    ranks_pool: RanksPool, tmp_path: Path, size: int, kind: str
) -> None:
    """Ids of features whose tables a rank owns do not travel to it; all that is not a maximum is pooled."""
    by_data = train(ranks_pool, size, tmp_path, "theirs", kind)
    by_model = train(ranks_pool, size, tmp_path, "ours", kind, read_by="owner")

    assert all(one["pooled"] == sorted([*POOLED, "place", "user"]) for one in by_model)
    assert_equal(tmp_path, by_model, by_data)
    assert sum(one["bytes"] for one in by_model) < sum(one["bytes"] for one in by_data)


def test_pooled_vectors_are_fewer_bytes_than_rows(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """The same training whose modules ask for rows, as for weights of their own: the result is the same.

    Of so small batches a third of the bytes are counts, which both send.
    """
    pooled = train(ranks_pool, 2, tmp_path, "ours", "table")
    rows = train(ranks_pool, 2, tmp_path, "theirs", "table", by_rows=True)

    assert all(one["pooled"] == [] for one in rows)
    assert_equal(tmp_path, pooled, rows)
    assert sum(one["bytes"] for one in pooled) < 0.7 * sum(one["bytes"] for one in rows)


@pytest.mark.parametrize("read_by", ["rank", "owner"])
def test_a_wrong_id_of_a_pooled_feature_is_said_on_all_ranks(
    ranks_pool: RanksPool, tmp_path: Path, read_by: str
) -> None:
    """With its place in the batch, before anything is pooled."""
    CASE.cut(tmp_path / "passes")

    errors = ranks_pool.errors(2, BODIES + "have_a_wrong_id", folder=str(tmp_path), read_by=read_by)

    said = "feature 'title' has local id 1048576 at entry 1 of the batch"
    assert all(error is not None and said in error[1] for error in errors), errors
    assert sorted(error[0] for error in errors if error) == ["IndexError", "RankError"]


@pytest.mark.parametrize(
    ("what", "sentence"), [("modes", "ranks look up different features"), ("sizes", "makes another batch than rank")]
)
def test_ranks_that_read_by_owner_and_differ_are_told_so(
    ranks_pool: RanksPool, tmp_path: Path, what: str, sentence: str
) -> None:
    """One of them pools the sum and the other the mean, or takes smaller batches."""
    CASE.cut(tmp_path / "passes")

    errors = ranks_pool.errors(2, BODIES + "differ", folder=str(tmp_path), what=what)

    assert all(error is not None and sentence in error[1] for error in errors), errors


def test_a_feature_that_gets_weights_keeps_its_rows(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Where it is announced; else the sentence says how."""
    CASE.cut(tmp_path / "passes")

    told = ranks_pool.run(2, BODIES + "weigh", folder=str(tmp_path), announced=True)
    assert [one[:2] for one in told] == [[["more"], ["title"]]] * 2
    assert all(one[2] > 0 for one in told)

    errors = ranks_pool.errors(2, BODIES + "weigh", folder=str(tmp_path), announced=False)
    assert all(error is not None and "make the module with weighted=['title']" in error[1] for error in errors), errors


def test_ids_that_a_batch_does_not_have_are_one_sentence(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Of a feature that is pooled elsewhere, of one that no module looks up, of none; all else is a dict's."""
    CASE.cut(tmp_path / "passes")

    for told in ranks_pool.run(2, BODIES + "ask_for_ids", folder=str(tmp_path), names=["more", "tag", "mor"]):
        assert told["said"] == [
            "feature 'more' is pooled by sum where the rows of its table are, so the batch has no ids of it: make the "
            "module that looks it up with weighted=['more'] to have them, or look for its vectors in batch.pooled",
            "no module of this cache looks up feature 'tag', so the batch was made without its ids: make one that "
            "does, before the batch is made",
            "there is no feature 'mor': the data have user, friend, word, title, tag, place, item, more",
        ]
        assert (told["iterated"], told["in"], told["got"], told["ids"]) == (["user"], [False] * 3, [None] * 3, 4)


def test_what_no_module_looks_up_is_not_brought(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """A feature that is pooled in two ways comes as rows; what no module looks up does not come at all."""
    CASE.cut(tmp_path / "passes")

    told = ranks_pool.run(2, BODIES + "modules_are_registered", folder=str(tmp_path))

    every = sorted(spec.name for spec in CASE.specs)
    rows = [["more", "user"], []]
    assert told == [[[every, []], [["user"], ["more"]], rows]] * 2
