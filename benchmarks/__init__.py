"""Measurements of the guarantees. Each benchmark prints a table and, with --json, writes the same figures."""
