"""Fixtures that tests of tiers share with those of trainings."""

from tests.train.conftest import passes

__all__ = ["passes"]
