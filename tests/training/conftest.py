"""What the tests of trainings share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import tiercache as tc


@pytest.fixture(scope="module")
def passes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tc.PassDataset:
    """The passes of a module's case."""
    return request.module.CASE.cut(tmp_path_factory.mktemp("case") / "passes")
