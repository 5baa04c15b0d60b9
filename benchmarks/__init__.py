"""Benchmarks: what tiercache promises, measured. Each prints a table and, with --json, writes the same figures."""
