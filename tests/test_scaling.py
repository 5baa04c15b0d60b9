"""The table of docs/scaling.md is what the formulas give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.scaling import Load, Machine, distinct, markdown, table, traffic
from benchmarks.zipf import Zipf

DOC = Path(__file__).parents[1] / "docs" / "scaling.md"


def test_the_documents_table_is_what_the_formulas_give_today() -> None:
    """Line for line."""
    assert markdown(table()) in DOC.read_text()


@pytest.mark.parametrize("draws", [100, 10_000, 300_000])
def test_the_expected_number_of_distinct_rows_is_that_of_real_draws(draws: int) -> None:
    """Within 2 % of what skewed draws from 100,000 rows find."""
    found = np.unique(Zipf(100_000, seed=3).ranks(draws)).size

    assert distinct(draws, 100_000) == pytest.approx(found, rel=0.02 if draws > 1000 else 0.1)


def test_one_device_sends_nothing_and_a_table_that_fits_needs_no_store() -> None:
    """The ends of the formulas."""
    alone = traffic(1, 10e9, Machine(), Load())

    assert (alone.wire_bytes, alone.message_bytes, alone.messages, alone.dense, alone.store) == (0, 0, 0, 0, 0)
    assert alone.passes == 1


def test_the_stores_seconds_for_a_batch_do_not_depend_on_the_number_of_devices_while_passes_grow_with_it() -> None:
    """Twice the devices, twice the rows of a pass and twice the samples of a batch."""
    few, many = (traffic(w, 1e15, Machine(device_budget=1e9), Load()) for w in (8, 16))

    assert many.pass_rows == 2 * few.pass_rows
    assert many.store == pytest.approx(few.store, rel=0.15)
