"""Faults planted in the product, one at a time, to see that its ordinary tests fail: ``python -m tests.mutants``."""
