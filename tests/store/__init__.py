"""Tests of the store against a dict, on every engine."""
