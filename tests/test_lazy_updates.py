"""The difference between lazy and dense updates in docs/migration.md."""

import re
from pathlib import Path

import pytest

from tests.lazy_updates import RULES, losses

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", RULES)
def test_the_page_tells_the_measured_losses(rule: str) -> None:
    """From `python -m tests.lazy_updates`, within another machine's rounding."""
    row = re.search(rf"^\| `{re.escape(rule)}`[^|]*\| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert row is not None, f"no row of {rule}"
    assert losses(rule) == pytest.approx([float(told) for told in row.groups()], abs=0.003)
