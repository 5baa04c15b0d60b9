"""What must be alike on all ranks is compared before they train, and every rank says what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import tiercache

if TYPE_CHECKING:
    from tests.ranks.pool import RanksPool

COMPARE = "tests.ranks.bodies:compare"
END = ": give all ranks the same, then start them again"


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_with_the_same_facts_go_on(ranks_pool: RanksPool, size: int) -> None:
    """Order within a fact does not count."""
    facts = [{"the schema": {"a": 1, "b": [1, 2]}, "the seed": 5}] * 2 + [
        {"the seed": 5, "the schema": {"b": [1, 2], "a": 1}}
    ]
    assert ranks_pool.errors(size, COMPARE, by_rank=facts) == [None] * size


def test_what_differs_is_named_with_its_values_and_ranks(ranks_pool: RanksPool) -> None:
    """On every rank the same sentence, of all differences."""
    facts = [{"the seed": 1, "the schema": "aa"}, {"the seed": 2, "the schema": "aa"}, {"the seed": 1}]
    seed, schema = "the seed (1 on ranks 0 and 2, 2 on rank 1)", "the schema (aa on ranks 0 and 1, nothing on rank 2)"
    sentence = f"ranks differ in {seed}; {schema}{END}"
    assert ranks_pool.errors(3, COMPARE, by_rank=facts) == [("RankError", sentence)] * 3


def test_long_facts_are_told_by_digest(ranks_pool: RanksPool) -> None:
    """Two sharding plans that differ in one letter of many."""
    facts = [{"the sharding": "x" * 500}, {"the sharding": "x" * 499 + "y"}]
    (first, second) = ranks_pool.errors(2, COMPARE, by_rank=facts)
    assert first == second is not None
    words = first[1].removeprefix("ranks differ in the sharding (digest ").removesuffix(f" on rank 1){END}").split()
    assert words[1:5] == ["on", "rank", "0,", "digest"]
    assert words[0] != words[5]


def test_ranks_with_different_versions_do_not_train_together(ranks_pool: RanksPool) -> None:
    """The version is compared though nobody asked."""
    here = tiercache.__version__
    sentence = f"ranks differ in the version of tiercache ({here} on ranks 0 and 1, 9.9 on rank 2){END}"
    assert ranks_pool.errors(3, COMPARE, by_rank=[{}] * 3, version="9.9") == [("RankError", sentence)] * 3
