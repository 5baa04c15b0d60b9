"""Runnable examples; each runs in CI on small data."""
