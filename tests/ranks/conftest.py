"""The ranks of a session: four processes that stay alive between tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ranks.pool import RanksPool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def ranks_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RanksPool]:
    """Four Gloo ranks, started at their first use."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    with RanksPool(folder) as pool:
        yield pool
