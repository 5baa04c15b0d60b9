"""Tests of the tiers and backends."""
