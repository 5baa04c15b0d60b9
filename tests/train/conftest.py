"""Shared fixtures of the tests of trainings."""

from collections.abc import Iterator

import pytest

import tiercache as tc
from tests.train.beside_torch import World


@pytest.fixture(scope="module")
def passes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tc.PassDataset:
    return request.module.CASE.cut(tmp_path_factory.mktemp("case") / "passes")


@pytest.fixture
def world(passes: tc.PassDataset) -> Iterator[World]:
    """A cache in the middle of a pass, with the same model in torch. The module's case is from `beside_torch`."""
    made = World(passes)
    yield made
    made.loop.close()
    made.cache._close(failed=True)
